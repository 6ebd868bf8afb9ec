"""From a world that has lost ranks to the next one, of those that are left, or of these and of others in the place of the lost.

`World.recover`   1. the process abandons the world: what is under way ends without other ranks, and calls are refused
                  2. the ranks that are left shrink its communicator, and settle what they are, as in `init()`
                  3. they agree whether all have made their world; if more ranks are lost meanwhile, they begin again
`World.replace`   processes in the place of lost ranks start, beside the program
`World.grow`      as `recover`, with the communicator that these have joined; if that fails, without them
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from ..core import members
from ..core.members import Limit, current_members, end_this_process, raise_lost
from ..core.settings import EnvironmentSettings
from ..ending.report import log
from ..ending.words import name_ranks
from .own_process import OwnProcess
from .replacement import Replacement

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..recorder.recorder import Recorder


class _AnyWorld(Protocol):
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def recorder(self) -> Recorder: ...
    @property
    def settings(self) -> EnvironmentSettings: ...


W = TypeVar("W", bound=_AnyWorld)


class Recovery(Generic[W]):
    """That of a process. `bootstrap.py` owns it.

    make: lets the ranks of a communicator make a world, by what each was in the world before. Collective over them.
    """

    def __init__(self, process: OwnProcess[W], make: Callable[[MPI.Intracomm, W], W]) -> None:
        self._process, self._make = process, make

    def replace(self, hosts: Sequence[str], limit_s: float) -> Replacement:
        """See `World.replace`."""
        try:
            started = Replacement(current_members().comm, hosts, limit_s)
        except Exception as error:
            raise_lost(error, members.current)
            raise
        self._process.ends.append((started.abandon, started.abandon))
        return started

    def next_world(self, world: W, replacement: Replacement | None = None) -> W:
        """See `World.recover`, and `World.grow` if there is a replacement.

        Whatever goes wrong with it ends this rank, which the others then lose: none waits for it.
        """
        lost, process = members.current, self._process
        if lost is None:
            raise RuntimeError(
                "world.recover() in a job that ends when it loses a rank: start it with shardrt.launch --survive"
            )
        if world is not process.world:
            raise RuntimeError("world.recover() of a world that was recovered before: shardrt.comm.world() is the one to use")
        if not lost.has_lost and replacement is None:
            raise RuntimeError(
                f"world.recover() on rank {world.rank}: no rank is lost; call it when a call has raised RankLost"
            )
        why = f"is of a world that has lost {name_ranks(lost.ranks)}: use that of world.recover()"
        if replacement is not None:
            why = "is of a world that has grown since: use that of world.grow()"
        assert process.monitor is not None, "of the world"
        monitor, made = process.monitor, None
        limit = Limit(world.settings.timeout_s, world.rank, monitor.kill_late)
        try:
            if replacement is not None:
                comm = replacement.taken()
                process.abandon(why)
                lost.stop()
                made = self._world_of(comm, world)
            while made is None:
                process.abandon(why)
                made = self._world_of(lost.shrink(), world)
        except BaseException as error:
            log(world.rank, "world.recover() failed; ending this rank", *traceback.format_exception(error))
            end_this_process()
        process.world = made
        limit.cancel()
        monitor.free()
        changed = f"without {name_ranks(lost.ranks)} of {world.size}" if lost.ranks else f"of {world.size} ranks"
        made.recorder.note(f"world of {made.size} ranks, from that {changed}")
        return made

    def _world_of(self, comm: MPI.Intracomm, before: W) -> W | None:
        """The world of the ranks of `comm`; None, on every rank, if more of them are lost meanwhile."""
        made = None
        members.current, members.has_lost = None, True
        try:
            made = self._make(comm, before)
        except Exception as error:
            log(before.rank, f"world.recover() begins again: {type(error).__name__}: {error}")
        found = current_members()
        if made is None:
            found.revoke()
        if found.agree(made is not None):
            return made
        found.stop()
        return None
