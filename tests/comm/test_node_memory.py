"""Memory of one node: what a rank writes, all see, or only itself; and who waits for whom."""

import gc
import os
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from ranks import on_ranks, run_script
from shardrt.comm import World
from shardrt.comm.backends.node import memory_files, node_memory
from shardrt.comm.core.backend import NodeMemory

PAGE = node_memory._PAGE


def made(world: World, nbytes: int) -> NodeMemory:
    memory = world.comm.node_memory(nbytes)
    assert memory is not None
    return memory


def pattern(start: int, nbytes: int) -> torch.Tensor:
    return (torch.arange(start, start + nbytes) * 7 % 251).to(torch.uint8)


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("nbytes", [1, PAGE - 1, PAGE, PAGE + 1, 70 * PAGE + 13])
def test_what_a_rank_writes_all_see(world: World, nbytes: int) -> None:
    memory = made(world, nbytes)
    assert memory.private.shape == (nbytes,)
    assert not memory.private.any()
    world.barrier()
    for turn in range(3):
        begin, end = (nbytes * rank // world.size for rank in (world.rank, world.rank + 1))
        if begin < end:
            part = memory.part(begin, end - begin)
            assert part.untyped_storage().nbytes() == end - begin
            part.copy_(pattern(begin + turn, end - begin))
        world.barrier()
        assert torch.equal(memory.private, pattern(turn, nbytes))
        world.barrier()


@on_ranks(2)
@pytest.mark.parametrize("nbytes", [3, PAGE + 1, 40 * PAGE])
def test_private_writes_stay_until_they_are_discarded(world: World, nbytes: int) -> None:
    memory, other = made(world, nbytes), made(world, nbytes)
    if world.rank == 0:
        memory.part(0, nbytes).fill_(1)
    world.barrier()
    assert memory.private.eq(1).all()
    memory.discard_writes()  # of which there are none
    assert memory.private.eq(1).all()
    if world.rank == 1:
        memory.private[-1] = 9
    other.private[0] = 5 + world.rank
    world.barrier()
    assert memory.private[-1] == (9 if world.rank == 1 else 1)
    if world.rank == 0:
        memory.part(0, nbytes).fill_(2)
    world.barrier()
    assert memory.private[-1] == (9 if world.rank == 1 else 2)
    memory.discard_writes()
    assert memory.private.eq(2).all()
    assert other.private[0] == 5 + world.rank
    assert not other.private[1:].any()
    world.barrier()


@on_ranks(2)
def test_more_pages_than_are_looked_at_at_once(world: World) -> None:
    with mock.patch.object(node_memory, "_SCANNED_PAGES", 4):
        for written in (0, 3, 4, 8, 9):
            memory = made(world, 9 * PAGE + 1)
            memory.private[written * PAGE] = 1
            memory.discard_writes()
            assert not memory.private.any()


@on_ranks(2, 3)
def test_a_writer_waits_for_those_that_read_the_same(world: World) -> None:
    memory, last = made(world, 8), world.size - 1
    for number in range(1, 4):
        if world.rank == last:
            memory.begin_reading(number)
            world.barrier()
            time.sleep(0.1)
            ended = time.monotonic()
            memory.end_reading()
        else:
            memory.begin_reading(number)
            memory.end_reading()
            world.barrier()
            if number == 2:
                assert list(zip(memory.readers(), range(1), strict=False))
            world.comm.wait_for_readers(memory)
            ended = time.monotonic()
        ends = world.comm.exchange(ended)
        assert min(ends[:last]) >= ends[last]
    # Who reads something newer may wait for this rank: nobody waits for it.
    memory.begin_reading(5 if world.rank == last else 4)
    if world.rank != last:
        memory.end_reading()
    world.barrier()
    world.comm.wait_for_readers(memory)
    world.barrier()


@on_ranks(2)
def test_nobody_waits_for_a_rank_that_left_a_block_of_agree(world: World) -> None:
    memory = made(world, 8)
    memory.begin_reading(1)
    world.barrier()

    @world.comm.agree()
    def fail() -> None:
        if world.rank == 1:
            raise ValueError("on purpose")
        world.comm.wait_for_readers(memory)

    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    world.barrier()


@on_ranks(2)
def test_tensors_keep_it_and_nothing_else_does(world: World) -> None:
    def mappings() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:shardrt")

    made(world, 1).discard_writes()  # which opens the page table
    descriptors = len(os.listdir("/proc/self/fd"))
    gc.collect()
    before = mappings()
    memory = made(world, 3 * PAGE)
    assert mappings() == before + 2
    part, private = memory.part(0, 5), memory.private
    del memory
    gc.collect()
    part.fill_(4)
    world.barrier()
    assert private[:5].eq(4).all()
    assert mappings() == before + 2
    del part, private
    gc.collect()
    assert mappings() == before
    assert len(os.listdir("/proc/self/fd")) == descriptors
    closed = world.comm.split(0, world.rank, "closed")
    assert closed is not None
    last = closed.node_memory(8)
    assert last is not None
    last.begin_reading(1)
    closed.close()
    closed.wait_for_readers(last)


@on_ranks(2, 3)
@pytest.mark.parametrize("what", ["memfd_create", "open", "shows_writes", "map", "another file"])
@pytest.mark.parametrize("at", ["all", "one"])
def test_where_it_cannot_be_had(world: World, what: str, at: str) -> None:
    """On one rank or on all: no rank has it."""
    broken = at == "all" or world.rank == (0 if what == "memfd_create" else world.size - 1)
    patches = {
        "memfd_create": mock.patch.object(os, "memfd_create", side_effect=OSError),
        "open": mock.patch.object(os, "open", side_effect=PermissionError),
        "shows_writes": mock.patch.object(node_memory, "_shows_writes", return_value=False),
        "map": mock.patch.object(node_memory, "map_file", side_effect=RuntimeError),
        "another file": mock.patch.object(memory_files, "_identity", return_value=(world.rank, 1)),
    }
    node_memory._shows_writes()
    with patches[what] if broken else mock.MagicMock():
        assert world.comm.node_memory(8) is None
    assert world.comm.node_memory(8) is not None


@on_ranks(1)
def test_a_kernel_that_does_not_tell_what_was_written(world: World) -> None:
    assert node_memory._shows_writes()
    for name in ("_has_writes", "map_file"):
        with mock.patch.object(node_memory, name, side_effect=OSError):
            assert not node_memory._shows_writes.__wrapped__()
    with mock.patch.object(node_memory, "_has_writes", return_value=True):
        assert not node_memory._shows_writes.__wrapped__()


HANGS = """
import time, shardrt
world = shardrt.init("cpu")
memory = world.comm.node_memory(8)
memory.begin_reading(1)
world.barrier()
if world.rank == 1:
    time.sleep(600)
memory.end_reading()
world.comm.wait_for_readers(memory)
"""


@pytest.mark.rest
def test_a_reader_that_hangs_is_named() -> None:
    done = run_script(HANGS, 2, SHARDRT_TIMEOUT="2", SHARDRT_PATIENCE="4")
    assert done.returncode != 0
    assert "wait_to_write what rank 1 reads" in done.stderr


def test_a_reader_that_dies_ends_the_job() -> None:
    start = time.monotonic()
    done = run_script(HANGS.replace("time.sleep(600)", "import os; os.kill(os.getpid(), 9)"), 2)
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    assert time.monotonic() - start < 60


def test_a_child_that_forks_reads_and_leaves_nothing_behind() -> None:
    source = """
import os, shardrt
world = shardrt.init("cpu")
memory = world.comm.node_memory(8)
memory.part(4 * world.rank, 4).fill_(world.rank + 1)
world.barrier()
child = os.fork()
if child == 0:
    os._exit(int(memory.private.sum()))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 12
memory.private.fill_(7)
child = os.fork()
if child == 0:
    memory.private.fill_(9)
    os._exit(0)
os.waitpid(child, 0)
assert memory.private.eq(7).all()
world.barrier()
"""
    run_script(source, 2, code=0)


def test_only_where_ranks_share_a_node() -> None:
    done = run_script(
        "import shardrt; world = shardrt.init('cpu'); print(world.comm.has_node_memory, world.mesh.size)",
        2,
        SHARDRT_RANKS_PER_NODE="1",
    )
    assert "False 2" in done.stdout, done.stderr
