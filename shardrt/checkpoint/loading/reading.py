"""Reading tensors: the boxes that this rank needs, from where they lie in files straight into its memory.

| what lies in the file                       | how it is read                                                                |
|---------------------------------------------|-------------------------------------------------------------------------------|
| small items, one after the other            | all of them with one call into a buffer, copied from there                    |
| one run of bytes, in the order of the target| in windows of 1 MiB into the target, each verified while it is in the cache   |
| several runs, each in the target's order    | one call for each, into the target; unverified: see below                     |
| another order, dtype or device              | in windows into a buffer, copied from there                                   |

A rank that needs columns needs only a part of each block of 16 KiB, and would read the whole file to verify them. So it reads
its columns unverified, and beside that each rank of the mesh verifies its share of the blocks of all of the tensor's chunks. A
load fails on all ranks if one of them finds damage. Cost: one exchange of names for each load; of these tensors, a rank reads
about twice as much as it needs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import groupby, product
from math import prod
from typing import NamedTuple

import torch

from ...comm import Communicator
from ...tensor.dtensor.inference_mode import overwrite
from ...tensor.placement.placement import Box
from ..disk.errors import DamagedCheckpointError, shown
from ..disk.files import Reader, Told, bytes_of, nobody
from ..formats.geometry import Runs, TensorPart, intersect, narrowed, parts, runs, tile
from ..formats.stored import Format, ReadBytes, Stored, StoredChunk, StoredItem, StoredTensor
from ..formats.torch_file.items import ALIGNMENT, BLOCK
from .checksums import Checksums, StoredItemBytes

_CPU = torch.device("cpu")

_SCRATCH = 4 << 20  # bytes of the buffer for what cannot be read into its place
_SMALL = 1 << 16  # items up to this size are read together
_UNVERIFIED = 16 << 20  # bytes to read at a time of what is not verified, and so need not stay in the caches
_FEW_CHUNKS = 16


class Fetch(NamedTuple):
    """What this rank needs of one chunk.

    dtype: the stored one.   memory: where the box goes: of shape box.sizes, with any strides, dtype and device.
    blocks: (first, last): only verify the blocks first <= block < last; then `memory` is empty. None: read the box.
    """

    name: str
    dtype: torch.dtype
    chunk: StoredChunk
    box: Box
    memory: torch.Tensor
    blocks: tuple[int, int] | None = None

    def is_small(self, *, has_checksums: bool) -> bool:
        """Whether the item is read whole, with others: a small one, or one of few blocks of which a part is to be verified."""
        most = _SMALL if self.box == self.chunk.box else 2 * BLOCK * has_checksums
        return self.blocks is None and self.chunk.length <= most


class Read(NamedTuple):
    """What was read.   nbytes: of files.   unverified: the names of tensors that were read unverified, by several runs."""

    nbytes: int
    unverified: set[str]


def fetches(name: str, stored: StoredTensor, target: torch.Tensor) -> list[Fetch]:
    """What this rank reads for `target`, plain or a `DTensor` of the stored shape.

    Raises CheckpointError if the chunks do not have each of its elements once.
    """
    found = list[Fetch]()
    for part in parts(target):
        missing, first = part.memory.numel(), len(found)
        # Cost: in Python, some microseconds for each chunk; in torch, some tens of microseconds for all chunks.
        for chunk in stored.chunks if len(stored.columns.file) < _FEW_CHUNKS else stored.overlapping(part.box):
            box = intersect(part.box, chunk.box)
            if box is not None:
                found.append(Fetch(name, stored.dtype, chunk, box, narrowed(part, box)))
                missing -= prod(box.sizes)
        if missing > 0:
            raise DamagedCheckpointError(
                f"tensor {shown(name)}: the checkpoint lacks {missing} of the {part.memory.numel()} elements of {part.box}, "
                "which this rank needs; it was not written to its end, or its .metadata belongs to other files"
            )
        boxes = [fetch.box for fetch in found[first:]]
        if len(boxes) > 1 and not tile(part.box, boxes):
            raise DamagedCheckpointError(
                f"tensor {shown(name)}: chunks of the checkpoint overlap in {part.box}; its .metadata is damaged"
            )
    return found


def read_all(stored: Stored, wanted: Iterable[Fetch], told: Told = nobody) -> Read:
    """Read everything that is wanted, file by file.   told: is called with how many bytes were just read.

    Raises CheckpointError, which names file and tensor, for what is damaged, cut off, of another save, or cannot be read.
    """
    ordered = sorted(wanted, key=lambda fetch: (fetch.chunk.file, fetch.chunk.offset))
    scratch, total, unverified = cache(_buffer), 0, set[str]()  # the buffers are freed when all is read
    for file, of_file in groupby(ordered, key=lambda fetch: fetch.chunk.file):
        with stored.open(file) as reader:
            reader.told = told
            reading = _FileReading(stored.format, reader, scratch, unverified)
            is_small = partial(Fetch.is_small, has_checksums=stored.format.has_checksums)
            for small, group in groupby(of_file, key=is_small):
                if small:
                    for batch in _batches(group):
                        reading.read_small(batch)
                else:
                    for fetch in group:
                        reading.read(fetch)
            total += reader.nbytes
    return Read(total, unverified)


def _buffer(is_pinned: bool) -> torch.Tensor:
    """A buffer on the host: (_SCRATCH,) uint8."""
    return torch.empty(_SCRATCH, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)


class _FileReading:
    """Reads one file.

    scratch: gives a buffer for what cannot be read into its place; a pinned one for what goes to a GPU.
    unverified: the names of tensors that are read unverified are added to it.
    """

    def __init__(self, of: Format, reader: Reader, scratch: Callable[[bool], torch.Tensor], unverified: set[str]) -> None:
        self._format, self._reader, self._scratch, self._unverified = of, reader, scratch, unverified

    def read_small(self, batch: Sequence[Fetch]) -> None:
        """Read small items that lie one after the other."""
        begin, last = batch[0].chunk.offset, batch[-1].chunk
        data = bytes_of(self._scratch(False))[: last.offset + last.length - begin]
        self._reader.read_into(begin, [data])
        for fetch in batch:
            own = data[fetch.chunk.offset - begin :][: fetch.chunk.length]
            source = self._source(fetch, partial(_bytes_at, own))
            item = source.item
            check = Checksums(source, item.data_start, item.data_start + item.data_nbytes)
            check.feed(own[item.data_start :][: item.data_nbytes])
            # A copy, since items of other writers may lie at any byte, where an element would not be aligned.
            _take(fetch, item, bytearray(own[item.start :][: _nbytes(item)]))

    def read(self, fetch: Fetch) -> None:
        """Read any part of an item."""
        source = self._source(fetch)
        item, memory = source.item, fetch.memory
        if fetch.blocks is not None:
            self._verify(source, *fetch.blocks)
            return
        if any(stride == 0 and size > 1 for stride, size in zip(item.strides, item.sizes, strict=True)):
            self._read_expanded(source, fetch)
            return
        found = runs(fetch.box, fetch.chunk.box, item.strides)
        if len(found.starts) > 1 and item.crcs_start is not None:
            self._unverified.add(fetch.name)
        stream = _RunStream(source, found)
        if memory.device == _CPU and memory.dtype == item.dtype and _holds_runs(memory, found):
            whole, nbytes = _bytes_around(memory), found.numel * item.dtype.itemsize
            for place in _places(memory, found):
                stream.fill(whole[place : place + nbytes])
            return
        scratch = self._scratch(memory.is_cuda)
        for piece in _pieces(memory.permute(found.order), len(scratch) // item.dtype.itemsize):
            values = scratch[: piece.numel() * item.dtype.itemsize]
            stream.fill(bytes_of(values))
            overwrite(piece, values.view(item.dtype).view(piece.shape))

    def _verify(self, source: StoredItemBytes, first: int, last: int) -> None:
        """Read blocks of an item, and verify them."""
        item = source.item
        start, stop = item.data_start + first * BLOCK, item.data_start + min(last * BLOCK, item.data_nbytes)
        check = Checksums(source, start, stop)
        window = bytes_of(self._scratch(False))[: self._reader.window]
        for place in range(start, stop, len(window)):
            view = window[: stop - place]
            source.read_into(place, view)
            check.feed(view)

    def _read_expanded(self, source: StoredItemBytes, fetch: Fetch) -> None:
        """Read an item in which several elements have one place."""
        item = source.item
        data = source.read(item.start, _nbytes(item))
        Checksums(source, item.start, item.start + len(data)).feed(memoryview(data))
        _take(fetch, item, data)

    def _source(self, fetch: Fetch, read: ReadBytes | None = None) -> StoredItemBytes:
        """The item of a fetch.   read: gives bytes of the item that are in memory; None: they are read from the file."""
        chunk, where = fetch.chunk, f"{str(self._reader.path)!r}, tensor {shown(fetch.name)}"
        read = read or (lambda at, nbytes: bytes(self._reader.read(chunk.offset + at, nbytes)))
        item = self._format.find_item(read, fetch.dtype, chunk.box.sizes, chunk.length, where)
        if (item.dtype, item.sizes) != (fetch.dtype, tuple(chunk.box.sizes)):
            raise DamagedCheckpointError(
                f"{where}: expected {fetch.dtype} of shape {tuple(chunk.box.sizes)}, by .metadata, found {item.dtype} of "
                f"{item.sizes}; the files are not of one checkpoint"
            )
        return StoredItemBytes(self._reader, chunk.offset, item, where)


class _RunStream:
    """The bytes of the runs of an item, one after the other. They are verified if there is a single run, with a checksum."""

    def __init__(self, source: StoredItemBytes, found: Runs) -> None:
        self._source = source
        self._itemsize = source.item.dtype.itemsize
        self._run = found.numel * self._itemsize
        self._starts = iter(found.starts)
        self._verifies = len(found.starts) == 1 and (source.item.crcs_start is not None or source.item.crc is not None)
        self._window = source.reader.window if self._verifies else max(source.reader.window, _UNVERIFIED)
        self._check: Checksums | None = None
        self._place = self._left = 0  # where the next byte is in the item; bytes that are left of the run

    def fill(self, view: memoryview) -> None:
        """Read the next bytes into `view`."""
        start = 0
        while start < len(view):
            if not self._left:
                self._next_run()
            window = view[start : start + min(self._left, self._window)]
            self._source.read_into(self._place, window)
            start += len(window)
            self._place += len(window)
            self._left -= len(window)
            if self._check is not None:
                self._check.feed(window)
                if not self._left:
                    self._check.end()

    def _next_run(self) -> None:
        self._place = self._source.item.start + next(self._starts) * self._itemsize
        self._left = self._run
        if self._verifies:
            self._check = Checksums(self._source, self._place, self._place + self._run)
            self._check.begin()


def _batches(group: Iterable[Fetch]) -> Iterator[list[Fetch]]:
    """Groups of small items that lie one after the other, each with as many items as the buffer holds."""
    batch: list[Fetch] = []
    for fetch in group:
        chunk = fetch.chunk
        if batch:
            first, last = batch[0].chunk, batch[-1].chunk
            adjoins = chunk.offset - last.offset - last.length < ALIGNMENT
            if not adjoins or chunk.offset + chunk.length - first.offset > _SCRATCH:
                yield batch
                batch = []
        batch.append(fetch)
    if batch:
        yield batch


def _holds_runs(memory: torch.Tensor, found: Runs) -> bool:
    """Whether each run lies in the memory in one piece, in the same order, and as the values that it stands for."""
    if memory.is_conj() or memory.is_neg():
        return False
    numel = 1
    for dim in reversed(found.order[len(found.order) - found.inner :]):
        if memory.shape[dim] != 1 and memory.stride(dim) != numel:
            return False
        numel *= memory.shape[dim]
    return True


def _places(memory: torch.Tensor, found: Runs) -> Iterator[int]:
    """Where each run lies in the memory: bytes from its first element."""
    outer, itemsize = found.order[: len(found.order) - found.inner], memory.element_size()
    for index in product(*(range(memory.shape[dim]) for dim in outer)):
        yield itemsize * sum(i * memory.stride(dim) for i, dim in zip(index, outer, strict=True))


def _bytes_around(memory: torch.Tensor) -> memoryview:
    """The bytes from the first element to the last, with those of other tensors between them."""
    last = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
    nbytes = (last + 1) * memory.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(memory.data_ptr())).cast("B")


def _pieces(memory: torch.Tensor, numel: int) -> Iterator[torch.Tensor]:
    """The tensor in pieces of at most `numel` elements that follow each other in row-major order."""
    if memory.numel() <= numel:
        yield memory
        return
    row = memory.numel() // memory.shape[0]
    for rows in memory.split(max(1, numel // row)):
        yield from (rows,) if rows.numel() <= numel else _pieces(rows[0], numel)


def _bytes_at(data: memoryview, offset: int, nbytes: int) -> bytes:
    return bytes(data[offset : offset + nbytes])


def _nbytes(item: StoredItem) -> int:
    """The bytes from the item's first element to its last one in memory."""
    last = sum((size - 1) * stride for size, stride in zip(item.sizes, item.strides, strict=True))
    return (last + 1) * item.dtype.itemsize


def _take(fetch: Fetch, item: StoredItem, data: bytearray) -> None:
    """Copy what is fetched out of the item's bytes."""
    whole = torch.frombuffer(data, dtype=item.dtype).as_strided(item.sizes, item.strides)
    overwrite(fetch.memory, narrowed(TensorPart(fetch.chunk.box, whole), fetch.box))


def on_any_rank(names: Sequence[str], comm: Communicator) -> list[str]:
    """All names that any rank has given. Collective."""
    everyone = comm.differing(list(names))
    return list(names) if everyone is None else sorted({name for theirs in everyone for name in theirs})


def share_of(name: str, stored: StoredTensor, rank: int, ranks: int) -> Iterator[Fetch]:
    """The blocks of a tensor that rank `rank` of `ranks` verifies.

    Chunks of up to two blocks are left out: a rank that needs a part of one reads all of it.
    """
    chunks = [chunk for chunk in stored.chunks if chunk.length > 2 * BLOCK]
    counts = [-(-prod(chunk.box.sizes) * stored.dtype.itemsize // BLOCK) for chunk in chunks]
    begin, end = (sum(counts) * each // ranks for each in (rank, rank + 1))
    place = 0
    for chunk, count in zip(chunks, counts, strict=True):
        first, last = max(begin - place, 0), min(end - place, count)
        if first < last:
            yield Fetch(name, stored.dtype, chunk, chunk.box, torch.empty(0), (first, last))
        place += count
