"""Saves: a thread writes them, while training goes on, or while the caller waits.

phase        this rank's thread                      ends when
WRITING      writes this rank's file                 `poll` finds that every rank has written
COMMITTING   on rank 0, commits the folder           `poll` finds that rank 0 has
COMMITTED    -                                       -
FAILED       -                                       one rank's error has been raised on all of them

The thread never communicates: `poll` and `wait` do, on the caller's thread, so every rank calls them at the same points.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, TypeVar, overload

from ...comm.core.streams import Stream, ThreadedStream, current_stream, new_stream, observe
from ...comm.groups.communicator import Communicator
from ...comm.startup.bootstrap import at_finalize, world
from ...tensor.dtensor.inference_mode import outside_inference_mode
from ...tensor.placement.snapshots import Snapshot
from ..disk.errors import CheckpointError, agreed
from ..disk.folders import Keep
from ..state.entries import Folder, folder_and_state
from .sources import Copies, Direct
from .writing import Prepared, prepare

_WAIT_S = 5.0
T = TypeVar("T")


class SavePhase(Enum):
    """How far a save is, the same on every rank."""

    WRITING = "writing"
    COMMITTING = "committing"
    COMMITTED = "committed"
    FAILED = "failed"


class AsyncSave:
    """A save that is written in the background: see `async_save`."""

    def __init__(
        self, prepared: Prepared[Any], comm: Communicator, thread: Stream, write: Callable[[], None], snapshot: Snapshot | None
    ) -> None:
        self.folder = prepared.target
        self._snapshot = snapshot
        self._prepared = prepared
        self._comm = comm
        self._thread = thread
        self._phase = SavePhase.WRITING
        self._error: CheckpointError | None = None
        self._task = _Task(thread, write)

    def poll(self) -> bool:
        """True once the save is committed, on every rank alike. Collective; does not wait for the disk.

        Call it at every step: it also starts the commit, once all ranks have written. Cost: one exchange of a number.
        Raises: CheckpointError on every rank, with the reason, if one of them could not write; the older checkpoints are
        as they were, and the next save may begin.
        """
        if self._error is not None:
            raise self._error
        if self._phase is not SavePhase.COMMITTED:
            everyone = self._comm.exchange(self._task.has_succeeded)
            if all(everyone):
                self._advance()
            elif None not in everyone:
                self._fail()
        return self._phase is SavePhase.COMMITTED

    def wait(self) -> None:
        """Return once the save is committed. Collective. Raises as `poll` does."""
        is_committed = False
        while not is_committed:
            # Hazard: a rank that waited for the others in an exchange for minutes would be reported as hanging.
            self._task.wait(_WAIT_S)
            is_committed = self.poll()

    def result(self) -> None:
        """The same as `wait`, by its name in the future of torch.distributed.checkpoint. Unlike that one, it is collective."""
        self.wait()

    def staged(self) -> None:
        """Let the current CUDA stream wait until the state has been copied, so that anything may write it. Not collective.

        Optimizers, operations on `DTensor`s and loads wait by themselves. Call it before something else writes sharded
        parameters or optimizer state: a kernel on local tensors that `to_local()` gave before the save, or the replay of a CUDA
        graph without an optimizer's step in it. No-op on the host.
        """
        if self._snapshot is not None:
            self._snapshot.wait()

    def interrupt(self) -> None:
        """Make the save fail if this rank still writes: the tensors may change from now on. `poll` then raises."""
        if self._phase is SavePhase.WRITING:
            self._task.error = CheckpointError(f"the save of {os.fspath(self.folder)!r} was interrupted while it was written")

    @property
    def is_committing(self) -> bool:
        """True while rank 0 makes it visible."""
        return self._phase is SavePhase.COMMITTING

    @property
    def has_ended(self) -> bool:
        """True once it is committed, or its error has been raised."""
        return self._phase is SavePhase.COMMITTED or self._error is not None

    def _advance(self) -> None:
        if self._phase is SavePhase.WRITING:
            self._phase = SavePhase.COMMITTING
            self._task = _Task(self._thread, self._prepared.commit)
        else:
            self._phase = SavePhase.COMMITTED

    def _fail(self) -> None:
        """Raise the error of the rank that has one, on every rank. No rank writes any more."""
        self._phase = SavePhase.FAILED
        try:
            with agreed(self._comm):
                if self._task.error is not None:
                    raise self._task.error
        except CheckpointError as error:
            self._error = error
            self._prepared.abandon()
            raise


@overload
def save(folder: Folder, state: dict[str, Any], *, keep: int | None = None, keep_every: int | None = None) -> None: ...
@overload
def save(
    state_dict: dict[str, Any], *, checkpoint_id: Folder, keep: int | None = None, keep_every: int | None = None
) -> None: ...
def save(*given: Any, keep: int | None = None, keep_every: int | None = None, **named: Any) -> None:
    """Save `state` in `folder`, in the format of torch.distributed.checkpoint. Collective; returns when it is committed.

    Called as `save(folder, state)`, or as that package's `save(state_dict, checkpoint_id=folder)`.
    state: modules, optimizers, objects with `state_dict`, tensors, and plain values, by the key that their names begin with.
    folder: the same on every rank, on a file system that all ranks share, or the URL of one in a store. A checkpoint that is
        there is replaced in one step; in a store, the save is refused instead. So is a folder with any other files.
    keep: how many of the newest checkpoints remain, of those beside it whose names differ from its own in the number at the end
        only. The others are deleted when this one is committed. None: nothing is deleted.
    keep_every: those whose number is a multiple of this are never deleted.

    On a disk, a save writes to a temporary folder beside `folder`, which gets this name once the data of every rank has reached
    the disk: a job that is killed leaves the earlier checkpoint. In a store, it writes to `folder` itself, and `.metadata`,
    without which it is no checkpoint, comes last. Each rank writes what it has; ranks that have the same share the work.
    Memory: none but for names and sizes; 64 MiB, pinned, for tensors of a GPU.
    Raises: CheckpointError on every rank, with the reason, if one of them cannot write or refuses its part of the state: what
    was there before is as it was. It also raises the error of an earlier save, if that has not been raised yet.
    """
    finish(_begin(*folder_and_state("save", given, named), Keep(keep, keep_every), is_copied=False))


@overload
def async_save(
    folder: Folder, state: dict[str, Any], *, keep: int | None = None, keep_every: int | None = None
) -> AsyncSave: ...
@overload
def async_save(
    state_dict: dict[str, Any], *, checkpoint_id: Folder, keep: int | None = None, keep_every: int | None = None
) -> AsyncSave: ...
def async_save(*given: Any, keep: int | None = None, keep_every: int | None = None, **named: Any) -> AsyncSave:
    """Save `state` as `save` does, but return when it has been copied: the disk is written in a thread. Collective.

    What is saved are the values at the call: on a GPU, those of the work submitted before it. Its sharded parameters and
    optimizer state are copied on a stream of their own. What writes them next, such as the next step of an optimizer, waits for
    the copies by itself; `staged` says what does not. Call `poll` of what it returns at every step, and `wait` where the
    checkpoint has to be there. A save that is under way is waited for first. finalize(), which runs at exit, commits the last
    one; if the job fails before, the older checkpoint stays.

    Memory: a copy of this rank's part of the state, in buffers of 256 MiB of host memory (pinned for a GPU's tensors), which
    later saves reuse.
    Cost: the copy, and 20 us for each name. The first call also takes the time to get the memory's pages.
    Raises: as `save` does, also the error of an earlier save.
    """
    return _begin(*folder_and_state("async_save", given, named), Keep(keep, keep_every), is_copied=True)


def _begin(folder: Folder, state: dict[str, Any], keep: Keep, *, is_copied: bool) -> AsyncSave:
    return begin(lambda: prepare(world(), folder, state, keep), is_copied=is_copied)


def begin(prepared: Callable[[], tuple[Prepared[T], Iterable[T]]], *, is_copied: bool) -> AsyncSave:
    """Begin a save. Collective.

    prepared: lets the ranks agree on the save; returns it, and the items that this rank writes.
    is_copied: copy the items before this returns, so that they may change while the thread writes.
    """
    global _background
    end_previous()
    with outside_inference_mode():
        made, items = prepared()
        if _background is None or _background.has_ended:
            _background = Background("checkpoint")
        return _background.start(made, items, is_copied=is_copied)


def finish(saving: AsyncSave) -> None:
    """Wait for a save that is not copied. Collective."""
    try:
        saving.wait()
    except BaseException:
        # Hazard: whatever ends the wait, the tensors may change from now on.
        saving.interrupt()
        raise


def end_previous() -> None:
    """Wait for the save under way, if there is one. Collective. Raises its error, unless that was raised already."""
    if _background is not None:
        _background.wait()


class _Task:
    """A function that runs in the thread.   error: what it has raised, or what its caller wants it to fail with."""

    def __init__(self, thread: Stream, run: Callable[[], None]) -> None:
        self.error: BaseException | None = None
        self._run: Callable[[], None] | None = run
        self._ended = threading.Event()
        thread.submit(self._call)

    @property
    def has_succeeded(self) -> bool | None:
        """None while it runs."""
        return self.error is None if self._ended.is_set() else None

    def wait(self, timeout_s: float | None = None) -> None:
        self._ended.wait(timeout_s)

    def _call(self) -> None:
        try:
            assert self._run is not None
            self._run()
        except BaseException as error:
            self.error = error
        finally:
            self._run = None  # it holds the tensors' copies
            self._ended.set()


class Background:
    """Saves that follow each other: a thread, the copies that it writes, and the newest save. Making it is collective.

    role: of its communicator, and the thread's name.
    """

    def __init__(self, role: str) -> None:
        self.current: AsyncSave | None = None
        self.has_ended = False  # it makes no more saves
        self._copies = Copies(new_stream(world().device, "staging"))
        self._comm = world().mesh.communicator(role)  # its own, so that polls come in any order with other calls
        self._thread = ThreadedStream(role)
        at_finalize(self.close, self.abandon)

    def start(self, prepared: Prepared[T], items: Iterable[T], *, is_copied: bool) -> AsyncSave:
        """Write the items, or copies of them that are made now, in the thread."""
        device = world().device
        try:
            with agreed(self._comm):
                if is_copied:
                    self._copies.restart()
                pieces_of = self._copies.pieces if is_copied else Direct().pieces
                sources = (prepared.source(item, pieces_of) for item in items)
                found = list(sources) if is_copied else sources
        except CheckpointError:
            self._copies.restart()
            prepared.abandon()
            raise
        snapshot, arrived = self._copies.start(), current_stream(device).record()

        def write() -> None:
            observe(device)
            if snapshot is not None:
                snapshot.end()
            arrived.synchronize()
            prepared.write(found)

        self.current = AsyncSave(prepared, self._comm, self._thread, write, snapshot)
        return self.current

    def wait(self) -> None:
        """Wait for the save under way, if there is one. Collective. Raises its error, unless that was raised already."""
        # Invariant: `current` stays the save until that has ended, whatever ends a wait for it; so its copies stay as they are.
        if self.current is not None and not self.current.has_ended:
            self.current.wait()

    def close(self) -> None:
        """Commit the save under way, and end the thread. Collective."""
        try:
            self.wait()
        finally:
            self._thread.close()
            self.has_ended = True

    def abandon(self) -> None:
        """Ranks are lost: the save under way stays unfinished, and the thread ends when it has written its part."""
        self.has_ended = True
        current, self.current = self.current, None
        if current is not None and current.is_committing:
            self._thread.close()  # what it deletes, nobody is to load
        else:
            self._thread.close_later()


_background: Background | None = None  # of `save` and `async_save`
