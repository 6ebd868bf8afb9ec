"""A named axis of ranks, and the communicators along it.

Gather, reduce and all-reduce get a communicator each, so that they can progress at once and can never cross-match.
"""

from __future__ import annotations

from typing import TypeVar

from .communicator import Communicator

T = TypeVar("T")


class DeviceMesh:
    """A 1-D mesh over every rank of `comm` (usually `world.comm`), its axis named "dp" unless told otherwise.

    Creating a mesh is not collective; its first `communicator(role)` for each role is.
    Raises ValueError if the mesh does not match the ranks.
    """

    def __init__(self, comm: Communicator, shape: tuple[int, ...] | None = None, axis_names: tuple[str, ...] = ("dp",)) -> None:
        shape = (comm.size,) if shape is None else shape
        if len(shape) != 1 or len(axis_names) != 1:
            raise ValueError(f"mesh of shape {shape} with axes {axis_names}: expected one axis and one name for it")
        if shape[0] != comm.size:
            raise ValueError(
                f"mesh of {shape[0]} ranks does not match the {comm.size} ranks of {comm}; "
                f"give shape=({comm.size},) or start {shape[0]} ranks"
            )
        self.axis_names = axis_names
        self.size = comm.size
        self.rank = comm.rank
        self.device = comm.device
        self._base = comm
        self._communicators: dict[str, Communicator] = {}

    def communicator(self, role: str) -> Communicator:
        """This mesh's own communicator for `role` ("gather", "reduce", ...). Its first call is collective."""
        if role not in self._communicators:
            made = self._base.split(0, self.rank, f"{self.axis_names[0]}.{role}")
            assert made is not None, "every rank gave the same colour"
            self._communicators[role] = made
        return self._communicators[role]

    def exchange(self, value: T) -> list[T]:
        """Every rank's picklable `value`, in rank order, on every rank. Blocks; for set-up, not for steps."""
        return self._base.exchange(value)

    def close(self) -> None:
        """Close the mesh's communicators, newest first. Collective."""
        while self._communicators:
            self._communicators.popitem()[1].close()

    def __repr__(self) -> str:
        return f"DeviceMesh({self.axis_names[0]}={self.size}, rank {self.rank}, {self.device})"
