"""The temporary folders that saves write in: each save has its own, and no job deletes one whose save may still run.

    step-200.<machine>-<id>.tmp/           the folder of the save with this id, whose rank 0 runs on this machine
    out.<machine>-<id>.safetensors.tmp/    the folder of a safetensors export; the new folder `out` is in it

Rank 0 holds a lock (flock) on the folder's `.metadata` from when it has made the folder until the folder has another name. On
the same machine, a folder without this lock belongs to a save that was killed. Not every file system passes locks on to other
machines: there, a save counts as killed if nothing in its folder was changed for an hour.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile

from .files import METADATA, explained
from .removal import remove_files, take_away

_QUIET_S = 3600.0
_TRIES, _RETRY_S = 1000, 0.01


def folder_of(target: Path, machine: str, save_id: str, kind: str = "") -> Path:
    """The temporary folder that a save of `target` writes in.   kind: the end of its name before ".tmp"."""
    return target.with_name(f"{target.name}.{machine}-{save_id}{kind}.tmp")


@cache
def this_machine() -> str:
    """Eight hexadecimal digits that name this machine until its next boot; random ones if the kernel has no boot id."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    return secrets.token_hex(4)


class Draft:
    """The temporary folder of a save, which the constructor makes and locks. Only rank 0 has one.   target: the result's path.

    Raises: CheckpointError with the system's reason if it cannot be made.
    """

    def __init__(self, target: Path, folder: Path) -> None:
        self.target, self.folder = target, folder
        self._lock: int | None = None
        with explained("create", folder):
            for _ in range(_TRIES):
                if self._make():
                    return
                time.sleep(_RETRY_S)
            raise OSError(errno.EAGAIN, "another job takes it for that of a killed save")

    def release(self) -> None:
        """Give up the lock. The folder has another name by now, or is about to be deleted."""
        lock, self._lock = self._lock, None
        if lock is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_UN)  # closing does not unlock while a forked child has the descriptor
            os.close(lock)

    def __del__(self) -> None:
        """Nobody goes on with the save, since ranks are lost: the next one in this place may delete the folder.

        Hazard: in a forked child, `release` would unlock it for the rank as well.
        """
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _make(self) -> bool:
        """Make and lock the folder; False if another job deletes it, as that of a killed save, before it is locked."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.target.exists():
            _copy_access(self.target, self.folder)
        file = self.folder / METADATA
        with suppress(FileNotFoundError):
            self._lock = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if _locked(self._lock) is not False and os.path.samestat(os.fstat(self._lock), file.stat()):
                return True
        self.release()
        return False


def remove_abandoned(folder: Path, base: str, machine: str | None) -> bool:
    """Delete the folder of a save if the save has certainly ended; returns False if that is not certain.

    base: what the folder's name begins with while it is deleted.   machine: the one in its name; None if there is none.
    Raises: CheckpointError as `remove` does.
    """
    with locked_if_ended(folder, machine) as has_ended:
        if not has_ended:
            return False
        # Hazard: the lock is held until the folder is renamed; without it, a save might begin there.
        gone = take_away(folder, base)
    remove_files(gone)
    return True


@contextmanager
def locked_if_ended(folder: Path, machine: str | None) -> Iterator[bool]:
    """Whether a folder's save has certainly ended; if so, the `with` block holds its lock.   machine: the one in its name."""
    fd = None
    try:
        with explained("open", folder), suppress(FileNotFoundError):
            fd = os.open(folder / METADATA, os.O_RDWR | os.O_CLOEXEC)
        yield _has_ended(folder, fd, machine)
    finally:
        if fd is not None:
            os.close(fd)


def _has_ended(folder: Path, fd: int | None, machine: str | None) -> bool:
    """Whether a folder's save has certainly ended.   fd: the open `.metadata`, which gets locked; None if it is not there."""
    locked = fd is None or _locked(fd)
    return locked is not False and ((bool(locked) and machine == this_machine()) or _is_quiet(folder))


def _locked(fd: int) -> bool | None:
    """Lock a file: True if that is done, False if another job has the lock, None if the file system has no locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_quiet(folder: Path) -> bool:
    """Whether nothing in the folder was changed for an hour, by the clock that has dated its files: that of the server."""
    with explained("list", folder), TemporaryFile(dir=folder.parent) as new:
        changed = max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
        return changed < os.fstat(new.fileno()).st_mtime - _QUIET_S


def _copy_access(target: Path, folder: Path) -> None:
    """Give the folder the group of the target, if this user may, and its permissions; its owner gets all permissions."""
    with suppress(PermissionError):
        shutil.chown(folder, group=target.stat().st_gid)
    folder.chmod(stat.S_IMODE(target.stat().st_mode) | stat.S_IRWXU)
