"""What the groups under one root share: streams, memory, and the size of a bucket."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ... import comm
from .buffers import CommBuffer, MemoryCounter

# Groups that follow each other in the order of use, and are no larger than this together, form a bucket: they are gathered and
# reduced in one go.
# Cost: as many bytes of buffers at most. The cost of a small collective is mostly waiting for the other ranks, and Python code
# that has left the caches: a hundred small ones in a row cost little more than ten.
BUCKET_BYTES = 1 << 20


class Streams:
    """The streams of a root. Gathers and reductions run beside compute; gradients are published on `post_reduce`.

    `post_reduce` is the reduce stream itself, unless there are replicas to reduce over as well.
    """

    device: torch.device
    gather: comm.Stream
    reduce: comm.Stream
    post_reduce: comm.Stream
    _host_compute: comm.Stream | None  # the host's; None on other devices, where it may change
    packed_on: dict[comm.Stream, None]  # streams that packed gradients; written by pack_grads() and Runtime.settle()

    def __init__(self, device: torch.device, *, replicas: bool) -> None:
        self.device = device
        self._host_compute = comm.current_stream(device) if device.type == "cpu" else None
        self.gather = comm.world().stream_for("gather")
        self.reduce = comm.world().stream_for("reduce")
        self.post_reduce = comm.world().stream_for("all_reduce") if replicas else self.reduce
        self.packed_on = {}

    @property
    def compute(self) -> comm.Stream:
        """The stream that is current: the user may call each module on another one.

        In a backward, autograd makes the stream of each node's forward current. Cost: 2 us on CUDA.
        """
        return self._host_compute or comm.current_stream(self.device)

    def begin(self, optimizer_done: comm.Event | None = None) -> None:
        """An iteration starts on the caller's current stream; gathers read the shards as last written there.

        optimizer_done: the event after which the shards are written, if the caller has a more exact one.
        """
        self.gather.wait(self.compute.record() if optimizer_done is None else optimizer_done)

    def synchronize(self) -> None:
        """Block until the gather and reduce streams have run everything."""
        for stream in (self.gather, self.reduce, self.post_reduce):
            stream.synchronize()

    def recover(self) -> None:
        """Block until the gather and reduce streams have run everything, and forget what failed on them."""
        for stream in (self.gather, self.reduce, self.post_reduce):
            stream.recover()


class Context(ABC):
    """What the groups under one root share. The root's `Runtime` is one; of that, groups use only what is declared here."""

    streams: Streams
    memory: MemoryCounter  # of all buffers of the groups
    pool: comm.Pool | None  # from which full parameters are allocated
    recorded: bool  # the forward that ended last, of any module, has made nodes of a graph; set by `hooks` and a `Runtime`
    # What a forward had left gathered was freed since shards were written: a graph may refer to it. Written by free_stale()
    # and a `Runtime`, on all ranks alike.
    replaced: bool
    _comm_buffer: CommBuffer | None  # written by make_comm_buffer()

    def __init__(self, device: torch.device, *, replicas: bool) -> None:
        self.memory = MemoryCounter()
        self.pool = comm.new_pool(device)
        self.streams = Streams(device, replicas=replicas)
        self.recorded = self.replaced = False
        self._comm_buffer = None

    @property
    @abstractmethod
    def is_left(self) -> bool:
        """Whether a backward has run whose end is left to finalize_backward()."""

    @staticmethod
    def is_large(nbytes: int) -> bool:
        """Whether a group of this size fills a bucket by itself."""
        return nbytes > BUCKET_BYTES

    def sends_from_comm_buffer(self, nbytes: int, *, symmetric: bool) -> bool:
        """Whether a group of `nbytes` reduces from the `CommBuffer`. Small ones do not: several may be in flight at a time.

        symmetric: the group has asked for NCCL's symmetric windows. Without them NCCL gains nothing from registered memory, so
        on GPUs packed gradients lie in memory of torch's allocator. On the host, ranks read each other's memory, and to map
        new pages each time would cost more than all else.
        """
        return self.is_large(nbytes) and (symmetric or not self._on_gpu)

    @property
    def _on_gpu(self) -> bool:
        """Whether the streams are a GPU's, or stand for a GPU's in a dry world, where only the host's do not overlap."""
        device = self.streams.device.type
        return device == "cuda" or (device == "meta" and self.streams.reduce.overlaps)

    def make_comm_buffer(self, reducer: comm.Communicator, nbytes: int, *, symmetric: bool) -> None:
        """Make the memory from which `reducer` reads packed gradients of large groups without a copy. Collective."""
        self._comm_buffer = CommBuffer.of(reducer, nbytes, symmetric=symmetric) if nbytes else None

    def comm_buffer_for(self, nbytes: int, *, symmetric: bool) -> CommBuffer | None:
        """The memory that make_comm_buffer() has made, for a group that sends from it; None for another group."""
        return self._comm_buffer if self.sends_from_comm_buffer(nbytes, symmetric=symmetric) else None
