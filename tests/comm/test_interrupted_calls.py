"""A signal handler's exception takes a rank out of a call, and the rank handles it: no rank gets a wrong result."""

from __future__ import annotations

import dis
import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from mpi4py import MPI

import shardrt.comm
from checkpoints import shared_folder
from ranks import on_ranks
from shardrt.comm import Communicator, MismatchError, ReduceOp, RemoteError, World
from shardrt.comm.backends.mpi import MpiBackend
from shardrt.comm.core.calls import Interrupted
from shardrt.comm.core.streams import INLINE
from toys import OddMLP, batch, shard_blocks, step_all

pytestmark = pytest.mark.mpi

COMM = Path(shardrt.comm.__file__).parent
SMALL, LARGE = 1 << 13, (1 << 13) + 1  # elements of 32 KiB, and more: by one exchange in shared memory, or in chunks

MOST_PASSES = 3  # of one point: a rank may wait for many turns of a loop

Call = Callable[[Communicator, float], float]


def all_reduce(comm: Communicator, value: float, numel: int) -> float:
    inp = torch.full((numel,), value)
    comm.all_reduce(inp, inp, ReduceOp.SUM, stream=INLINE)
    assert inp.eq(inp[0]).all()
    return float(inp[0])


def all_gather(comm: Communicator, value: float) -> float:
    out = torch.zeros(3 * comm.size)
    comm.all_gather(out, torch.full((3,), value), stream=INLINE)
    assert out.eq(out[0]).all()
    return float(out.sum() / 3)


def reduce_scatter(comm: Communicator, value: float) -> float:
    out = torch.zeros(3)
    comm.reduce_scatter(out, torch.full((3 * comm.size,), value), ReduceOp.SUM, stream=INLINE)
    return float(out[2])


def broadcast(comm: Communicator, value: float) -> float:
    out = torch.zeros(3)
    comm.broadcast(out, torch.full((3,), value), 0, stream=INLINE)
    return float(out[0] * comm.size)


def grouped(comm: Communicator, value: float) -> float:
    one, two = torch.full((3,), value), torch.full((5,), value)
    with comm.group():
        comm.all_reduce(one, one, ReduceOp.SUM, stream=INLINE)
        comm.all_reduce(two, two, ReduceOp.SUM, stream=INLINE)
    assert one[0] == two[4]
    return float(one[0])


CALLS: dict[str, Call] = {
    "all_reduce": lambda comm, value: all_reduce(comm, value, 4),
    "32 KiB": lambda comm, value: all_reduce(comm, value, SMALL),
    "more": lambda comm, value: all_reduce(comm, value, LARGE),
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "broadcast": broadcast,
    "group": grouped,
    "exchange": lambda comm, value: sum(comm.exchange(value)),
}


@contextmanager
def communicator(world: World, node: int = 0) -> Iterator[Communicator]:
    comm = Communicator(MpiBackend(MPI.COMM_WORLD.Dup(), "part", node), world.comm.hooks)
    yield comm
    comm.close()


def outcome(comm: Communicator, call: Call, value: float) -> str:
    try:
        return "right" if call(comm, value) == comm.size * value else "wrong"
    except (TimeoutError, Interrupted, MismatchError, RemoteError) as error:
        return type(error).__name__


def alarm(*_: object) -> None:
    raise TimeoutError("on purpose")


def interrupt_rank_1(world: World) -> None:
    """In a tenth of a second; the others come later."""
    world.comm.exchange(None)
    if world.rank == 1:
        signal.signal(signal.SIGALRM, alarm)
        signal.setitimer(signal.ITIMER_REAL, 0.1)
    else:
        time.sleep(0.2)


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2, 3)
def test_a_signal_while_the_rank_waits(world: World, name: str) -> None:
    """Rank 1 leaves the call, and so do the others, until an agree() has ended."""
    call = CALLS[name]
    with communicator(world) as comm:
        for _ in range(2):
            assert outcome(comm, call, 1.0) == "right"
            interrupt_rank_1(world)
            found = [outcome(comm, call, value) for value in (2.0, 3.0, 4.0)]
            assert found == [*(["TimeoutError"] if world.rank == 1 else ["Interrupted"]), "Interrupted", "Interrupted"]
            with comm.agree():
                pass
            assert outcome(comm, call, 5.0) == "right"
            assert len(set(comm.exchange(comm._number))) == 1


@on_ranks(2)  # of more, one may get the message from the rank that has left
def test_messages_of_a_call_that_was_cut_short(world: World) -> None:
    """A broadcast that rank 1 has not received is none of the next ones."""
    with communicator(world, node=world.rank) as comm:
        for _ in range(2):
            interrupt_rank_1(world)
            found = [outcome(comm, broadcast, 2.0), outcome(comm, broadcast, 3.0)]
            assert found == [("TimeoutError" if world.rank == 1 else "right"), "Interrupted"]
            with comm.agree():
                pass
            for name in ("broadcast", "all_reduce", "more"):
                assert outcome(comm, CALLS[name], 5.0) == "right"


@on_ranks(2, 3)
def test_all_ranks_are_interrupted_and_save(world: World) -> None:
    """As by Ctrl-C, at about the same time, anywhere in a step; then they train on."""
    torch.manual_seed(5)
    model: Any = shard_blocks(OddMLP())
    optimizer = torch.optim.AdamW(model.parameters())

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def train(steps: int) -> None:
        for number in range(steps):
            loss = model(batch(number).float().chunk(world.size)[world.rank]).square().mean()
            loss.backward()
            step_all(optimizer)
            world.mean(loss.detach())

    train(1)  # the optimizer has the same state on all ranks
    signal.signal(signal.SIGALRM, interrupt)
    with shared_folder(world) as folder:
        for trial in range(10):
            world.barrier()
            signal.setitimer(signal.ITIMER_REAL, 0.02 + 0.0017 * trial + 0.0003 * world.rank)
            with pytest.raises(KeyboardInterrupt):
                train(100_000)
            shardrt.checkpoint.save(folder / f"step-{trial}", {"model": model, "optimizer": optimizer})
            model.reset_iter_state()
            optimizer.zero_grad()
            saved = [parameter.full_tensor() for parameter in model.parameters()]
            shardrt.checkpoint.load(folder / f"step-{trial}", {"model": model, "optimizer": optimizer})
            for before, parameter in zip(saved, model.parameters(), strict=True):
                assert torch.equal(before, parameter.full_tensor())


@cache
def points(code: CodeType) -> frozenset[int]:
    """The instructions before which CPython runs signal handlers: behind calls, and where functions and loops begin."""
    found, before = set[int](), None
    for instruction in dis.get_instructions(code):
        if before is not None and before.opname.startswith(("CALL", "RESUME")):
            found.add(instruction.offset)
        if instruction.opname.startswith("JUMP_BACKWARD"):
            found.add(instruction.argval)
        before = instruction
    return frozenset(found)


class Interruption:
    """In the block, raises TimeoutError at point `number` of the code in `folders`.

    first: points count from the first call of this function on.   seen: the points that were passed.   place: the last one.
    """

    def __init__(self, number: int, *folders: Path, first: Callable[..., object] | None = None) -> None:
        self._number, self._folders, self._first = number, tuple(f"{folder}{os.sep}" for folder in folders), first
        self._passes = Counter[tuple[CodeType, int]]()
        self.seen, self.place = 0, "nowhere"

    def __enter__(self) -> Interruption:
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter_frame(self, frame: FrameType, event: str, argument: object) -> Any:
        if getattr(self._first, "__code__", None) is frame.f_code:
            self._first = None
        if self._first is not None or not frame.f_code.co_filename.startswith(self._folders):
            return None
        frame.f_trace_opcodes = True
        return self._trace

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and frame.f_lasti in points(frame.f_code):
            self._passes[frame.f_code, frame.f_lasti] += 1
            if self._passes[frame.f_code, frame.f_lasti] > MOST_PASSES:
                return self._trace
            self.seen += 1
            if self.seen == self._number:
                sys.settrace(None)
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise TimeoutError(f"on purpose, at {self.place}")
        return self._trace


@pytest.mark.parametrize(
    ("name", "others"),
    [*((name, name) for name in ("all_reduce", "more", "all_gather", "group")), ("all_reduce", "all_gather")],
    ids=lambda name: name,
)
@on_ranks(2, more=(3,))
def test_an_exception_anywhere_in_a_call(world: World, name: str, others: str) -> None:
    """The others get the right result or an error, in this call and the next; all go on together after an agree().

    Before a call has its number, the rank has not made it.   others: what they call the first time.
    """
    call, number, is_last = CALLS[name], 0, False
    with communicator(world) as comm, pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardrt.comm.groups.control._SIGNAL_S", 0.0)
        patch.setattr(
            "shardrt.comm.backends.node.staging._PATIENCE_S", 1e3
        )  # late ranks go on by messages, whose calls wait in MPI
        while not is_last:
            number += 1
            if world.rank == 1:
                with Interruption(number, COMM, first=Communicator._run) as interruption:
                    found = [outcome(comm, call, 2.0)]
                is_last = interruption.seen < number
            else:
                found = [outcome(comm, CALLS[others], 2.0)]
            found.append(outcome(comm, call, 3.0))
            assert "wrong" not in found, (number, found)
            with suppress(MismatchError), comm.agree():  # of rank 1, which may have made one call more than the others
                pass
            assert outcome(comm, call, 4.0) == "right", number
            is_last = world.comm.exchange(is_last)[1]
        assert number > 40


def text_of(path: Path) -> str:
    """What another rank writes to a file within half a minute; else an empty string."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if path.exists() and (text := path.read_text()):
            return text
        time.sleep(0.001)
    return ""


@on_ranks(2)
def test_an_exception_anywhere_in_a_step(world: World) -> None:
    """On all ranks in the same place between collectives: what is left saves, loads and trains as if nothing had been."""
    torch.manual_seed(5)
    model: Any = shard_blocks(OddMLP())

    def step() -> list[torch.Tensor]:
        model.zero_grad()
        model(batch(0).float().chunk(world.size)[world.rank]).square().mean().backward()
        return [parameter.grad.full_tensor() for parameter in model.parameters()]

    gc.collect()  # what other tests have left would be freed in the step of one rank, and not of another
    step()
    expected, weights = step(), [parameter.detach().full_tensor() for parameter in model.parameters()]
    # Not in tensor/placement, where ranks with smaller shards pad them.
    folders = [COMM.parent / name for name in ("fsdp", "tensor/dtensor", "tensor/operations", "tensor/optimizers")]
    with shared_folder(world) as folder:
        for number in range(1, 100_000, 157):
            with Interruption(number, *folders) as interruption, suppress(TimeoutError):
                step()
            (folder / f"{number}-{world.rank}").write_text(interruption.place)
            # Through files: ranks that have left the step in different places could not meet in a call.
            assert interruption.place == text_of(folder / f"{number}-{1 - world.rank}"), number
            if interruption.seen < number:
                break
            shardrt.checkpoint.save(folder / "saved", {"model": model})
            model.reset_iter_state()
            assert all(map(torch.equal, step(), expected)), number
            shardrt.checkpoint.load(folder / "saved", {"model": model})
            loaded = [parameter.detach().full_tensor() for parameter in model.parameters()]
            assert all(map(torch.equal, loaded, weights)), number
        assert number > 1000
