"""Saves as one rank makes them, without ranks, and a system whose calls can be counted down."""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardrt.checkpoint.disk import folders
from shardrt.checkpoint.disk.drafts import Draft, folder_of, this_machine
from shardrt.checkpoint.disk.files import Writer
from shardrt.checkpoint.disk.folders import Keep, check_target, commit

STEPS = ("mkdir", "open", "pwritev", "fsync", "close", "rename", "unlink", "rmdir")


FILE = "__0_0.distcp"


def begin(target: Path, machine: str | None = None) -> Draft:
    return folders.begin(target, folder_of(target, machine or this_machine(), secrets.token_hex(16)))


def save(folder: Path, content: bytes, keep: int | None = None, keep_every: int | None = None) -> None:
    """A save as one rank does it."""
    target = check_target(folder, Keep(keep, keep_every))
    draft = begin(target)
    with Writer(draft.folder / FILE) as writer:
        writer.write(0, [content])
    commit(draft, {FILE: len(content)}, [content[::-1]], Keep(keep, keep_every))


def content_of(folder: Path) -> bytes:
    content = (folder / FILE).read_bytes()
    assert (folder / ".metadata").read_bytes() == content[::-1]
    return content


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def grow_old(*folders: Path) -> None:
    """As if nothing had been changed in them for more than an hour."""
    for path in (inside for folder in folders for inside in (*folder.iterdir(), folder)):
        os.utime(path, (time.time() - 3700,) * 2)


def without_exchange(monkeypatch: Any) -> None:
    """A file system that cannot exchange folders."""
    unable = type("Libc", (), {"renameat2": lambda self, *args: ctypes.set_errno(errno.EINVAL) or -1})
    monkeypatch.setattr(ctypes, "CDLL", lambda *args, **options: unable())


def counted_down(function: Callable[..., Any], left: list[int], number: signal.Signals) -> Callable[..., Any]:
    """The function, which gives its process a signal before the last call that is left."""

    def call(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), number)
        return function(*args, **options)

    return call
