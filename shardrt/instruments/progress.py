"""Progress bars of commands."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_SECONDS = 60.0  # from one line of a log to the next


@contextmanager
def progress(total: int, unit: str) -> Iterator[Callable[[int], object]]:
    """Show a progress bar on a terminal, if tqdm is installed. Yields a function to call with how many units are just done."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count: None
        return
    with tqdm(total=total, unit=unit, unit_scale=unit == "B", leave=unit == "B", disable=None) as bar:
        yield bar.update


def told_each_minute(what: str, total: int, say: Callable[[str], object]) -> Callable[[int], None]:
    """A function to call with how many bytes were just read. Of what takes longer than a minute, each minute has a line.

    what: is read.   total: bytes, about.   say: takes a line for the user.
    """
    start = time.monotonic()
    done, due = 0, start + _SECONDS

    def tell(nbytes: int) -> None:
        nonlocal done, due
        done += nbytes
        if (now := time.monotonic()) >= due:
            due = now + _SECONDS
            say(f"{what}: read {done / 1e9:.2f} of about {total / 1e9:.2f} GB in {now - start:.0f} s")

    return tell


def logged_bar(**options: Any) -> Any:
    """A bar of tqdm, on stderr. Where that is no terminal: at most one line a minute, and the last one.

    options: tqdm's. With the variable TQDM_MININTERVAL it is a bar everywhere: of a rank, whose output mpirun reads, and which
    a person may watch all the same. Raises ImportError without tqdm.
    """
    from tqdm import tqdm

    if sys.stderr.isatty() or "TQDM_MININTERVAL" in os.environ:
        return tqdm(**options)

    class Lines(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        disable: bool
        due = 0.0
        ends = False

        def display(self, msg: str | None = None, pos: int | None = None) -> None:
            if self.ends or time.monotonic() >= self.due:
                self.due = time.monotonic() + _SECONDS
                print(msg or str(self), file=self.fp, flush=True)

        def clear(self, *_: object, **__: object) -> None:
            """Do nothing: a line stays."""

        def close(self) -> None:
            if not self.disable:
                self.ends = True
                self.display()
                self.disable = True  # nothing is left to draw
                self._decr_instances(self)

    return Lines(**options)
