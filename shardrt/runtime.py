"""One root's shared state: streams, prefetch queue, and where an iteration begins and ends."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from . import comm
from .buffers import Account
from .group import ParamGroup, Phase
from .prefetch import PrefetchQueue

if TYPE_CHECKING:
    from .reduction import Handoff


class Streams:
    """The streams of a root and the events between them.

    gather and reduce run beside compute. `shards_written` passes when the optimizer's last writes to the shards have;
    `in_flight` is the packed buffer that the newest reduction reads: one at a time, so it bounds gradient memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.compute = comm.current_stream(device)
        self.gather = comm.world().stream_for("gather")
        self.reduce = comm.world().stream_for("reduce")
        self.shards_written = self.compute.record()
        self.in_flight: Handoff | None = None

    def begin(self) -> None:
        """An iteration starts on the caller's current stream."""
        self.compute = comm.current_stream(self.device)
        self.shards_written = self.compute.record()

    def retire(self) -> None:
        """Give back the packed buffer of the newest reduction once that has run."""
        if self.in_flight is not None:
            self.in_flight.release()
            self.in_flight = None


class Runtime:
    """What the groups under one root share. Made by the root's first forward, when all of them are known."""

    def __init__(self, root: ParamGroup) -> None:
        self.root = root
        names = {module: name for name, module in root.module.named_modules()}
        self.groups = list(root.with_descendants())
        self.account = Account()
        self.streams = Streams(root.mesh.device)
        self.prefetch = PrefetchQueue()
        self._end_queued = False
        for group in self.groups:
            if group.runtime is not None:
                raise RuntimeError(
                    f"'{names[group.module]}' ran as a root of its own before '{root.name}' around it was sharded (rank "
                    f"{root.mesh.rank}): shard all modules, from the inside out, before the first forward"
                )
            group.attach(self, names[group.module])

    def begin_forward(self) -> None:
        """The root's forward starts."""
        if self._end_queued:
            raise RuntimeError(
                f"the last backward through '{self.root.name}' did not end (rank {self.root.mesh.rank}): an exception "
                "cut it short; call reset_iter_state() on the root to drop its gradients and go on"
            )
        self.streams.begin()
        for group in self.groups:
            group.refresh_trainable()
            group.drop_stale()
        self.prefetch.begin()

    def end_forward(self) -> None:
        """The root's forward is over: what was gathered ahead and not used is not needed."""
        for group in self.groups:
            if not group.installed:
                group.reshard()

    def gather_ahead(self, groups: list[ParamGroup]) -> None:
        """Start gathering what the prefetch queue names."""
        for group in groups:
            group.unshard()

    def begin_backward(self) -> None:
        """The first gradient of a backward comes in: have its end announced."""
        if not self._end_queued:
            self._end_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        """Reduce what is left (parameters without a gradient kept their groups waiting), and let compute see it all."""
        self._end_queued = False
        for group in self.groups:
            group.reduce_grads(last=True)
            group.open_calls.clear()
            if group.phase is Phase.BACKWARD:
                group.move(Phase.RESTING)
            group.reshard()
        self.streams.retire()
        self.streams.compute.wait(self.streams.reduce.record())

    def reset(self) -> None:
        """Forget a failed iteration: everything under way is waited for, everything is sharded again."""
        self._end_queued = False
        self.streams.retire()
        self.streams.gather.synchronize()
        self.streams.reduce.synchronize()
        for group in self.groups:
            group.reset()
