"""Folders of checkpoints, which are there whole or not at all.

A save writes beside its target, and only a rename makes it visible:

    step-200.tmp/    `begin` makes it; every rank writes and syncs its own file in it; all ranks agree that they have
    step-200/        `commit` writes .metadata, syncs the folder, renames it, and syncs the parent
    step-100.old.tmp/    a folder that is being deleted: `prune` renames it first, so that no half of it is ever taken for whole
    step-200.aside/  what was step-200 before, on a file system that cannot exchange folders: `latest` gives it until
                     step-200 is there, and then it is deleted

Invariant: a folder with .metadata and a name that does not end in .tmp is complete, and its data has reached the disk.
Nothing is ever deleted that no checkpoint has: `_delete` knows the names of files, and refuses the rest.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .dcp.metadata import METADATA
from .errors import CheckpointError
from .store import Bytes, Writer, explained

_OWN_FILES = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp")
_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<number>\d+)(\.aside)?")
_STALE = re.compile(r"(?P<prefix>.*?)\d+(\.aside)?(\.old)?\.tmp")
_ASIDE = ".aside"
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100

_log = logging.getLogger("shardrt")


class Keep(NamedTuple):
    """Which numbered checkpoints remain after a save: so many of the newest (None: all), and multiples of `every`."""

    newest: int | None = None
    every: int | None = None

    def __str__(self) -> str:
        return f"keep={self.newest}" + (f", keep_every={self.every}" if self.every is not None else "")


def beside(target: Path) -> Path:
    """The folder that a save of `target` is written in."""
    return target.with_name(f"{target.name}.tmp")


def check_target(folder: str | os.PathLike[str], keep: Keep) -> Path:
    """The real path of a folder to save in. Raises ValueError for a name, or a `keep`, that a save cannot have."""
    target = Path(os.path.realpath(folder))
    if target.name.endswith((".tmp", _ASIDE)) or not target.name:
        name = "neither *.tmp nor *.aside"
        raise ValueError(f"a checkpoint cannot be saved as {os.fspath(folder)!r}: expected a folder whose name is {name}")
    with suppress(OSError):  # one of the two is not there
        if target.samefile(os.curdir):
            raise ValueError(f"{os.fspath(folder)!r} is the current directory, which would be replaced: save in one inside")
    if keep.newest is not None and keep.newest < 1:
        raise ValueError(f"{keep}: expected at least 1, or None to keep every checkpoint")
    if keep.every is not None and (keep.every < 1 or keep.newest is None):
        raise ValueError(f"{keep}: expected keep_every to be at least 1, and beside keep=, without which nothing is deleted")
    if keep.newest is not None and not _NUMBERED.fullmatch(target.name):
        raise ValueError(f"{keep} needs a folder whose name ends in a number, such as 'step-100'; found {target.name!r}")
    return target


def begin(target: Path) -> None:
    """Make the folder that a save is written in, and the parents it needs. Rank 0 calls it, before any rank writes.

    Raises: CheckpointError if `target` is there and has anything that no checkpoint has, since it would be replaced.
    """
    if target.is_dir():
        _refuse_foreign(target)
        if target.is_mount():
            raise CheckpointError(f"{str(target)!r} is a mount point, which cannot be renamed: save in a folder inside it")
    elif target.exists():
        raise CheckpointError(f"{str(target)!r} is a file; expected a folder, or nothing")
    folder = beside(target)
    _delete(folder)
    missing = [parent for parent in folder.parents if not parent.exists()]
    with explained("create", folder):
        folder.mkdir(parents=True)
        if target.exists():
            _copy_access(target, folder)
    for parent in missing:
        sync_folder(parent.parent)


def _copy_access(target: Path, folder: Path) -> None:
    """Let the same users in, as far as this one may say so."""
    with suppress(PermissionError):
        shutil.chown(folder, group=target.stat().st_gid)
    folder.chmod(stat.S_IMODE(target.stat().st_mode) | stat.S_IRWXU)


def check_files(target: Path, files: Mapping[str, int]) -> None:
    """Raise CheckpointError if rank 0 does not see what the others have written. files: their names and bytes."""
    for name, nbytes in files.items():
        path = beside(target) / name
        with explained("find", path):
            found = path.stat().st_size
        if found != nbytes:
            raise CheckpointError(
                f"{str(path)!r} has {found} bytes, as rank 0 sees it; its rank has written {nbytes}. Save on a file "
                "system that all ranks share"
            )


def commit(target: Path, metadata: Bytes, keep: Keep) -> None:
    """Make the save of `target` visible, in the place of what was there; then delete old ones. Rank 0 calls it.

    metadata: the bytes of .metadata.
    """
    folder = beside(target)
    with Writer(folder / METADATA) as writer:
        writer.write(0, [metadata])
    sync_folder(folder)
    with explained("rename", folder):
        if target.exists():
            exchange(folder, target)
        else:
            os.rename(folder, target)
    try:  # from here on the checkpoint is there: what fails is not the save
        sync_folder(target.parent)
        _sweep(folder)
        _sweep(_aside(target))
        if keep.newest is not None:
            prune(target, keep.newest, keep.every)
    except CheckpointError as error:
        _log.warning("%s is saved, but: %s", target, error)


def abandon(target: Path) -> None:
    """Delete what a failed save has written, as far as that is possible. Rank 0 calls it, when no rank writes any more."""
    _sweep(beside(target))


def latest(parent: str | os.PathLike[str], prefix: str | None = None) -> Path | None:
    """The newest committed checkpoint in `parent`: the folder with the highest number at the end of its name.

    prefix: "step-" looks only at those that are named so, up to the number.
    Returns None if there is none, or no such parent. Needs no ranks: it reads the names in the folder as this process sees it.
    What is being written, or was when its job died, is not committed.
    """
    try:
        committed = [folder for folder in _committed(Path(parent)) if prefix in (None, _prefix(folder))]
    except FileNotFoundError:
        return None
    return max(committed, key=lambda folder: (_number(folder), folder.name), default=None)


def prune(target: Path, keep: int, keep_every: int | None = None) -> None:
    """Delete all but the `keep` newest committed checkpoints that are named as `target` is, up to the number, and but those
    whose number is a multiple of `keep_every`.

    `target`, and those with higher numbers, stay; so do links, and, with a warning, folders with files that no checkpoint has.
    Folders that other saves of this name left unfinished are deleted.
    """
    with explained("list", target.parent):
        alike = [folder for folder in _committed(target.parent) if _prefix(folder) == _prefix(target)]
    newest = max(alike, key=_number, default=target)
    if _number(newest) > _number(target):
        _log.warning("%s stays the latest checkpoint, not %s: save each training in a folder of its own", newest, target.name)
    for folder in alike:
        _sweep(_aside(folder))
    older = sorted((folder for folder in alike if _number(folder) < _number(target)), key=_number, reverse=True)
    for folder in older[keep - 1 :]:
        if not folder.is_symlink() and (keep_every is None or _number(folder) % keep_every):
            _discard(folder)
    remove_stale(target)


def remove_stale(target: Path) -> None:
    """Delete the unfinished folders beside `target` that are named as it is, up to the number."""
    with explained("list", target.parent):
        names = os.listdir(target.parent)
    for name in names:
        match = _STALE.fullmatch(name)
        if match and match["prefix"] == _prefix(target):
            _sweep(target.parent / name)


def sync_folder(folder: Path) -> None:
    """Wait until the names of what was created or renamed in a folder have reached the disk."""
    with explained("sync", folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that has no such thing
                raise
        finally:
            os.close(fd)


def _prefix(folder: Path) -> str | None:
    match = _NUMBERED.fullmatch(folder.name)
    return None if match is None else match["prefix"]


def _number(folder: Path) -> int:
    match = _NUMBERED.fullmatch(folder.name)
    return -1 if match is None else int(match["number"])


def _committed(parent: Path) -> list[Path]:
    """The folders in `parent` whose names end in a number, and that have .metadata; one that was set aside if it is alone."""
    found = {path.name: path for path in parent.iterdir() if _NUMBERED.fullmatch(path.name) and (path / METADATA).is_file()}
    return [path for name, path in found.items() if not (name.endswith(_ASIDE) and name.removesuffix(_ASIDE) in found)]


def _aside(target: Path) -> Path:
    return target.with_name(f"{target.name}{_ASIDE}")


def _discard(folder: Path) -> None:
    """Delete a committed checkpoint; one that cannot be deleted stays as it is, with a warning."""
    gone = folder.with_name(f"{folder.name}.old.tmp")
    try:
        _refuse_foreign(folder)
        _delete(gone)
        with explained("delete", folder):
            os.rename(folder, gone)
        _delete(gone)
    except CheckpointError as error:
        _log.warning("%s", error)


def _refuse_foreign(folder: Path) -> None:
    """Raise CheckpointError if the folder has anything that no checkpoint has."""
    with explained("list", folder):
        foreign = sorted(name for name in os.listdir(folder) if not _OWN_FILES.fullmatch(name))
    if foreign:
        names = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise CheckpointError(
            f"{str(folder)!r} is neither replaced nor deleted: it has {names}, which no checkpoint has. "
            "Move that elsewhere, or save in another folder"
        )


def _delete(folder: Path) -> None:
    """Delete a folder and the files of a checkpoint in it, if it is there."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink():
        raise CheckpointError(f"{str(folder)!r} is a link, and is not deleted: move it elsewhere")
    _refuse_foreign(folder)
    with explained("delete", folder):
        for name in os.listdir(folder):
            os.unlink(folder / name)
        os.rmdir(folder)


def _sweep(folder: Path) -> None:
    """As `_delete`; what cannot be deleted stays, with a warning."""
    try:
        _delete(folder)
    except CheckpointError as error:
        _log.warning("%s", error)


def exchange(folder: Path, target: Path) -> None:
    """Exchange two folders of one parent in one step. Raises OSError.

    Hazard: a file system without this (NFS) gets three renames; killed between them, it has what was there as `_aside` says.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.renameat2(_AT_FDCWD, os.fsencode(folder), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE):
        return
    if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise OSError(code, os.strerror(code), os.fspath(folder))
    _delete(_aside(target))
    os.rename(target, _aside(target))
    os.rename(folder, target)
    os.rename(_aside(target), folder)
