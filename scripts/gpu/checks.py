"""The type of a check, its result, and the function that runs checks on every rank of a job."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum

from shardrt.comm import World

PREFIX = "gpu_check "  # of a line with a result on a job's standard output


class Outcome(StrEnum):
    """Only FAILED makes the command fail: MISSED is a missed goal of speed, not a wrong result."""

    OK = "ok"
    MISSED = "missed"
    FAILED = "FAILED"
    SKIPPED = "skipped"


@dataclass(slots=True)
class Found:
    """The findings of a check that did not raise: a note, figures by name, missed goals, the reason for a skip."""

    note: str = ""
    figures: dict[str, float] = field(default_factory=dict)
    missed: list[str] = field(default_factory=list)
    skipped: str = ""

    def figure(self, name: str, value: float, *, least: float | None = None, most: float | None = None) -> None:
        """Record a figure, rounded to three digits. least, most: its goal."""
        self.figures[name] = value = float(f"{value:.3g}")
        if least is not None and value < least:
            self.missed.append(f"{name} {value:g}, goal >= {least:g}")
        if most is not None and value > most:
            self.missed.append(f"{name} {value:g}, goal <= {most:g}")


Check = Callable[[World], Found | None]


@dataclass(frozen=True, slots=True)
class Result:
    """A line of the table, and of the summary."""

    check: str
    ranks: int
    outcome: Outcome
    seconds: float
    note: str = ""
    figures: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, check: str, ranks: int, seconds: float, found: Found) -> Result:
        """The result of a check that did not raise."""
        outcome = Outcome.SKIPPED if found.skipped else Outcome.MISSED if found.missed else Outcome.OK
        note = "; ".join(part for part in (found.skipped, found.note, *found.missed) if part)
        return cls(check, ranks, outcome, round(seconds, 1), note, found.figures)

    @classmethod
    def parse(cls, line: str) -> Result:
        """The inverse of `write`."""
        fields = json.loads(line.removeprefix(PREFIX))
        return cls(**fields | {"outcome": Outcome(fields["outcome"])})

    def write(self) -> str:
        """One line for a pipe."""
        return PREFIX + json.dumps(asdict(self))

    def __str__(self) -> str:
        figures = "  ".join(f"{name} {value:g}" for name, value in self.figures.items())
        note = self.note if self.outcome is Outcome.FAILED else self.note.partition("\n")[0]
        details = "  ".join(part for part in (note, figures) if part)
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ' '}"
        return f"{ranks}  {self.check:<22} {self.outcome:<8}{self.seconds:6.1f} s  {details}".rstrip()


def run_checks(world: World, checks: Sequence[Check]) -> None:
    """Run each check on every rank. A failure on any rank is agreed on by all; rank 0 writes the results."""
    for check in checks:
        name, start = check.__name__, time.perf_counter()
        try:
            with world.comm.agree():
                found = check(world) or Found()
            result = Result.of(name, world.size, time.perf_counter() - start, found)
        except Exception as error:
            seconds = round(time.perf_counter() - start, 1)
            result = Result(name, world.size, Outcome.FAILED, seconds, str(error) or repr(error))
        if world.rank == 0:
            print(result.write(), flush=True)
