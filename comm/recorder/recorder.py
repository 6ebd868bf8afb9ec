"""Flight recorder: keeps this rank's last calls, and writes them as JSON when something goes wrong.

    python -m shardrt.comm.recorder merge FOLDER-OR-FILES...

merges the dumps of the ranks (`merge_dumps.py`). SHARDRT_RECORDER is how many calls are kept (2000; 0: none), SHARDRT_DUMP the
folder of the dumps (`dumps.py`).
"""

from __future__ import annotations

import json
import os
import socket
import sys

if __name__ == "__main__":  # before the imports of torch, which a merge needs not
    from .merge_dumps import main

    sys.exit(main(sys.argv[1:]))

import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from time import time
from types import CodeType, FrameType
from typing import Any

from ..core.calls import BLOCKING, CallList, CollectiveCall, Hook, Work
from ..core.streams import PAST, is_capturing
from .dumps import DumpFolder

_FRAMES = 8
_OWN_FRAMES = 4  # between the caller and `called`, at least
_COMM = os.path.dirname(os.path.dirname(__file__))
_CALLING = {os.path.join(_COMM, room) for room in ("core", "groups", "recorder", "startup")}  # whose frames a dump leaves out


# The fields of an entry. Cost: a plain list costs a third of what a class does. Times are in seconds since the epoch, 0.0 until
# they are known. Code and instruction of each frame of the stack follow; only a dump formats them.
_FIELDS = ("comm", "ranks", "number", "what", "stream", "called", "started", "ended")
_STARTED, _ENDED = (_FIELDS.index(name) for name in ("started", "ended"))
Entry = list[Any]


class Recorder(Hook):
    """The ring buffer of one rank. now: the caller's clock. Cost: 3 us per call."""

    def __init__(self, rank: int, size: int, folder: DumpFolder, capacity: int, now: Callable[[], float] = time) -> None:
        self._folder = folder
        self._rank = rank
        self._size = size
        self._capacity = capacity
        self._now = now
        self._ring: deque[Entry] = deque(maxlen=capacity)
        self._notes: deque[tuple[float, tuple[str, ...]]] = deque(maxlen=capacity)
        self._running: deque[tuple[Work, Entry]] = deque(maxlen=capacity)  # on a CUDA device
        self._reasons: list[str] = []  # for which dumps were written into `folder`
        # Entries of calls that were made and have not run, by the id of the first call of a list.
        self._open: dict[int, Entry] = {}

    def called(self, calls: CallList, work: Work) -> None:
        entry = self._add(calls)
        if calls[0].comm.is_async and not is_capturing():
            self._running.append((work, entry))

    def before(self, calls: CallList) -> None:
        entry = self._add(calls) if calls[0].name in BLOCKING else self._open.get(id(calls[0]))
        if entry is not None:
            entry[_STARTED] = self._time_of(calls[0])

    def after(self, calls: CallList) -> None:
        call = calls[0]
        entry = self._open.pop(id(call), None)
        if entry is not None and (call.name in BLOCKING or not call.comm.is_async):
            entry[_ENDED] = self._time_of(call)

    def _time_of(self, call: CollectiveCall) -> float:
        return self._now() if call.name in BLOCKING else call.stream.now()  # control calls run on the caller's thread

    def _add(self, calls: CallList) -> Entry:
        call = calls[0]
        comm = call.comm
        # Hazard: what is kept here must not keep a tensor alive, as a frame or the call would.
        entry: Entry = [comm.name, comm.ranks, call.number, calls.description.text, call.stream, self._now(), 0.0, 0.0]
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
        self._notes.append((self._now(), what))

    def notes(self, since: float = 0.0) -> list[str]:
        """The notes since a time, in seconds since the epoch, the oldest first."""
        return [" ".join(what) for at, what in self._notes if at > since]

    def calls(self) -> list[dict[str, Any]]:
        """The last calls, the oldest first: `comm`, `ranks`, `number`, `what`, `stream`, the times `called`, `started` and
        `ended`, 0.0 until known, and `stack`."""
        return [_as_dict(entry) for entry in list(self._ring)]

    def poll(self) -> None:
        """Record the end of the calls that a CUDA device has finished."""
        while self._running and is_past(self._running[0][0]):
            self._running.popleft()[1][_ENDED] = self._now()

    def last_call(self) -> str:
        """The newest call, and the line that made it."""
        if not self._ring:
            return "no call"
        call = _as_dict(self._ring[-1])
        return f"#{call['number']} {call['what']} on '{call['comm']}', {(call['stack'] or ['?'])[0]}"

    @property
    def folder(self) -> Path:
        """Where dumps go by default."""
        return self._folder.path

    def dump(self, path: str | os.PathLike[str] | None = None, why: str = "requested") -> Path:
        """Write the ring and every thread's stack as JSON; by default to rank-R.json in `folder`. Returns the path.

        A dump there replaces the one before, and has its reason as well: a rank that fails may then hear that another does.
        """
        if path is None:
            self._reasons.append(why)
            why = "\n".join(self._reasons)
        report = {
            "rank": self._rank,
            "size": self._size,
            "job": self._folder.job,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time(),
            "why": why,
            "calls": [call | {"ranks": list(call["ranks"])} for call in self.calls()],
            "notes": [(at, " ".join(what)) for at, what in list(self._notes)],
            "threads": {ident: traceback.format_stack(frame) for ident, frame in sys._current_frames().items()},
        }
        if path is None:
            return self._folder.write(f"rank-{self._rank}.json", json.dumps(report))
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report))
        return path


def is_past(work: Work) -> bool:
    """True once a call on a CUDA stream is done. Until it is enqueued, its event is `PAST`, which has passed from the start."""
    return work.event is not PAST and work.event.query()


def _as_dict(entry: Entry) -> dict[str, Any]:
    """An entry as it is dumped: the stack as "FILE:LINE in FUNCTION", innermost first, without the frames of communicators."""
    call = dict(zip(_FIELDS, entry, strict=False))
    stack = entry[len(_FIELDS) :]
    frames = zip(stack[::2], stack[1::2], strict=True)
    stack = [_line(*frame) for frame in frames if os.path.dirname(frame[0].co_filename) not in _CALLING]
    return call | {"stack": stack, "stream": call["stream"].name}


def _line(code: CodeType, instruction: int) -> str:
    line = next((at for start, end, at in code.co_lines() if start <= instruction < end), code.co_firstlineno)
    return f"{code.co_filename}:{line} in {code.co_name}"
