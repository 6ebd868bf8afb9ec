"""Flight recorder: keeps this rank's last calls, writes them as JSON when something goes wrong, merges the ranks' dumps.

    python -m shardrt.comm.recorder merge FOLDER-OR-FILES...

SHARDRT_RECORDER is how many calls are kept (2000; 0: none), SHARDRT_DUMP the folder of the dumps: by default
shardrt-dumps-UID/TIME-PID in the system's folder for temporary files, on each node.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from time import time
from types import CodeType, FrameType
from typing import Any

from .calls import BLOCKING, CallList, Hook, Work
from .fingerprint import name_ranks
from .streams import PAST, is_capturing

_FRAMES = 8
_OWN_FRAMES = 4  # between the caller and `called`, at least
_HERE = os.path.dirname(__file__)


# The fields of an entry. Cost: a plain list costs a third of what a class does. Times are in seconds since the epoch, 0.0 until
# they are known. Code and instruction of each frame of the stack follow; only a dump formats them.
_FIELDS = ("comm", "ranks", "number", "what", "stream", "called", "started", "ended")
_STARTED, _ENDED = (_FIELDS.index(name) for name in ("started", "ended"))
Entry = list[Any]


class Recorder(Hook):
    """The ring buffer of one rank. Cost: 3 us per call."""

    def __init__(self, rank: int, size: int, folder: Path, capacity: int) -> None:
        self.folder = folder
        self._rank = rank
        self._size = size
        self._capacity = capacity
        self._ring: deque[Entry] = deque(maxlen=capacity)
        self._notes: deque[tuple[float, tuple[str, ...]]] = deque(maxlen=capacity)
        self._running: deque[tuple[Work, Entry]] = deque(maxlen=capacity)  # on a CUDA device
        self._open: dict[int, Entry] = {}  # of calls that were made and have not run, by the id of the first call of a list

    def called(self, calls: CallList, work: Work) -> None:
        entry = self._add(calls)
        if calls[0].comm.is_async and not is_capturing():
            self._running.append((work, entry))

    def before(self, calls: CallList) -> None:
        entry = self._add(calls) if calls[0].name in BLOCKING else self._open.get(id(calls[0]))
        if entry is not None:
            entry[_STARTED] = time()

    def after(self, calls: CallList) -> None:
        call = calls[0]
        entry = self._open.pop(id(call), None)
        if entry is not None and (call.name in BLOCKING or not call.comm.is_async):
            entry[_ENDED] = time()

    def _add(self, calls: CallList) -> Entry:
        call = calls[0]
        comm = call.comm
        # Hazard: what is kept here must not keep a tensor alive, as a frame or the call would.
        entry = [comm.name, comm.ranks, call.number, calls.description.text, call.stream, time(), 0.0, 0.0]
        frame: FrameType | None = sys._getframe(_OWN_FRAMES)
        for _ in range(_FRAMES):  # Cost: 0.2 us a frame
            if frame is None:
                break
            entry += frame.f_code, frame.f_lasti
            frame = frame.f_back
        self._ring.append(entry)
        self._open.pop(id(call), None)  # of an earlier call whose id is reused: the new one goes to the end
        self._open[id(call)] = entry
        if len(self._open) > self._capacity:  # of calls that failed, or that the ring has dropped
            for oldest in list(self._open)[: -self._capacity // 2]:
                self._open.pop(oldest, None)
        return entry

    def note(self, *what: str) -> None:
        """Keep a note of what the caller does, in words, beside the calls."""
        self._notes.append((time(), what))

    def notes(self, since: float = 0.0) -> list[str]:
        """The notes since a time, in seconds since the epoch, the oldest first."""
        return [" ".join(what) for at, what in self._notes if at > since]

    def poll(self) -> None:
        """Record the end of the calls that a CUDA device has finished."""
        while self._running and is_past(self._running[0][0]):
            self._running.popleft()[1][_ENDED] = time()

    def last_call(self) -> str:
        """The newest call, and the line that made it."""
        if not self._ring:
            return "no call"
        call = _as_dict(self._ring[-1])
        return f"#{call['number']} {call['what']} on '{call['comm']}', {(call['stack'] or ['?'])[0]}"

    def dump(self, path: str | os.PathLike[str] | None = None, why: str = "requested") -> Path:
        """Write the ring and every thread's stack as JSON; by default to rank-R.json in `folder`. Returns the path."""
        path = Path(path) if path is not None else self.folder / f"rank-{self._rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        report = {
            "rank": self._rank,
            "size": self._size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time(),
            "why": why,
            "calls": [_as_dict(entry) for entry in list(self._ring)],
            "notes": [(at, " ".join(what)) for at, what in list(self._notes)],
            "threads": {ident: traceback.format_stack(frame) for ident, frame in sys._current_frames().items()},
        }
        path.write_text(json.dumps(report))
        return path


def is_past(work: Work) -> bool:
    """True once a call on a CUDA stream is done. Until it is enqueued, its event is `PAST`, which has passed from the start."""
    return work.event is not PAST and work.event.query()


def _as_dict(entry: Entry) -> dict[str, Any]:
    """An entry as it is dumped: the stack as "FILE:LINE in FUNCTION", innermost first, without the frames of this folder."""
    call = dict(zip(_FIELDS, entry, strict=False))
    stack = entry[len(_FIELDS) :]
    frames = zip(stack[::2], stack[1::2], strict=True)
    stack = [_line(*frame) for frame in frames if os.path.dirname(frame[0].co_filename) != _HERE]
    stream = getattr(call["stream"], "name", type(call["stream"]).__name__)
    return call | {"stack": stack, "stream": stream}


def _line(code: CodeType, instruction: int) -> str:
    line = next((at for start, end, at in code.co_lines() if start <= instruction < end), code.co_firstlineno)
    return f"{code.co_filename}:{line} in {code.co_name}"


# ---------------------------------------------------------------------- merging


def merge(dumps: Sequence[dict[str, Any]]) -> str:
    """A line for each communicator: which rank is at which call. Communicators whose ranks differ are marked with "!"."""
    places: dict[tuple[str, tuple[int, ...]], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for dump in sorted(dumps, key=lambda dump: dump["rank"]):
        newest: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
        for call in dump["calls"]:
            key = call["comm"], tuple(call["ranks"])
            if key not in newest or _has_ended(newest[key]):
                newest[key] = call
        for key, call in newest.items():
            places[key][f"#{call['number']} {call['what']}, {_phase(call)}"].append(dump["rank"])
    missing = sorted(set(range(max(dump["size"] for dump in dumps))) - {dump["rank"] for dump in dumps})
    lines = [f"no dump of {name_ranks(missing)}"] if missing else []
    for (comm, ranks), at in places.items():
        apart = len(at) > 1 or sum(map(len, at.values())) < len(ranks)
        lines.append(f"{'! ' if apart else '  '}'{comm}' of {name_ranks(ranks)}: {_positions(at, len(ranks))}")
    noted: dict[str, list[int]] = defaultdict(list)
    for dump in dumps:
        if dump["notes"]:
            noted[dump["notes"][-1][1]].append(dump["rank"])
    return "\n".join([*lines, *(f"  last noted by {name_ranks(sorted(ranks))}: {what}" for what, ranks in noted.items())])


def _positions(at: dict[str, list[int]], size: int) -> str:
    """The smallest set of ranks first; the largest as "all others"."""
    positions = sorted(at.items(), key=lambda item: len(item[1]))
    parts = [f"{name_ranks(ranks)} {'is' if len(ranks) == 1 else 'are'} at {what}" for what, ranks in positions]
    what, ranks = positions[-1]
    if len(positions) == 1 and len(ranks) == size:
        parts[-1] = f"all at {what}"
    elif len(ranks) > 1 and sum(map(len, at.values())) == size:
        parts[-1] = f"all others at {what}"
    return "; ".join(parts)


def _has_ended(call: dict[str, Any]) -> bool:
    return call["ended"] > 0.0


def _phase(call: dict[str, Any]) -> str:
    return "done" if _has_ended(call) else "under way" if call["started"] else "called"


def main(arguments: list[str]) -> int:
    """The command line."""
    if arguments[:1] != ["merge"] or len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    paths = [p for name in arguments[1:] for p in (sorted(Path(name).glob("*.json")) if Path(name).is_dir() else [Path(name)])]
    if not paths:
        print(f"no dump (*.json) in {', '.join(arguments[1:])}", file=sys.stderr)
        return 2
    print(merge([json.loads(path.read_text()) for path in paths]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
