"""The command line of a script on several ranks: errors of one line, from one rank, and numbers with a minimum."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar, cast

import common.checkout  # noqa: F401  # before shardrt
from shardrt.comm.program.options import RankParser, is_told_by_others

if TYPE_CHECKING:
    from shardrt import World

T = TypeVar("T")


class Parser(RankParser):
    """Keeps the line breaks of a description."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        exit_with_usage_error(message)


def exit_with_usage_error(message: str) -> NoReturn:
    """Exit with a message and code 2, before `shardrt.init()`: every rank must find the error itself. See `agreed`."""
    if not is_told_by_others():
        _write_error(message)
    sys.exit(2)


def agreed(world: World, work: Callable[[], T]) -> T:
    """What `work` returns. If it raises a ValueError or OSError on any rank, rank 0 prints it, and all exit. Collective."""
    result, message = None, None
    try:
        result = work()
    except (ValueError, OSError) as error:
        message = str(error)
    messages = world.comm.exchange(message)
    failed = [rank for rank, text in enumerate(messages) if text is not None]
    if failed:
        if world.rank == 0:
            _write_error(f"{messages[failed[0]]}{f' (on rank {failed[0]})' if len(failed) < world.size else ''}")
        world.barrier()  # a rank that fails ends the others
        sys.exit(2)
    return cast(T, result)


def _write_error(message: str) -> None:
    text = f"{Path(sys.argv[0]).name}: error: {message}\n"
    os.write(2, text.encode(errors="backslashreplace"))  # names of files may be no text


def at_least(least: float, kind: Callable[[str], float] = int) -> Callable[[str], float]:
    def number(text: str) -> float:
        value = kind(text)
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: expected a number of at least {least:g}")
        return value

    number.__name__ = kind.__name__  # in argparse's message: "invalid int value"
    return number
