"""What a timeline keeps while steps run: stamps, in the order in which things happened, and changes of memory.

Cost: on the host 0.3 us per stamp of a step, 1.5 us per collective; on a GPU, where stamps are events on streams, 2 us each.
Nothing is worked out here, and entries are plain tuples: `assembly.py` does the rest afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from operator import methodcaller
from time import time
from typing import NamedTuple
from weakref import ref

import torch

from ..comm import Stream, Work, World, current_stream
from ..comm.core.calls import BLOCKING, CallList, Hook
from ..comm.core.streams import INLINE, CudaStream, is_capturing
from ..fsdp.base import events
from ..fsdp.base.events import BufferKind, HasName, Observer, Step
from ..fsdp.memory.buffers import buffers_in_use
from .clocks import Stamp

FORWARD, BACKWARD, OPTIMIZER, RECOVER = "forward", "backward", "optimizer", "recover"
_GRADIENTS = "gradients"  # a kind of memory that is no buffer's
_SPANS = {
    Step.FORWARD: FORWARD,
    Step.BACKWARD: BACKWARD,
    Step.WAIT: "wait",
    Step.PACK: "pack",
    Step.RECOVER: RECOVER,
}  # the steps that are kept
_LAUNCHES = {Step.GATHER, Step.LAUNCH, Step.REDUCE, Step.PUBLISH}  # collectives that are called in these are for their groups


class Edge(Enum):
    """What a stamp is: a span begins or ends, the newest of its name and subject, or all spans of its name end."""

    BEGIN = auto()
    END = auto()
    END_ALL = auto()


@dataclass(slots=True, eq=False)
class PastGroup:
    """Stands for a group that is gone."""

    name: str


class Collective(NamedTuple):
    """What is kept of a call, or of the calls of a group: no tensor."""

    text: str
    groups: tuple[HasName, ...]  # those that it was made for
    comm: str
    ranks: int
    number: int
    nbytes: int  # the bytes of the larger tensor of each call


Subject = HasName | Collective | str | None  # a group, calls, the class of an optimizer, or None where collectives end
Entry = tuple[Edge, Stamp | None, Stream, str, Subject]  # the name of the span before its subject; no stamp: left out
Change = tuple[float, str, str, int]  # bytes of a kind that a group has from a time on, by its name; negative: no longer


class _Launches(threading.local):
    """For which groups this thread launches collectives now: the newest counts. Hooks of the user's may call some in others."""

    def __init__(self) -> None:
        self.groups: list[Sequence[HasName]] = []


class Recording(Hook, Observer):
    """Stamps of a rank. A hook of all communicators, and an observer of what happens to groups.

    Streams' threads add to it as well: a list's `append` needs no lock.
    """

    entries: list[Entry]
    changes: list[Change]
    held: list[tuple[BufferKind, str, int]]  # the buffers that were in use at the beginning
    on_gpu: bool
    _host: Stream  # where the caller waits
    _compute: Callable[[], Stream]
    _stamp: Callable[[Stream], Stamp | None]
    _now: Callable[[], float]
    _launches: _Launches
    _gradients: dict[int, ref[torch.UntypedStorage]]  # by identity, which a storage keeps while it is alive
    _called: dict[int, Sequence[HasName]]  # by the id of a list of calls

    def __init__(self, world: World) -> None:
        device = world.device
        self.entries, self.changes = [], []
        self.held = [(kind, group.name, nbytes) for kind, group, nbytes in buffers_in_use(device)]
        self.on_gpu = device.type == "cuda"
        self._host = INLINE if self.on_gpu else world.stream
        self._compute = lambda: current_stream(device)
        self._stamp = _event if self.on_gpu else methodcaller("now")
        self._now = (lambda: current_stream(device).now()) if device.type == "meta" else time
        self._launches, self._gradients, self._called = _Launches(), {}, {}

    @property
    def streams(self) -> list[Stream]:
        """The streams that were seen, and are still there: those from before the last recovery are not."""
        first = max((place for place, entry in enumerate(self.entries) if entry[3] == RECOVER), default=0)
        return list(dict.fromkeys(entry[2] for entry in self.entries[first:]))

    # ------------------------------------------------------------------ the observer

    def begin(self, step: Step, groups: Sequence[HasName], stream: Stream | None) -> None:
        if step is Step.RECOVER:
            self._forget_groups()
        if step in _LAUNCHES:
            self._launches.groups.append(groups)
        elif (name := _SPANS.get(step)) is not None:
            stream = stream or self._compute()
            for group in groups:
                self.entries.append((Edge.BEGIN, self._stamp(stream), stream, name, group))

    def end(self, step: Step, groups: Sequence[HasName], stream: Stream | None) -> None:
        if step in _LAUNCHES:
            self._launches.groups.pop()
        elif (name := _SPANS.get(step)) is not None:
            stream = stream or self._compute()
            for group in reversed(groups):
                self.entries.append((Edge.END, self._stamp(stream), stream, name, group))
            if not groups:
                self.entries.append((Edge.END_ALL, self._stamp(stream), stream, name, None))

    def memory_changed(self, kind: BufferKind, group: HasName, nbytes: int) -> None:
        self.changes.append((self._now(), kind.value, group.name, nbytes))  # on a GPU the host's clock is ahead of the streams

    def gradients_made(self, group: HasName, storage: torch.UntypedStorage) -> None:
        identity, nbytes, name = id(storage), storage.nbytes(), group.name

        def freed(_: object) -> None:
            del self._gradients[identity]
            self.changes.append((self._now(), _GRADIENTS, name, -nbytes))

        if identity not in self._gradients:
            self._gradients[identity] = ref(storage, freed)
            self.changes.append((self._now(), _GRADIENTS, name, nbytes))

    def _forget_groups(self) -> None:
        """Keep the names of the groups seen so far, not the groups: their model is about to be dropped, for its memory."""
        known: dict[int, HasName] = {}

        def name_of(group: HasName) -> HasName:
            return known.setdefault(id(group), PastGroup(group.name))

        def kept(subject: Subject) -> Subject:
            if isinstance(subject, Collective):
                return subject._replace(groups=tuple(map(name_of, subject.groups)))
            return subject if subject is None or isinstance(subject, str) else name_of(subject)

        self.entries[:] = [(edge, at, stream, name, kept(subject)) for edge, at, stream, name, subject in self.entries]
        self._called.clear()

    def forget_gradients(self) -> None:
        """Do not count the gradients any more when they are freed."""
        self._gradients.clear()

    # ------------------------------------------------------------------ the hook

    def called(self, calls: CallList, work: Work) -> None:
        if self._launches.groups:
            self._called[id(calls)] = self._launches.groups[-1]

    def before(self, calls: CallList) -> None:
        stream, call = self._stream_of(calls), calls[0]
        nbytes = 0
        for each in calls:
            nbytes += max(each.out.nbytes if each.out is not None else 0, each.inp.nbytes if each.inp is not None else 0)
        groups = self._called.pop(id(calls), ())
        made = Collective(calls.description.text, tuple(groups), call.comm.name, call.comm.size, call.number, nbytes)
        self.entries.append((Edge.BEGIN, self._stamp(stream), stream, call.name, made))

    def after(self, calls: CallList) -> None:
        stream = self._stream_of(calls)
        self.entries.append((Edge.END, self._stamp(stream), stream, calls[0].name, None))

    def _stream_of(self, calls: CallList) -> Stream:
        return self._host if calls[0].name in BLOCKING else calls[0].stream

    # ------------------------------------------------------------------ hooks of optimizers

    def begin_optimizer(self, optimizer: object, *_: object) -> None:
        """A hook of all optimizers, before their steps."""
        stream = self._compute()
        self.entries.append((Edge.BEGIN, self._stamp(stream), stream, OPTIMIZER, type(optimizer).__name__))

    def end_optimizer(self, optimizer: object, *_: object) -> None:
        """A hook of all optimizers, after their steps."""
        stream = self._compute()
        self.entries.append((Edge.END, self._stamp(stream), stream, OPTIMIZER, type(optimizer).__name__))


def is_recording() -> bool:
    """Whether a timeline is open."""
    return any(isinstance(each, Recording) for each in events.observers)


def _event(stream: Stream) -> Stamp | None:
    """An event on a GPU's stream; the time on the host. None while calls are captured: nothing runs now."""
    if not isinstance(stream, CudaStream):
        return stream.now()
    return None if is_capturing() else stream.timed_event()
