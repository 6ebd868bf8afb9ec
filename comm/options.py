"""Options of command lines: errors of one line, which those of several ranks do not mix, and whole numbers."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from .version import __version__


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line. That of a command of shardrt, but not of its subcommands, has --version."""

    def __init__(self, prog: str | None = None, **options: Any) -> None:
        super().__init__(prog, **options)
        if prog is not None and prog.startswith("shardrt") and " " not in prog:
            self.add_argument("--version", action="version", version=f"{prog} {__version__}", help="print it, and end")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


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
