"""From one kind of checkpoint to another, by one process and a tensor at a time.

kind          where                                                      found by
dcp           a folder, of shardrt or of torch.distributed.checkpoint    .metadata in it
safetensors   a file, or a folder with an index                          the names of files
torch         a file of torch.save                                       everything else

Memory: the largest tensor; for a file of torch.save, all of them. What is written appears under its name when it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch

from ..disk.files import METADATA, Writer, bytes_of, explained
from ..disk.folders import sync_folder
from ..disk.remote_path import Location
from ..disk.storage import on_disk
from ..errors import CheckpointError
from ..formats.safetensors import (
    DTYPE_NAMES,
    INDEX_NAME,
    SINGLE_NAME,
    TensorInfo,
    encode_header,
    encode_index,
    split_into_files,
)
from ..state.names import Path as Keys
from ..state.objects import without_numpy
from ..state.trees import placed
from .dcp_folder import DcpCheckpoint, DcpWriter
from .kinds import Checkpoint, SafetensorsCheckpoint, TorchCheckpoint

Progress = Callable[[int], object]  # is told how many bytes were done


SUFFIX = ".safetensors"


def open_checkpoint(path: Location) -> Checkpoint:
    """The checkpoint at `path`. Raises CheckpointError if there is none of a known kind, and for what cannot be read."""
    if not path.exists():
        raise CheckpointError(f"no file or folder '{path}'")
    if (path / METADATA).is_file():
        return DcpCheckpoint(path)
    path = on_disk(path)
    if not path.is_dir():
        return SafetensorsCheckpoint(path) if path.suffix == SUFFIX else TorchCheckpoint(path)
    if (path / SINGLE_NAME).is_file() or (path / INDEX_NAME).is_file():
        return SafetensorsCheckpoint(path)
    raise CheckpointError(f"'{path}' is no checkpoint: it has no {METADATA}, {SINGLE_NAME} or {INDEX_NAME}")


class Selected(NamedTuple):
    """A name of the source, as the target has it."""

    name: str  # in the source
    new_name: str
    keys: Keys  # of the new name


def select(source: Checkpoint, only: str | None) -> list[Selected]:
    """The names to convert: all, or those under the key `only`, without that key. Raises CheckpointError if there are none."""
    if only is None:
        return [Selected(name, name, source.paths[name]) for name in (*source.tensors, *source.objects)]
    prefix = f"{only}."
    names = [name for name in (*source.tensors, *source.objects) if name.startswith(prefix)]
    if not names:
        keys = sorted({name.split(".")[0] for name in source.paths})
        raise CheckpointError(f"--only {only}: no name begins with '{prefix}'; the first keys are {', '.join(keys)[:300]}")
    return [Selected(name, name.removeprefix(prefix), _without(source.paths[name], only)) for name in names]


def _without(keys: Keys, only: str) -> Keys:
    """Keys without those that `only` joins; where a key of the source has a part of it, the rest of that key."""
    rest = only
    for place, key in enumerate(keys):
        if str(key) == rest:
            return keys[place + 1 :]
        if isinstance(key, str) and key.startswith(f"{rest}."):
            return (key.removeprefix(f"{rest}."), *keys[place + 1 :])
        rest = rest.removeprefix(f"{key}.")
    raise AssertionError(f"{only} is no prefix of {keys}")


def convert(
    source: Checkpoint, selected: Sequence[Selected], kind: str, target: Path, shard_nbytes: int, done: Progress
) -> None:
    """Write the selected names at `target`.

    kind: "dcp" (a folder), "safetensors" (a file if the target ends in .safetensors, else a folder) or "torch" (a file).
    shard_nbytes: the largest file in a folder of safetensors. Objects have no place in safetensors: they are left out.
    Raises: CheckpointError if the target exists, or something has no place in this kind of checkpoint.
    """
    if target.exists():
        raise CheckpointError(f"'{target}' exists: name another target, or remove it")
    write = {"dcp": _write_dcp, "torch": _write_torch}.get(kind)
    with explained("create", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(prefix=f"{target.name}.", suffix=".tmp", dir=target.parent, ignore_cleanup_errors=True)
    with folder:
        beside = Path(folder.name) / target.name
        if write is not None:
            write(source, selected, beside, done)
        else:
            _write_safetensors(source, selected, beside, None if target.suffix == SUFFIX else shard_nbytes, done)
        with explained("rename", beside):
            os.rename(beside, target)
            sync_folder(target.parent)


# ---------------------------------------------------------------------- torch.save


def _write_torch(source: Checkpoint, selected: Sequence[Selected], path: Path, done: Progress) -> None:
    def leaf(each: Selected) -> Any:
        if each.name not in source.tensors:
            return without_numpy(source.object(each.name))
        found = source.tensor(each.name)
        done(found.nbytes)
        return found

    tree: dict[str, Any] = {}
    for each in selected:
        tree = placed(tree, each.keys, leaf(each), None)
    with explained("write", path), open(path, "wb") as file:
        torch.save(tree, file)
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------------- safetensors


def _write_safetensors(
    source: Checkpoint, selected: Sequence[Selected], path: Path, shard_nbytes: int | None, done: Progress
) -> None:
    """shard_nbytes: None for one file, not in a folder."""
    old_names = {each.new_name: each.name for each in selected if each.name in source.tensors}
    infos = {new: source.tensors[old] for new, old in old_names.items()}
    for new, info in infos.items():
        if info.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"tensor '{new}' has the dtype {info.dtype}, which safetensors does not have")
    if shard_nbytes is None:
        _write_file(source, old_names, infos, path, done)
        return
    files = split_into_files(infos, shard_nbytes)
    with explained("create", path):
        path.mkdir()
    for file, names in files.items():
        _write_file(source, old_names, {name: infos[name] for name in names}, path / file, done)
    if len(files) > 1:
        total, numel = sum(info.nbytes for info in infos.values()), sum(info.shape.numel() for info in infos.values())
        with Writer(path / INDEX_NAME) as writer:
            writer.write(0, [encode_index(files, total, numel)])
    sync_folder(path)


def _write_file(
    source: Checkpoint, old_names: Mapping[str, str], infos: Mapping[str, TensorInfo], path: Path, done: Progress
) -> None:
    header, offsets = encode_header(infos, {"format": "pt"})
    with Writer(path) as writer:
        writer.write(0, [header])
        for name, offset in sorted(offsets.items(), key=lambda item: item[1]):
            found = source.tensor(old_names[name])
            writer.write(offset, [bytes_of(found)])
            writer.flush()  # `found` goes
            done(found.nbytes)


# ---------------------------------------------------------------------- DCP


def _write_dcp(source: Checkpoint, selected: Sequence[Selected], path: Path, done: Progress) -> None:
    writer = DcpWriter(path)
    for each in selected:
        if each.name in source.tensors:
            found = source.tensor(each.name)
            writer.tensor(each.new_name, each.keys, found)
            done(found.nbytes)
        else:
            writer.object(each.new_name, each.keys, source.object(each.name))
    writer.finish()
