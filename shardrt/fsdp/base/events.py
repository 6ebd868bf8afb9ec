"""The one place through which a step of training is observed: what happens is told here, and whoever wants to know subscribes.

Two are told without having subscribed. A profiler shows the host's time in ranges, with FSDP2's names and the full names of the
groups' modules (`_RANGES`); they are NVTX ranges under `torch.autograd.profiler.emit_nvtx`. The flight recorder has notes
(`_NOTES`). Collectives are told by the communicators (`comm.core.calls.Hook`), which know nothing of groups: those that are
called within a GATHER, LAUNCH, REDUCE or PUBLISH are for its groups.

Cost: 0.2 us for each step that nobody observes, 0.6 us for a note.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from types import TracebackType
from typing import Protocol

import torch
from torch.autograd import profiler

from ...comm import Stream
from ...comm.startup.bootstrap import note
from ...torch_internals import profiler_state


class HasName(Protocol):
    """Anything with a name to show, such as a group of parameters."""

    name: str


class Step(Enum):
    """What happens to groups of parameters, in the order of a step; and to a run between steps."""

    __hash__ = object.__hash__  # Cost: Enum's own hash is Python code

    ROOT_PRE_FORWARD = auto()  # an iteration begins
    PRE_FORWARD = auto()  # what is done before a module's forward
    FORWARD = auto()  # the module runs; again in a recomputation
    POST_FORWARD = auto()  # what is done after it
    PRE_BACKWARD = auto()  # what is done before its backward
    BACKWARD = auto()  # from its outputs' gradients until its inputs' are ready
    FORWARD_PREFETCH = auto()  # groups are gathered ahead
    BACKWARD_PREFETCH = auto()
    GATHER = auto()  # a gather is launched
    LAUNCH = auto()  # collectives are launched, in one go if there are several groups
    WAIT = auto()  # compute waits for a gather, and the modules see full parameters
    FREE = auto()  # what is gathered is freed
    KEEP = auto()  # a part of it is kept for the backward
    PACK = auto()  # gradients -> packed
    RETIRE = auto()  # buffers of earlier reductions are released
    REDUCE = auto()  # reductions are launched
    PUBLISH = auto()  # reduced gradients are assigned
    POST_BACKWARD = auto()  # what is done after a backward: full parameters are freed
    ROOT_POST_BACKWARD = auto()  # a backward ends
    RECOVER = auto()  # a run goes on without ranks that are lost, or with others in their place: the group is these


_RANGES = {
    Step.ROOT_PRE_FORWARD: "root_pre_forward",
    Step.PRE_FORWARD: "pre_forward",
    Step.POST_FORWARD: "post_forward",
    Step.PRE_BACKWARD: "pre_backward",
    Step.FORWARD_PREFETCH: "forward_prefetch for",
    Step.BACKWARD_PREFETCH: "backward_prefetch for",
    Step.GATHER: "all_gather",
    Step.WAIT: "all_gather_copy_out",  # here nothing is copied
    Step.PACK: "post_backward_accumulate",
    Step.RETIRE: "post_backward_rs_wait",
    Step.REDUCE: "post_backward_reduce",
    Step.PUBLISH: "post_backward_publish",  # not in FSDP2
    Step.POST_BACKWARD: "post_backward_reshard",
    Step.ROOT_POST_BACKWARD: "root_post_backward_callback",
}

_NOTES = {
    Step.GATHER: "gather",
    Step.FREE: "free",
    Step.KEEP: "keep a post-forward shard of",
    Step.REDUCE: "reduce",
    Step.RECOVER: "recover",
}


class BufferKind(Enum):
    """What a buffer is for."""

    GATHERED = "gathered"  # full parameters
    POST_FORWARD = "post-forward"  # the part of them that reshard_after_forward=k keeps
    PACKED = "packed"  # gradients on their way to a reduction
    PARTIAL = "partial"  # gradients that are reduced within a replica only
    SCRATCH = "scratch"  # what a reduction writes before it is converted or added
    CODES = "codes"  # quantised values, and their scales


class Observer:
    """Is told of what happens to all groups of this process. A subclass overrides what it wants to know.

    Cost: its time adds to every step, several times per group.
    """

    def begin(self, step: Step, groups: Sequence[HasName], stream: Stream | None) -> None:
        """A step of these groups begins, on the caller's thread. stream: where its work runs; None: on the current stream."""

    def end(self, step: Step, groups: Sequence[HasName], stream: Stream | None) -> None:
        """The newest such step of these groups ends; without groups, that of all. It may have begun before this observer
        observed."""

    def memory_changed(self, kind: BufferKind, group: HasName, nbytes: int) -> None:
        """A buffer of the group was allocated, or, if negative, released.

        Hazard: this runs in any stream's thread, under a lock: it must not touch a buffer.
        """

    def gradients_made(self, group: HasName, storage: torch.UntypedStorage) -> None:
        """This storage holds sharded gradients of the group from now on until it dies.

        It is told before anything is in it, or, if autograd has made the gradients, when they are published or kept for a
        later backward.
        """


observers: tuple[Observer, ...] = ()  # written by observing(): replaced, since other threads may iterate over it meanwhile


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Inside the block, `observer` is told what happens, after those that observe already."""
    global observers
    observers = (*observers, observer)
    try:
        yield
    finally:
        observers = tuple(each for each in observers if each is not observer)


_NOTHING = nullcontext()


def during(step: Step, *groups: HasName, stream: Stream | None = None) -> AbstractContextManager[object]:
    """The `with` block is this step of these groups. stream: where its work runs, if that is not the current stream."""
    if (noted := _NOTES.get(step)) is not None:
        for group in groups:
            note(noted, group.name)
    if observers or profiler_state._is_profiler_enabled:
        return _ObservedStep(step, groups, stream)
    return _NOTHING


def begin(step: Step, *groups: HasName, stream: Stream | None = None) -> None:
    """A step begins that is no block: no profiler shows it."""
    for each in observers:
        each.begin(step, groups, stream)


def end(step: Step, *groups: HasName, stream: Stream | None = None) -> None:
    """Such a step ends; without groups, that of all groups."""
    for each in observers:
        each.end(step, groups, stream)


class _ObservedStep:
    """Tells those of a step that observe when it begins."""

    __slots__ = ("_groups", "_observers", "_range", "_step", "_stream")

    def __init__(self, step: Step, groups: Sequence[HasName], stream: Stream | None) -> None:
        self._step, self._groups, self._stream = step, groups, stream

    def __enter__(self) -> None:
        self._observers, self._range = observers, _range(self._step, self._groups)
        self._range.__enter__()
        for each in self._observers:
            each.begin(self._step, self._groups, self._stream)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        for each in self._observers:
            each.end(self._step, self._groups, self._stream)
        self._range.__exit__(kind, error, traceback)


def _range(step: Step, groups: Sequence[HasName]) -> AbstractContextManager[object]:
    """The range of a step in a profile, named `FSDP::step (groups)`, if a profiler runs."""
    label = _RANGES.get(step)
    if label is None or not profiler_state._is_profiler_enabled:
        return _NOTHING
    names = ", ".join(group.name for group in groups)
    shown = f" {names}" if label.endswith(" for") else f" ({names})" if names else ""
    return profiler.record_function(f"FSDP::{label}{shown}")
