"""Options of command lines: errors of one line, which one rank prints for all, and whole numbers."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import Any, NoReturn

from ..ending.guard.node import Node, RankPlace, is_first_rank, launcher_variables
from .version import __version__

_FIRST_S = 2.0  # that ranks leave to the first one


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line. That of a command of shardrt, but not of its subcommands, has --version."""

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, **options)
        if prog is not None and prog.startswith("shardrt") and " " not in prog:
            self.add_argument("--version", action="version", version=f"{prog} {__version__}", help="print it, and end")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


class RankParser(Parser):
    """The parser of a program that runs on ranks: the first one prints help, version and errors for all of them."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if not (is_told_by_others() if file is sys.stderr else is_after_first()):
            super()._print_message(message, file)


def is_after_first() -> bool:
    """Whether a launcher has started this process as another rank than the first."""
    return launcher_variables(os.environ) is not None and not is_first_rank(os.environ)


def is_told_by_others() -> bool:
    """Whether the first rank of this node prints the error that this one has found: some seconds later all below it have ended.

    Hazard: launchers end all ranks with one that fails. One that does not wait here may end the one that is to print.
    """
    if not is_after_first():
        return False
    time.sleep(_FIRST_S)
    with suppress(LookupError, ValueError):  # no launcher shows the ranks of the node
        place = RankPlace(os.environ)
        return not place.is_first and min(Node(os.getppid(), place).look()[0], default=place.rank) >= place.rank
    return False


def at_least(least: int, units: Mapping[str, int] = MappingProxyType({})) -> Callable[[str], int]:
    """The type of an option: a whole number from `least` on, with an optional unit after it."""

    def number(text: str) -> int:
        digits = text.rstrip("".join(units))
        unit = text.removeprefix(digits)
        if not digits.isdecimal() or int(digits) < least or unit not in ("", *units):
            optional = f", with an optional unit of {', '.join(units)}" if units else ""
            raise argparse.ArgumentTypeError(f"{text}: expected a whole number of at least {least}{optional}")
        return int(digits) * units.get(unit, 1)

    return number
