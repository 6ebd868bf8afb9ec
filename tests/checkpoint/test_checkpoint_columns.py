"""Loads by columns are verified: each block of a file by one of the ranks, at the cost of as much as a rank reads anyway."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import shardrt
from checkpoints import flip, reading, shared_folder
from ranks import on_ranks
from shardrt import FlatShard, RaggedShard, Replicate, Shard
from shardrt.checkpoint import CheckpointError, load, save
from shardrt.checkpoint.formats.dcp.metadata_reader import read_stored
from shardrt.checkpoint.formats.stored import StoredChunk
from shardrt.checkpoint.formats.torch_file.items import BLOCK
from shardrt.comm import World
from shardrt.tensor.placement.placement import Placement

ROWS, COLUMNS = 310, 700  # 53 blocks of float32, the last one not full


def target(world: World, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype) -> shardrt.DTensor:
    """Zeros on a mesh with an axis for each placement; the last axis has all ranks that the others leave."""
    first = 2 if len(placements) == 2 else 1
    sizes = (first, world.size // first)[-len(placements) :]
    mesh = shardrt.DeviceMesh(world.comm, sizes, ("a", "b")[: len(placements)])
    return shardrt.distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, list(placements))


@contextmanager
def flipped(world: World, folder: Path, chunk: StoredChunk, at: int) -> Iterator[None]:
    """In the block, a bit of the chunk's memory, `at` bytes from its start or, if negative, its end, is another one."""

    def change() -> None:
        if world.rank == 0:
            flip(folder, chunk, at)
        world.comm.exchange(None)

    change()
    yield
    world.comm.exchange(None)
    change()


def ragged(world: World) -> tuple[Placement, ...]:
    return (RaggedShard(1, (COLUMNS - 1, *[0] * (world.size - 2), 1)),)


def flat_columns(world: World) -> tuple[Placement, ...]:
    rest = ROWS * COLUMNS - 100_001
    return (FlatShard(1, (100_001, rest, *[0] * (world.size - 2))),)


PLACEMENTS: dict[str, Callable[[World], tuple[Placement, ...]]] = {
    "columns": lambda world: (Shard(1),),
    "ragged": ragged,
    "flat": flat_columns,
    "rows and columns": lambda world: (Shard(0), Shard(1)),
    "columns and rows": lambda world: (Shard(1), Shard(0)),
    "columns twice": lambda world: (Shard(1), Shard(1)),
    "replicas": lambda world: (Replicate(), Shard(1)),
}
ON_TWO_AXES = ("rows and columns", "columns and rows", "columns twice", "replicas")
PLACES = (0, -1, BLOCK - 1, BLOCK, 5 * BLOCK + 77, 26 * BLOCK, -BLOCK, 300_001)


def check_places(world: World, folder: Path, placements: tuple[Placement, ...], dtype: torch.dtype) -> None:
    """A flipped bit at any of the places is found, and none is where there is none."""
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    loaded = target(world, placements, (ROWS, COLUMNS), dtype)
    for chunk in read_stored(folder).tensors["w"].chunks:
        for at in PLACES[: 8 if chunk.box.offsets == (0, 0) else 2]:
            with flipped(world, folder, chunk, at), pytest.raises(CheckpointError, match="tensor 'w' is damaged: the checksum"):
                load(folder, {"w": loaded})
    load(folder, {"w": loaded})
    assert torch.equal(loaded.to_local(), loaded.spec.local_shard(whole.to(dtype)))


@pytest.mark.parametrize("kind", [kind for kind in PLACEMENTS if kind not in ON_TWO_AXES])
@on_ranks(2, more=(3,))
def test_a_flipped_bit_in_columns(world: World, kind: str) -> None:
    """Of a tensor that was saved whole, by rows, and by columns that are cut elsewhere; also into another dtype."""
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    mesh = shardrt.DeviceMesh(world.comm, (world.size,), ("a",))
    uneven = RaggedShard(1, (COLUMNS - 5 * (world.size - 1), *[5] * (world.size - 1)))
    with shared_folder(world) as folder:
        for number, saved in enumerate(
            (whole, shardrt.distribute_tensor(whole, mesh, [Shard(0)]), shardrt.distribute_tensor(whole, mesh, [uneven]))
        ):
            save(folder / f"{number}", {"w": saved})
            check_places(world, folder / f"{number}", PLACEMENTS[kind](world), torch.float32)
        check_places(world, folder / "0", PLACEMENTS[kind](world), torch.bfloat16)


@pytest.mark.parametrize("kind", ON_TWO_AXES)
@on_ranks(4)
def test_a_flipped_bit_on_two_axes(world: World, kind: str) -> None:
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)
    with shared_folder(world) as folder:
        save(folder / "saved", {"w": whole})
        check_places(world, folder / "saved", PLACEMENTS[kind](world), torch.float32)


@on_ranks(2)
def test_a_flipped_bit_in_another_order_of_dims(world: World) -> None:
    """Rows of a tensor that lies in memory column by column are runs as short as columns; also of a plain tensor's parts."""
    whole = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(COLUMNS, ROWS).t()
    with shared_folder(world) as folder:
        save(folder / "saved", {"w": whole})
        (chunk,) = read_stored(folder / "saved").tensors["w"].chunks
        loaded = target(world, (Shard(0),), (ROWS, COLUMNS), torch.float32)
        for at in PLACES:
            with flipped(world, folder / "saved", chunk, at), pytest.raises(CheckpointError, match="tensor 'w' is damaged"):
                load(folder / "saved", {"w": loaded})
        load(folder / "saved", {"w": loaded})
        assert torch.equal(loaded.to_local(), loaded.spec.local_shard(whole))


@pytest.mark.parametrize("numel", [8192, 8193, 4096, 4097])  # elements: 2 blocks, which are read whole, and 1
@on_ranks(2)
def test_small_tensors(world: World, numel: int) -> None:
    whole = torch.arange(float(numel - numel % 2)).view(2, -1)
    with shared_folder(world) as folder:
        save(folder / "saved", {"w": whole})
        (chunk,) = read_stored(folder / "saved").tensors["w"].chunks
        loaded = target(world, (Shard(1),), tuple(whole.shape), torch.float32)
        for at in (0, -1, 5000):
            with flipped(world, folder / "saved", chunk, at), pytest.raises(CheckpointError, match="tensor 'w' is damaged"):
                load(folder / "saved", {"w": loaded})


@on_ranks(3)
def test_what_the_verification_reads(world: World) -> None:
    """As much as a rank needs, once more; nothing where every rank reads what it wrote, or whole rows."""
    shape = (900, 3000)
    mesh = shardrt.DeviceMesh(world.comm, (world.size,), ("a",))
    columns = shardrt.distribute_tensor(torch.rand(shape), mesh, [Shard(1)])
    rows = shardrt.distribute_tensor(torch.rand(shape), mesh, [Shard(0)])
    wanted = 4 * columns.to_local().numel()
    with shared_folder(world) as folder:
        save(folder / "columns", {"w": columns})
        save(folder / "rows", {"w": rows})
        for name, tensor, least, most in (
            ("columns", columns, 1.0, 1.01),
            ("rows", rows, 1.0, 1.01),
            ("columns", rows, 1.0, 1.05),
            ("rows", columns, 1.98, 2.02),
        ):
            with reading() as read:
                load(folder / name, {"w": tensor})
            assert least <= read[0][0] / wanted <= most, (name, read[0][0] / wanted)


@on_ranks(2)
def test_columns_of_other_writers(world: World) -> None:
    """Items of stock DCP have one checksum, which tells of what is read whole alone: parts load, unverified."""
    model = nn.Linear(500, 500)
    with shared_folder(world) as folder:
        if world.rank == 0:
            from torch.distributed.checkpoint.state_dict_saver import save as stock_save

            with pytest.warns():
                stock_save({"w": model.weight.detach()}, checkpoint_id=folder / "saved", no_dist=True)
        world.comm.exchange(None)
        loaded = target(world, (Shard(1),), (500, 500), torch.float32)
        whole = torch.empty(500, 500)
        load(folder / "saved", {"w": whole})
        with reading() as read:
            load(folder / "saved", {"w": loaded})
        assert torch.equal(loaded.to_local(), loaded.spec.local_shard(whole))
        assert read[0][0] < 1.1 * 4 * loaded.to_local().numel()
