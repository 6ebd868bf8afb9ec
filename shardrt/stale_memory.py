"""Remove the shared memory segments of this user's killed jobs on this machine: python -P stale_memory.py [--wait]

Nothing else frees that memory. A Slurm job that starts again gives its segments the names of the killed run's, and MPI_Init
fails on those. `shardrt.launch` runs this before each job; --wait takes the time to tell new segments from stale ones. It
imports nothing but the standard library.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

_SEGMENTS = ("mpich_shm_*", "sm_segment.*")  # of MPICH, of Open MPI
_MIN_AGE_S = 10.0


def main(arguments: list[str]) -> None:
    """Remove them; with --wait, look again until none is too new to tell."""
    until = time.monotonic() + (_MIN_AGE_S if "--wait" in arguments else 0.0)
    while remove_stale() and time.monotonic() < until:
        time.sleep(0.5)


def remove_stale(folder: Path = Path("/dev/shm")) -> bool:
    """Remove segments that are old and that no process maps; returns whether there are some that are too new to tell.

    Hazard: a rank creates a segment before it maps it.
    """
    max_mtime = time.time() - _MIN_AGE_S
    found = [(path, path.lstat()) for pattern in _SEGMENTS for path in folder.glob(pattern)]
    own = {path: status for path, status in found if status.st_uid == os.geteuid()}
    mapped = _mapped_inodes() if own else set()
    unmapped = {path: status for path, status in own.items() if status.st_ino not in mapped}
    for path, status in unmapped.items():
        if status.st_mtime < max_mtime:
            path.unlink(missing_ok=True)
    return any(status.st_mtime >= max_mtime for status in unmapped.values())


def _mapped_inodes() -> set[int]:
    """The inodes of all files that the processes of this user map; for root, those of all processes."""
    inodes: set[int] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            inodes.update(int(line.split(maxsplit=5)[4]) for line in maps.read_text(errors="replace").splitlines())
        except OSError:  # the process has ended, or belongs to another user
            continue
    return inodes


if __name__ == "__main__":
    main(sys.argv[1:])
