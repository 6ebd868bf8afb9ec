"""How a step is observed: by a listener, such as a timeline; by a profiler, as ranges; by observers of memory.

A listener is told of these steps. Without a listener, each place in the code that would tell it costs one comparison.

| step       | from                                   | to                                          | stream  |
|------------|----------------------------------------|---------------------------------------------|---------|
| WAIT       | compute waits for the gather           | the modules see full parameters             | compute |
| FORWARD    | a module of the group runs             | it has run; again in a recomputation        | compute |
| BACKWARD   | its outputs' gradients are ready       | its inputs' gradients are ready             | compute |
| PACK       | gradients -> packed                    |                                             | compute |

GATHER, REDUCE and ALL_REDUCE are collectives: the listener sees them as a hook of the communicators, and `Listener.launch`
tells it for which groups they are.

A profile shows the host's time in named ranges, which are NVTX ranges under `torch.autograd.profiler.emit_nvtx`. The names are
FSDP2's.

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

The full names of the groups' modules follow the name of the range, in parentheses except after `for`.
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
    """Anything with a name to show, such as a group of parameters."""

    name: str


class Step(Enum):
    """The steps of a group that a listener is told of."""

    __hash__ = object.__hash__  # Cost: Enum's own hash is Python code

    FORWARD = "forward"
    BACKWARD = "backward"
    WAIT = "wait"
    PACK = "pack"
    GATHER = "gather"
    REDUCE = "reduce"
    ALL_REDUCE = "all_reduce"


class Listener(Protocol):
    """It is called on the thread that runs the model. Cost: its time adds to every step, several times per group."""

    def begin(self, step: Step, group: HasName, stream: Stream) -> None:
        """A step of `group` begins on `stream`."""

    def end(self, step: Step, group: HasName, stream: Stream) -> None:
        """The newest such step of `group` ends. It may have begun before this listener listened."""

    def end_backward(self, stream: Stream) -> None:
        """The whole backward ends, and with it the BACKWARD step of groups whose inputs require no gradient."""

    def launch(self, step: Step, groups: Iterable[HasName], *, joint: bool = False) -> None:
        """The collectives of this kind that the caller makes next are for these groups.

        joint: they may be launched in one go with those of the groups named just before, which were joint too. Until one is
        launched, the next collectives are for all of these groups.
        """


listener: Listener | None = None  # written by listening()


@contextmanager
def listening(to: Listener) -> Iterator[None]:
    """Inside the block, tell this listener of all steps. Raises RuntimeError if another one listens."""
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
    """The observers whose `observing` blocks are open, in the order in which they were opened."""

    all: tuple[Observer, ...]  # replaced at each change, so that another thread may iterate over it meanwhile

    def __init__(self) -> None:
        self.all = ()

    @contextmanager
    def observing(self, observer: Observer) -> Iterator[None]:
        """Inside the block, `observer` is one of these observers."""
        self.all = (*self.all, observer)
        try:
            yield
        finally:
            self.all = tuple(each for each in self.all if each is not observer)
