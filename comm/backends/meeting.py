"""Where the ranks of several nodes compare their next calls. Ranks of one node do so in shared memory (`shared_memory.py`)."""

from __future__ import annotations

from array import array

from mpi4py import MPI

from ..calls import Interrupted

# Instead of a fingerprint: of a rank that has left; of one that has raised in the middle of a call, and left with that.
LEFT, QUIT = -1, -2


class MessageMeeting:
    """A barrier with fingerprints, of messages; as that of `SharedMemoryExchange`. label: of the communicator, for messages.

    A rank that leaves reaches the next barrier without waiting in it: hence a non-blocking call. So the ranks of a communicator
    have reached the same barriers, whether they have waited in the last one or left. reached: their number.

    Cost: on 2 ranks of one node 12 us; a blocking all-gather takes 7.
    """

    def __init__(self, comm: MPI.Comm, label: str) -> None:
        self._comm, self._label = comm, label
        self.reached = 0
        self._has_left = False
        self._leaving = MPI.REQUEST_NULL
        self._fingerprints = array("q", bytes(8 * comm.Get_size()))

    def barrier(self, fingerprint: int) -> bool:
        """See `SharedMemoryExchange.barrier`."""
        if self._has_left:
            raise Interrupted(self._label, [self._comm.Get_rank()])
        self._arrive(fingerprint).Wait()
        found = self._fingerprints
        if found.count(fingerprint) == len(found):
            return True
        if LEFT in found:
            self._has_left = True
            raise Interrupted(self._label, [rank for rank, each in enumerate(found) if each == LEFT])
        return False

    def leave(self) -> None:
        """See `SharedMemoryExchange.leave`."""
        if not self._has_left:
            self._has_left = True
            self._leaving = self._arrive(LEFT)

    def rejoin(self, reached: int) -> None:
        """See `SharedMemoryExchange.rejoin`."""
        while self.reached < reached:
            self._leaving = self._arrive(LEFT)
        self._leaving.Wait()
        self._has_left = False

    def _arrive(self, fingerprint: int) -> MPI.Request:
        self.reached += 1
        own = array("q", [fingerprint])
        return self._comm.Iallgather((own, MPI.INT64_T), (self._fingerprints, MPI.INT64_T))
