"""Deletes folders of checkpoints: only if all files are a checkpoint's, and never one that another job renames then.

A folder is first renamed, to `step-100.<random>.old.tmp`: the job that renames it first has it. So a half-deleted folder is
never taken for a whole one, and a save whose folder was taken away fails when it commits.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .errors import CheckpointError, shown
from .files import explained
from .remote_path import Location

_OWN_FILES = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp")
_SHOWN = 3

_log = logging.getLogger("shardrt")


def refuse_foreign(folder: Path) -> None:
    """Raise CheckpointError if the folder has files that no checkpoint has, or is a link."""
    if folder.is_symlink():
        raise CheckpointError(f"{str(folder)!r} is a link, and is not deleted: move it elsewhere")
    with explained("list", folder):
        names = os.listdir(folder)
    refuse_foreign_names(folder, names)


def refuse_foreign_names(folder: Location, found: Iterable[str]) -> None:
    """Raise CheckpointError if any of the names in the folder is one that no checkpoint has."""
    foreign = sorted(name for name in found if not _OWN_FILES.fullmatch(name))
    if foreign:
        names = ", ".join(shown(name)[1:-1] for name in foreign[:_SHOWN]) + (", ..." if len(foreign) > _SHOWN else "")
        raise CheckpointError(
            f"{str(folder)!r} is neither replaced nor deleted: it has {names}, which no checkpoint has. "
            "Move that elsewhere, or save in another folder"
        )


def remove(folder: Path, base: str) -> None:
    """Delete a folder and the files of a checkpoint in it. base: as `take_away` has it.

    Raises: CheckpointError if it is a link, has other files, or cannot be deleted: then it stays, or what is left of it does.
    """
    remove_files(take_away(folder, base))


def take_away(folder: Path, base: str) -> Path:
    """Rename a folder as one that is being deleted; returns its new path.   base: what the new name begins with."""
    refuse_foreign(folder)
    gone = folder.with_name(f"{base}.{secrets.token_hex(16)}.old.tmp")
    with explained("delete", folder):
        os.rename(folder, gone)
    return gone


def remove_files(gone: Path) -> None:
    """Delete a folder that `take_away` has renamed, in this job or in another one, which may delete it at the same time."""
    with explained("delete", gone), suppress(FileNotFoundError):
        refuse_foreign(gone)
        for name in os.listdir(gone):
            with suppress(FileNotFoundError):
                os.unlink(gone / name)
        os.rmdir(gone)


@contextmanager
def warned() -> Iterator[None]:
    """Turn a CheckpointError of the `with` block into a warning: what cannot be deleted stays."""
    try:
        yield
    except CheckpointError as error:
        _log.warning("%s", error)
