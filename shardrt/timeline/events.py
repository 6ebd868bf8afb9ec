"""What a timeline consists of, whether it was measured or forecast: spans on tracks, counters, and arrows between spans.

Times are in seconds, from the moment at which the timeline was opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

COMPUTE, GATHER, REDUCE, ALL_REDUCE = "compute", "gather", "reduce", "all_reduce"  # tracks
BY_KIND, BY_GROUP = "bytes by kind", "bytes by group"  # counters


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """Something that takes time.

    track: the stream that it runs on; the spans of a track lie inside each other, or one after the other.
    name: what it is, such as "forward".   subject: what it is about: names of groups, or a call in words.
    arguments: more to know about it, as JSON.
    """

    track: str
    name: str
    subject: str
    start: float
    end: float
    arguments: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Counter:
    """New values of some series, by their names. A series that is not among them keeps its value; each begins with 0.

    name: `BY_KIND` or `BY_GROUP` for bytes of memory.
    """

    name: str
    at: float
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Arrow:
    """From what was made to where it is used, such as from a gather to a forward."""

    source: Span
    target: Span


@dataclass(frozen=True, slots=True)
class Events:
    """One rank's timeline.

    spans: in the order in which they began, as this rank's threads saw it.   counters: by time.
    """

    spans: Sequence[Span] = ()
    counters: Sequence[Counter] = ()
    arrows: Sequence[Arrow] = ()

    def order(self, track: str) -> list[tuple[str, str]]:
        """Names and subjects of the spans of a track, in their order: what two runs have alike."""
        return [(span.name, span.subject) for span in self.spans if span.track == track]

    def seconds(self, track: str, name: str) -> float:
        """How long the spans of this name took."""
        return sum(span.end - span.start for span in self.spans if (span.track, span.name) == (track, name))
