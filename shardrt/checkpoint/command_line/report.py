"""Describes the contents of a checkpoint in lines of text, and verifies that they are what was written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch

from ...comm.core.fingerprint import printable
from ..disk.errors import CheckpointError
from ..disk.files import Reader
from ..disk.remote_path import Location
from ..formats.stored import Stored
from ..formats.torch_file.archive import Archive
from ..formats.torch_file.stored_items import item_in
from ..formats.torch_file.whole import check_whole
from ..loading.reading import fetches
from ..saving.equal_values import as_ranges
from .checkpoints import Checkpoint, open_checkpoint

Place = tuple[str, int, int]  # file, offset, length


# ---------------------------------------------------------------------- inspect


def description(path: Location) -> Iterator[str]:
    """The lines of `inspect`: a line for each tensor, the names of objects, and the sums."""
    checkpoint = open_checkpoint(path)
    ranks = checkpoint.ranks()
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


def as_json(path: Location) -> dict[str, object]:
    """What `inspect --json` prints: of `description`, the same for programs. What is not known is None, or an empty list."""
    checkpoint = open_checkpoint(path)
    ranks = checkpoint.ranks()
    tensors = {
        name: {
            "shape": list(info.shape),
            "dtype": str(info.dtype).removeprefix("torch."),
            "nbytes": info.nbytes,
            "ranks": sorted(set(ranks.get(name, ()))),
        }
        for name, info in checkpoint.tensors.items()
    }
    return {
        "path": str(path),
        "kind": checkpoint.kind,
        "save": checkpoint.save_id,
        "step": step_of(checkpoint),
        "nbytes": sum(info.nbytes for info in checkpoint.tensors.values()),
        "tensors": tensors,
        "objects": list(checkpoint.objects),
    }


def _sums(path: Location, checkpoint: Checkpoint, ranks: Mapping[str, Iterable[int]]) -> Iterator[str]:
    infos = checkpoint.tensors.values()
    yield f"{path}: {checkpoint.kind}"
    yield f"{len(infos):,} tensors, {sum(info.shape.numel() for info in infos):,} elements"
    by_dtype: dict[torch.dtype, int] = {}
    for info in infos:
        by_dtype[info.dtype] = by_dtype.get(info.dtype, 0) + info.nbytes
    each = ", ".join(f"{str(dtype).removeprefix('torch.')} {nbytes:,}" for dtype, nbytes in by_dtype.items())
    yield f"{sum(by_dtype.values()):,} bytes{f' ({each})' if each else ''}; {len(checkpoint.objects):,} objects"
    if checkpoint.save_id is not None:
        yield f"save {checkpoint.save_id}"
    if ranks:
        yield f"written by ranks {as_ranges(rank for some in ranks.values() for rank in some)}"
    if (step := step_of(checkpoint)) is not None:
        yield f"step {step}"


def step_of(checkpoint: Checkpoint) -> int | None:
    """The number of steps done, as a `Run` has counted them, or else as an optimizer has; None if neither is there."""
    if "run.step" in checkpoint.objects and isinstance(step := checkpoint.object("run.step"), int):
        return step
    name = next((name for name, info in checkpoint.tensors.items() if not info.shape and _is_step(name)), None)
    return None if name is None else int(checkpoint.tensor(name))


def _is_step(name: str) -> bool:
    """Whether it is the step of an optimizer: `[...].state.<parameter>.step`."""
    *keys, last = name.split(".")
    return last == "step" and "state" in keys[:-1]


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


def verify(stored: Stored, items: Mapping[Place, ReportedItem], done: Callable[[int], object]) -> Report:
    """Read these items of a DCP checkpoint, and compare the checksums of each.

    done: is called with the number of bytes of each item that was read.
    """
    report = Report(items=len(items))
    for file, places in groupby(sorted(items), lambda place: place[0]):
        try:
            with stored.open(file) as reader:
                for place in places:
                    _verify_item(reader, place, items[place], report)
                    done(place[2])
                report.nbytes += reader.nbytes
        except CheckpointError as error:  # the file cannot be opened, or belongs to another save
            report.damaged += [f"{items[place].label}: {error}" for place in items if place[0] == file]
    return report


@dataclass(slots=True)
class ReportedItem:
    """A chunk of a tensor, or an object.

    names: several for tied tensors.   dtype, sizes: those of a chunk; None and () for an object.
    """

    names: list[str]
    dtype: torch.dtype | None = None
    sizes: Sequence[int] = ()

    @property
    def label(self) -> str:
        return f"{'object' if self.dtype is None else 'tensor'} '{', '.join(self.names[:3])}{', ...' * (len(self.names) > 3)}'"


def items_of(stored: Stored) -> dict[Place, ReportedItem]:
    """The chunks and objects of a DCP checkpoint, by place. Raises CheckpointError if its chunks do not make up the tensors."""
    found = dict[Place, ReportedItem]()
    for name, tensor in stored.tensors.items():
        fetches(name, tensor, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
        for chunk in tensor.chunks:
            place = (chunk.file, chunk.offset, chunk.length)
            found.setdefault(place, ReportedItem([], tensor.dtype, chunk.box.sizes)).names.append(name)
    for name, item in stored.objects.items():
        found.setdefault((item.file, item.offset, item.length), ReportedItem([])).names.append(name)
    return found


def _verify_item(reader: Reader, place: Place, item: ReportedItem, report: Report) -> None:
    """Compare an item with its checksums, and a tensor with what .metadata says."""
    file, start, length = place
    try:
        is_whole = item.dtype is None and check_whole(bytes(reader.read(start, length)), f"item at {start}")
        archive = Archive(lambda offset, nbytes: bytes(reader.read(start + offset, nbytes)), length, f"item at {start}")
        if item.dtype is not None:
            found = item_in(archive)
            if (found.dtype, *found.sizes) != (item.dtype, *item.sizes):
                raise archive.error(f"expected {item.dtype} of {tuple(item.sizes)}, found {found.dtype} of {found.sizes}")
        report.unchecked += not archive.verify() and not is_whole
    except CheckpointError as error:
        report.damaged.append(f"{file}: {item.label}: {error}")
