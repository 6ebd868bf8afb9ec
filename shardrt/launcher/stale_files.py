"""Remove what this user's killed jobs left on this machine: python -I -S stale_files.py

That is shared memory, copies of runs in it, and folders of launchers and of Open MPI's mpirun. Nothing else frees that memory,
and it can keep a job from starting: MPI_Init fails on segments of the killed run's names, which a Slurm job that starts again
gives its own, and an mpirun that gets the process number of a killed one refuses the folder it finds. `shardrt.launch` runs
this before each job, and after one that failed. It imports nothing but the standard library.

A segment is stale if nobody has it open or mapped to write, which the kernel says exactly when it is asked for a read lease:
it grants none on a file that is open to write, and a mapping keeps its file open. Unlike /proc, the answer covers processes in
other PID namespaces, and segments that a rank has just created and not mapped yet. A folder is stale if one file in it is,
which mpirun, or each rank, keeps open to write; that of a launcher, if nobody holds the lock (flock) that its launcher has on
it. It is on a file system of this machine alone: of others the kernel does not know who writes, nor always who has a lock.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SEGMENTS = ("mpich_shm_*", "sm_segment.*")  # their names in MPICH, and in Open MPI
_TOPOLOGY = "ompi.*/hwloc.sm"  # a file of Open MPI's mpirun
_COPIES = "shardrt-copies-*/held"  # a file of the folder with the copies of a run (checkpoint/run/survival/copies.py)
_LAUNCHERS = "shardrt-launcher-*"  # folders of supervisor.py; version 0.2.0 locked none of its "shardrt-launch-*"
_LOCAL = {"btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"}  # file systems


def main() -> None:
    """Remove what killed jobs left."""
    signal.signal(signal.SIGIO, signal.SIG_IGN)  # the holder of a lease gets it when somebody else opens the file
    names = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))  # as mpirun looks for it
    remove_stale(Path("/dev/shm"), Path(next(filter(None, names), "/tmp")))
    with suppress(FileNotFoundError):  # no folder for temporary files can be written to
        remove_folders_of_launchers(Path(tempfile.gettempdir()))


def remove_stale(memory: Path, temporary: Path) -> None:
    """Remove the segments in `memory` that no process has open, and the folders in `temporary` whose mpirun has ended."""
    for pattern in _SEGMENTS:
        for path in memory.glob(pattern):
            with suppress(OSError), _lease(path):
                path.unlink()
    for path in [*temporary.glob(_TOPOLOGY), *memory.glob(_COPIES)]:
        folder = path.parent
        with suppress(OSError), _lease(path):
            if not folder.is_symlink() and _is_local(folder):
                # Hazard: under its own name, half a folder would keep an mpirun from starting.
                shutil.rmtree(folder.rename(folder.with_name(f"{folder.name}.{os.getpid()}.stale")))


def remove_folders_of_launchers(temporary: Path) -> None:
    """Remove the folders in `temporary` whose launcher has ended."""
    for folder in temporary.glob(_LAUNCHERS):
        with suppress(OSError), _own(folder, os.O_DIRECTORY) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError if the launcher has it
            if _is_local(folder):
                shutil.rmtree(folder)


def _is_local(folder: Path) -> bool:
    """Whether a file is on a file system of this machine alone."""
    device = folder.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = (line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return any(fields[2] == number and fields[fields.index("-") + 1] in _LOCAL for fields in mounts)


@contextmanager
def _lease(path: Path) -> Iterator[None]:
    """Hold a read lease on a file of this user; OSError if it is none, or is there no more, or the kernel grants no lease."""
    with _own(path, os.O_NONBLOCK) as file:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise PermissionError(f"{path} is no file")
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_RDLCK)  # raises BlockingIOError if it is open to write
        yield


@contextmanager
def _own(path: Path, flags: int) -> Iterator[int]:
    """Open a file or folder of this user to read; OSError if it is another user's, a link, or there no more."""
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | flags)
    try:
        if os.fstat(file).st_uid != os.geteuid():
            raise PermissionError(f"{path} is another user's")
        yield file
    finally:
        os.close(file)


if __name__ == "__main__":
    main()
