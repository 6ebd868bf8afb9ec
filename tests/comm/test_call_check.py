"""Calls that differ between ranks, and what the recorder keeps of calls."""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch

from ranks import on_ranks, refused
from shardrt.comm import Communicator, MismatchError, PreMulSum, ReduceOp, RemoteError, World, new_stream
from shardrt.comm.core.calls import Subject, about
from shardrt.comm.ending.words import name_ranks


def fresh(world: World) -> Communicator:
    """A communicator of the test's own: its call numbers begin at 0."""
    comm = world.comm.split(0, world.rank, "test")
    assert comm is not None
    return comm


def gather(comm: Communicator, numel: int = 4, dtype: torch.dtype = torch.float32, stream: str = "inline") -> None:
    used = new_stream(comm.device, "test", threaded=stream == "threaded")
    inp = torch.zeros(numel, dtype=dtype)
    work = comm.all_gather(torch.zeros(comm.size * numel, dtype=dtype), inp, stream=used)
    try:
        work.synchronize()
    except RuntimeError as error:  # of a thread
        raise error.__cause__ or error from None


@pytest.mark.parametrize("stream", ["inline", "threaded"])
@on_ranks(2, 3, 4)
def test_a_mismatch_raises_everywhere(world: World, stream: str) -> None:
    comm = fresh(world)
    gather(comm, stream=stream)
    others = "rank 0" if world.size == 2 else f"ranks 0, {', '.join(map(str, range(2, world.size)))}"
    with pytest.raises(MismatchError) as caught:
        gather(comm, numel=4 if world.rank != 1 else 5, stream=stream)
    assert f"{others}: all_gather float32 4; rank 1: all_gather float32 5" in str(caught.value)
    assert "at #1" in str(caught.value)
    if stream == "inline":  # a thread that has failed does not go on
        gather(comm)
    comm.close()


@on_ranks(2)
def test_what_is_compared(world: World) -> None:
    comm, odd, stream = fresh(world), world.rank == 1, world.stream
    x = torch.ones(4)
    differing = [
        lambda: comm.all_reduce(x, x, ReduceOp.MAX if odd else ReduceOp.MIN, stream=stream),
        lambda: comm.all_reduce(x, x, PreMulSum(2.0 if odd else 3.0), stream=stream),
        lambda: comm.broadcast(x, x, world.rank, stream=stream),
        lambda: gather(comm, dtype=torch.int32 if odd else torch.float32),
        lambda: gather(comm) if odd else comm.barrier(stream=stream),
    ]
    for call in differing:
        refused(r"rank 0: .*; rank 1: ", call, MismatchError)
    sent, received = ([3, 1], [3, 2]) if not odd else ([2, 0], [1, 0])
    comm.all_to_all(torch.ones(sum(received)), torch.ones(sum(sent)), received, sent, stream=stream)
    if odd:
        comm.send(x, 0, stream=stream)
    else:
        comm.recv(x, 1, stream=stream)
    gather(comm)
    comm.close()


@on_ranks(2, 3)
def test_what_calls_are_for_is_compared(world: World) -> None:
    """Of each call of a group too; the innermost words hold. Control calls are for all."""
    comm, last = fresh(world), world.rank == world.size - 1
    with about("outside"):
        with about(Subject("a" if last else "b", "try this")):
            with pytest.raises(MismatchError, match=r"all_gather float32 4 of b; .*all_gather float32 4 of a .*; try this$"):
                gather(comm)
            assert comm.exchange(1) == [1] * comm.size
            with about(""), pytest.raises(MismatchError, match="barrier of a"):
                comm.barrier(stream=world.stream)
            with about("inside"):
                gather(comm)
        gather(comm)

    def barriers(*names: str) -> None:
        with comm.group():
            for name in names:
                with about(name):
                    comm.barrier(stream=world.stream)

    refused(r"barrier of a \+ barrier of b", lambda: barriers(*("ab" if last else "ba")), MismatchError)
    if last:
        with about("a"):
            comm.send(torch.ones(1), 0, stream=world.stream)
    elif world.rank == 0:
        comm.recv(torch.ones(1), world.size - 1, stream=world.stream)
    comm.close()


@pytest.mark.mpi
@on_ranks(2, 3)
def test_counts_of_an_all_to_all_are_compared(world: World) -> None:
    comm, stream = fresh(world), world.stream
    good = [1] * world.size
    wrong = [*good[:-1], 3] if world.rank == 0 else good

    def send(*counts: list[int]) -> None:
        numel = sum(counts[1]) if counts else world.size
        comm.all_to_all(torch.zeros(world.size), torch.ones(numel), *counts, stream=stream)

    def grouped() -> None:
        with comm.group():
            send(good, good)
            send(good, wrong)

    last = world.size - 1
    for call in (lambda: send(good, wrong), grouped):
        refused(f"do not match: rank 0 sends 3 elements to rank {last}, which expects 1 .report", call, MismatchError)
        gather(comm)
    with pytest.raises(MismatchError, match=r"rank 0: all_to_all float32 with counts; .*: all_to_all float32 \d \("):
        send(*((good, good) if world.rank == 0 else ()))
    gather(comm)
    comm.close()


LARGE = 1 << 16  # of float32: a message of this size waits for its receiver


@pytest.mark.mpi
@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "grouped"])
@on_ranks(2, 3)
def test_sends_and_receives_are_compared(world: World, grouped: bool) -> None:
    """The receiver takes nothing of a message that is not of its size and dtype; the next messages arrive."""
    comm, stream = fresh(world), world.stream

    def transfer(send: torch.Tensor, recv: torch.Tensor) -> None:
        with comm.group() if grouped else nullcontext():
            if world.rank == 0:
                comm.send(send, 1, stream=stream)
            elif world.rank == 1:
                comm.recv(recv, 0, stream=stream)

    for sent, expected in ((4, 5), (5, 4), (0, 4), (4, 0), (LARGE, 4), (4, LARGE), (LARGE, LARGE + 1), (LARGE, 0)):
        for dtype in (torch.float32, torch.int32):
            if sent == expected and dtype is torch.float32:
                continue
            out = torch.full((expected,), 9.0)
            text = f"rank 0: send {str(dtype)[6:]} {sent} to 1; rank 1: recv float32 {expected} from 0"
            waits = sent == LARGE or world.rank == 1
            if waits and world.rank < 2:
                with pytest.raises(MismatchError, match=text):
                    transfer(torch.ones(sent, dtype=dtype), out)
            else:
                transfer(torch.ones(sent, dtype=dtype), out)
            assert out.eq(9.0).all()
            comm.exchange(None)
            if not waits and world.rank == 0:  # it has been sent when it is refused
                with pytest.raises(MismatchError, match=text):
                    transfer(torch.ones(3), out)
            elif world.rank == 1 and sent != LARGE:
                transfer(out, out := torch.zeros(3))
                assert out.tolist() == [1, 1, 1]
    comm.close()


@pytest.mark.mpi
@on_ranks(2)
def test_a_refusal_takes_the_place_of_no_message(world: World) -> None:
    """Rank 0 hears of it in its next call, which receives what it would have received."""
    comm, stream, answer = fresh(world), world.stream, torch.zeros(2)
    if world.rank == 0:
        comm.send(torch.ones(4), 1, stream=stream)
    else:
        refused("recv float32 5", lambda: comm.recv(torch.zeros(5), 0, stream=stream), MismatchError)
    for number in (1.0, 2.0):
        if world.rank == 1:
            comm.send(torch.full((2,), number), 0, stream=stream)
            continue
        with pytest.raises(MismatchError, match="recv float32 5") if number == 1.0 else nullcontext():
            comm.recv(answer, 1, stream=stream)
        assert answer.tolist() == [number, number]
    comm.close()


@pytest.mark.mpi
@on_ranks(2)
def test_messages_of_several_parts_are_compared(world: World) -> None:
    comm = fresh(world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardrt.comm.backends.messages._MESSAGE_NBYTES", 4 * LARGE)
        for sent, expected in ((2, 1), (1, 2), (3, 2), (2, 3), (2, 2)):
            sent, expected = sent * LARGE, expected * LARGE
            tensor = torch.ones(sent if world.rank == 0 else expected)
            call = comm.send if world.rank == 0 else comm.recv
            if sent == expected:
                call(tensor, 1 - world.rank, stream=world.stream)
                continue
            with pytest.raises(MismatchError, match=f"send float32 {sent} to 1; rank 1: recv float32 {expected} from 0"):
                call(tensor, 1 - world.rank, stream=world.stream)
    comm.close()


@pytest.mark.parametrize("stream", ["inline", "threaded"])
@on_ranks(2, 3)
def test_control_calls_are_compared_as_any_other(world: World, stream: str) -> None:
    control: dict[str, Callable[[Communicator], object]] = {
        "exchange": lambda comm: comm.exchange(1),
        "split": lambda comm: comm.split(0, 0, "part"),
        "empty float32 4": lambda comm: comm.empty(4, torch.float32),
    }
    others: dict[str, Callable[[Communicator], object]] = {
        "all_gather float32 4": lambda comm: gather(comm, stream=stream),
        "exchange": lambda comm: comm.exchange(1),
        "empty float32 5": lambda comm: comm.empty(5, torch.float32),
    }
    for (name, call), (other, else_call) in product(control.items(), others.items()):
        if name == other:
            continue
        comm = fresh(world)
        gather(comm, stream=stream)
        comm.exchange(None)
        expected = f"at #2: rank 0: {name}; {name_ranks(range(1, world.size))}: {other} "
        with pytest.raises(MismatchError) as caught:
            (call if world.rank == 0 else else_call)(comm)
        assert expected in str(caught.value)
        if stream == "inline":  # a thread that has failed does not go on
            assert comm.exchange(world.rank) == list(range(world.size))
        comm.close()


@pytest.mark.mpi
@on_ranks(2, 3)
def test_control_calls_keep_their_place_beside_threads(world: World) -> None:
    """They wait for the collectives before them, which some ranks' threads come to late, but not for sends and receives."""
    comm, stream = fresh(world), new_stream(world.device, "late", threaded=True)
    for step in range(6):
        if step % world.size == world.rank:
            stream.submit(lambda: time.sleep(0.02))
        for _ in range(step):
            comm.all_gather(torch.zeros(comm.size), torch.zeros(1), stream=stream)
        assert comm.exchange((step, world.rank)) == [(step, rank) for rank in range(world.size)]
        part = comm.split(0, world.rank, f"part {step}")
        comm.barrier(stream=stream)
        comm.empty(step + 1, torch.uint8)
        assert part is not None
        part.close()
    message = torch.full((1 << 18,), float(world.rank))
    if world.rank == 0:
        comm.send(message, 1, stream=stream)
    comm.exchange(None)
    if world.rank == 1:
        comm.recv(message, 0, stream=stream)
    stream.synchronize()
    assert message[-1] == (0 if world.rank < 2 else 2)
    stream.close()
    comm.close()


@on_ranks(2, 3)
def test_a_group_is_compared_as_one(world: World) -> None:
    comm = fresh(world)

    def group() -> None:
        with comm.group():
            comm.all_gather(torch.zeros(4 * comm.size), torch.zeros(4), stream=world.stream)
            if world.rank == 0:
                comm.barrier(stream=world.stream)

    refused(r"all_gather float32 4 \+ barrier", group, MismatchError)
    comm.close()


@pytest.mark.parametrize("kind", ["collective", "control call"])
@on_ranks(2, 3)
def test_a_failed_rank_is_heard(world: World, kind: str) -> None:
    """The others wait in a call of the block that the failed rank never makes."""
    comm, is_control = fresh(world), kind == "control call"

    @comm.agree()
    def fail() -> None:
        if world.rank == 1:
            raise ArithmeticError("on purpose")
        for _ in range(2):
            comm.exchange(1) if is_control else gather(comm)

    @comm.agree()
    def skip() -> None:
        if world.rank != 1:
            comm.split(0, 0, "part") if is_control else gather(comm)

    for _ in range(2):
        with pytest.raises(RemoteError, match="rank 1 raised ArithmeticError: on purpose") as caught:
            fail()
        assert caught.value.failure.rank == 1
        assert len(set(comm.exchange(comm._number))) == 1
    refused("rank 1: agree", skip, MismatchError)
    assert len(set(comm.exchange(comm._number))) == 1
    gather(comm)
    comm.close()


@on_ranks(2)
def test_the_recorder_keeps_calls_not_tensors(world: World) -> None:
    comm = fresh(world)
    world.comm.exchange(None)
    gather(comm, numel=3)
    gather(comm, numel=3, stream="threaded")
    path = world.recorder.dump(Path(world.comm.exchange(f"{world.recorder.folder}")[0]) / f"test-{world.rank}.json")
    inline, threaded = json.loads(path.read_text())["calls"][-3:-1]
    path.unlink()
    assert (inline["comm"], inline["number"], inline["what"], inline["ranks"]) == ("test", 0, "all_gather float32 3", [0, 1])
    assert "test_call_check.py" in inline["stack"][0]
    assert inline["stack"][0].endswith("in gather")
    assert inline["called"] <= inline["started"] <= inline["ended"]
    assert threaded["stream"] == "test"
    comm.close()


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([3], "rank 3"),
        (range(8), "ranks 0, 1, 2, 3, 4, 5, 6, 7"),
        (range(100_000), "ranks 0 to 99999"),
        ([*range(500), 502, *range(504, 512)], "ranks 0 to 499, 502, 504 to 511"),
        (range(0, 1000, 8), "ranks 0, 8, 16, 24, 32, 40, 48, 56 and 117 more"),
    ],
)
def test_messages_name_many_ranks_in_few_words(ranks: Sequence[int], named: str) -> None:
    assert name_ranks(ranks) == named
