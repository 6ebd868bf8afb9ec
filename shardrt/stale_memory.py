"""Remove the shared memory segments of this user's killed jobs on this machine: python -I -S stale_memory.py

Nothing else frees that memory. A Slurm job that starts again gives its segments the names of the killed run's, and MPI_Init
fails on those. `shardrt.launch` runs this before each job, and after one that failed. It imports nothing but the standard
library.

A segment is stale if nobody has it open or mapped to write, which the kernel says exactly when it is asked for a read lease:
it grants none on a file that is open to write, and a mapping keeps its file open. Unlike /proc, the answer covers processes in
other PID namespaces, and segments that a rank has just created and not mapped yet.
"""

from __future__ import annotations

import fcntl
import os
import signal
import stat
from pathlib import Path

_SEGMENTS = ("mpich_shm_*", "sm_segment.*")  # of MPICH, of Open MPI


def main() -> None:
    """Remove them."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # to the holder of a lease, as somebody else opens the file
    remove_stale()


def remove_stale(folder: Path = Path("/dev/shm")) -> None:
    """Remove the segments that no process has open."""
    for pattern in _SEGMENTS:
        for path in folder.glob(pattern):
            try:
                _remove_if_stale(path)
            except OSError:  # it is gone, or the kernel grants no lease
                continue


def _remove_if_stale(path: Path) -> None:
    segment = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(segment)
        if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
            fcntl.fcntl(segment, fcntl.F_SETLEASE, fcntl.F_RDLCK)  # raises BlockingIOError if it is open to write
            path.unlink()
    finally:
        os.close(segment)


if __name__ == "__main__":
    main()
