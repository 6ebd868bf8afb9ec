"""What a timeline keeps while steps run: stamps, in the order in which things happened, and changes of memory.

Cost: on the host 0.3 us per stamp of a step, 1.5 us per collective; on a GPU, where stamps are events on streams, 2 us each.
Nothing is worked out here, and entries are plain tuples: `assembly.py` does the rest afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, auto
from operator import methodcaller
from time import time
from typing import NamedTuple
from weakref import ref

import torch

from ..comm import Stream, Work, World, current_stream
from ..comm.calls import BLOCKING, CallList, Hook
from ..comm.streams import INLINE, CudaStream, is_capturing
from ..fsdp.base.events import HasName, Step
from ..fsdp.memory.buffers import BufferKind, buffers_in_use
from .clocks import Stamp
from .events import ALL_REDUCE, GATHER, REDUCE

OPTIMIZER = "optimizer"
_GRADIENTS = "gradients"  # a kind of memory that is no buffer's
_TRACKS = {Step.GATHER: GATHER, Step.REDUCE: REDUCE, Step.ALL_REDUCE: ALL_REDUCE}


class Edge(Enum):
    """What a stamp is: a span begins or ends, the newest of its kind and subject, or all spans of backwards end."""

    BEGIN = auto()
    END = auto()
    END_BACKWARD = auto()


class Collective(NamedTuple):
    """What is kept of a call, or of the calls of a group: no tensor."""

    text: str
    groups: tuple[HasName, ...]  # those that it was made for
    comm: str
    ranks: int
    number: int
    nbytes: int  # the bytes of the larger tensor of each call


Subject = HasName | Collective | str | None  # a group, calls, the class of an optimizer, or None where collectives end
Entry = tuple[Edge, Stamp | None, Stream, Step | str, Subject]  # the name of the span before its subject; no stamp: left out
Change = tuple[float, str, HasName, int]  # bytes of a kind that a group has from a time on; negative: has no longer


class Recording(Hook):
    """Stamps of a rank. A hook of all communicators, a listener of `fsdp.base.events`, an observer of the memory of buffers and
    of sharded gradients.

    Streams' threads add to it as well: a list's `append` needs no lock.
    """

    entries: list[Entry]
    changes: list[Change]
    held: list[tuple[BufferKind, HasName, int]]  # the buffers that were in use at the beginning
    on_gpu: bool
    _host: Stream  # where the caller waits
    _compute: Callable[[], Stream]
    _stamp: Callable[[Stream], Stamp | None]
    _now: Callable[[], float]
    _groups: dict[str, tuple[HasName, ...]]  # by track: for which the next collectives are
    _joint: set[str]  # tracks on which others may be launched together with these
    _gradients: dict[int, ref[torch.UntypedStorage]]  # by identity, which a storage keeps while it is alive
    _called: dict[int, tuple[HasName, ...]]  # by the id of a list of calls

    def __init__(self, world: World) -> None:
        device = world.device
        self.entries, self.changes, self.held = [], [], buffers_in_use(device)
        self.on_gpu = device.type == "cuda"
        self._host = INLINE if self.on_gpu else world.stream
        self._compute = lambda: current_stream(device)
        self._stamp = _event if self.on_gpu else methodcaller("now")
        self._now = (lambda: current_stream(device).now()) if device.type == "meta" else time
        self._groups, self._joint, self._gradients, self._called = {}, set(), {}, {}

    @property
    def streams(self) -> list[Stream]:
        """The streams that were seen."""
        return list(dict.fromkeys(entry[2] for entry in self.entries))

    # ------------------------------------------------------------------ the listener

    def begin(self, step: Step, group: HasName, stream: Stream) -> None:
        self.entries.append((Edge.BEGIN, self._stamp(stream), stream, step, group))

    def end(self, step: Step, group: HasName, stream: Stream) -> None:
        self.entries.append((Edge.END, self._stamp(stream), stream, step, group))

    def end_backward(self, stream: Stream) -> None:
        self.entries.append((Edge.END_BACKWARD, self._stamp(stream), stream, Step.BACKWARD, None))

    def launch(self, step: Step, groups: Iterable[HasName], *, joint: bool = False) -> None:
        track = _TRACKS[step]
        self._groups[track] = (*(self._groups[track] if joint and track in self._joint else ()), *groups)
        (self._joint.add if joint else self._joint.discard)(track)

    # ------------------------------------------------------------------ the hook

    def called(self, calls: CallList, work: Work) -> None:
        track = calls[0].stream.name
        if track in self._groups:
            self._joint.discard(track)
            self._called[id(calls)] = self._groups[track]

    def before(self, calls: CallList) -> None:
        stream, call = self._stream_of(calls), calls[0]
        nbytes = 0
        for each in calls:
            nbytes += max(each.out.nbytes if each.out is not None else 0, each.inp.nbytes if each.inp is not None else 0)
        groups = self._called.pop(id(calls), ())
        made = Collective(calls.description.text, groups, call.comm.name, call.comm.size, call.number, nbytes)
        self.entries.append((Edge.BEGIN, self._stamp(stream), stream, call.name, made))

    def after(self, calls: CallList) -> None:
        stream = self._stream_of(calls)
        self.entries.append((Edge.END, self._stamp(stream), stream, calls[0].name, None))

    def _stream_of(self, calls: CallList) -> Stream:
        return self._host if calls[0].name in BLOCKING else calls[0].stream

    def forget_gradients(self) -> None:
        """Do not count the gradients any more when they are freed."""
        self._gradients.clear()

    # ------------------------------------------------------------------ others

    def count(self, kind: BufferKind, group: HasName, nbytes: int) -> None:
        """A buffer's memory was allocated or freed, by the host's clock: on a GPU ahead of the streams."""
        self.changes.append((self._now(), kind.value, group, nbytes))

    def count_gradients(self, group: HasName, storage: torch.UntypedStorage) -> None:
        """Sharded gradients have memory, until the last of them is dropped. No-op for a storage that is counted."""
        identity, nbytes = id(storage), storage.nbytes()

        def freed(_: object) -> None:
            del self._gradients[identity]
            self.changes.append((self._now(), _GRADIENTS, group, -nbytes))

        if identity not in self._gradients:
            self._gradients[identity] = ref(storage, freed)
            self.changes.append((self._now(), _GRADIENTS, group, nbytes))

    def begin_optimizer(self, optimizer: object, *_: object) -> None:
        """A hook of all optimizers, before their steps."""
        stream = self._compute()
        self.entries.append((Edge.BEGIN, self._stamp(stream), stream, OPTIMIZER, type(optimizer).__name__))

    def end_optimizer(self, optimizer: object, *_: object) -> None:
        """A hook of all optimizers, after their steps."""
        stream = self._compute()
        self.entries.append((Edge.END, self._stamp(stream), stream, OPTIMIZER, type(optimizer).__name__))


def _event(stream: Stream) -> Stamp | None:
    """An event on a GPU's stream; the time on the host. None while calls are captured: nothing runs now."""
    if not isinstance(stream, CudaStream):
        return stream.now()
    return None if is_capturing() else stream.timed_event()
