"""Python objects between the ranks of an MPI communicator."""

from __future__ import annotations

import pickle
from array import array
from itertools import accumulate
from typing import TypeVar
from zlib import crc32

from mpi4py import MPI

from ..core import members

T = TypeVar("T")
_SUM_NBYTES = 4


def gather_objects(comm: MPI.Comm, value: T) -> list[T]:
    """`comm.allgather`. Raises: RankLost, in a job that survives it, unless the values of all ranks have come.

    Hazard: where a rank is killed within MPI_Allgatherv, Open MPI 5.0.11 tells some of the others of success, with memory as it
    was in the place of what has not come: that unpickles as what it was, or not at all. So the sizes and the bytes are received
    in zeros, and the bytes have a checksum. Nobody checks what else is received of a lost rank: nothing that lasts uses it
    before the ranks exchange values once more, as they do before a checkpoint is committed.
    """
    if members.current is None:
        return comm.allgather(value)
    own = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    own += crc32(own).to_bytes(_SUM_NBYTES)
    nbytes = array("q", bytes(8 * comm.Get_size()))
    comm.Allgather((array("q", [len(own)]), MPI.INT64_T), (nbytes, MPI.INT64_T))
    if all(nbytes):
        found = bytearray(sum(nbytes))
        ends = list(accumulate(nbytes))
        starts = [0, *ends[:-1]]
        comm.Allgatherv(own, (found, (nbytes.tolist(), starts), MPI.BYTE))
        parts = [memoryview(found)[start:end] for start, end in zip(starts, ends, strict=True)]
        if all(crc32(part[:-_SUM_NBYTES]) == int.from_bytes(part[-_SUM_NBYTES:]) for part in parts):
            return [pickle.loads(part) for part in parts]
    members.current.notice()
    members.current.check()
    raise AssertionError("a rank is lost")
