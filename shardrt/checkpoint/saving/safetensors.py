"""`save_safetensors`: the final files, of which each rank writes its own byte ranges.

every rank   which tensors there are, their shapes and dtypes; if the ranks' answers differ, all are put together
rank 0       makes `<folder>.safetensors.tmp` with files that have their headers and their sizes
every rank   writes and syncs its parts; the ranks agree that they have
rank 0       links the folder's other files into it, writes the index, and exchanges the folders
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...comm import Communicator, DeviceMesh, world
from ...tensor.dtensor import DTensor
from ...tensor.placement import Replicate
from ..disk.files import Writer, bytes_of, explained
from ..disk.folders import exchange, sync_folder
from ..disk.storage import on_disk
from ..errors import agreed
from ..formats.safetensors import (
    DTYPE_NAMES,
    INDEX_NAME,
    Array,
    TensorInfo,
    check_metadata,
    encode_header,
    encode_index,
    parse_size,
    split_into_files,
)
from ..geometry import Part, memory_of, parts
from ..state.models import Scratch, byte_runs, lies_as_stored, named_tensors, outside_inference_mode, pieces

_MODEL_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
_mesh_keys: WeakKeyDictionary[DeviceMesh, str] = WeakKeyDictionary()  # a cache


class Held(NamedTuple):
    """A tensor as one rank has it.   mesh: names the ranks over which it lies; empty for a plain tensor."""

    info: TensorInfo
    mesh: str


class Plan(NamedTuple):
    """The files to be made, the same on every rank."""

    files: dict[str, list[str]]  # the tensors of each
    headers: dict[str, bytes]
    arrays: dict[str, Array]


@outside_inference_mode()
def save_safetensors(
    model: nn.Module,
    folder: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Save the model's tensors as `transformers.from_pretrained` loads them. Collective.

    model: sharded or not, of any placements but `Partial`; not on the meta device. Tensors have their names in the whole model.
        A tensor with several names is stored once, under the name that `_tied_weights_keys` of transformers' models keeps.
        Extra state that is no tensor is left out.
    folder: becomes `model.safetensors`, or `model-00001-of-0000N.safetensors` and an index if there is more than
        max_shard_size. Its other files stay, and older files of these names go. What is there is exchanged for the new in one
        step: whatever fails, it stays as it is. Save the configuration with `model.config.save_pretrained(folder)`.
    max_shard_size: bytes of the tensors of a file, or such as "5GB", 5 * 10**9 bytes. A larger tensor has its own file.
    dtype: of the floating-point tensors in the files, but for those of one byte; None: as they are.
    metadata: strings for the files' headers, beside {"format": "pt"}.
    Cost: no communication but a comparison; each rank writes its shards, and converts at most 16 MiB at a time. Each
        run of bytes is a write: with columns, in runs of 4 KiB, a save takes up to three times as long as with rows.
    Raises, on every rank alike: CheckpointError for arguments, placements and dtypes that cannot be saved, and with the
    system's reason if a file cannot be written; ValueError if ranks have different tensors of one name.
    """
    comm = world().comm
    with agreed(comm):
        target = _target(folder)
        nbytes, texts = parse_size(max_shard_size), {"format": "pt", **(metadata or {})}
        check_metadata(texts, "save_safetensors")
        ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()  # of transformers' models, which make them anew
        tensors = {
            each.name: memory_of(each.name, each.tensor.detach()) for each in named_tensors(model) if each.name not in ignored
        }
        held = {name: _held(name, tensor, dtype) for name, tensor in tensors.items()}
    owners = _owners(comm, held)
    beside = target.with_name(f"{target.name}.safetensors.tmp")
    plan = _plan({name: owned.info for name, (_, owned) in owners.items()}, nbytes, texts, beside)
    turns = {name: index for index, name in enumerate(plan.arrays)}
    mine = {
        name: tensor for name, tensor in tensors.items() if _writes(tensor, held[name], turns[name], comm.rank, owners[name])
    }
    try:
        with agreed(comm):
            if comm.rank == 0:
                _begin(beside, plan)
        with agreed(comm):
            _write(plan, mine)
        with agreed(comm):
            if comm.rank == 0:
                _commit(beside, target, plan)
    except BaseException:
        if comm.rank == 0:
            shutil.rmtree(beside, ignore_errors=True)
        raise


def _target(folder: str | os.PathLike[str]) -> Path:
    target = Path(os.path.realpath(on_disk(folder)))
    if target.is_mount() or (target.exists() and not target.is_dir()):
        raise ValueError(f"folder={str(target)!r}: expected a folder that is no mount point, or nothing")
    return target


# ---------------------------------------------------------------------- which tensors, and who writes them


def _held(name: str, tensor: torch.Tensor, dtype: torch.dtype | None) -> Held:
    converted = dtype is not None and tensor.is_floating_point() and tensor.dtype.itemsize > 1
    info = TensorInfo(dtype if dtype is not None and converted else tensor.dtype, tensor.shape)
    if info.dtype not in DTYPE_NAMES:
        raise ValueError(f"tensor '{name}' of {info.dtype}: safetensors files cannot hold it; give a dtype that they can")
    if tensor.is_meta:
        raise ValueError(f"tensor '{name}' has no values: it is on the meta device; call to_empty() and load it first")
    if not isinstance(tensor, DTensor):
        return Held(info, "")
    if tensor.spec.partial:
        raise ValueError(f"tensor '{name}' of {tensor.placements}: a rank has only a term of it; redistribute it first")
    return Held(info, _mesh_key(tensor.spec.mesh))


def _mesh_key(mesh: DeviceMesh) -> str:
    if mesh not in _mesh_keys:
        _mesh_keys[mesh] = hashlib.sha256(repr(sorted(mesh.mesh.flatten().tolist())).encode()).hexdigest()[:16]
    return _mesh_keys[mesh]


def _owners(comm: Communicator, held: dict[str, Held]) -> dict[str, tuple[int, Held]]:
    """The first rank that has each tensor, and how. Raises ValueError, on every rank, if two ranks have different ones."""
    digest = hashlib.sha256(repr(held).encode()).digest()
    everyone = comm.compare(int.from_bytes(digest[:8], "little") >> 1, lambda: held) or [held]
    owners: dict[str, tuple[int, Held]] = {}
    for rank, theirs in enumerate(everyone):
        for name, each in theirs.items():
            first, owned = owners.setdefault(name, (rank, each))
            if owned.info != each.info:
                raise ValueError(
                    f"tensor '{name}' is {tuple(owned.info.shape)} {owned.info.dtype} on rank {first}, and "
                    f"{tuple(each.info.shape)} {each.info.dtype} on rank {rank}: expected one tensor of this name"
                )
    return owners


def _writes(tensor: torch.Tensor, held: Held, index: int, rank: int, owner: tuple[int, Held]) -> bool:
    """Whether this rank writes its parts of a tensor: replicas take turns, by the tensor's index in the files."""
    if not isinstance(tensor, DTensor) or held.mesh != owner[1].mesh:
        return rank == owner[0]
    spec = tensor.spec
    replica, replicas = 0, 1
    for placement, size, coordinate in zip(spec.placements, spec.mesh.shape, spec.mesh.coordinates, strict=True):
        if isinstance(placement, Replicate):
            replica, replicas = replica * size + coordinate, replicas * size
    return replica == index % replicas


def _plan(infos: dict[str, TensorInfo], max_nbytes: int, metadata: Mapping[str, str], folder: Path) -> Plan:
    plan = Plan(split_into_files(infos, max_nbytes), {}, {})
    for file, names in plan.files.items():
        plan.headers[file], offsets = encode_header({name: infos[name] for name in names}, metadata)
        for name in names:
            plan.arrays[name] = Array(folder / file, *infos[name], offsets[name])
    return plan


# ---------------------------------------------------------------------- files


def _begin(folder: Path, plan: Plan) -> None:
    """Make the files with their headers and sizes, in the place of what a killed save has left."""
    with explained("create", folder):
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        for file, names in plan.files.items():
            with Writer(folder / file) as writer:
                writer.write(0, [plan.headers[file]])
                os.truncate(folder / file, len(plan.headers[file]) + sum(plan.arrays[name].nbytes for name in names))


def _write(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write this rank's parts of these tensors, file by file, in the order of the files."""
    scratch = Scratch()
    for names in plan.files.values():
        arrays = sorted((plan.arrays[name].offset, name) for name in names if name in tensors)
        found = [(plan.arrays[name], part) for _, name in arrays for part in parts(tensors[name])]
        if found:
            with Writer(found[0][0].file, new=False) as writer:
                for array, part in found:
                    _write_part(writer, array, part, scratch)


def _write_part(writer: Writer, array: Array, part: Part, scratch: Scratch) -> None:
    if lies_as_stored(part.memory, array.dtype):
        _write_runs(writer, array, part)
        return
    for box, memory in pieces(part, max(array.dtype.itemsize, part.memory.dtype.itemsize)):
        _write_runs(writer, array, Part(box, scratch.like(memory, array.dtype).copy_(memory)))
        writer.flush()  # the next piece takes the same buffer


def _write_runs(writer: Writer, array: Array, part: Part) -> None:
    starts, nbytes = byte_runs(part.box, array.shape, array.dtype.itemsize)
    data = bytes_of(part.memory)
    for index, start in enumerate(starts):
        writer.write(array.offset + start, [data[index * nbytes : (index + 1) * nbytes]])


def _commit(folder: Path, target: Path, plan: Plan) -> None:
    """Give the files the place of those in `target`, whose other files they get as well."""
    with explained("rename", folder):
        if len(plan.files) > 1:
            arrays = plan.arrays.values()
            index = encode_index(plan.files, sum(a.nbytes for a in arrays), sum(a.shape.numel() for a in arrays))
            with Writer(folder / INDEX_NAME) as writer:
                writer.write(0, [index])
        if not target.exists():
            sync_folder(folder)
            os.rename(folder, target)
            sync_folder(target.parent)
            return
        shutil.copystat(target, folder)
        shutil.copytree(target, folder, symlinks=True, ignore=_replaced(target), copy_function=_link, dirs_exist_ok=True)
        linked = set(os.listdir(folder))
        sync_folder(folder)
        exchange(folder, target)
        sync_folder(target.parent)
        for name in os.listdir(folder):
            if name not in linked and not _MODEL_FILES.fullmatch(name):  # it came while the others were linked
                os.rename(folder / name, target / name)
        shutil.rmtree(folder)


def _replaced(target: Path) -> Callable[[str, list[str]], list[str]]:
    """For copytree: the names in `target` that the new files replace."""
    return lambda folder, names: [name for name in names if folder == str(target) and _MODEL_FILES.fullmatch(name)]


def _link(source: str, copy: str) -> None:
    try:
        os.link(source, copy, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, copy, follow_symlinks=False)
