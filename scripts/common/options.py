"""The command line of a script on several ranks: one-line errors, numbers with a minimum."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

if TYPE_CHECKING:
    from shardrt import World

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """Keeps the line breaks of a description, and writes an error in one call: ranks would mix argparse's several writes."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        exit_with_usage_error(message)


def exit_with_usage_error(message: str) -> NoReturn:
    """Exit with a message and code 2. No collective: every rank must find the error itself; see `agreed`."""
    text = f"{Path(sys.argv[0]).name}: error: {message}\n"
    os.write(2, text.encode(errors="backslashreplace"))  # names of files may be no text
    sys.exit(2)


def agreed(world: World, work: Callable[[], T]) -> T:
    """What `work` returns. If it raises a ValueError or OSError on any rank, every rank exits with that error. Collective."""
    result, message = None, None
    try:
        result = work()
    except (ValueError, OSError) as error:
        message = str(error)
    messages = world.comm.exchange(message)
    failed = [rank for rank, text in enumerate(messages) if text is not None]
    if failed:
        only = f" (on rank {failed[0]})" if len(failed) < world.size else ""
        exit_with_usage_error(f"{messages[failed[0]]}{only}")
    return cast(T, result)


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: expected a number of at least {least:g}")
        return value

    number.__name__ = kind.__name__  # in argparse's message: "invalid int value"
    return number
