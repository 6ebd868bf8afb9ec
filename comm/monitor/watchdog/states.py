"""Who ends the job: the states of a rank's row, who writes them, and what it reads before.

A row has two states, each with one writer, so that neither can overwrite the other.

`ProgramPhase`, of the program, written by the rank's main thread:

    STARTING -> RUNNING <-> LEAVING -> FINISHED

`Alarm`, written by the rank's watchdog, which looks at all rows every `poll_s` and then acts:

    NONE <-> RAISED -> COMMITTED -> REPORTED      the rank that writes the report
    NONE or RAISED -> FOLLOWED                    other ranks, once one has committed

| from             | to        | when                                                                                 |
|------------------|-----------|--------------------------------------------------------------------------------------|
| NONE             | RAISED    | an operation of this rank is overdue                                                 |
| RAISED           | NONE      | it has come through                                                                  |
| RAISED           | COMMITTED | it is still under way when the others have had time to raise theirs, in turn; the    |
|                  |           | node's claim, which one process can hold, is free                                    |
| COMMITTED        | REPORTED  | the report is written; the job may end                                               |
| NONE, RAISED     | FOLLOWED  | another rank has committed, and this one, which raised its alarm too or speaks for   |
|                  |           | its node, has written what it knows                                                  |
| LEAVING          | FINISHED  | no alarm is raised on any rank, and this one is not ending                           |

An alarm that is only raised changes nothing: it is withdrawn, or one rank commits, and then all ranks end. Nothing withdraws a
commitment. A rank does not finish while an alarm is raised, and does not commit once it has finished.
Invariant: on one node, exactly one rank commits. Between nodes a row arrives late; there the turns keep the ranks apart,
each counted from when a rank hears of a node that is ahead of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import Enum
from typing import Protocol

from ...ending.status_table import Alarm, ProgramPhase
from ..timing import Timing


class Rows(Protocol):
    """The states of all ranks; `StatusTable` has them in shared memory."""

    def alarms(self) -> bytes:
        """Every rank's alarm."""

    def set_alarm(self, rank: int, alarm: Alarm) -> None:
        """Set the alarm of a rank."""

    def set_phase(self, rank: int, phase: ProgramPhase) -> None:
        """Set the phase of a rank."""

    def claim(self) -> bool:
        """True if this rank now is the only one of its node to hold the claim."""

    def release(self) -> None:
        """Give the claim back."""


class OverdueOperation(Protocol):
    """An operation of this rank that is overdue."""

    @property
    def everyone_is_here(self) -> bool:
        """True if every rank had reached it when it was looked at."""

    def is_under_way(self) -> bool:
        """True if it has not come through meanwhile."""


class Move(Enum):
    """What a watchdog does after it has looked."""

    WATCH = "go on"
    RAISE = "raise the alarm"
    WITHDRAW = "withdraw it"
    COMMIT = "write the report and end the job"
    FOLLOW = "end, as another rank does"


class Decision:
    """One rank's part in who ends the job. The main thread calls `finish`, the watchdog's `look` and then `act`.

    nodes: each rank's node, in the order of their turns.
    """

    def __init__(self, rows: Rows, rank: int, nodes: Sequence[int], timing: Timing) -> None:
        self.rows = rows
        self._rank = rank
        self._nodes = nodes
        self._settle_s = timing.settle_s if len(set(nodes)) == 1 else timing.settle_nodes_s
        self._turn_s, self._report_s = timing.turn_s, timing.report_s
        self._everyone_was_here = False
        self._ahead: set[int] = set()  # nodes that may report before this rank
        self._settled_s = 0.0  # since the alarm was raised, the last rank has reached the operation, or a node came to be ahead
        # Under the lock one of both becomes true, never both: the main thread finishes, or the watchdog ends.
        self._lock = threading.Lock()
        self._has_finished = self._is_ending = False

    def finish(self, patient: bool = True) -> bool:
        """Finish, as all ranks do. Returns: False if this rank is ending the job, or an alarm is raised.

        If it is not `patient`, a raised alarm is no reason.
        """
        with self._lock:
            if self._is_ending or max(self.rows.alarms()) >= (Alarm.RAISED if patient else Alarm.FOLLOWED):
                return False
            self._has_finished = True
            self.rows.set_phase(self._rank, ProgramPhase.FINISHED)
            return True

    def look(self, elapsed: float, overdue: OverdueOperation | None, cut_off: bool = False) -> Move:
        """Choose a move from what the rows show. elapsed: seconds since the last look.

        cut_off: the alarms of other nodes may not reach this rank.
        """
        alarms = self.rows.alarms()
        if max(alarms) >= Alarm.COMMITTED:
            return Move.FOLLOW
        if overdue is None:
            return Move.WITHDRAW if alarms[self._rank] else Move.WATCH
        ahead = self._nodes_ahead(alarms, cut_off)
        if not alarms[self._rank]:
            self._ahead = set()
        if not alarms[self._rank] or overdue.everyone_is_here != self._everyone_was_here or not ahead <= self._ahead:
            # What everyone has reached is about to come through, unless it never will. Who is ahead has its turn from now on.
            self._everyone_was_here, self._ahead, self._settled_s = overdue.everyone_is_here, self._ahead | ahead, 0.0
        else:
            self._settled_s += elapsed
        if not alarms[self._rank]:
            return Move.RAISE
        return Move.COMMIT if self._settled_s >= self._settle_s + self._turn_s * len(ahead) else Move.WATCH

    def act(self, move: Move, overdue: OverdueOperation | None) -> Move:
        """Write what was chosen. Returns: the move, or another one if something has changed since."""
        if move is Move.RAISE:
            with self._lock:
                if not self._has_finished:  # if it had, nothing would withdraw the alarm
                    self.rows.set_alarm(self._rank, Alarm.RAISED)
        elif move is Move.WITHDRAW:
            self.rows.set_alarm(self._rank, Alarm.NONE)
        elif move is Move.COMMIT:
            assert overdue is not None, "an operation"
            return self._commit(overdue)
        elif move is Move.FOLLOW and not self._end():
            return Move.WATCH
        return move

    def _nodes_ahead(self, alarms: bytes, cut_off: bool) -> set[int]:
        """The nodes that may report before this rank; its own one, if a lower rank of it may."""
        ahead = {self._nodes[rank] for rank in range(self._rank) if alarms[rank]}
        if cut_off:
            ahead |= set(self._nodes[: self._nodes.index(self._nodes[self._rank])])
        return ahead

    def _commit(self, overdue: OverdueOperation) -> Move:
        if not self.rows.claim():  # another rank has it and commits; if that fails to, end without its report
            late = self._settled_s >= self._settle_s + self._turn_s + self._report_s
            return Move.FOLLOW if late and self._end() else Move.WATCH
        if not overdue.is_under_way() or not self._end():
            self.rows.release()
            self.rows.set_alarm(self._rank, Alarm.NONE)
            return Move.WITHDRAW
        self.rows.set_alarm(self._rank, Alarm.COMMITTED)
        return Move.COMMIT

    def _end(self) -> bool:
        """From now on this rank does not finish; False if it has."""
        with self._lock:
            self._is_ending = not self._has_finished
            return self._is_ending
