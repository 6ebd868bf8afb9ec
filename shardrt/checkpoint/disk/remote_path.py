"""Files and folders by their URLs, in any store or remote file system that fsspec knows: s3://, gs://, file://, memory://..."""

from __future__ import annotations

import errno
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from ...comm.monitor.requests import requests
from .errors import CheckpointError

_AT_ONCE = 32  # files of a request
_ERRNOS = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES, NotADirectoryError: errno.ENOTDIR}
_UNUSABLE = ("*", "?", "[", "::")  # they mean patterns, and several file systems in one URL


@contextmanager
def request(action: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """The `with` block is a request to a store, whose time the watchdog limits: it moves few bytes, or asks for few files.

    Any error becomes an OSError with a number and a reason: each store has classes of its own.
    """
    try:
        with requests.under_way(f"{action} {os.fspath(path)!r}"):
            yield
    except OSError as error:
        if error.errno is not None:
            raise
        number = _ERRNOS.get(type(error), errno.EIO)
        raise OSError(number, f"{os.strerror(number)} ({type(error).__name__}: {error})") from error
    except Exception as error:
        raise OSError(errno.EIO, f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class RemotePath:
    """The path of a file or folder in a store, with those methods of `pathlib.Path` that checkpoints need.

    fs: the file system of fsspec.   path: the path in it.   url: the URL that users see and `os.fspath` gives; fsspec takes it.
    Raises: OSError, from every method that asks the store.
    """

    fs: Any
    path: str
    url: str

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(self.fs, f"{self.path}/{name}", f"{self.url.removesuffix('/')}/{name}")

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the path; empty for the root."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.fs, self.path.rpartition("/")[0], _trimmed(self.url.removesuffix(self.name)))

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def absolute(self) -> RemotePath:
        """Itself: a URL does not depend on the working directory."""
        return self

    def resolve(self) -> RemotePath:
        """Itself: nothing is known of links."""
        return self

    # ------------------------------------------------------------------ what is there

    def exists(self) -> bool:
        return self._kind() is not None

    def is_file(self) -> bool:
        return self._kind() == "file"

    def _kind(self) -> str | None:
        # Hazard: fsspec's own `exists` returns False for any error, even if the store does not answer.
        try:
            return str(self._info()["type"])
        except (FileNotFoundError, NotADirectoryError):
            return None

    def size(self) -> int:
        """Bytes of a file."""
        return int(self._info()["size"])

    def sizes(self) -> dict[str, int]:
        """The names in a folder, each with its bytes if it is a file; empty if there is no such folder."""
        with request("list", self):
            self.fs.invalidate_cache()
            try:
                found = self.fs.ls(self.path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        paths = {each["name"].rstrip("/"): each["size"] or 0 for each in found}
        # Some stores list an empty object that stands for the folder.
        return {path.rpartition("/")[2]: size for path, size in paths.items() if path != self.path.rstrip("/")}

    def _info(self) -> dict[str, Any]:
        with request("look for", self):
            self.fs.invalidate_cache()
            return dict(self.fs.info(self.path))

    # ------------------------------------------------------------------ what changes it

    def mkdir(self) -> None:
        """Make a folder and its parents, in a store that has folders; no error if it is there."""
        with request("create", self):
            self.fs.makedirs(self.path, exist_ok=True)

    def rename(self, new: RemotePath) -> None:
        """Move a file. Object stores copy it and then delete it; there, too, the new file appears whole."""
        with request("rename", self):
            self.fs.mv(self.path, new.path)

    def copy(self, names: Collection[str], folder: RemotePath) -> None:
        """Copy files of a folder into another one, within the store."""
        for some in _batches(names):
            with request("copy files of", self):
                self.fs.copy([f"{self.path}/{name}" for name in some], [f"{folder.path}/{name}" for name in some])

    def unlink(self, names: Iterable[str]) -> None:
        """Delete files of a folder."""
        for some in _batches(names):
            with request("delete files of", self):
                self.fs.rm([f"{self.path}/{name}" for name in some])

    def rmdir(self) -> None:
        """Delete an empty folder, in a store that has folders: in others it is gone already."""
        with suppress(Exception), request("delete", self):
            self.fs.rmdir(self.path)


Location = Path | RemotePath


def is_url(folder: str | os.PathLike[str]) -> bool:
    """Whether `folder` is a URL, which names a place in a store, and not a path on a disk."""
    return "://" in os.fspath(folder)


def remote_path(url: str) -> RemotePath:
    """The path that a URL names.

    Raises: CheckpointError if fsspec, or its package for this store, is not installed, or does not know the URL.
    """
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise CheckpointError(f"{url!r} is a URL, which needs fsspec ({error}): pip install fsspec") from error
    if any(part in url for part in _UNUSABLE):
        raise CheckpointError(f"{url!r} has one of {' '.join(_UNUSABLE)} in it, which fsspec would not take for a name")
    try:
        fs, path = url_to_fs(url)
    except Exception as error:
        raise CheckpointError(
            f"fsspec has nothing for {url!r} ({type(error).__name__}: {error}); expected a path, or a URL such as "
            "'s3://bucket/run'"
        ) from error
    return RemotePath(fs, path.rstrip("/"), _trimmed(url))


def _batches(names: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(names)
    while some := list(islice(rest, _AT_ONCE)):
        yield some


def _trimmed(url: str) -> str:
    return url if url.endswith("://") else url.rstrip("/")
