"""Where checkpoints lie: on a disk, or in a store that fsspec knows. Here, and nowhere else, the two are told apart."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, overload

from . import folders, remote_folders
from .errors import CheckpointError
from .files import Bytes, Reader, Writer
from .folders import Keep
from .remote_path import Location, RemotePath, is_url, remote_path

_CUT_URL = re.compile(r"[a-z][a-z0-9+.-]+:/")  # a URL that became a Path


class Storage(Protocol):
    """What a kind of storage does, as the modules `folders` and `remote_folders` do it. Paths are its kind of `Location`."""

    def reader(self, path: Any) -> Reader:
        """Open a file of a checkpoint for reading."""

    def writer(self, path: Any) -> AbstractContextManager[Writer]:
        """A new file of a save, which is safe in the storage when the `with` block ends."""

    def check_target(self, folder: Any, keep: Keep) -> Any:
        """The real path of a folder to save in. Raises ValueError for a folder, or a `keep`, that a save cannot have."""

    def folder_of(self, target: Any, machine: str, save_id: str) -> Any:
        """The folder that a save of `target` is written in."""

    def begin(self, target: Any, folder: Any) -> Any:
        """Make that folder; returns what `commit` and `abandon` take. Rank 0 calls these three."""

    def commit(self, draft: Any, files: Mapping[str, int], metadata: Sequence[Bytes], keep: Keep) -> None:
        """Make a save visible, and delete old checkpoints."""

    def abandon(self, draft: Any) -> None:
        """Delete what a failed save has written."""

    def newest_first(self, parent: Any, prefix: str | None) -> Iterable[Any]:
        """The committed checkpoints in a folder, by descending number.   prefix: as `latest` has it."""

    def set_aside_damaged(self, folder: Any) -> Any:
        """Give a damaged checkpoint a name that `newest_first` does not find; returns its new path."""


def storage_of(path: Location) -> Storage:
    """The kind of storage that has this file or folder."""
    return remote_folders if isinstance(path, RemotePath) else folders


def located(folder: str | os.PathLike[str]) -> Location:
    """The place that a user names: a URL with "://" is one in a store, anything else one on a disk.

    Raises: CheckpointError as `remote_path` does, and for a `Path` that was made of a URL, which loses a slash.
    """
    if isinstance(folder, RemotePath):
        return folder
    if is_url(folder):
        return remote_path(os.fspath(folder))
    if isinstance(folder, Path) and _CUT_URL.match(str(folder)):
        raise CheckpointError(f"{folder!r} is a URL with a slash too few: give URLs as strings, not as a Path")
    return Path(folder)


def on_disk(folder: str | os.PathLike[str]) -> Path:
    """The path of what has to lie on a disk. Raises: CheckpointError for a URL."""
    if is_url(folder):
        advice = "use a path, and copy the files"
        raise CheckpointError(f"'{os.fspath(folder)}': a store can have checkpoints in DCP's format only; {advice}")
    return Path(folder)


@overload
def latest(parent: Path, prefix: str | None = None) -> Path | None: ...
@overload
def latest(parent: str | os.PathLike[str], prefix: str | None = None) -> Location | None: ...
def latest(parent: str | os.PathLike[str], prefix: str | None = None) -> Location | None:
    """The newest committed checkpoint in `parent`: the folder with the highest number at the end of its name.

    prefix: what the name has before the number, such as "step-"; None: anything.
    Returns a `Path`, or, for a URL, a path-like of which str() gives the URL; None if there is none, or no such parent. Needs
    no ranks: it reads the names in the folder as this process sees it.
    A save that is being written, or was when its job died, is not committed.
    """
    where = located(parent)
    return next(iter(storage_of(where).newest_first(where, prefix)), None)
