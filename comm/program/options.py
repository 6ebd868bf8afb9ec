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

from ..ending.guard.node import Node, RankPlace, is_first_rank
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
        if not (is_told_by_first_rank() if file is sys.stderr else not is_first_rank(os.environ)):
            super()._print_message(message, file)


def is_told_by_first_rank() -> bool:
    """Whether rank 0 prints the error that this rank has found: it has ended some seconds later, as with the same error.

    Hazard: launchers end all ranks with one that fails. One that does not wait here may end the one that is to print.
    """
    if is_first_rank(os.environ):
        return False
    time.sleep(_FIRST_S)
    with suppress(LookupError, ValueError):  # no launcher shows the ranks of the node
        return 0 not in Node(os.getppid(), RankPlace(os.environ)).look()[0]
    return True


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
