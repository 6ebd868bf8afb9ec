"""What the ranks of a ring must have alike: found out before anything else is sent, and refused on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...comm import DeviceMesh
from ...comm.core.fingerprint import fingerprint_of
from .transport import Ring, ring_of

T = TypeVar("T")
_REFUSALS: dict[str, type[Exception]] = {"ValueError": ValueError, "NotImplementedError": NotImplementedError}


def ring_for(mesh: DeviceMesh, what: str) -> Ring:
    """The ring of a mesh of one axis. Raises ValueError for another, TypeError for what is no mesh."""
    check_mesh(mesh, what)
    if mesh.ndim != 1:
        raise ValueError(f"{what} on {mesh}: expected a mesh of one axis, such as mesh['cp']")
    return ring_of(mesh)


def check_mesh(mesh: object, what: str) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{what}(mesh={mesh!r}): expected a shardrt.DeviceMesh, such as mesh['cp']; found a {type(mesh).__name__}"
        )


def agreed(ring: Ring, what: str, find: Callable[[], T]) -> T:
    """What `find` returns, the same on every rank. Raises on every rank if it raises on one, or if they differ. Collective.

    find: what it returns tells by its `repr` what is equal. What it raises, the other ranks raise as well: ValueError and
    NotImplementedError as they are, anything else, which is no refusal of this project, as RuntimeError.
    Cost: a comparison on the host, 5 us within a node. It waits for the other ranks' hosts, never for a GPU.
    """
    problem: Exception | None = None
    result: T | None = None
    try:
        result = find()
    except Exception as error:
        problem = error
    mine = None if problem is None else (type(problem).__name__, str(problem)), repr(result)
    found = ring.comm.compare(fingerprint_of(repr(mine)), lambda: mine)
    if problem is not None:
        if (kind := _REFUSALS.get(type(problem).__name__)) is None:
            raise problem
        raise kind(f"{what} on {ring.mesh}: {problem}")
    if found is None:
        return result  # type: ignore[return-value]
    for rank, (failed, _) in enumerate(found):
        if failed is not None:
            kind = _REFUSALS.get(failed[0], RuntimeError)
            raise kind(f"{what} on {ring.mesh}: rank {rank} of it raised {failed[0]}: {failed[1]}")
    rank = next(rank for rank, (_, described) in enumerate(found) if described != found[0][1])
    differing = f"rank 0 of it has {found[0][1]}, rank {rank} has {found[rank][1]}"
    raise ValueError(f"{what} on {ring.mesh}: {differing}; expected the same on every rank")
