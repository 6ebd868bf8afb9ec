"""What is in a checkpoint, as lines to read; and whether what is in it is what was written."""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from ...comm.fingerprint import printable
from ..disk.files import Reader
from ..disk.remote_path import Location
from ..errors import CheckpointError
from ..formats.dcp.stored import Stored
from ..formats.torch_file.expansion import check_records
from ..formats.torch_file.stored_items import read_item
from ..loading.reading import fetches
from ..saving.equal_values import as_ranges
from .convert import open_checkpoint
from .dcp_folder import DcpCheckpoint
from .kinds import Checkpoint

Place = tuple[str, int, int]  # file, offset, length


# ---------------------------------------------------------------------- inspect


def description(path: Location) -> Iterator[str]:
    """The lines of `inspect`: a line for each tensor, the names of objects, and the sums."""
    checkpoint = open_checkpoint(path)
    ranks = checkpoint.ranks() if isinstance(checkpoint, DcpCheckpoint) else {}
    rows = [("tensor", "shape", "dtype", "bytes", "ranks" if ranks else "")]
    for name, info in checkpoint.tensors.items():
        dtype = str(info.dtype).removeprefix("torch.")
        rows.append((printable(name), str(tuple(info.shape)), dtype, f"{info.nbytes:,}", as_ranges(ranks.get(name, ()))))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for name, shape, dtype, nbytes, written in rows:
        cells = (name.ljust(widths[0]), shape.ljust(widths[1]), dtype.ljust(widths[2]), nbytes.rjust(widths[3]), written)
        yield "  ".join(cells).rstrip()
    yield from (f"{name}  (object)" for name in checkpoint.objects)
    yield ""
    yield from _sums(path, checkpoint, ranks)


def _sums(path: Location, checkpoint: Checkpoint, ranks: Mapping[str, Iterable[int]]) -> Iterator[str]:
    infos = checkpoint.tensors.values()
    yield f"{path}: {checkpoint.kind}"
    yield f"{len(infos):,} tensors, {sum(info.shape.numel() for info in infos):,} elements"
    by_dtype: dict[torch.dtype, int] = {}
    for info in infos:
        by_dtype[info.dtype] = by_dtype.get(info.dtype, 0) + info.nbytes
    each = ", ".join(f"{str(dtype).removeprefix('torch.')} {nbytes:,}" for dtype, nbytes in by_dtype.items())
    yield f"{sum(by_dtype.values()):,} bytes{f' ({each})' if each else ''}; {len(checkpoint.objects):,} objects"
    if isinstance(checkpoint, DcpCheckpoint) and checkpoint.save_id is not None:
        yield f"save {checkpoint.save_id}"
    if ranks:
        yield f"written by ranks {as_ranges(rank for some in ranks.values() for rank in some)}"
    if (step := step_of(checkpoint)) is not None:
        yield f"step {step}"


def step_of(checkpoint: Checkpoint) -> int | None:
    """The number of steps done: as a run has counted them, else as the optimizer has."""
    if "run.step" in checkpoint.objects and isinstance(step := checkpoint.object("run.step"), int):
        return step
    steps = (name for name, info in checkpoint.tensors.items() if name.endswith(".step") and not info.shape)
    name = next(steps, None)
    return None if name is None else int(checkpoint.tensor(name))


# ---------------------------------------------------------------------- verify


@dataclass(slots=True)
class Report:
    """What `verify` found. damaged: a line for each damaged item, with file, name and reason."""

    damaged: list[str] = field(default_factory=list)
    items: int = 0
    nbytes: int = 0
    unchecked: int = 0  # items of torch.save without checksums

    @property
    def summary(self) -> str:
        """One line."""
        found = (
            f"{len(self.damaged):,} of {self.items:,} items are damaged" if self.damaged else f"{self.items:,} items are sound"
        )
        without = f"; {self.unchecked:,} have no checksum" if self.unchecked else ""
        return f"{found}{without}; {self.nbytes:,} bytes read"


def verify(stored: Stored, items: Mapping[Place, Item], done: Callable[[int], object]) -> Report:
    """Read these items of a DCP checkpoint, and compare the checksums of each.

    done: is told how many bytes were read.
    """
    report = Report(items=len(items))
    for file, places in groupby(sorted(items), lambda place: place[0]):
        try:
            with stored.open(file) as reader:
                for place in places:
                    _verify_item(reader, place, items[place], report)
                    done(place[2])
                report.nbytes += reader.nbytes
        except CheckpointError as error:  # the file cannot be opened, or is of another save
            report.damaged += [f"{items[place].label}: {error}" for place in items if place[0] == file]
    return report


@dataclass(slots=True)
class Item:
    """A chunk of a tensor, or an object.

    names: several for tied tensors.   dtype, sizes: of a chunk; None of an object.
    """

    names: list[str]
    dtype: torch.dtype | None = None
    sizes: Sequence[int] = ()

    @property
    def label(self) -> str:
        return f"{'object' if self.dtype is None else 'tensor'} '{', '.join(self.names[:3])}{', ...' * (len(self.names) > 3)}'"


def items_of(stored: Stored) -> dict[Place, Item]:
    """Everything that a DCP checkpoint has, by its place. Raises CheckpointError if its chunks do not make up the tensors."""
    found = dict[Place, Item]()
    for name, tensor in stored.tensors.items():
        fetches(name, tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        for chunk in tensor.chunks:
            place = (chunk.file, chunk.offset, chunk.length)
            found.setdefault(place, Item([], tensor.dtype, chunk.box.sizes)).names.append(name)
    for name, item in stored.objects.items():
        found.setdefault((item.file, item.offset, item.length), Item([])).names.append(name)
    return found


def _verify_item(reader: Reader, place: Place, item: Item, report: Report) -> None:
    file, start, length = place
    try:
        if item.dtype is not None:
            _compare(reader, start, length, item)
        if not _has_right_checksums(_Window(reader, start, length)):
            report.unchecked += 1
    except (
        CheckpointError,
        zipfile.BadZipFile,
        NotImplementedError,
        EOFError,
        RuntimeError,
        ValueError,
        struct.error,
    ) as error:
        report.damaged.append(f"{file}: {item.label}: {error}")


def _compare(reader: Reader, start: int, length: int, item: Item) -> None:
    """Raise ValueError if another tensor is there than .metadata says."""
    found = read_item(lambda offset, nbytes: bytes(reader.read(start + offset, nbytes)), length, f"item at {start}")
    if (found.dtype, *found.sizes) != (item.dtype, *item.sizes):
        raise ValueError(f"expected {item.dtype} of {tuple(item.sizes)}, found {found.dtype} of {tuple(found.sizes)}")


def _has_right_checksums(window: _Window) -> bool:
    """Whether there are any. Raises ValueError for one that is not that of the data."""
    with zipfile.ZipFile(window) as archive:
        check_records(archive, window.seek(0, os.SEEK_END), "it")
        if not any(record.CRC for record in archive.infolist()):  # as torch.save writes after set_crc32_options(False)
            return False
        if damaged := archive.testzip():
            raise ValueError(f"the checksum of its record '{damaged}' is wrong")
    return True


class _Window(io.RawIOBase):
    """An item as a file of its own."""

    def __init__(self, reader: Reader, start: int, length: int) -> None:
        self._reader, self._start, self._length = reader, start, length
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError(f"byte {base + offset} of an item")
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        wanted = memoryview(buffer)[: max(0, self._length - self._place)]
        self._reader.read_into(self._start + self._place, [wanted])
        self._place += len(wanted)
        return len(wanted)
