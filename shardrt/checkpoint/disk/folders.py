"""Folders of checkpoints, which are there whole or not at all.

A save writes beside its target, and only a rename makes it visible:

    step-200.<machine>-<id>.tmp/   `begin` makes it, for this save alone; every rank writes and syncs its own file in it; all
                                   ranks agree that all have done so
    step-200/                      `commit` writes .metadata, syncs the folder, renames it, and syncs the parent
    step-100.<random>.old.tmp/     a folder that is being deleted (`removal.py`)
    step-200.damaged/              a checkpoint that a run could not load, and did not delete (`run.py`)
    step-200.<random>.aside/       the step-200 from before, on a file system that cannot exchange folders: `latest` returns it
                                   until the new step-200 is there, and then it is deleted

Invariant: a folder with .metadata and a name that does not end in .tmp is complete, and its data has reached the disk.
A deletion spares files that no checkpoint has, and the folders that running jobs write in (`drafts.py`). So several jobs may
save in one folder: whatever their order, each checkpoint that appears is whole.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple

from .drafts import Draft, remove_abandoned
from .drafts import folder_of as folder_of
from .errors import CheckpointError
from .files import METADATA, Bytes, Reader, Writer, explained
from .remote_path import Location
from .removal import refuse_foreign, remove, remove_files, warned

_NUMBERED = re.compile(r"(?P<prefix>.*?)(?P<number>\d+)")
_LEFT = re.compile(  # what saves of `base` leave; earlier versions gave some of these names
    r"(?P<base>.+?)(\.(?P<machine>[0-9a-f]{8})-[0-9a-f]{32}|\.[0-9a-f]{32}|\.aside)?(?P<kind>\.aside|\.old\.tmp|\.tmp)"
)
_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY)

_log = logging.getLogger("shardrt")


class Keep(NamedTuple):
    """Which checkpoints remain after a save: the `newest` ones (None: all), and those with multiples of `every` as numbers."""

    newest: int | None = None
    every: int | None = None

    def __str__(self) -> str:
        return f"keep={self.newest}" + (f", keep_every={self.every}" if self.every is not None else "")


reader = Reader


@contextmanager
def writer(path: Path) -> Iterator[Writer]:
    """A file, whose bytes and name have reached the disk when the `with` block ends.

    It is new, or, where the caller has put one of the same size in its place, written over.
    """
    with Writer(path, new=not path.exists()) as made:
        yield made
    sync_folder(path.parent)


def check_target(folder: str | os.PathLike[str], keep: Keep) -> Path:
    """The real path of a folder to save in: of a link, what it leads to, which the save replaces.

    Raises ValueError for a name, or a `keep`, that a save cannot have.
    """
    target = Path(os.path.realpath(folder))
    with suppress(OSError):  # one of the two is not there
        if target.samefile(os.curdir):
            raise ValueError(f"{os.fspath(folder)!r} is the current directory, which would be replaced: save in one inside")
    is_link = os.path.islink(os.path.abspath(folder))
    check_name(target, keep, f"{os.fspath(folder)!r}, a link to {str(target)!r}" if is_link else repr(str(target)))
    return target


def check_name(target: Location, keep: Keep, shown: str) -> None:
    """Raise ValueError for a name, or a `keep`, that a save cannot have.   shown: the target in messages."""
    if target.name.endswith((".tmp", ".aside")) or not target.name:
        name = "neither *.tmp nor *.aside"
        raise ValueError(f"a checkpoint cannot be saved as {shown}: expected a folder whose name is {name}")
    if keep.newest is not None and keep.newest < 1:
        raise ValueError(f"{keep}: expected at least 1, or None to keep every checkpoint")
    if keep.every is not None and (keep.every < 1 or keep.newest is None):
        raise ValueError(f"{keep}: expected keep_every to be at least 1, and beside keep=, without which nothing is deleted")
    if keep.newest is not None and not _NUMBERED.fullmatch(target.name):
        raise ValueError(f"{keep} needs a folder whose name ends in a number, such as 'step-100'; found {shown}")


def begin(target: Path, folder: Path) -> Draft:
    """Make the folder that a save of `target` is written in, and the parents it needs. Rank 0 calls it, before any rank writes.

    Raises: CheckpointError if `target` has files that no checkpoint has, as it will be replaced, or is a file or mount point.
    """
    if target.is_dir():
        refuse_foreign(target)
        if target.is_mount():
            raise CheckpointError(f"{str(target)!r} is a mount point, which cannot be renamed: save in a folder inside it")
    elif target.exists():
        raise CheckpointError(f"{str(target)!r} is a file; expected a folder, or nothing")
    missing = [parent for parent in folder.parents if not parent.exists()]
    if not missing:
        with warned():
            _clean(target, with_alike=False)
    draft = Draft(target, folder)
    for parent in missing:
        sync_folder(parent.parent)
    return draft


def check_files(folder: Path, files: Mapping[str, int]) -> None:
    """Raise CheckpointError unless rank 0 sees all files that the ranks have written.   files: their names and bytes."""
    for name, nbytes in files.items():
        path = folder / name
        with explained("find", path):
            found = path.stat().st_size
        if found != nbytes:
            raise CheckpointError(
                f"{str(path)!r} has {found} bytes, as rank 0 sees it; its rank has written {nbytes}. Save on a file "
                "system that all ranks share"
            )


def commit(draft: Draft, files: Mapping[str, int], metadata: Sequence[Bytes], keep: Keep) -> None:
    """Make a save visible, in the place of what was there; then delete old checkpoints. Rank 0 calls it.

    files: as `check_files` has them.   metadata: the contents of .metadata.
    """
    folder, target = draft.folder, draft.target
    with Writer(folder / METADATA, new=False) as writer:
        writer.write(0, metadata)
    sync_folder(folder)
    check_files(folder, files)
    # Invariant: another job that deletes this folder renames it first, and then this rename fails.
    with explained("rename", folder):
        _take_place(folder, target)
    draft.release()
    try:  # the checkpoint is there from here on: an error below is no failure of the save
        sync_folder(target.parent)
        if os.path.lexists(folder):  # what was `target` before
            with warned():
                remove(folder, target.name)
        if keep.newest is not None:
            prune(target, keep)
        _clean(target, with_alike=keep.newest is not None)
    except (CheckpointError, OSError) as error:
        _log.warning("%s is saved, but: %s", target, error)


def abandon(draft: Draft) -> None:
    """Delete what a failed save has written, as far as that is possible. Rank 0 calls it, when no rank writes any more."""
    draft.release()
    if os.path.lexists(draft.folder):
        with warned():
            remove(draft.folder, draft.target.name)


def newest_first(parent: Path, prefix: str | None) -> list[Path]:
    """The committed checkpoints of which `latest` returns the first, by descending number.   prefix: as `latest` has it."""
    try:
        found = _committed(parent)
    except FileNotFoundError:
        return []
    return [found[name] for name in descending(found, prefix)]


def descending(names: Iterable[str], prefix: str | None) -> list[str]:
    """The names that end in a number, with this prefix before it if one is given, by descending number."""
    numbered = [name for name in names if _prefix(name) is not None and prefix in (None, _prefix(name))]
    return sorted(numbered, key=lambda name: (_number(name), name), reverse=True)


def set_aside_damaged(folder: Path) -> Path:
    """Give a damaged checkpoint a name that `latest` does not find, and that nothing deletes; returns its new path."""
    left = _LEFT.fullmatch(folder.name)
    base = folder.name if left is None else left["base"]
    names = (f"{base}.{number}.damaged" if number else f"{base}.damaged" for number in count())
    damaged = next(path for name in names if not os.path.lexists(path := folder.with_name(name)))
    with explained("rename", folder):
        os.rename(folder, damaged)
    sync_folder(folder.parent)
    return damaged


def prune(target: Path, keep: Keep) -> None:
    """Delete the committed checkpoints whose names differ from `target`'s in the number only, unless `keep` retains them.

    `target` and those with higher numbers stay; so do links and, with a warning, folders with files that no checkpoint has.
    """
    with explained("list", target.parent):
        found = _committed(target.parent)
    for name in outdated(found, target, keep):
        if not found[name].is_symlink():
            with warned():
                remove(found[name], name)


def outdated(committed: Iterable[str], target: Location, keep: Keep) -> list[str]:
    """The names of the checkpoints that `prune` deletes, links included. Warns if one has a higher number than `target`."""
    alike = descending(committed, _prefix(target.name))
    if alike and _number(alike[0]) > _number(target.name):
        newest = target.with_name(alike[0])
        _log.warning("%s stays the latest checkpoint, not %s: save each training in a folder of its own", newest, target.name)
    older = [name for name in alike if _number(name) < _number(target.name)]
    return [name for name in older[(keep.newest or 1) - 1 :] if keep.every is None or _number(name) % keep.every]


def sync_folder(folder: Path) -> None:
    """Wait until the names of what was created or renamed in a folder have reached the disk."""
    with explained("sync", folder):
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a file system that cannot sync folders
                raise
        finally:
            os.close(fd)


def _prefix(name: str) -> str | None:
    match = _NUMBERED.fullmatch(name)
    return None if match is None else match["prefix"]


def _number(name: str) -> int:
    match = _NUMBERED.fullmatch(name)
    return -1 if match is None else int(match["number"])


def _is_alike(name: str, target: Path) -> bool:
    return _prefix(name) == _prefix(target.name) is not None


def _committed(parent: Path) -> dict[str, Path]:
    """The folders in `parent` with .metadata and a number at the end of the name; one set aside, if no other has its name."""
    found = dict[str, list[tuple[bool, float, Path]]]()
    for path in parent.iterdir():
        left = _LEFT.fullmatch(path.name)
        name = path.name if left is None else left["base"]
        if (left is None or left["kind"] == ".aside") and _NUMBERED.fullmatch(name):
            with suppress(FileNotFoundError, NotADirectoryError):
                found.setdefault(name, []).append((left is None, (path / METADATA).stat().st_mtime, path))
    return {name: max(each)[2] for name, each in found.items() if each}


def _clean(target: Path, *, with_alike: bool) -> None:
    """Delete what killed saves of `target` have left.   with_alike: also those of checkpoints that differ in the number only.

    What cannot be deleted stays, with a warning, and so does what another job writes.
    """
    with explained("list", target.parent):
        names = os.listdir(target.parent)
    for name in names:
        left = _LEFT.fullmatch(name)
        if left is not None and (left["base"] == target.name or (with_alike and _is_alike(left["base"], target))):
            with warned():
                _remove_left(target.with_name(name), left)


def _remove_left(folder: Path, left: re.Match[str]) -> None:
    base, kind = left["base"], left["kind"]
    if kind == ".aside":
        # Hazard: this check follows the listing of the folder: before it, another job might set aside what has the name.
        if (folder.with_name(base) / METADATA).is_file():
            remove(folder, base)
    elif kind == ".old.tmp":
        remove_files(folder)
    elif not remove_abandoned(folder, base, left["machine"]):
        _log.warning("%s stays: another job writes there, or did in the last hour; save each training elsewhere", folder)


def _take_place(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; if there is a `target`, it gets the name of `folder`. Raises OSError."""
    while True:  # repeats while other jobs delete and make the target
        try:
            os.rename(folder, target)  # an empty folder is replaced
            return
        except OSError as error:
            if error.errno not in OCCUPIED:
                raise
        try:
            exchange(folder, target)
            return
        except OSError as error:
            if error.errno not in (*OCCUPIED, errno.ENOENT):
                raise


def exchange(folder: Path, target: Path) -> None:
    """Exchange two folders of one parent in one step. Raises OSError.

    Hazard: without this operation (NFS), it takes three renames; a job killed between them leaves the old folder as `.aside`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.renameat2(_AT_FDCWD, os.fsencode(folder), _AT_FDCWD, os.fsencode(target), _RENAME_EXCHANGE):
        return
    if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        raise OSError(code, os.strerror(code), os.fspath(folder))
    aside = target.with_name(f"{target.name}.{secrets.token_hex(16)}.aside")
    os.rename(target, aside)
    try:
        os.rename(folder, target)
    except OSError:
        with suppress(OSError):  # another job has made a new one
            os.rename(aside, target)
        raise
    with suppress(FileNotFoundError):  # another job has deleted it
        os.rename(aside, folder)
