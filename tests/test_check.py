"""Calls that differ between ranks, and what the recorder keeps of calls."""

import json
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch

from ranks import on_ranks
from shardrt.comm import Communicator, MismatchError, PreMulSum, ReduceOp, RemoteError, World, new_stream
from shardrt.comm.fingerprint import name_ranks
from shardrt.comm.recorder import main, merge


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
        with pytest.raises(MismatchError, match=r"rank 0: .*; rank 1: "):
            call()
    sent, received = ([3, 1], [3, 2]) if not odd else ([2, 0], [1, 0])
    comm.all_to_all(torch.ones(sum(received)), torch.ones(sum(sent)), received, sent, stream=stream)
    if odd:
        comm.send(x, 0, stream=stream)
    else:
        comm.recv(x, 1, stream=stream)
    gather(comm)
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

    with pytest.raises(MismatchError, match=r"all_gather float32 4 \+ barrier"):
        group()
    comm.close()


@on_ranks(2, 3)
def test_a_failed_rank_is_heard_in_a_collective(world: World) -> None:
    """The others wait in a collective of the block that the failed rank never makes."""
    comm = fresh(world)

    @comm.agree()
    def fail() -> None:
        if world.rank == 1:
            raise ArithmeticError("on purpose")
        gather(comm)
        gather(comm)

    @comm.agree()
    def skip() -> None:
        if world.rank != 1:
            gather(comm)

    for _ in range(2):
        with pytest.raises(RemoteError, match="rank 1 raised ArithmeticError: on purpose") as caught:
            fail()
        assert caught.value.failure.rank == 1
        assert len(set(comm.exchange(comm._number))) == 1
    with pytest.raises(MismatchError, match="rank 1: agree"):
        skip()
    gather(comm)
    comm.close()


@on_ranks(2, 3)
def test_a_failed_rank_is_heard_in_a_control_call(world: World) -> None:
    comm = fresh(world)

    @comm.agree()
    def fail() -> None:
        if world.rank == 1:
            raise ArithmeticError("on purpose")
        comm.exchange(1)

    @comm.agree()
    def skip() -> None:
        if world.rank != 1:
            comm.split(0, 0, "part")

    with pytest.raises(RemoteError, match="rank 1 raised ArithmeticError: on purpose"):
        fail()
    with pytest.raises(MismatchError, match="rank 1: agree"):
        skip()
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
    assert "test_check.py" in inline["stack"][0]
    assert inline["stack"][0].endswith("in gather")
    assert inline["called"] <= inline["started"] <= inline["ended"]
    assert threaded["stream"] == "test"
    comm.close()


def call(number: int, what: str, ended: float = 2.0) -> dict[str, object]:
    return {"comm": "dp", "ranks": [0, 1, 2, 3], "number": number, "what": what, "started": 1.0, "ended": ended}


def test_merge_names_who_is_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def dump(rank: int) -> dict[str, object]:
        what = "all_gather bfloat16 4096" if rank == 3 else "reduce_scatter bfloat16 4096 sum"
        return {"rank": rank, "size": 4, "notes": [], "calls": [call(811, "barrier"), call(812, what, ended=0.0)]}

    stuck = (
        "! 'dp' of ranks 0, 1, 2, 3: rank 3 is at #812 all_gather bfloat16 4096, under way; "
        "all others at #812 reduce_scatter bfloat16 4096 sum, under way"
    )
    assert merge([dump(rank) for rank in (2, 0, 3, 1)]) == stuck
    assert merge([dump(0), dump(2), dump(3)]).splitlines()[0] == "no dump of rank 1"
    together = [{"rank": rank, "size": 4, "notes": [], "calls": [call(5, "barrier")]} for rank in range(4)]
    assert merge(together) == "  'dp' of ranks 0, 1, 2, 3: all at #5 barrier, done"
    for rank in range(4):
        (tmp_path / f"rank-{rank}.json").write_text(json.dumps(dump(rank)))
    assert main(["merge", str(tmp_path)]) == 0
    assert capsys.readouterr().out == stuck + "\n"
    assert main(["merge"]) == 2
