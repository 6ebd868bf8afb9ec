"""`load_safetensors`: each rank reads what it needs of the files, as `load` does of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ...comm import world
from ...tensor.dtensor import DTensor
from ...tensor.snapshots import wait_to_write
from ..disk.storage import on_disk
from ..errors import CheckpointError, agreed, shown
from ..formats.safetensors import read_stored
from ..formats.stored import Stored
from ..geometry import memory_of
from ..state.models import Named, materialise, named_tensors, take_back
from ..state.names import LoadedKeys
from .reading import fetches, read_all
from .renaming import KeyMap, with_new_names


class _Match(NamedTuple):
    found: dict[str, str]  # the names in the files, by those of the model's tensors
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
    Cost: no communication; each rank reads the headers and the bytes of its shards, and converts at most 4 MiB at a time.
    Raises, on every rank alike: CheckpointError for files that do not fit the model, with all missing and unexpected names and
    wrong shapes, and for those that the format does not allow.
    """
    comm = world().comm
    with agreed(comm):
        path = on_disk(folder)
        stored = with_new_names(read_stored(path), key_map).stored
        match = _match(named_tensors(model), stored, path, strict=strict)
    wait_to_write()
    with agreed(comm):
        materialise(model, comm.device)
        written = [named for named in named_tensors(model) if named.name in match.found]
        _read(stored, [(match.found[name], tensor) for name, tensor, _ in written])
    take_back(model, written)
    return match.keys


# ---------------------------------------------------------------------- names


def _match(model: Iterable[Named], stored: Stored, folder: Path, *, strict: bool) -> _Match:
    found, missing, wrong, known = dict[str, str](), list[str](), list[str](), set[str]()
    for name, tensor, aliases in model:
        names = (name, *aliases)
        known.update(names)
        here = next((each for each in names if each in stored.tensors), None)
        if here is None:
            missing.append(name)
        elif (shape := stored.tensors[here].shape) != tuple(tensor.shape):
            (chunk,) = stored.tensors[here].chunks
            wrong.append(f"'{name}' is {tuple(tensor.shape)}, in '{stored.folder / chunk.file}' {shape}")
        elif isinstance(tensor, DTensor) and tensor.spec.partial:
            wrong.append(f"'{name}' is {tensor.placements}, of which a rank has only a term")
        else:
            found[name] = here
    unexpected = sorted(stored.tensors.keys() - known)
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
def _read(stored: Stored, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Read this rank's parts of each tensor."""
    read_all(
        stored,
        (fetch for name, tensor in targets for fetch in fetches(name, stored.tensors[name], memory_of(name, tensor.detach()))),
    )
    increment_version([tensor for _, tensor in targets])  # the next forward gathers again
