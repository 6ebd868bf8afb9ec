"""Geometry of checkpoints: which boxes of a global tensor a rank has, and where a box lies in a stored array.

A box of 2 x 3 elements in a stored array of 4 x 5, in row-major order:

    . . . . .
    . a b c .      runs of 3 elements that begin at elements 6 and 11
    . d e f .
    . . . . .
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import prod
from random import getrandbits
from typing import NamedTuple

import torch

from ...tensor.dtensor.dtensor import DTensor
from ...tensor.placement.placement import Box, FlatShard, Spec
from ..disk.errors import CheckpointError

PIECE_NBYTES = 16 << 20  # the most bytes of a piece, where a part is converted or put into another order


class TensorPart(NamedTuple):
    """A box of a global tensor, and this rank's memory of its elements.

    memory: of shape box.sizes, with any strides; a view of the tensor's local memory.
    """

    box: Box
    memory: torch.Tensor


def parts(tensor: torch.Tensor) -> list[TensorPart]:
    """The boxes of the global tensor that this rank has, with its memory of each; none if it has no elements.

    tensor: a `DTensor` of any placements, or a plain tensor, which is one box. A replicated or `Partial` one is one box too; a
    `FlatShard` gives up to 2 * dims - 1 boxes.
    """
    if not isinstance(tensor, DTensor):
        whole = Box((0,) * tensor.dim(), tuple(tensor.shape))
        return [TensorPart(whole, tensor.detach())] if tensor.numel() else []
    return parts_of(tensor._local_tensor.detach(), tensor.spec)


def parts_of(local: torch.Tensor, spec: Spec) -> list[TensorPart]:
    """The boxes of a tensor of `spec`, with views of `local`, this rank's shard of it."""
    boxes = spec.boxes()
    flat = next((placement for placement in spec.placements if isinstance(placement, FlatShard)), None)
    if len(boxes) == 1 and local.dim() == len(spec.shape) and (flat is None or local.dim() < 2):
        return [TensorPart(boxes[0], local)]
    dims = len(spec.shape)
    first = 0 if flat is None or not dims else flat.dim
    order = [first, *(dim for dim in range(dims) if dim != first)] if dims else []  # the elements' order: `first` outermost
    places = [order.index(dim) for dim in range(dims)]
    found, start = [], 0
    for box in boxes:
        sizes = torch.Size([box.sizes[dim] for dim in order])
        memory = local.narrow(0, start, sizes.numel()).view(sizes).permute(places)
        found.append(TensorPart(box, memory))
        start += sizes.numel()
    return found


def intersect(a: Box, b: Box) -> Box | None:
    """The box that lies in both; None if there is none."""
    offsets, sizes = [], []
    for a_offset, a_size, b_offset, b_size in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True):
        start, stop = max(a_offset, b_offset), min(a_offset + a_size, b_offset + b_size)
        if start >= stop:
            return None
        offsets.append(start)
        sizes.append(stop - start)
    return Box(tuple(offsets), tuple(sizes))


def tile(box: Box, boxes: Sequence[Box]) -> bool:
    """Whether these boxes make up all of `box`, each element once.

    Each coordinate x of a dim gets a random number f(x), and a box counts as the product of f(stop) - f(start) over its dims.
    Boxes that make up `box` count as much as it does, since the sum telescopes; with gaps or overlaps, they do so with a
    probability of 2**-60.
    """
    values = defaultdict[tuple[int, int], int](partial(getrandbits, 64))

    def count(each: Box) -> int:
        dims = enumerate(zip(each.offsets, each.sizes, strict=True))
        return prod(values[dim, offset + size] - values[dim, offset] for dim, (offset, size) in dims)

    return sum(map(count, boxes)) == count(box)


def narrowed(part: TensorPart, box: Box) -> torch.Tensor:
    """The memory of a box that lies in the part: a view."""
    memory = part.memory
    for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        memory = memory.narrow(dim, offset - part.box.offsets[dim], size)
    return memory


@dataclass(frozen=True, slots=True)
class Runs:
    """Where the elements of a box lie in a stored array: `starts` of runs of `numel` elements each, ascending.

    order: the dims of the box, as the array has them, outermost first.   inner: how many of them, from the end, a run covers.
    """

    starts: Sequence[int]
    numel: int
    order: tuple[int, ...]
    inner: int


def runs(box: Box, within: Box, strides: Sequence[int]) -> Runs:
    """The runs of `box` in an array that holds the elements of the box `within`, with these strides in elements.

    strides: no two elements have the same place. Runs that touch each other are one.
    """
    order = tuple(sorted(range(len(strides)), key=lambda dim: (strides[dim], within.sizes[dim]), reverse=True))
    base = sum((box.offsets[dim] - within.offsets[dim]) * strides[dim] for dim in order)
    numel, inner = 1, 0
    for dim in reversed(order):
        if box.sizes[dim] != 1 and strides[dim] != numel:
            break
        numel *= box.sizes[dim]
        inner += 1
    outer = order[: len(order) - inner]
    steps = [range(0, box.sizes[dim] * strides[dim], strides[dim]) for dim in outer]
    return Runs([base + sum(index) for index in product(*steps)] if steps else [base], numel, order, inner)


def byte_runs(box: Box, shape: torch.Size, itemsize: int) -> tuple[list[int], int]:
    """Where the elements of a box lie in a row-major array of `shape`: the first bytes of runs, and the bytes of each run."""
    strides = [shape[dim + 1 :].numel() for dim in range(len(shape))]
    found = runs(box, Box((0,) * len(shape), tuple(shape)), strides)
    return [start * itemsize for start in found.starts], found.numel * itemsize


def pieces(part: TensorPart, itemsize: int) -> Iterator[TensorPart]:
    """The part in pieces of at most `PIECE_NBYTES`, each a box."""
    offsets, sizes = part.box
    numel = max(1, PIECE_NBYTES // itemsize)
    dim = next((dim for dim, size in enumerate(sizes) if size > 1), None)
    if dim is None or part.memory.numel() <= numel:
        yield part
        return
    rows = max(1, numel // (part.memory.numel() // sizes[dim]))
    for start in range(0, sizes[dim], rows):
        box = Box(
            (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
            (*sizes[:dim], min(rows, sizes[dim] - start), *sizes[dim + 1 :]),
        )
        yield from pieces(TensorPart(box, narrowed(part, box)), itemsize)


def memory_of(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that has the memory: the inner one of a tensor subclass; of a `DTensor` of one, a `DTensor` of the inner one.

    Raises CheckpointError for a subclass that does not consist of one tensor of its shape.
    """
    if isinstance(tensor, DTensor):
        local = memory_of(name, tensor._local_tensor)
        return tensor if local is tensor._local_tensor else DTensor(local, tensor.spec)
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return tensor
    inner = [*inner_tensors(tensor).values()]
    if len(inner) != 1 or inner[0].shape != tensor.shape:
        raise CheckpointError(
            f"tensor '{name}' is a {type(tensor).__name__} of {len(inner)} tensors: expected a tensor subclass with one inner "
            "tensor of its shape, by __tensor_flatten__; save the tensors that it consists of"
        )
    return memory_of(name, inner[0])


def inner_tensors(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors that a tensor subclass consists of, by their attributes; none for a plain tensor."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    return {} if flatten is None else {name: getattr(tensor, name) for name in flatten()[0]}
