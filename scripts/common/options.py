"""The command line of a script on several ranks: one-line errors, numbers with a minimum."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """Keeps the line breaks of a description, and writes an error in one call: ranks would mix argparse's several writes."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        exit_with_usage_error(message)


def exit_with_usage_error(message: str) -> NoReturn:
    """Exit with a message and code 2. No collective: every rank must find the error itself."""
    os.write(2, f"{Path(sys.argv[0]).name}: error: {message}\n".encode())
    sys.exit(2)


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: expected a number of at least {least:g}")
        return value

    number.__name__ = kind.__name__  # in argparse's message: "invalid int value"
    return number
