"""`load_safetensors`: each rank reads what it needs of the files, as `load` does of a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ...comm import world
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.inference_mode import outside_inference_mode
from ...tensor.placement.snapshots import wait_to_write
from ..disk.errors import CheckpointError, agreed
from ..disk.storage import on_disk
from ..formats.geometry import memory_of
from ..formats.safetensors import read_stored
from ..formats.stored import Stored
from ..state.dtypes import sentence
from ..state.models import match, materialise, named_tensors, take_back
from ..state.names import LoadedKeys
from ..state.several_names import Twins, settle
from .compared import unlike
from .reading import fetches, read_all
from .renaming import KeyMap, with_new_names


def load_safetensors(
    model: nn.Module, folder: str | os.PathLike[str], *, key_map: KeyMap | None = None, strict: bool = True
) -> LoadedKeys:
    """Load safetensors files into the model. Collective.

    model: sharded or not, of any placements but `Partial`. One that is on the meta device gets its memory first. The files
        lack non-persistent buffers, such as rotary tables: models of transformers compute theirs anew, others get memory
        without values.
    folder: with `model.safetensors`, or with `model.safetensors.index.json` and the files that it names; or a single file.
    key_map: from names in the files to names in the model: a function, a dict, or pairs of regular expressions and
        replacements, all of which are applied in order (`re.sub`). A tensor whose name becomes None is left out.
    strict: raise for names that the model or the files lack, and for different values under several names of one tensor; False:
        it gets the first, and a warning names them. A tensor with several names needs one of them.
    Values are converted to the dtypes of the model's tensors; a warning says if these are narrower.
    Cost: no values are sent; each rank reads the headers and the bytes of its shards, and converts at most 4 MiB at a time.
    Raises, on every rank alike: CheckpointError for files that do not fit the model, with all missing and unexpected names and
    wrong shapes, and for those that the format does not allow.
    """
    with outside_inference_mode():
        return _load(model, folder, key_map, strict=strict)


def _load(model: nn.Module, folder: str | os.PathLike[str], key_map: KeyMap | None, *, strict: bool) -> LoadedKeys:
    comm = world().comm
    with agreed(comm):
        path = on_disk(folder)
        stored = with_new_names(read_stored(path), key_map).stored
        named = named_tensors(model)
        found, keys, further, rounded = match(named, (), stored.tensors, f"'{path}'", comm, strict=strict)
        for name, tensor, _ in named:
            if isinstance(tensor, DTensor) and tensor.spec.partial and name in found:
                raise CheckpointError(
                    f"tensor '{name}' is {tensor.placements}, of which a rank has only a term: redistribute it"
                )
    wait_to_write()
    with agreed(comm), torch.no_grad():
        materialise(model, comm.device)
        written = [each for each in named_tensors(model) if each.name in found]
        own = {name: tensor for name, tensor, _ in written}
        lost = unlike(stored, [Twins(found[name], other, own[name]) for name, other in further])
    settle(f"'{path}'", lost, sentence(rounded, comm.rank), comm, strict=strict)
    with agreed(comm):
        _read(stored, [(found[name], tensor) for name, tensor, _ in written])
    take_back(model, written)
    return keys


@torch.no_grad()
def _read(stored: Stored, targets: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Read this rank's parts of each tensor."""
    read_all(
        stored,
        (fetch for name, tensor in targets for fetch in fetches(name, stored.tensors[name], memory_of(name, tensor.detach()))),
    )
    increment_version([tensor for _, tensor in targets if not tensor.is_inference()])  # the next forward gathers again
