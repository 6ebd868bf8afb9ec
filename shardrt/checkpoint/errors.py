"""The error of checkpoints, and how all ranks raise it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..comm.calls import RemoteError
from ..comm.control import ControlPlane


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file, the tensor, and what to do.

    On every rank alike: where one rank has failed, the message has that rank's number and reason, and the cause is the
    `shardrt.comm.RemoteError` with its traceback. Names that come from a file are printable in it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """The text with escapes in the place of what a terminal would act on: control characters, line ends, other directions."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


@contextmanager
def agreed(comm: ControlPlane) -> Iterator[None]:
    """Whatever a rank raises in the `with` block becomes a CheckpointError on every rank; else as `comm.agree()`."""
    try:
        with comm.agree():
            yield
    except RemoteError as error:
        raise CheckpointError(f"rank {error.failure.rank} raised {error.failure.error}") from error
