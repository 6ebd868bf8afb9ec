"""The table of faults in Markdown: a row for each fault, a column for each MPI or launcher.

In a file it stands between two comments. A run writes the cells of the faults and the column that it ran; the others stay.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

from .faults import FAULTS, Fault, When
from .jobs import Ending, Way

COLUMNS = ("MPICH", "Open MPI", "srun")
BEGIN, END = "<!-- faults: written by shardrt-stress -->", "<!-- end of faults -->"
PRINT = Path("-")
UNKNOWN = "-"
_HEAD = ("what happens on one rank", "what the job does", *COLUMNS)


@dataclass(slots=True)
class FaultTable:
    """cells: what is known, by a fault's name and column.   others: rows of faults that this program does not know."""

    cells: dict[tuple[str, str], str]
    others: list[str]

    @classmethod
    def read(cls, page: Path) -> FaultTable:
        """The table in a page. Exits if the page has none."""
        names = {fault.what: fault.name for fault in FAULTS.values()}
        cells, others = dict[tuple[str, str], str](), list[str]()
        for line in _between(page)[1].splitlines()[2:]:
            what, _, *of_columns = (cell.strip() for cell in line.strip("| ").split(" | "))
            if what not in names:
                others.append(line)
            else:
                cells |= {(names[what], col): cell for col, cell in zip(COLUMNS, of_columns, strict=True) if cell != UNKNOWN}
        return cls(cells, others)

    def add(self, fault: Fault, column: str, way: Way, ending: Ending, *, holds: bool) -> None:
        """Note how a job ended: BARE after LAUNCH, and only where it is another ending."""
        found = outcome(fault, ending, holds=holds)
        if way is Way.LAUNCH:
            self.cells[fault.name, column] = found
        elif (launched := self.cells[fault.name, column]).partition(",")[0] != found.partition(",")[0]:
            self.cells[fault.name, column] = f"{launched}; {way.value}: {found}"

    def lines(self) -> list[str]:
        """Every fault's row, in Markdown."""
        rows = [[f.what, f.must, *(self.cells.get((f.name, c)) or UNKNOWN for c in COLUMNS)] for f in FAULTS.values()]
        return [*(f"| {' | '.join(row)} |" for row in (_HEAD, ["---"] * len(_HEAD), *rows)), *self.others]

    def write(self, page: Path) -> None:
        """Put the table into a page that has one, or print it."""
        rows = "".join(f"{line}\n" for line in self.lines())
        if page == PRINT:
            sys.stdout.write(rows)
        else:
            before, _, after = _between(page)
            page.write_text(before + rows + after)


def outcome(fault: Fault, ending: Ending, *, holds: bool) -> str:
    """A cell: the exit code, or that every rank raises, and the seconds from the fault until then."""
    what = "no end" if ending.code is None else "raises" if fault.when is When.CALL and holds else str(ending.code)
    seconds = "" if ending.seconds is None else f", {ending.seconds:.0f} s"
    return f"{what}{seconds}" if holds else f"**not so**: {what}{seconds}"


def _between(page: Path) -> tuple[str, str, str]:
    """What stands before the table, the table, and what stands after it."""
    found = (
        re.fullmatch(f"(.*{re.escape(BEGIN)}\n)(.*)({re.escape(END)}.*)", page.read_text(), re.DOTALL)
        if page.is_file()
        else None
    )
    if found is None:
        sys.exit(f"--report {page}: expected a file with the lines {BEGIN} and {END}")
    before, table, after = found.groups()
    return before, table, after
