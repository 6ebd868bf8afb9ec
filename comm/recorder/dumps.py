"""The folder of the flight recorder's dumps, in which no other user of the machine can have a file overwritten.

By default it lies in the folder for temporary files, where anyone may have made a folder or a link of its name. So a folder is
opened once, without following a link, and its owner is looked up; all that follows goes through that descriptor. A file is new,
and takes its name when it is complete: what had the name before, a link included, is replaced, never written to.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import time

_MAX_AGE_S, _MIN_AGE_S = 7 * 24 * 3600.0, 24 * 3600.0
_MAX_JOBS = 50
_JOB = re.compile(r"\d{8}-\d{6}-\d+(-[0-9a-f]{4})?")  # TIME-PID-RANDOM; earlier versions: TIME-PID
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class DumpFolder:
    """Where this job's dumps go on this node. Nothing is made before the first file is written.

    chosen: the user's folder (SHARDRT_DUMP), or None for shardrt-dumps-UID/JOB among the temporary files, mode 0700; of its
    jobs those of the last day are kept, and of those of the last week the newest, up to 50 in all.   job: a name that no other
    job has, TIME-PID-RANDOM.   say: takes a line for the user.
    """

    def __init__(self, chosen: Path | None, job: str, say: Callable[[str], object]) -> None:
        self._chosen = chosen
        self._say = say
        self.job = job
        self.path = chosen or _temporary() / f"shardrt-dumps-{os.geteuid()}" / job

    def write(self, name: str, text: str) -> Path:
        """Write a file, mode 0600, in the place of an earlier one of this name. Returns its path. Raises: OSError."""
        folder = self._open()
        try:
            _write(folder, name, text)
        finally:
            os.close(folder)
        if self._chosen is None:
            self._remove_old()
        return self.path / name

    def _open(self) -> int:
        """A descriptor of the folder, made if need be; if the default one is not this user's, of a fresh one from now on."""
        if self._chosen is None:
            try:
                base = _open_own(self.path.parent)
                try:
                    return _open_own(self.path.name, base)
                finally:
                    os.close(base)
            except OSError as error:
                self._chosen = Path(tempfile.mkdtemp(prefix="shardrt-dumps-"))
                self._say(f"dumps of this rank go to {self._chosen}, not to {self.path}: {error}")
                self.path = self._chosen
        self.path.mkdir(parents=True, exist_ok=True)
        return os.open(self.path, _DIRECTORY)

    def _remove_old(self) -> None:
        """Remove the folders of jobs that are too old, or too many. What cannot be removed stays."""
        with suppress(OSError):
            base = _open_own(self.path.parent)
            try:
                for job in _old_jobs(base):
                    if job != self.path.name:
                        shutil.rmtree(job, ignore_errors=True, dir_fd=base)  # follows no link
            finally:
                os.close(base)


def _temporary() -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # there is no folder that can be written to, as each dump will say
        return Path("/tmp")


def _open_own(name: str | Path, base: int | None = None) -> int:
    """A descriptor of a folder of this user, mode 0700, made if need be. Raises: OSError for a link, or another's folder."""
    with suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=base)
    folder = os.open(name, _DIRECTORY | os.O_NOFOLLOW, dir_fd=base)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{str(name)!r} belongs to user {status.st_uid}, not to {os.geteuid()}")
        if status.st_mode & 0o777 != 0o700:
            os.fchmod(folder, 0o700)
    except BaseException:
        os.close(folder)
        raise
    return folder


def _write(folder: int, name: str, text: str) -> None:
    unfinished = f".{name}.{secrets.token_hex(8)}"
    file = os.open(unfinished, _NEW, 0o600, dir_fd=folder)
    try:
        with open(file, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
        os.rename(unfinished, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with suppress(OSError):
            os.unlink(unfinished, dir_fd=folder)
        raise


def _old_jobs(base: int) -> list[str]:
    with os.scandir(base) as entries:
        jobs = [
            (entry.stat(follow_symlinks=False).st_mtime, entry.name)
            for entry in entries
            if _JOB.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        ]
    newest_first, now = sorted(jobs, reverse=True), time()
    return [
        name
        for index, (changed, name) in enumerate(newest_first)
        if changed < now - (_MIN_AGE_S if index >= _MAX_JOBS else _MAX_AGE_S)
    ]
