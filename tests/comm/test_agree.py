"""An exception on one rank in a block of `agree()` while the others wait for it: in which communicator does not matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import Thread
from time import sleep
from typing import Any

import pytest
import torch
from mpi4py import MPI

from checkpoints import shared_folder
from ranks import on_ranks, refused, run_script
from shardrt import checkpoint
from shardrt.comm import Communicator, ReduceOp, RemoteError, World, new_stream
from shardrt.comm.backends.mpi import MpiBackend
from shardrt.comm.core.calls import Failure, Interrupted
from shardrt.comm.core.streams import INLINE, Stream
from toys import OddMLP, batch, shard_blocks, step_all

pytestmark = pytest.mark.mpi

Call = Callable[[Communicator], object]


@contextmanager
def suppress_into(errors: list[Exception]) -> Iterator[None]:
    """Keep an exception of a thread."""
    try:
        yield
    except Exception as error:
        errors.append(error)


def all_reduce(comm: Communicator, stream: str = "inline") -> None:
    """A sum of ones, on every rank of `comm`; a stream in a thread is used once."""
    used, total = new_stream(comm.device, "test", threaded=stream == "threaded"), torch.ones(3)
    comm.all_reduce(total, total, ReduceOp.SUM, stream=used)
    used.close()
    assert total.tolist() == 3 * [comm.size]


@contextmanager
def communicators(world: World, nodes: str) -> Iterator[tuple[Communicator, list[Communicator]]]:
    """One over all ranks, whose calls are compared, and parts of it: two over all ranks, one of this rank and the next."""
    node = world.rank if nodes == "several nodes" else 0
    comm = Communicator(MpiBackend(MPI.COMM_WORLD.Dup(), "all", node), world.comm.hooks)
    parts = [comm.split(color, world.rank, f"part {color}") for color in (0, 0, 1 + world.rank // 2)]
    yield comm, [part for part in parts if part is not None]
    for part in (*reversed(parts), comm):
        assert part is not None
        part.close()


LARGE = torch.ones(1 << 18)


def grouped(comm: Communicator) -> None:
    with comm.group():
        for peer in (1, comm.rank):
            comm.send(LARGE, peer, stream=INLINE)
            comm.send(LARGE[:3], peer, stream=INLINE)
            comm.recv(torch.zeros(1 << 18), peer, stream=INLINE)
            comm.recv(torch.zeros(3), peer, stream=INLINE)


def to_itself(comm: Communicator, numel: int) -> None:
    """Nothing is left of a message to itself that has not been received."""
    sent, received = torch.full((numel,), 7.0), torch.zeros(numel)
    with comm.group():
        comm.send(sent, comm.rank, stream=INLINE)
        comm.recv(received, comm.rank, stream=INLINE)
    assert received.eq(7.0).all()


WAITS: dict[str, Call] = {
    "collective": all_reduce,
    "in a thread": lambda comm: all_reduce(comm, "threaded"),
    "exchange": lambda comm: comm.exchange(1),
    "split": lambda comm: comm.split(0, 0, "more"),
    "empty": lambda comm: comm.empty(4, torch.float32),
    "close": lambda comm: comm.close(),
    "agree": lambda comm: comm.agree()(lambda: None)(),
    "recv": lambda comm: comm.recv(torch.zeros(5), 1, stream=INLINE),
    "send": lambda comm: comm.send(LARGE, 1, stream=INLINE),
    "group": grouped,
}


@pytest.mark.parametrize("nodes", ["several nodes", "one node"])
@on_ranks(3, more=(2,))
def test_it_interrupts_whatever_waits_for_the_rank(world: World, nodes: str) -> None:
    """All go on together: the next calls of every communicator work, and have the same numbers on all ranks."""
    with communicators(world, nodes) as (comm, parts):

        @comm.agree()
        def fail(part: Communicator, call: Call) -> None:
            all_reduce(part)
            all_reduce(parts[1], "threaded")
            if world.rank == 1:
                raise ArithmeticError("on purpose")
            call(part)

        for call in WAITS.values():
            for part in (parts[0], parts[1], comm):
                if part is comm and call in (WAITS["close"], WAITS["agree"]):
                    continue
                with pytest.raises(RemoteError, match="rank 1 raised ArithmeticError: on purpose") as caught:
                    fail(part, call)
                assert caught.value.failure.rank == 1
                assert caught.value.comm is comm
                for each in (comm, *parts):
                    all_reduce(each)
                    assert len(set(each.exchange(each._number))) == 1
                if call is grouped:
                    to_itself(part, 1 << 18)
                    to_itself(part, 3)


@pytest.mark.parametrize("nodes", ["several nodes", "one node"])
@on_ranks(2, more=(3,))
def test_calls_of_its_own_threads_do_not_hold_up_a_rank_that_fails(world: World, nodes: str) -> None:
    """Rank 1 fails while its threads send, receive, or are in a collective that the others come to later."""
    with communicators(world, nodes) as (comm, parts):
        pending: dict[str, Callable[[Communicator, Stream], object]] = {
            "send": lambda part, stream: part.send(LARGE, 0, stream=stream),
            "recv": lambda part, stream: part.recv(torch.zeros(5), 0, stream=stream),
            "collective": lambda part, stream: part.all_gather(torch.zeros(part.size), torch.zeros(1), stream=stream),
        }

        @comm.agree()
        def fail(part: Communicator, stream: Stream, call: Callable[[Communicator, Stream], object]) -> None:
            if world.rank == 1:
                call(part, stream)
                raise ArithmeticError("on purpose")
            all_reduce(parts[1])

        for call in pending.values():
            for part in (parts[0], comm):
                stream = new_stream(world.device, "test", threaded=True)
                with pytest.raises(RemoteError) as caught:
                    fail(part, stream, call)
                if part is comm and call is pending["collective"]:  # the others, which have been interrupted, are heard first
                    assert "ArithmeticError" in str(caught.value) or caught.value.failure.is_consequence
                    assert world.rank != 1 or isinstance(caught.value.__cause__, ArithmeticError)
                else:
                    assert "rank 1 raised ArithmeticError: on purpose" in str(caught.value)
                stream.recover()
                stream.close()
                for each in (comm, *parts):
                    all_reduce(each)
                to_itself(part, 3)


class Beside(Thread):
    """Makes collectives on a communicator of its own, until all ranks want it to end."""

    def __init__(self, own: Communicator) -> None:
        super().__init__()
        self.own, self.wants_end, self.calls, self.errors = own, False, 0, list[Exception]()

    def run(self) -> None:
        with suppress_into(self.errors):
            ended = 0.0
            while ended < self.own.size:
                value = torch.tensor([float(self.wants_end), 1.0])
                self.own.all_reduce(value, value, ReduceOp.SUM, stream=INLINE).synchronize()
                ended, ranks = value.tolist()
                assert ranks == self.own.size
                self.calls += 1
                sleep(0.002 * (1 + self.own.rank))


@pytest.mark.parametrize("nodes", ["several nodes", "one node"])
@on_ranks(2, 3)
def test_a_thread_beside_the_block_goes_on(world: World, nodes: str) -> None:
    """It has a communicator of its own. Once it has ended, a block may use that."""
    with communicators(world, nodes) as (comm, (part, own, _)), shared_folder(world) as folder:
        beside = Beside(own)
        beside.start()

        @comm.agree()
        def fail(used: Communicator) -> None:
            if world.rank == 1:
                sleep(0.005)
                raise ArithmeticError("on purpose")
            all_reduce(used)

        while not all(comm.exchange(beside.calls)):
            sleep(0.002)
        for _ in range(10):
            refused("on purpose", lambda: fail(part), RemoteError)
            all_reduce(part)
        with pytest.raises(checkpoint.CheckpointError, match="rank 1 raised"):
            checkpoint.save(folder / "step-1", {"value": object() if world.rank == 1 else 1})
        beside.wants_end = True
        beside.join()
        assert not beside.errors
        for _ in range(2):
            refused("on purpose", lambda: fail(own), RemoteError)
            all_reduce(own)


@on_ranks(2, 3)
def test_a_thread_that_only_some_ranks_have(world: World) -> None:
    """It waits for ranks that make the call in the block: they leave it, and all go on together."""
    with communicators(world, "one node") as (comm, (part, *_)):
        errors = list[Exception]()

        def beside() -> None:
            with suppress_into(errors):
                all_reduce(part)
                all_reduce(part)

        thread = Thread(target=beside)

        @comm.agree()
        def fail() -> None:
            if world.rank == 0:
                thread.start()
            else:
                all_reduce(part)
            if world.rank == 1:
                sleep(0.01)
                raise ArithmeticError("on purpose")

        refused("on purpose", fail, RemoteError)
        if world.rank == 0:
            thread.join()
            assert [type(error) for error in errors] == [Interrupted]
        all_reduce(part)


@on_ranks(2, more=(3,))
def test_an_exception_in_a_barrier(world: World) -> None:
    """As a signal handler raises it, in a rank that waits in a barrier which the others do not reach."""
    with communicators(world, "one node") as (comm, (part, *_)):
        assert isinstance(part.backend, MpiBackend)
        meeting = part.backend._meeting

        def handler(*_: object) -> None:
            raise TimeoutError("on purpose")

        @comm.agree()
        def fail() -> None:
            if world.rank == 1:
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(meeting, "_wait", handler)
                    all_reduce(part)

        refused("rank 1 raised TimeoutError: on purpose", fail, RemoteError)
        assert len(set(comm.exchange(meeting.reached))) == 1
        for each in (part, comm):
            for _ in range(3):
                all_reduce(each)


def test_an_exception_that_causes_itself() -> None:
    error = ArithmeticError("on purpose")
    error.__cause__ = error
    assert not Failure.of(error, 0).is_consequence
    error.__cause__ = KeyError("another")
    error.__cause__.__context__ = Interrupted("part", [1])
    assert Failure.of(error, 0).is_consequence


@pytest.mark.parametrize("nodes", ["several nodes", "one node"])
@on_ranks(3)
def test_ranks_that_wait_for_those_that_wait(world: World, nodes: str) -> None:
    """Rank 0 waits for rank 1, in a call or at the end of a block of their own; rank 1 waits for rank 2, which has failed."""
    with communicators(world, nodes) as (comm, (first, second, _)):
        low = first.split(0 if world.rank < 2 else None, world.rank, "ranks 0, 1")
        high = second.split(0 if world.rank > 0 else None, world.rank, "ranks 1, 2")

        def step(own_block: bool) -> None:
            if world.rank == 2:
                raise ArithmeticError("on purpose")
            assert low is not None
            with low.agree() if own_block else nullcontext():
                if high is not None:
                    all_reduce(high)
            all_reduce(low)

        for own_block in (False, True):
            with pytest.raises(RemoteError, match="rank 2 raised ArithmeticError: on purpose") as caught:
                comm.agree()(step)(own_block)
            assert not caught.value.failure.is_consequence
            for each in filter(None, (high, low, first, comm)):
                all_reduce(each)
        for part in filter(None, (high, low)):
            part.close()


@on_ranks(2)
def test_a_communicator_that_a_rank_has_left_waits_for_nobody(world: World) -> None:
    """An interrupted rank that goes on in the block is told again, until the block ends."""
    with communicators(world, "one node") as (comm, (part, *_)):

        @comm.agree()
        def fail() -> None:
            if world.rank == 1:
                raise ArithmeticError("on purpose")
            for _ in range(2):
                refused(r"'part 0'.*: rank [01] left a block of agree\(\)", lambda: all_reduce(part), Interrupted)

        refused("on purpose", fail, RemoteError)


@on_ranks(2, more=(3,))
def test_a_training_step_is_repeated(world: World) -> None:
    """A rank fails in a forward, in a backward, and between them; the steps are those of a training without failures."""

    def train(failing: dict[int, str]) -> list[torch.Tensor]:
        torch.manual_seed(5)
        model: Any = shard_blocks(OddMLP())
        optimizer = torch.optim.AdamW(model.parameters())
        fail_in = ""

        def fail(here: str) -> None:
            if fail_in == here and world.rank == 1:
                raise ArithmeticError("on purpose")

        def in_forward(module: torch.nn.Module, args: object, out: torch.Tensor) -> None:
            fail("forward")
            out.register_hook(lambda grad: fail("backward"))

        model.blocks[1].register_forward_hook(in_forward)

        def step(number: int) -> None:
            loss = model(batch(number).float().chunk(world.size)[world.rank]).square().mean()
            fail("middle")
            loss.backward()

        for number in range(4):
            fail_in = failing.get(number, "")
            if fail_in:
                with pytest.raises(RemoteError, match="rank 1 raised ArithmeticError: on purpose"):
                    world.comm.agree()(step)(number)
                model.reset_iter_state()
                optimizer.zero_grad()
            fail_in = ""
            with world.comm.agree():
                step(number)
            step_all(optimizer)
        return [parameter.full_tensor() for parameter in model.parameters()]

    for one, other in zip(train({}), train({0: "forward", 1: "backward", 3: "middle"}), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("is_caught", [False, True], ids=["raised", "caught"])
@pytest.mark.parametrize("is_checked", [True, False], ids=["checked", "unchecked"])
@on_ranks(2, 3)
def test_blocks_within_blocks(world: World, is_checked: bool, is_caught: bool) -> None:
    """Rank 1 fails between any two ends. Each block that it has failed in, or that is around it, raises on every rank."""
    comm = Communicator(MpiBackend(MPI.COMM_WORLD.Dup(), "all", 0), world.comm.hooks if is_checked else ())

    found = set[tuple[int, str]]()

    def run(failing: int) -> list[int]:
        """The depths of the blocks that raise, if rank 1 fails in the place of this number."""
        raised, places = list[int](), iter(range(5))

        def place() -> None:
            if next(places) == failing and world.rank == 1:
                raise ArithmeticError("on purpose")

        def block(depth: int) -> None:
            try:
                with comm.agree():
                    place()
                    if depth < 3:
                        block(depth + 1)
                        place()
            except RemoteError as error:
                found.add((error.failure.rank, error.failure.error))
                raised.append(depth)
                if not is_caught:
                    raise

        with suppress(RemoteError):
            block(1)
        return raised

    # The depth of each place, and of the ends at which the others meet rank 1 first.
    for failing, (depth, deepest) in enumerate([(1, 3), (2, 3), (3, 3), (2, 2), (1, 1)]):
        first, last = (depth if world.rank == 1 else deepest), (depth if is_caught else 1)
        assert run(failing) == list(range(first, last - 1, -1)), failing
        all_reduce(comm)
        assert len(set(comm.exchange(comm._number))) == 1
    assert run(5) == []
    assert found == {(1, "ArithmeticError: on purpose")}
    comm.close()


@on_ranks(2)
def test_a_save_in_a_block(world: World) -> None:
    """Rank 1 fails before it, so that the other waits in the save; then also where it handles that."""
    with shared_folder(world) as folder:

        def save(is_caught: bool) -> None:
            if world.rank == 1:
                raise ArithmeticError("on purpose")
            with suppress(*[checkpoint.CheckpointError] * is_caught):
                checkpoint.save(folder / "step-1", {"value": 1})

        for is_caught in (False, True):
            with pytest.raises(RemoteError, match=r"^rank 1 raised ArithmeticError: on purpose"):
                world.comm.agree()(save)(is_caught)
        world.comm.agree()(checkpoint.save)(folder / "step-2", {"value": 2})
        assert [path.name for path in folder.iterdir()] == ["step-2"]


@pytest.mark.rest
def test_waits_that_cannot_be_interrupted() -> None:
    """Where calls are not compared, the job ends in seconds, with the exception."""
    source = """
import torch, shardrt
world = shardrt.init("cpu")
part, large = world.mesh.communicator("gather"), torch.ones(1 << 16)
with world.comm.agree():
    if world.rank == 1:
        raise ArithmeticError("on purpose")
    part.broadcast(large, large, 1, stream=world.stream)
"""
    timing = "poll_s=0.05,lost_s=1,settle_s=0.2"
    done = run_script(source, 2, code=17, SHARDRT_CHECK="0", SHARDRT_MONITOR_TIMING=timing)
    assert "missing rank 1: host" in done.stderr, done.stderr
    assert "agree, after an exception on 'world'" in done.stderr, done.stderr
    assert done.stderr.count("ArithmeticError: on purpose") == 1, done.stderr
