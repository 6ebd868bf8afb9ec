"""Folders of checkpoints in a store, which has no rename, no lock, and no folder that is there before its files.

    step-200/__3_0.distcp    every rank writes its own file, in the final folder
    step-200/.metadata       `commit` writes it last, as .metadata.tmp, and renames it: from then on this is a checkpoint

Invariant: a folder without .metadata is no checkpoint; .metadata is deleted before anything else is.
A save is refused where a checkpoint is, since neither would be whole for some time. `Storage` describes the functions.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import count

from .errors import CheckpointError
from .files import METADATA, Bytes, explained
from .folders import Keep, check_name, descending, outdated
from .remote_files import RemoteReader, RemoteWriter
from .remote_path import RemotePath
from .removal import refuse_foreign_names, warned

reader, writer = RemoteReader, RemoteWriter

_log = logging.getLogger("shardrt")


def check_target(folder: RemotePath, keep: Keep) -> RemotePath:
    """The folder to save in. Raises ValueError for a name, or a `keep`, that a save cannot have."""
    check_name(folder, keep, repr(os.fspath(folder)))
    if "/" not in folder.path:
        raise ValueError(f"'{folder}' is a whole bucket: save in a folder inside it")
    return folder


def folder_of(target: RemotePath, machine: str, save_id: str) -> RemotePath:
    """Where a save of `target` is written: `target` itself."""
    return target


def begin(target: RemotePath, folder: RemotePath) -> RemotePath:
    """Delete what killed saves have left in the folder.

    Raises: CheckpointError if the folder has a checkpoint, or files that no checkpoint has.
    """
    with explained("list", target):
        found = target.sizes()
    if METADATA in found:
        advice = "delete it first, or save under another name"
        raise CheckpointError(f"'{target}' has a checkpoint, which a store cannot replace in one step: {advice}")
    if found:  # Cost: training waits for each request
        remove(target)
    with explained("create", target):
        target.mkdir()
    return target


def commit(draft: RemotePath, files: Mapping[str, int], metadata: Sequence[Bytes], keep: Keep) -> None:
    """Make a save visible; then delete old checkpoints. Rank 0 calls it.

    files: names and bytes of what the ranks have written.   metadata, keep: as `folders.commit` has them.
    """
    with explained("list", draft):
        found = draft.sizes()
    if METADATA in found:
        advice = "save each training in a folder of its own"
        raise CheckpointError(f"'{draft}' has a checkpoint that another job has saved there since this save began: {advice}")
    for name, nbytes in files.items():
        if found.get(name) != nbytes:
            raise CheckpointError(
                f"'{draft / name}' has {found.get(name, 'no')} bytes, as rank 0 sees it; its rank has written {nbytes}. Save "
                "in a store that all ranks share, and each training in a folder of its own"
            )
    beside = draft / f"{METADATA}.tmp"
    with RemoteWriter(beside) as writer:
        writer.write(0, metadata)
    with explained("rename", beside):
        beside.rename(draft / METADATA)
    if keep.newest is not None:
        with warned():  # the checkpoint is there from here on
            _prune(draft, keep)


def abandon(draft: RemotePath) -> None:
    """Delete what a failed save has written, as far as that is possible, and unless another job has saved there since."""
    with warned(), explained("delete", draft):
        if not (draft / METADATA).exists():
            remove(draft)


def newest_first(parent: RemotePath, prefix: str | None) -> Iterator[RemotePath]:
    """The checkpoints among which `latest` chooses, in descending order. Cost: a request for each."""
    with explained("list", parent):
        yield from (parent / name for name in descending(parent.sizes(), prefix) if (parent / name / METADATA).is_file())


def set_aside_damaged(folder: RemotePath) -> RemotePath:
    """Give a damaged checkpoint a name that `latest` does not find. Cost: the store copies it, and then deletes it."""
    names = (f"{folder.name}.{number}.damaged" if number else f"{folder.name}.damaged" for number in count())
    with explained("rename", folder):
        damaged = next(path for name in names if not (path := folder.with_name(name)).exists())
        damaged.mkdir()
        folder.copy(folder.sizes(), damaged)
    remove(folder)
    return damaged


def remove(folder: RemotePath) -> None:
    """Delete the files of a checkpoint, or of a save that has failed: `.metadata` first.

    Raises: CheckpointError if the folder has anything else, or cannot be deleted.
    """
    with explained("delete", folder):
        names = folder.sizes()
        refuse_foreign_names(folder, names)
        folder.unlink(name for name in names if name == METADATA)
        folder.unlink(name for name in names if name != METADATA)
        folder.rmdir()


def _prune(target: RemotePath, keep: Keep) -> None:
    committed = [path.name for path in newest_first(target.parent, None)]
    for name in outdated(committed, target, keep):
        with warned():
            remove(target.with_name(name))
