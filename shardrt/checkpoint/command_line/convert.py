"""Converts a checkpoint from one kind to another, in one process and one tensor at a time.

Memory: the largest tensor; for a file of torch.save, all tensors. The target appears under its name once it is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from ..disk import folders
from ..disk.errors import CheckpointError
from ..disk.files import METADATA, Writer, explained
from ..disk.folders import Keep, sync_folder
from ..formats.dcp.marks import new_save_id
from ..formats.dcp.metadata_writer import ending
from ..formats.geometry import parts
from ..formats.safetensors import DTYPE_NAMES, lay_out, split_into_files
from ..saving.plan import PlannedItem, plan_of_one
from ..saving.safetensors import PreparedExport, Slice, create_files
from ..saving.sources import Direct
from ..saving.writing import Prepared, PreparedFolder
from ..state.entries import Entry
from ..state.names import Path as Keys
from ..state.objects import encode, without_numpy
from ..state.trees import placed
from .checkpoints import SUFFIX, Checkpoint

T = TypeVar("T")
Progress = Callable[[int], object]  # to be called with the number of bytes just done


class _Selection(Checkpoint):
    """What lies under a key of another checkpoint, by names without that key."""

    def __init__(self, source: Checkpoint, key: str) -> None:
        self._source, self._prefix, self.kind = source, f"{key}.", source.kind
        self.tensors = {name: source.tensors[self._prefix + name] for name in self._inside(source.tensors)}
        self.objects = self._inside(source.objects)
        self.paths = {name: _without(source.paths[self._prefix + name], key) for name in (*self.tensors, *self.objects)}

    def tensor(self, name: str) -> torch.Tensor:
        return self._source.tensor(self._prefix + name)

    def object(self, name: str) -> Any:
        return self._source.object(self._prefix + name)

    def _inside(self, names: Iterable[str]) -> list[str]:
        return [name.removeprefix(self._prefix) for name in names if name.startswith(self._prefix)]


def select(source: Checkpoint, only: str | None) -> Checkpoint:
    """What is converted: all, or what lies under the key `only`, without that key. Raises CheckpointError if nothing does."""
    if only is None:
        return source
    if not any(name.startswith(f"{only}.") for name in source.paths):
        keys = sorted({name.split(".")[0] for name in source.paths})
        raise CheckpointError(f"--only {only}: no name begins with '{only}.'; the first keys are {', '.join(keys)[:300]}")
    return _Selection(source, only)


def _without(keys: Keys, only: str) -> Keys:
    """The keys after those that `only` names. A key of the source that has the end of `only` and more in it is cut there."""
    rest = only
    for place, key in enumerate(keys):
        if str(key) == rest:
            return keys[place + 1 :]
        if isinstance(key, str) and key.startswith(f"{rest}."):
            return (key.removeprefix(f"{rest}."), *keys[place + 1 :])
        rest = rest.removeprefix(f"{key}.")
    raise AssertionError(f"{only} is no prefix of {keys}")


def convert(source: Checkpoint, kind: str, target: Path, shard_nbytes: int, done: Progress) -> None:
    """Write what `select` has given at `target`.

    kind: "dcp" (a folder), "safetensors" (a file if the target ends in .safetensors, else a folder) or "torch" (a file).
    shard_nbytes: the most bytes of tensors in a file, for a folder of safetensors. Objects are left out of safetensors.
    done: is called with the number of bytes just done.
    Raises: CheckpointError if the target exists, or if this kind of checkpoint cannot hold something of the source.
    """
    if target.exists():
        raise CheckpointError(f"'{target}' exists: name another target, or remove it")
    with explained("create", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(prefix=f"{target.name}.", suffix=".tmp", dir=target.parent, ignore_cleanup_errors=True)
    with folder:
        beside = Path(folder.name) / target.name
        WRITERS[kind](source, beside, None if target.suffix == SUFFIX else shard_nbytes, done)
        with explained("rename", beside):
            os.rename(beside, target)
            sync_folder(target.parent)


# ---------------------------------------------------------------------- torch.save


def _write_torch(source: Checkpoint, path: Path, shard_nbytes: int | None, done: Progress) -> None:
    tree: dict[str, Any] = {}
    for name in source.tensors:
        tensor = source.tensor(name)
        tree = placed(tree, source.paths[name], tensor, None)
        done(tensor.nbytes)
    for name in source.objects:
        tree = placed(tree, source.paths[name], without_numpy(source.object(name)), None)
    with explained("write", path), open(path, "wb") as file:
        torch.save(tree, file)
        file.flush()
        os.fsync(file.fileno())


# ---------------------------------------------------------------------- safetensors and dcp, by the functions of saves


def _write_safetensors(source: Checkpoint, path: Path, shard_nbytes: int | None, done: Progress) -> None:
    infos = source.tensors
    for name, info in infos.items():
        if info.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"tensor '{name}' has the dtype {info.dtype}, which safetensors does not have")
    files = {path.name: list(infos)} if shard_nbytes is None else split_into_files(infos, shard_nbytes)
    folder = path.parent if shard_nbytes is None else path
    layout = lay_out(infos, files, {"format": "pt"}, folder)
    create_files(folder, layout)

    def items() -> Iterator[Slice]:
        for name, array in layout.in_order():
            yield from (Slice(array, part) for part in parts(source.tensor(name)))
            done(array.nbytes)

    _write(PreparedExport(folder, folder, draft=None), items())
    sync_folder(folder)


def _write_dcp(source: Checkpoint, path: Path, shard_nbytes: int | None, done: Progress) -> None:
    values: dict[str, torch.Tensor | bytes] = {
        name: torch.empty(info.shape, dtype=info.dtype, device="meta") for name, info in source.tensors.items()
    }
    values |= {name: encode(name, source.object(name)) for name in source.objects}
    plan, save_id = plan_of_one([Entry(name, value, source.paths[name]) for name, value in values.items()]), new_save_id()
    with explained("create", path):
        path.mkdir()

    def items() -> Iterator[PlannedItem]:
        for item in plan.items:
            if isinstance(item.value, bytes):
                yield item
            else:
                yield item._replace(value=parts(source.tensor(item.name))[0])
                done(item.value.memory.nbytes)

    _write(PreparedFolder(path, folders, path, None, Keep(), plan, (plan.nbytes,), save_id), items())
    with Writer(path / METADATA) as writer:
        writer.write(0, [plan.metadata, ending(save_id)])
    sync_folder(path)


def _write(prepared: Prepared[T], items: Iterator[T]) -> None:
    """Write items one after the other: the memory of each is freed before the next one is made."""
    direct = Direct()
    prepared.write(map(lambda item: prepared.source(item, direct.pieces)._replace(is_passing=True), items))


WRITERS = {"dcp": _write_dcp, "safetensors": _write_safetensors, "torch": _write_torch}
