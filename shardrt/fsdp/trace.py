"""What a listener, such as a timeline, hears of a step. Where nobody listens, each place costs one comparison.

| step       | from                                   | to                                          | stream  |
|------------|----------------------------------------|---------------------------------------------|---------|
| WAIT       | compute waits for the gather           | the modules see full parameters             | compute |
| FORWARD    | a module of the group runs             | it has run; again in a recomputation        | compute |
| BACKWARD   | its outputs' gradients are ready       | its inputs' gradients are ready             | compute |
| PACK       | gradients -> packed                    |                                             | compute |

GATHER, REDUCE and ALL_REDUCE are collectives: the listener sees those as a hook of the communicators, and hears here for which
group they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Protocol

from ..comm import Stream
from .ranges import Named


class Step(Enum):
    """What is done for a group."""

    __hash__ = object.__hash__  # Cost: Enum's own hash is Python code

    FORWARD = "forward"
    BACKWARD = "backward"
    WAIT = "wait"
    PACK = "pack"
    GATHER = "gather"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"


class Listener(Protocol):
    """Called on the thread that runs the model. Cost: it adds to each step, several times per group."""

    def begin(self, step: Step, group: Named, stream: Stream) -> None:
        """A step of `group` begins on `stream`."""

    def end(self, step: Step, group: Named, stream: Stream) -> None:
        """The newest such step of `group` ends. It may have begun before anybody listened."""

    def end_backward(self, stream: Stream) -> None:
        """The whole backward ends, with it that of groups whose inputs want no gradient."""

    def launch(self, step: Step, groups: Iterable[Named], *, joint: bool = False) -> None:
        """The collectives of this kind that the caller makes next are for these groups.

        joint: they may be launched together, and so are for groups named just before as well, as long as none was launched.
        """


listener: Listener | None = None  # written by listening()


@contextmanager
def listening(to: Listener) -> Iterator[None]:
    """In the block, tell this listener of all steps. RuntimeError if another one listens."""
    global listener
    if listener is not None:
        raise RuntimeError("a timeline is being recorded: close it before you open another")
    listener = to
    try:
        yield
    finally:
        listener = None
