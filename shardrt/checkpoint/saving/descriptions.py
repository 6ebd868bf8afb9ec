"""A short description of what a rank has to save: any rank can tell from it which chunks this one has, and where they go."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import torch

from ...comm import DeviceMesh
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.placement.digest import digest
from ...tensor.placement.placement import FlatShard, Partial, Placement, RaggedShard
from ..disk.errors import CheckpointError
from ..formats.torch_file.pickles import MOST_DIMS
from ..state.entries import Entry
from ..state.stateful import OF_RANK


class Grid(NamedTuple):
    """The ranks of a mesh.   ranks: their world ranks in row-major order, int64, as `bytes`, since Python caches their hash."""

    shape: tuple[int, ...]
    ranks: bytes

    @classmethod
    def of(cls, shape: Sequence[int], ranks: Iterable[int]) -> Grid:
        """The grid of this shape."""
        return cls(tuple(shape), array("q", ranks).tobytes())


class Described(NamedTuple):
    """One entry, without its values.

    dtype: None for an object, which has `nbytes` bytes; `nbytes` is 0 for a tensor.   shape: the global one.
    grid, placements: of a `DTensor`; None and () for a plain tensor, which is whole.
    tied: the name of an earlier entry that is the same tensor in memory; None if there is none; empty if this rank has no
    elements, so that only other ranks can tell.
    digest: of the bytes of a plain value or plain tensor that has to be the same on all ranks that have it; None for others.
    """

    name: str
    path: tuple[str | int, ...]
    dtype: torch.dtype | None
    shape: tuple[int, ...] = ()
    nbytes: int = 0
    grid: Grid | None = None
    placements: tuple[Placement, ...] = ()
    tied: str | None = None
    digest: int | None = None

    @property
    def is_per_rank(self) -> bool:
        """Whether it is a rank's own value, by a name that no other rank has."""
        return self.dtype is None and OF_RANK.fullmatch(str(self.path[-1])) is not None

    def __str__(self) -> str:
        if self.dtype is None:
            return "an object"
        kind = "plain" if self.grid is None else f"sharded over {prod(self.grid.shape)} ranks"
        return f"a {kind} tensor of shape {self.shape} and {self.dtype}"


Description = tuple[Described, ...]


def describe(entries: Iterable[Entry], rank: int) -> Description:
    """The entries of this rank. No communication.

    Raises CheckpointError for a tensor that is not in memory, `Partial`, or not strided.
    """
    found, grids, seen = list[Described](), dict[DeviceMesh, Grid](), dict[object, str]()
    entries = list(entries)
    shared = {entry.name: entry.value for entry in entries if entry.is_shared and isinstance(entry.value, torch.Tensor)}
    digests = _digests({name: value for name, value in shared.items() if not (value.is_meta or value.is_quantized)})
    for name, value, path, is_shared, _ in entries:
        if isinstance(value, bytes):
            digest = digest_of(value) if is_shared else None
            found.append(Described(name, tuple(path), None, nbytes=len(value), digest=digest))
            continue
        _check(name, value, rank)
        grid, placements, local = None, tuple[Placement, ...](), value
        if isinstance(value, DTensor):
            mesh, placements, local = value.spec.mesh, value.spec.placements, value._local_tensor
            if mesh not in grids:
                grids[mesh] = Grid.of(mesh.shape, mesh.mesh.flatten().tolist())
            grid = grids[mesh]
        shape, tied = tuple(value.shape), ""
        if local.numel():
            tied = seen.setdefault((*_memory(local), shape, placements), name)
        tie = None if tied == name else tied
        found.append(Described(name, tuple(path), value.dtype, shape, 0, grid, placements, tie, digests.get(name)))
    return tuple(found)


def fingerprint(description: Description) -> int:
    """A hash of 63 bits: equal for equal descriptions, whatever the sizes and contents of their objects."""
    total = blake2b(digest_size=8)
    for entry in description:
        total.update(repr((entry.name, entry.path, entry.dtype, entry.shape, entry.tied or None)).encode())
        if entry.grid is not None:
            total.update(repr(entry.grid.shape).encode() + entry.grid.ranks)
        for placement in entry.placements:
            total.update(_bytes_of(placement))
    return int.from_bytes(total.digest(), "little") >> 1


def digest_of(data: bytes) -> int:
    """A hash of the bytes, of 63 bits."""
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little") >> 1


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Hashes of 63 bits of tensors. Cost: those on a GPU are read once, and the host waits for it once for each kind."""
    waiting, found = dict[object, dict[str, torch.Tensor]](), dict[str, int]()
    for name, value in tensors.items():
        if value.layout is torch.strided:
            # Counters, of which an optimizer has one for each parameter, are compared as they are.
            bits = value.detach().reshape(()) if value.numel() == 1 else digest(value.reshape(-1))
            waiting.setdefault((bits.device, bits.dtype), {})[name] = bits
    for together in waiting.values():
        numbers = torch.stack([*together.values()]).tolist()
        found.update((name, int(number) & (1 << 63) - 1) for name, number in zip(together, numbers, strict=True))
    return found


def _check(name: str, value: torch.Tensor, rank: int) -> None:
    problem = None
    if value.layout != torch.strided:
        problem = f"of layout {value.layout}: save its values and indices as tensors"
    elif value.dim() > MOST_DIMS:
        problem = f"of {value.dim()} dims: reshape it to one of {MOST_DIMS} at most"
    elif value.is_quantized:
        problem = "quantised, with a scale that has no place in the format: save its int_repr() and its scale"
    elif value.is_meta:
        problem = "on the meta device, without values: call to_empty() and initialise it first"
    elif isinstance(value, DTensor) and value.spec.partial:
        op = next(placement for placement in value.spec.placements if isinstance(placement, Partial))
        problem = f"{op} over ranks, a term of a reduction: redistribute it first"
    if problem:
        raise CheckpointError(f"tensor '{name}' (rank {rank}) is {problem}")


def _memory(local: torch.Tensor) -> tuple[object, ...]:
    """A key that tensors of the same memory share."""
    storage, signs = local.untyped_storage().data_ptr(), (local.is_conj(), local.is_neg())
    return (local.device, storage, local.storage_offset(), local.dtype, local.stride(), signs)


def _bytes_of(placement: Placement) -> bytes:
    runs = placement.counts.runs if isinstance(placement, RaggedShard | FlatShard) else ()
    return f"{type(placement).__name__} {getattr(placement, 'dim', '')}:{runs};".encode()
