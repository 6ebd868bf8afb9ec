"""One root's shared state: streams, prefetch queue, and where an iteration begins and ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager

import torch
from torch.autograd.graph import Node

from .. import comm
from ..torch_internals import queue_backward_callback
from . import prefetch, registered, symmetric_windows
from .buffers import CommBuffer, MemoryCounter
from .extension import split_hooked
from .moves import warn_of_unwritten
from .param_group import ForwardCall, ParamGroup
from .ranges import ranged
from .reduce import Handoff, PackedGrads


class Streams:
    """The streams of a root: gather and reduce run beside compute. What was reduced is finished on `post_reduce`.

    That is the reduce stream itself, unless there are replicas to reduce over as well.
    """

    def __init__(self, device: torch.device, *, replicas: bool) -> None:
        self.device = device
        self.compute = comm.current_stream(device)
        self.gather = comm.world().stream_for("gather")
        self.reduce = comm.world().stream_for("reduce")
        self.post_reduce = comm.world().stream_for("all_reduce") if replicas else self.reduce

    def begin(self, optimizer_done: comm.Event | None = None) -> None:
        """An iteration starts on the caller's current stream; the shards are gathered as they were last written there.

        optimizer_done: since when they are written, if the caller knows better.
        """
        self.compute = comm.current_stream(self.device)
        self.gather.wait(self.compute.record() if optimizer_done is None else optimizer_done)

    def synchronize(self) -> None:
        """Block until everything beside compute has run."""
        for stream in (self.gather, self.reduce, self.post_reduce):
            stream.synchronize()

    def recover(self) -> None:
        """The same, and forget what failed."""
        for stream in (self.gather, self.reduce, self.post_reduce):
            stream.recover()


class GradHook:
    """An autograd node between modules: what to do once its gradient is complete.

    The backward of the module that the tensor went into is over; that of the modules it came from, the innermost first,
    begins. In a chain of modules one grad_hook, and one call from autograd, does for both.
    """

    __slots__ = ("ended_call", "on_post_backward", "on_pre_backward")

    def __init__(self) -> None:
        self.on_post_backward: Callable[[], None] | None = None
        self.ended_call: ForwardCall | None = None  # the call that `on_post_backward` ends
        self.on_pre_backward: list[Callable[[], None]] = []

    @classmethod
    def find(cls, node: Node) -> GradHook | None:
        """The grad_hook at this node, if there is one."""
        return node.metadata.get(cls)  # type: ignore[attr-defined]  # a property that torch declares as a method

    @classmethod
    def at(cls, node: Node) -> GradHook:
        """The grad_hook at this node, made if there is none."""
        metadata: dict[object, GradHook] = node.metadata  # type: ignore[assignment]
        grad_hook = metadata.get(cls)
        if grad_hook is None:
            metadata[cls] = grad_hook = cls()
            node.register_prehook(grad_hook)
        return grad_hook

    def __call__(self, gradients: object) -> None:
        if self.on_post_backward is not None:
            self.on_post_backward()
        for on_pre_backward in self.on_pre_backward:
            on_pre_backward()


class Runtime:
    """What the groups under one root share. Made by the root's first forward, when all of them are known."""

    def __init__(self, root: ParamGroup) -> None:
        self.root = root
        names = {module: name for name, module in root.modules[0].named_modules()}
        self.groups = list(root.with_descendants())
        self.memory = MemoryCounter()
        self.pool = comm.new_pool(root.mesh.device)  # of full parameters
        self.streams = Streams(root.mesh.device, replicas=any(group.replicas is not None for group in self.groups))
        self.prefetch = prefetch.PrefetchQueue()
        self.newest_output: GradHook | None = None  # of the module that ran last
        self._to_reduce: dict[ParamGroup, None] = {}  # whose gradients are ready, in order; small ones wait for more
        self._to_reduce_nbytes = 0
        self._in_flight: deque[tuple[Set[ParamGroup], Handoff]] = deque()  # the newest reductions, and what they use
        self._reductions_in_flight = 1  # at most, beside the newest
        self._reduced: set[ParamGroup] = set()  # in this backward
        self._end_queued = False
        for group in self.groups:
            group.name = ", ".join(names.get(module, type(module).__name__) for module in group.modules) or group.name
            if group.runtime is not None:
                raise RuntimeError(
                    f"'{group.name}' ran as a root of its own before '{root.name}' around it was sharded (rank "
                    f"{root.mesh.rank}): shard all modules, from the inside out, before the first forward"
                )
        registered.follow(root, self.groups)
        self.groups = split_hooked(root)
        for group in self.groups:
            group.refuse_meta()
        if root.mesh.rank == 0:
            warn_of_unwritten(names)
        symmetric_windows.agree(root, self.groups)
        self.gathers = symmetric_windows.gathers(self.groups)
        for group in self.groups:
            group.attach(self)
        sent = [group for group in self.groups if prefetch.is_large(group) and group.mesh.size > 1]
        nbytes = max((group.packed_nbytes() for group in sent), default=0)
        reducer = root.mesh.communicator("reduce")
        symmetric = symmetric_windows.useful(reducer) and any(group.settings.symmetric for group in sent)
        self._comm_buffer = CommBuffer.of(reducer, nbytes, symmetric=symmetric) if nbytes else None
        self._added = registered.Watch(root)
        for group in self.groups:
            group.refresh_trainable()

    def comm_buffer_for(self, group: ParamGroup) -> CommBuffer | None:
        """Where the reduce communicator reads packed gradients. For large groups: one of them is in flight at a time."""
        return self._comm_buffer if prefetch.is_large(group) else None

    def begin_forward(self) -> None:
        """The root's forward starts."""
        if self._end_queued:
            raise RuntimeError(
                f"the last backward through '{self.root.name}' did not end (rank {self.root.mesh.rank}): an exception "
                "cut it short; call reset_iter_state() on the root to drop its gradients and go on"
            )
        for group in self.groups:
            group.check_registered()
        self._added.look()
        with ranged("FSDP::root_pre_forward"):
            self._begin_iteration()

    def _begin_iteration(self) -> None:
        settings = self.root.settings
        done, settings.post_optim_event = settings.post_optim_event, None
        self.streams.begin(done)
        for group in self.groups:
            group.begin()
        if settings.free_gradients:
            read = [self.streams.post_reduce.record(), self.streams.compute.record(), *([done] if done is not None else [])]
            for group in self.groups:
                group.free_gradients(read)
        self._reductions_in_flight = max(group.settings.reductions_in_flight for group in self.groups)
        self.prefetch.begin(settings.prefetch)

    def end_forward(self) -> None:
        """The root's forward is over: what was gathered ahead and not used is not needed."""
        for group in self.groups:
            if not (group.installed and (torch.is_grad_enabled() or not group.reshards_after_forward)):
                group.reshard()
            else:
                group.guard()
        if not torch.is_grad_enabled() and any(group.offloads for group in self.groups):
            self.streams.gather.synchronize()  # the caller may write to the shards, on the host

    def gather_ahead(self, groups: list[ParamGroup], label: str) -> None:
        """Start gathering what the prefetch queue names. label: of the range in a profile."""
        if groups:
            with ranged(label, *groups):
                self._gather_ahead(groups)

    def _gather_ahead(self, groups: list[ParamGroup]) -> None:
        # A custom collective may go on with what it gathered: not inside of a group of calls.
        ours = [group for group in groups if group.custom_gather is None]
        with _together(group.gather_comm for group in ours):
            for group in ours:
                group.unshard()
        for group in groups:
            if group.custom_gather is not None:
                group.unshard()

    def begin_backward(self) -> None:
        """The first gradient of a backward comes in: have its end announced."""
        if not self._end_queued:
            self._end_queued = True
            for group in self.groups:
                if group.guarded:
                    group.guard(False)
            queue_backward_callback(self._end_backward)

    def reduce(self, group: ParamGroup) -> None:
        """Gradients of `group` are ready: pack and reduce them, small groups several at a time. No-op if there are none."""
        if group.has_gradients() or (group.settings.reduce_unused and group.reduction is not None):
            self._enqueue(group)

    def _enqueue(self, group: ParamGroup) -> None:
        if group not in self._to_reduce:
            self._to_reduce[group] = None
            self._to_reduce_nbytes += group.nbytes
        if self._to_reduce_nbytes > prefetch.BUCKET_BYTES:
            self._reduce_waiting()

    def _reduce_waiting(self) -> None:
        """Reduce what waits. Few buckets at a time are in flight, so that packed gradients take a bounded amount of memory."""
        again = any(groups & self._to_reduce.keys() for groups, _ in self._in_flight)  # with the same buffers
        with ranged("FSDP::post_backward_rs_wait", *self._to_reduce):
            self._retire(0 if again else self._reductions_in_flight - 1)
        with torch.no_grad():  # backward(create_graph=True) runs its hooks with gradients enabled
            with ranged("FSDP::post_backward_accumulate", *self._to_reduce):
                packed = {group: group.pack_grads() for group in self._to_reduce}
            self._send({group: grads for group, grads in packed.items() if grads is not None})
        self._to_reduce.clear()
        self._to_reduce_nbytes = 0

    def _send(self, packed: dict[ParamGroup, PackedGrads]) -> None:
        """Reduce what these groups have packed, over the shards and over the replicas, and publish it."""
        streams = self.streams
        with ranged("FSDP::post_backward_reduce", *packed):
            self._reduce(packed)
        with ranged("FSDP::post_backward_publish", *packed):
            for group, grads in packed.items():
                group.publish_grads(grads)
        used = [buffer for grads in packed.values() for buffer in grads.used]
        self._in_flight.append((set(packed), Handoff(used, streams.post_reduce.record(), streams.compute)))
        self._reduced.update(packed)

    def _reduce(self, packed: dict[ParamGroup, PackedGrads]) -> None:
        streams = self.streams
        streams.reduce.wait(streams.compute.record())
        ours = [group for group in packed if group.settings.reduce_scatter is None]
        with _together(group.reduce_comm for group in ours):
            for group in ours:
                group.reduce_grads(packed[group])
        for group in packed:
            if group.settings.reduce_scatter is not None:
                group.reduce_grads(packed[group])
        if streams.post_reduce is not streams.reduce:
            streams.post_reduce.wait(streams.reduce.record())
        with _together(group.all_reduce_comm for group in packed if group.all_reduce_comm is not None):
            for group, grads in packed.items():
                group.reduce_over_replicas(grads)

    def _retire(self, but: int) -> None:
        """Give back the buffers of all but the newest `but` buckets of reductions, once those have run."""
        while len(self._in_flight) > but:
            self._in_flight.popleft()[1].release()

    def _end_backward(self) -> None:
        """Reduce what is left (parameters without a gradient kept their groups waiting), and let compute see it all."""
        self._end_queued = False
        with ranged("FSDP::root_post_backward_callback"):
            self._finish_backward()

    def _finish_backward(self) -> None:
        for group in self.groups:
            if group.has_gradients() or group.needs_reduction(group in self._reduced):
                self._enqueue(group)
        if self._to_reduce:
            self._reduce_waiting()
        self._reduced.clear()
        for group in self.groups:
            group.end_backward()
        if self.root.settings.is_last_backward:
            self.settle()

    def settle(self) -> None:
        """Let compute and the caller's stream see all reduced gradients, and give back what the reductions used."""
        self._retire(0)
        done = self.streams.post_reduce.record()
        self.streams.compute.wait(done)
        comm.current_stream(self.streams.device).wait(done)  # where the optimizer runs
        if any(group.offloads for group in self.groups):
            self.streams.synchronize()  # the optimizer reads the gradients on the host, whatever the streams do

    def reset(self) -> None:
        """Forget a failed iteration: everything under way is waited for, everything is sharded again."""
        self._end_queued = False
        self.streams.recover()
        self._to_reduce.clear()
        self._to_reduce_nbytes = 0
        self._reduced.clear()
        self._retire(0)
        for group in self.groups:
            if group.settings.reduce_hook_stream is not None:
                group.settings.reduce_hook_stream.recover()
        for group in self.groups:
            group.reset()


@contextmanager
def _together(comms: Iterable[comm.Communicator]) -> Iterator[None]:
    """Make the calls of the `with` block on each of these communicators one."""
    with ExitStack() as stack:
        for communicator in dict.fromkeys(comms):
            stack.enter_context(communicator.group())
        yield
