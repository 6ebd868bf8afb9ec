"""`Timeline`: what a rank does in a `with` block, as a file for Perfetto."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..comm import World, world
from ..comm.core.streams import CudaStream
from ..comm.groups.control import hooked
from ..fsdp.base.events import observing
from . import chrome
from .assembly import assemble
from .clocks import AlignedClock, Anchor, Offset, measure
from .events import Events
from .recording import Recording, is_recording


class Timeline:
    """Records what this rank does in the `with` block: streams, groups, collectives, and the memory of buffers and of sharded
    gradients.

    path: a folder, in which each rank writes rank-R.json, in Chrome's trace-event format; open the files in Perfetto
    (ui.perfetto.dev), one, or several merged (`python -m shardrt.timeline merge`). None: nothing is written.
    Times in the files are in microseconds from the moment at which rank 0 began, by its clock; `otherData` has each rank's
    offset from it and the error of that, in seconds. In a dry world they are simulated: rank-R-forecast.json.
    Collective, at the beginning and, unless the block raises, at the end; then nothing is written. One at a time.
    Cost: 8 barriers at each end; in between, about 10 us per group and step on the host, and 300 bytes for each event.
    Raises: RuntimeError without a world, and where another timeline is open; RemoteError on every rank for a file that one rank
    cannot write, and for what else fails on one rank at either end.
    """

    events: Events  # what was recorded; written when the block has ended
    path: Path | None
    _block: AbstractContextManager[None]

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)

    def __enter__(self) -> Self:
        self._block = self._record()
        self._block.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._block.__exit__(kind, error, traceback)

    @contextmanager
    def _record(self) -> Iterator[None]:
        """Record the `with` block. What was recorded is kept no longer than this."""
        here = world()
        if is_recording():
            raise RuntimeError("a timeline is being recorded: close it before you open another")
        with here.comm.agree():
            if self.path is not None:
                self.path.mkdir(parents=True, exist_ok=True)
        begin: Offset | None
        begin, opened = measure(here)
        job = f"{datetime.fromtimestamp(opened, UTC):%Y%m%d-%H%M%S-%f}"
        anchors = _anchors(here)
        recording = Recording(here)
        with _sources(recording) as sources:
            yield
            if world() is not here:  # ranks are lost: rank 0 may be another
                here, begin = world(), None
            with here.comm.agree(), sources.pop_all():
                for stream in recording.streams:  # their threads still add to the recording
                    stream.synchronize()
        end, _ = measure(here)
        with here.comm.agree():
            clock = AlignedClock(opened, (begin or end, end), (*anchors, *_anchors(here)))
            self.events = assemble(recording, clock)
            if self.path is not None:
                _write(self.path, self.events, here, job, clock)


def _sources(recording: Recording) -> ExitStack:
    """What tells the recording, until the stack is closed."""
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_pre_hook(recording.begin_optimizer).remove)
        stack.callback(register_optimizer_step_post_hook(recording.end_optimizer).remove)
        stack.enter_context(hooked(recording))
        stack.callback(recording.forget_gradients)
        stack.enter_context(observing(recording))
        return stack.pop_all()


def _write(path: Path, events: Events, here: World, job: str, clock: AlignedClock) -> None:
    simulated = here.device.type == "meta"
    offset = clock.offsets[0].seconds
    process = chrome.TimelineProcess(
        here.rank, here.size, job, socket.gethostname(), simulated, offset, clock.error, clock.drift
    )
    name = f"rank-{here.rank}{'-forecast' if simulated else ''}.json"
    chrome.write(path / name, chrome.chrome_events(events, process), [process])


def _anchors(world: World) -> list[Anchor]:
    """On a GPU, an event of which the host's time is known: the compute stream waits for nothing when it is recorded."""
    stream = world.stream
    if not isinstance(stream, CudaStream):
        return []
    stream.synchronize()
    before = stream.now()
    event = stream.timed_event()
    event.synchronize()
    return [Anchor(event, (before + stream.now()) / 2)]
