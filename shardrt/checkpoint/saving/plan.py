"""Which rank writes what, and where: worked out by every rank for itself, and by rank 0 for all of them.

    complete      the names of parameters of an optimizer's groups, of which a rank may have some     one collective
    describe      names, shapes, dtypes and placements of this rank's entries                         no communication
    compare       the descriptions and plain values of all ranks, which are usually equal             one collective
    check         the plain values, if they differ                                                    two more
                  tensors of one name on several meshes, if there are any                             one more
    exchange      each description once, from the first rank that has it, if they differ; and the     one more
                  entries that ranks have for themselves, if there are any
    assign        which copy of each name is written: a copy is a set of ranks that have all of it    no communication
    place         this rank's chunks in its file; on rank 0, those of all ranks, for the metadata     no communication

Replicas share the work: each tensor is written by the copy that has the fewest bytes to write so far. Plain tensors below 64
KiB and objects are written by the first rank that has them, tensors of one memory once, parts without elements not at all.
In a file, chunks of 64 KiB and more come first, then the others, then objects, each at a multiple of 64 bytes, between two
marks of the save (`formats/dcp/marks.py`).

Cost: on rank 0, for each tensor, some operations on vectors with an element for each rank, and many if its layout is new;
memory for layouts of two million chunks in all, and for that of one tensor. Layouts beyond these are made twice.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import BinaryIO, NamedTuple

import torch

from ...comm import Communicator
from ..disk.errors import agreed
from ..formats.dcp.marks import MARK_NBYTES
from ..formats.dcp.metadata_writer import MetadataWriter
from ..formats.geometry import TensorPart, parts
from ..formats.stored import Columns
from ..formats.torch_file.items import ALIGNMENT, Number, item_length
from ..state.entries import Entry, with_all_names
from .assignment import Agreed, Assigned, assign, order_names
from .chunks import Boxes
from .copies_alike import check_copies
from .descriptions import Described, Description, describe, digest_of, fingerprint
from .equal_values import check_values

LARGE = 1 << 16  # bytes from which a chunk is large
_KEPT = 1 << 21  # chunks of layouts that are kept in memory


class PlannedItem(NamedTuple):
    """A chunk or an object of this rank's file.   offset, length: the bytes of its item, header and footer included."""

    name: str
    value: TensorPart | bytes
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """What this rank writes.

    file: the name of its file.   items: in the order of their offsets; without any, there is no file.   nbytes: of the file.
    """

    file: str
    items: tuple[PlannedItem, ...]
    nbytes: int
    agreed: Agreed

    @property
    def metadata(self) -> bytes:
        """The contents of `.metadata` without its ending, the same on every rank; rank 0 writes them.

        Cost: as the module's docstring says, for the first of several equal plans; the next ones reuse the result.
        """
        return _newest.metadata(self.agreed)


def make_plan(entries: Sequence[Entry], comm: Communicator) -> SavePlan:
    """Agree on who writes what. Collective over `comm`, the world's.

    entries: with different names; other ranks may have others.
    Raises CheckpointError if a rank has a tensor that cannot be saved, and CheckpointError on every rank if two ranks have
    different tensors of one name, or if a rank of a tensor's mesh does not have it.
    """
    entries = with_all_names(entries, comm)
    with agreed(comm):
        description = describe(entries, comm.rank)
    plan = agree(description, {each.name: each.value for each in entries if each.is_shared}, comm)
    check_copies(plan.kinds, {each.name: each.value for each in entries if isinstance(each.value, torch.Tensor)}, comm)
    return _plan(entries, _newest.names(plan, comm.rank), plan, comm.rank)


def plan_of_one(entries: Sequence[Entry]) -> SavePlan:
    """The plan of a process that writes alone. Tensors may be on the meta device: their values are given later."""
    found = tuple(
        Described(name, path, None, nbytes=len(value))
        if isinstance(value, bytes)
        else Described(name, path, value.dtype, tuple(value.shape))
        for name, value, path, *_ in entries
    )
    return _plan(entries, [entry.name for entry in entries], Agreed.of_equal(found, 1), 0)


def _plan(entries: Sequence[Entry], names: Iterable[str], agreed: Agreed, rank: int) -> SavePlan:
    """The plan of this rank.   names: those of which it writes a part, in the order of assignment."""
    items = tuple(_placed({entry.name: entry.value for entry in entries}, names))
    end = max((_aligned(item.offset + item.length) + MARK_NBYTES for item in items), default=0)
    return SavePlan(file_of(rank), items, end, agreed)


def agree(description: Description, values: Mapping[str, torch.Tensor | bytes], comm: Communicator) -> Agreed:
    """The descriptions of all ranks. Collective.

    values: those that have to be the same on all ranks that have them.
    Raises CheckpointError on every rank for one that is not.
    """
    own = tuple(each for each in description if each.is_per_rank)
    shared = tuple(each for each in description if not each.is_per_rank)
    digests = {each.name: each.digest for each in shared if each.digest is not None}
    layout, contents = 2 * fingerprint(shared) + bool(own), digest_of(repr(digests).encode())
    answers = comm.compare(digest_of(repr((layout, contents)).encode()), lambda: (layout, contents))
    if answers is None:
        everyones = tuple(comm.exchange(own)) if own else ()
        return Agreed.of_equal(shared, comm.size, (layout, comm.size, _sizes((shared,)), everyones), everyones)
    marks = [mark for mark, _ in answers]
    if len({other for _, other in answers}) > 1:
        check_values(digests, values, comm)
    firsts = {each: rank for rank, each in reversed(list(enumerate(marks)))}
    given = comm.exchange((shared if firsts[layout] == comm.rank else None, own))
    numbers = {each: number for number, each in enumerate(sorted(firsts, key=firsts.__getitem__))}
    kinds = tuple(each for each, _ in given if each is not None)
    everyones = tuple(each for _, each in given)
    untied = _untied(kinds, shared, comm)
    kinds = tuple(tuple(each._replace(tied=None) if each.name in untied else each for each in kind) for kind in kinds)
    key = marks, _sizes(kinds), everyones, sorted(untied)
    return Agreed(kinds, torch.tensor([numbers[each] for each in marks]), key, everyones)


def _untied(kinds: Iterable[Description], own: Description, comm: Communicator) -> Set[str]:
    """The names that are tied on some ranks, but not on others that have elements of them. Collective if any is tied.

    In one kind are ranks that cannot tell and ranks that say no.
    """
    tied = {each.name for kind in kinds for each in kind if each.tied}
    return set[str]().union(*comm.exchange({each.name for each in own if each.tied is None} & tied)) if tied else tied


def _sizes(kinds: Iterable[Description]) -> list[int]:
    return [entry.nbytes for kind in kinds for entry in kind]


def file_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"__{rank}_0.distcp"


def write_metadata(out: BinaryIO, agreed: Agreed) -> None:
    """Write the `.metadata` of what these ranks have, without its ending.

    No communication: `agreed` may be of ranks that do not exist.
    Raises CheckpointError as `make_plan` does, and for placements whose chunks are not the whole tensor.
    """
    assigned = {each.entry.name: each for each in assign(agreed)}
    files = _Files(agreed.size, assigned.values())
    writer = MetadataWriter(out, [file_of(rank) for rank in range(agreed.size)])
    written = dict[str, Columns]()
    is_target = {each.entry.tied for each in assigned.values() if each.entry.tied}
    for name in order_names(agreed):
        each, entry = assigned[name], assigned[name].entry
        if entry.dtype is None:
            writer.add_object(name, entry.path, each.first, *files.place_object(each))
            continue
        columns = written[entry.tied] if entry.tied else files.place(each)
        if name in is_target:
            written[name] = columns
        writer.add_tensor(name, entry.path, entry.dtype, entry.shape, columns)
    writer.finish()


def _placed(values: dict[str, torch.Tensor | bytes], names: Iterable[str]) -> Iterator[PlannedItem]:
    """This rank's items, in the order of their offsets."""
    large, small, objects = list[tuple[str, TensorPart]](), list[tuple[str, TensorPart]](), list[tuple[str, bytes]]()
    for name in names:
        value = values[name]
        if isinstance(value, bytes):
            objects.append((name, value))
            continue
        for part in parts(value):
            (large if part.memory.nbytes >= LARGE else small).append((name, part))
    place = MARK_NBYTES
    for name, part in large + small:
        length = item_length(part.memory.dtype, part.memory.dim(), part.memory.nbytes)
        yield PlannedItem(name, part, place, length)
        place = _aligned(place + length)
    for name, data in objects:
        yield PlannedItem(name, data, place, len(data))
        place = _aligned(place + len(data))


def _aligned(place: Number) -> Number:
    return -(-place // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class _Derived:
    """What follows from a description of all ranks.   key: of the description.   names: that this rank writes."""

    key: object
    names: tuple[str, ...] | None = None
    metadata: bytes | None = None


class _Newest:
    """What follows from the newest description of all ranks, kept for the next save of the same names, placements and sizes.

    Threads that commit other saves use it at the same time: each fills what belongs to its own description.
    """

    _LIMIT = 1 << 26  # bytes of metadata that are kept

    def __init__(self) -> None:
        self._kept = _Derived(None)

    def names(self, agreed: Agreed, rank: int) -> tuple[str, ...]:
        """The names of which this rank writes a part, in the order of their assignment."""
        kept = self._of(agreed)
        if kept.names is None:
            kept.names = tuple(each.entry.name for each in assign(agreed) if each.includes(rank))
        return kept.names

    def metadata(self, agreed: Agreed) -> bytes:
        """The contents of `.metadata` without its ending."""
        kept = self._of(agreed)
        if kept.metadata is not None:
            return kept.metadata
        out = io.BytesIO()
        write_metadata(out, agreed)
        made = out.getvalue()
        kept.metadata = made if len(made) <= self._LIMIT else None
        return made

    def _of(self, agreed: Agreed) -> _Derived:
        kept = self._kept
        if agreed.key is None or agreed.key != kept.key:
            self._kept = kept = _Derived(agreed.key)
        return kept


_newest = _Newest()


class _SizeClass(NamedTuple):
    """Chunks of one tensor that lie in the same part of the files, that of large chunks or that of small ones.

    at: (n,), their places among the chunks of the tensor.   rank: (n,), the ranks that write them.
    before: (n,), the bytes that earlier ones of the same rank take.   taken: (n,), their own bytes, up to a multiple of 64.
    """

    is_large: bool
    at: torch.Tensor
    rank: torch.Tensor
    before: torch.Tensor
    taken: torch.Tensor


class _ChunkLayout(NamedTuple):
    """The chunks of a tensor.   lengths: (n,), the bytes of their items.   classes: the large and the small ones."""

    chunks: Boxes
    lengths: torch.Tensor
    classes: tuple[_SizeClass, ...]

    @classmethod
    def of(cls, each: Assigned) -> _ChunkLayout:
        """The layout of a tensor. Raises CheckpointError as `Assigned.chunks` does."""
        entry, chunks = each.entry, each.chunks()
        assert entry.dtype is not None, "objects have no chunks"
        nbytes = chunks.sizes.prod(1) * entry.dtype.itemsize
        lengths = item_length(entry.dtype, len(entry.shape), nbytes)
        taken, found = _aligned(lengths), list[_SizeClass]()
        for is_large in (True, False):
            at = ((nbytes >= LARGE) == is_large).nonzero().view(-1)
            if len(at):
                found.append(_SizeClass(is_large, at, chunks.owner[at], _before(chunks.owner[at], taken[at]), taken[at]))
        return cls(chunks, lengths, tuple(found))


class _Files:
    """Where the next items go in every rank's file: in the places that `_placed` gives them on that rank."""

    def __init__(self, ranks: int, assigned: Iterable[Assigned]) -> None:
        self._layouts, self._kept = dict[object, _ChunkLayout](), 0
        large, small = torch.zeros(ranks, dtype=torch.int64), torch.zeros(ranks, dtype=torch.int64)
        for each in assigned:
            if each.entry.dtype is not None and each.entry.tied is None:
                for some in self._layout(each).classes:
                    (large if some.is_large else small).index_add_(0, some.rank, some.taken)
        self._large = torch.full_like(large, MARK_NBYTES)
        self._small = self._large + large
        self._objects = self._small + small

    def place(self, each: Assigned) -> Columns:
        """Place the chunks of a tensor."""
        chunks, lengths, found = self._layout(each)
        start = torch.empty_like(lengths)
        for some in found:
            cursor = self._large if some.is_large else self._small
            start[some.at] = cursor[some.rank] + some.before
            cursor.index_add_(0, some.rank, some.taken)
        return Columns(chunks.offsets, chunks.sizes, chunks.owner, start, lengths)

    def place_object(self, each: Assigned) -> tuple[int, int]:
        """Place an object; returns its offset and length."""
        start = int(self._objects[each.first])
        self._objects[each.first] += _aligned(each.entry.nbytes)
        return start, each.entry.nbytes

    def _layout(self, each: Assigned) -> _ChunkLayout:
        # Cost: a layout takes a third of a millisecond, and most tensors of a model have the layout of another one.
        found = self._layouts.get(each.key) or _ChunkLayout.of(each)
        if each.key not in self._layouts and self._kept < _KEPT:
            self._layouts[each.key] = found
            self._kept += len(found.lengths)
        return found


def _before(rank: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """For each row, the sum of `taken` over earlier rows of the same rank; the rows of a rank follow each other."""
    total = taken.cumsum(0) - taken
    _, group, counts = torch.unique_consecutive(rank, return_inverse=True, return_counts=True)
    first = counts.cumsum(0) - counts
    return total - total[first][group]
