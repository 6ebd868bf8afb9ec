"""The error of checkpoints, and how all ranks raise it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..comm.calls import RemoteError
from ..comm.control import ControlPlane


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file, the tensor, and what to do.

    On every rank alike: where one rank has failed, the message has that rank's number and reason, and the cause is the
    `shardrt.comm.RemoteError` with its traceback.
    """


@contextmanager
def agreed(comm: ControlPlane) -> Iterator[None]:
    """Whatever a rank raises in the `with` block becomes a CheckpointError on every rank; else as `comm.agree()`."""
    try:
        with comm.agree():
            yield
    except RemoteError as error:
        raise CheckpointError(f"rank {error.failure.rank} raised {error.failure.error}") from error
