"""Makes events of what a recording has kept."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from ..comm.core.streams import INLINE
from .clocks import AlignedClock
from .events import BY_GROUP, BY_KIND, GATHER, Arrow, Counter, Events, Span
from .recording import BACKWARD, FORWARD, RECOVER, Collective, Edge, Recording, Subject

HOST = "host"  # the track of what the caller waits for while a GPU computes
RECOMPUTE = "recompute"  # a forward within a backward
_CUT = " (cut short)"  # by the loss of a rank
_USES = {FORWARD, BACKWARD}  # of what was gathered


def assemble(recording: Recording, clock: AlignedClock) -> Events:
    """The events of a recording that has ended. Spans that began before it, or have not ended, are left out."""
    builder = _Builder()
    for edge, stamp, stream, name, subject in recording.entries:
        if stamp is not None:
            track = HOST if recording.on_gpu and stream is INLINE else stream.name
            builder.take(edge, clock.seconds(stamp), track, name, subject)
    spans = [builder.spans[number] for number in sorted(builder.spans)]
    return Events(spans, list(_counters(recording, clock)), builder.arrows)


@dataclass(slots=True)
class _Open:
    """A span that has begun. number: how many began before it.   gather: of what it uses, if it is the first to use it."""

    number: int
    name: str
    subject: Subject
    start: float
    gather: Span | None

    def ends_by(self, name: str, subject: Subject) -> bool:
        """Whether an end of this name and subject is that of this span."""
        return self.name == name and (isinstance(self.subject, Collective) or self.subject == subject)


@dataclass(slots=True)
class _Builder:
    """Takes stamps in the order in which they were made."""

    spans: dict[int, Span] = field(default_factory=dict)  # by number
    arrows: list[Arrow] = field(default_factory=list)
    _begun: int = 0
    _open: dict[str, list[_Open]] = field(default_factory=lambda: defaultdict(list))  # by track
    _gathers: dict[Subject, Span] = field(default_factory=dict)  # the newest of each group, until it is used

    def take(self, edge: Edge, at: float, track: str, name: str, subject: Subject) -> None:
        opened = self._open[track]
        if edge is Edge.BEGIN:
            if name == RECOVER:
                self._cut(at)
            gather = self._gathers.pop(subject, None) if name in _USES else None
            opened.append(_Open(self._begun, name, subject, at, gather))
            self._begun += 1
            return
        for index in reversed(range(len(opened))):
            if edge is Edge.END_ALL and opened[index].name == name:
                self._close(opened.pop(index), at, track)
            elif edge is Edge.END and opened[index].ends_by(name, subject):
                self._close(opened.pop(index), at, track)
                return

    def _cut(self, at: float) -> None:
        """End what the loss of a rank has ended."""
        for track, opened in self._open.items():
            while opened:
                ended = opened.pop()
                ended.name += _CUT
                self._close(ended, at, track)

    def _close(self, ended: _Open, at: float, track: str) -> None:
        name, subject = ended.name, ended.subject
        if name == FORWARD and any(each.name == BACKWARD for each in self._open[track]):
            name = RECOMPUTE
        arguments = _arguments(subject) if isinstance(subject, Collective) else {}
        self.spans[ended.number] = span = Span(track, name, _text(subject), ended.start, max(at, ended.start), arguments)
        if ended.gather is not None:
            self.arrows.append(Arrow(ended.gather, span))
        if track == GATHER and isinstance(subject, Collective):
            self._gathers.update(dict.fromkeys(subject.groups, span))


def _text(subject: Subject) -> str:
    if isinstance(subject, Collective):
        return ", ".join(dict.fromkeys(group.name for group in subject.groups)) or subject.text.partition(" ")[2]
    return subject if isinstance(subject, str) else subject.name if subject is not None else ""


def _arguments(call: Collective) -> dict[str, object]:
    return {"call": call.text, "bytes": call.nbytes, "communicator": call.comm, "ranks": call.ranks, "number": call.number}


def _counters(recording: Recording, clock: AlignedClock) -> Iterator[Counter]:
    """What the memory comes to after each change, of its kind and of its group."""
    kinds, groups = defaultdict[str, int](int), defaultdict[str, int](int)
    for buffer_kind, group, nbytes in recording.held:
        kinds[buffer_kind.value] += nbytes
        groups[group] += nbytes
    yield Counter(BY_KIND, 0.0, dict(kinds))
    yield Counter(BY_GROUP, 0.0, dict(groups))
    # Streams of a simulation have a clock each; those of a buffer's allocation and release are the same.
    for at, kind, group, nbytes in sorted(recording.changes, key=itemgetter(0)):
        for name, values, series in ((BY_KIND, kinds, kind), (BY_GROUP, groups, group)):
            values[series] += nbytes
            yield Counter(name, clock.seconds(at), {series: values[series]})
