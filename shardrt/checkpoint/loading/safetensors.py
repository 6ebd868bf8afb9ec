"""`load_safetensors`: each rank reads the byte ranges of its shards, straight into them where files and shards agree."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ...comm import world
from ...tensor.dtensor import DTensor
from ...tensor.snapshots import wait_to_write
from ..disk.files import Reader, bytes_of
from ..disk.storage import on_disk
from ..errors import CheckpointError, agreed, shown
from ..formats.safetensors import Array, read_arrays
from ..geometry import Part, memory_of, parts
from ..state.models import Named, Scratch, byte_runs, lies_as_stored, materialise, named_tensors, pieces, take_back
from ..state.names import LoadedKeys
from .renaming import KeyMap, new_names, renamer


class _Match(NamedTuple):
    found: dict[str, Array]  # by the names of the model's tensors
    keys: LoadedKeys


def load_safetensors(
    model: nn.Module, folder: str | os.PathLike[str], *, key_map: KeyMap | None = None, strict: bool = True
) -> LoadedKeys:
    """Load safetensors files into the model. Collective.

    model: sharded or not, of any placements but `Partial`. One that is on the meta device gets its memory first. Files have
        no non-persistent buffers, such as rotary tables: models of transformers compute theirs, others get memory alone.
    folder: with `model.safetensors`, or with `model.safetensors.index.json` and the files that it names; or a single file.
    key_map: from names in the files to names in the model: a function, a dict, or pairs of regular expressions and
        replacements, all of which are applied in order (`re.sub`). A tensor whose name becomes None is left out.
    strict: raise for names that the model or the files lack. A tensor with several names needs one of them.
    Values are converted to the dtypes of the model's tensors.
    Cost: no communication; each rank reads the headers and the bytes of its shards, and converts at most 16 MiB at a time.
    Raises, on every rank alike: CheckpointError for files that do not fit the model, with all missing and unexpected names and
    wrong shapes, and for those that the format does not allow.
    """
    comm = world().comm
    with agreed(comm):
        path = on_disk(folder)
        found = read_arrays(path)
        arrays = {new: found[name] for new, name in new_names(found, renamer(key_map), folder).items()}
        match = _match(named_tensors(model), arrays, path, strict=strict)
    wait_to_write()
    with agreed(comm):
        materialise(model, comm.device)
        written = [named for named in named_tensors(model) if named.name in match.found]
        _read([(match.found[name], name, tensor) for name, tensor, _ in written])
    take_back(model, written)
    return match.keys


# ---------------------------------------------------------------------- names


def _match(model: Iterable[Named], arrays: Mapping[str, Array], folder: Path, *, strict: bool) -> _Match:
    found, missing, wrong, known = dict[str, Array](), list[str](), list[str](), set[str]()
    for name, tensor, aliases in model:
        names = (name, *aliases)
        known.update(names)
        array = next((arrays[each] for each in names if each in arrays), None)
        if array is None:
            missing.append(name)
        elif array.shape != tensor.shape:
            wrong.append(f"'{name}' is {tuple(tensor.shape)}, in '{array.file}' {tuple(array.shape)}")
        elif isinstance(tensor, DTensor) and tensor.spec.partial:
            wrong.append(f"'{name}' is {tensor.placements}, of which a rank has only a term")
        else:
            found[name] = array
    unexpected = sorted(arrays.keys() - known)
    problems = [f"expected other shapes: {'; '.join(wrong)}"] if wrong else []
    if strict and missing:
        problems.append(f"missing: {_listed(missing)}")
    if strict and unexpected:
        problems.append(f"unexpected: {_listed(unexpected)}")
    if problems:
        advice = "rename with key_map, or pass strict=False to leave out what is missing or unexpected"
        raise CheckpointError(f"'{folder}' does not fit the model: {'. '.join(problems)}. {advice}")
    return _Match(found, LoadedKeys(missing, unexpected))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(shown, names))


# ---------------------------------------------------------------------- values


@torch.no_grad()
def _read(targets: Sequence[tuple[Array, str, torch.Tensor]]) -> None:
    """Read this rank's parts of each tensor, file by file, in the order of the files."""
    scratch, by_file = Scratch(), dict[Path, list[tuple[Array, Part]]]()
    for array, name, tensor in targets:
        by_file.setdefault(array.file, []).extend((array, part) for part in parts(memory_of(name, tensor.detach())))
    for file, found in by_file.items():
        if found:
            with Reader(file) as reader:
                for array, part in sorted(found, key=lambda each: each[0].offset):
                    _read_part(reader, array, part, scratch)
    increment_version([tensor for _, _, tensor in targets])  # the next forward gathers again


def _read_part(reader: Reader, array: Array, part: Part, scratch: Scratch) -> None:
    if lies_as_stored(part.memory, array.dtype):
        _read_runs(reader, array, part)
        return
    for box, memory in pieces(part, max(array.dtype.itemsize, part.memory.dtype.itemsize)):
        stored = scratch.like(memory, array.dtype)
        _read_runs(reader, array, Part(box, stored))
        memory.copy_(stored)


def _read_runs(reader: Reader, array: Array, part: Part) -> None:
    starts, nbytes = byte_runs(part.box, array.shape, array.dtype.itemsize)
    data = bytes_of(part.memory)
    for index, start in enumerate(starts):
        reader.read_into(array.offset + start, [data[index * nbytes : (index + 1) * nbytes]])
