"""Which processes may read the memory of a rank: the others of its job on this node, where the kernel lets a process choose."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from ..ending.processes import launcher_of


def may_read_other_processes() -> bool:
    """True if the kernel lets processes of one user read each other's memory (`process_vm_readv`).

    Hazard: MPICH does not check, and fails in the middle of a message if it does not. It is forbidden by Yama (a security
    module: 0 permits, 1 permits what a process itself allows, more forbids), for a process that may not be dumped, and by a
    container's filter of system calls, which a read of this process's own memory detects.
    Under 1, this process allows what its launcher's process on this node has started, the other ranks above all; that is
    forbidden if the launcher cannot be told, as in a container of its own for each rank.
    """
    if sys.platform != "linux":
        return False
    yama = Path("/proc/sys/kernel/yama/ptrace_scope")
    scope = int(yama.read_text()) if yama.exists() else 0
    libc = ctypes.CDLL(None)
    get_dumpable, set_ptracer = 3, 0x59616D61
    if scope > 1 or libc.prctl(get_dumpable, 0, 0, 0, 0) != 1 or not hasattr(libc, "process_vm_readv"):
        return False
    if scope == 1:
        rank = next((variable for variable in ("PMI_RANK", "PMIX_RANK") if variable in os.environ), "PMI_RANK")
        launcher = launcher_of(os.getpid(), rank, os.environ.get(rank, ""))
        if launcher == 0 or libc.prctl(set_ptracer, ctypes.c_ulong(launcher), 0, 0, 0) != 0:
            return False
    source, target = ctypes.create_string_buffer(b"readable"), ctypes.create_string_buffer(9)
    iovecs = [(ctypes.c_size_t * 2)(ctypes.addressof(buffer), 8) for buffer in (target, source)]  # base, length
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    return libc.process_vm_readv(os.getpid(), iovecs[0], one, iovecs[1], one, none) == 8 and target.value == b"readable"
