"""The error of checkpoints, and how all ranks raise it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..comm.calls import RemoteError
from ..comm.control import ControlPlane
from ..comm.fingerprint import printable


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file, the tensor, and what to do.

    On every rank alike: where one rank has failed, the message has that rank's number and reason, and the cause is the
    `shardrt.comm.RemoteError` with its traceback. Names that come from a file are printable in it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was written: a checksum differs, a file is cut off, missing, or of another save.

    Another one of the same training may be whole. Errors of the file system, and a state that does not fit, are no damage.
    """


@contextmanager
def agreed(comm: ControlPlane) -> Iterator[None]:
    """Whatever a rank raises in the `with` block becomes a CheckpointError on every rank; else as `comm.agree()`.

    A DamagedCheckpointError remains one.
    """
    try:
        with comm.agree():
            yield
    except RemoteError as error:
        failed = error.failure.error  # begins with the name of the class
        kind = DamagedCheckpointError if failed.startswith(f"{DamagedCheckpointError.__name__}:") else CheckpointError
        raise kind(f"rank {error.failure.rank} raised {failed}") from error
