"""The command line of many ranks at once: a refusal is one line, a number has a least value."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Keeps the lines of a description, and refuses in one write: argparse's several would tear."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        refuse(message)


def refuse(message: str) -> NoReturn:
    """End this rank with a message and exit code 2; every rank comes to the same end by itself."""
    os.write(2, f"{Path(sys.argv[0]).name}: error: {message}\n".encode())
    sys.exit(2)


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: expected a number of at least {least:g}")
        return value

    number.__name__ = kind.__name__  # argparse names it: "invalid int value"
    return number
