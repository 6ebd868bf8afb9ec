"""What is told of a step: to a listener, such as a timeline; to a profiler, as ranges; to observers of memory.

A listener hears of steps. Where nobody listens, each place costs one comparison.

| step       | from                                   | to                                          | stream  |
|------------|----------------------------------------|---------------------------------------------|---------|
| WAIT       | compute waits for the gather           | the modules see full parameters             | compute |
| FORWARD    | a module of the group runs             | it has run; again in a recomputation        | compute |
| BACKWARD   | its outputs' gradients are ready       | its inputs' gradients are ready             | compute |
| PACK       | gradients -> packed                    |                                             | compute |

GATHER, REDUCE and ALL_REDUCE are collectives: the listener sees those as a hook of the communicators, and hears here for which
group they are.

A profile has named ranges of the host's time, NVTX ranges under `torch.autograd.profiler.emit_nvtx`. The names are FSDP2's.

| range                                                 | around                                                   |
|-------------------------------------------------------|----------------------------------------------------------|
| `FSDP::root_pre_forward`                              | the start of an iteration                                |
| `FSDP::pre_forward`, `FSDP::post_forward`, `FSDP::pre_backward` | the hooks of a module                          |
| `FSDP::all_gather`                                    | the launch of a gather                                   |
| `FSDP::forward_prefetch for`, `FSDP::backward_prefetch for` | prefetched gathers, small groups together          |
| `FSDP::all_gather_copy_out`                           | the wait for a gather; here nothing is copied            |
| `FSDP::post_backward_accumulate`                      | packing of gradients                                     |
| `FSDP::post_backward_reshard`                         | freeing of the full parameters                           |
| `FSDP::post_backward_rs_wait`                         | release of the buffers of earlier reductions             |
| `FSDP::post_backward_reduce`                          | the launch of reductions, small groups together          |
| `FSDP::post_backward_publish`                         | assignment of reduced gradients (not in FSDP2)           |
| `FSDP::root_post_backward_callback`                   | the end of the backward                                  |

Groups follow in parentheses, by their modules' full names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum
from typing import Generic, Protocol, TypeVar

from torch.autograd import profiler

from ...comm import Stream
from ...torch_internals import profiler_state


class HasName(Protocol):
    """Has a name to show."""

    name: str


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

    def begin(self, step: Step, group: HasName, stream: Stream) -> None:
        """A step of `group` begins on `stream`."""

    def end(self, step: Step, group: HasName, stream: Stream) -> None:
        """The newest such step of `group` ends. It may have begun before anybody listened."""

    def end_backward(self, stream: Stream) -> None:
        """The whole backward ends, with it that of groups whose inputs want no gradient."""

    def launch(self, step: Step, groups: Iterable[HasName], *, joint: bool = False) -> None:
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


# ---------------------------------------------------------------------- ranges of a profile

_NOTHING = nullcontext()


def ranged(label: str, *groups: HasName) -> AbstractContextManager[object]:
    """A range named `label (names)` around the `with` block, if a profiler runs.

    Cost: 0.15 us without a profiler, where `record_function` itself costs 5.
    """
    if not profiler_state._is_profiler_enabled:
        return _NOTHING
    names = ", ".join(group.name for group in groups)
    if label.endswith(" for"):
        return profiler.record_function(f"{label} {names}")
    return profiler.record_function(f"{label} ({names})" if names else label)


# ---------------------------------------------------------------------- observers

Observer = TypeVar("Observer")


class Observers(Generic[Observer]):
    """Those whose blocks are open, in the order in which they were opened."""

    all: tuple[Observer, ...]  # another tuple after each change, so that a thread may go through it meanwhile

    def __init__(self) -> None:
        self.all = ()

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[None]:
        """In the block, `observer` is one of these."""
        self.all = (*self.all, observer)
        try:
            yield
        finally:
            self.all = tuple(each for each in self.all if each is not observer)
