"""How the parameters of one group lie on the ranks, and how they are gathered: the way from a group to the wire.

| step                | stream  | before -> after                                  | cost                                     |
|---------------------|---------|--------------------------------------------------|------------------------------------------|
| launch              | gather  | this rank's shards (S,) -> full (N * S,)         | 1 all-gather, (N - 1) * S bytes          |
| fill_unsharded      | compute | full -> the unsharded parameters                 | nothing: they are views of full          |
| keep_part           | gather  | 1 / k of full is copied to a post-forward shard  | that part copied                         |
| launch_part         | gather  | post-forward shards of k ranks -> full           | 1 all-gather among k neighbouring ranks  |
| release             | gather  | full is freed, after all that has read it        | no communication                         |

Legend: N ranks; S bytes in a segment of the layout; k ranks that share a post-forward shard.
A single rank fills the buffer by itself.
A group is given one of four strategies: `FlatGather` here, `mapped.MappedGather`, which copies nothing within a node,
`coded.QuantizedGather`, which sends codes, or `extension.ExtensionGather` for a parameter whose own methods define what is
gathered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import ClassVar

import torch

from ...comm import Communicator, DeviceMesh, Pool, Stream, Work
from ...kernels import pack_into
from ...kernels.reference import BLOCK
from ..base.events import BufferKind, HasName
from ..base.policy import CPUOffloadPolicy, Policies, StepSettings
from ..memory.buffers import BufferMaker, CommBuffer, FlatBuffer
from ..memory.context import Context
from ..params.layout import ALIGNMENT, Layout, ParamSpec, round_up
from ..params.param import ShardedParam, local_geometry, placement_of
from ..params.planner import plan

AllGather = Callable[[torch.Tensor, torch.Tensor, Communicator, Stream], Work]
Pair = tuple[torch.Tensor, torch.Tensor]  # gathered bytes, and what this rank sends


def subgroup(mesh: DeviceMesh, ranks: int) -> Communicator:
    """The communicator of this rank and its neighbours on the mesh, `ranks` in all. Collective the first time."""
    return mesh.unflatten((mesh.size // ranks, ranks), ("across", "within"))["within"].communicator("gather")


class PostForwardShard:
    """A k-th of each gathered buffer, kept after forward such that k neighbouring ranks together have all of them."""

    buffer: FlatBuffer
    _comm: Communicator  # of this rank and its neighbours
    _gathered: Sequence[torch.Tensor]  # bytes of the gathered buffers
    _kept: list[torch.Tensor]  # views of `buffer`, one for each gathered buffer
    _sources: list[torch.Tensor]  # the parts of the gathered buffers that are kept

    def __init__(self, ranks: int, mesh: DeviceMesh, gathered: Sequence[torch.Tensor], buffers: BufferMaker) -> None:
        self._comm = subgroup(mesh, ranks)
        self._gathered = gathered
        position, sizes = mesh.rank % ranks, [full_bytes.numel() // ranks for full_bytes in gathered]
        self.buffer = buffers.make(BufferKind.POST_FORWARD, sum(sizes))
        self._kept = [
            self.buffer.view(torch.uint8, end - size, (size,)) for size, end in zip(sizes, accumulate(sizes), strict=True)
        ]
        self.buffer.seal()
        self._sources = [full_bytes.narrow(0, position * size, size) for full_bytes, size in zip(gathered, sizes, strict=True)]

    def fill(self) -> None:
        """Copy the shard out of the gathered buffers."""
        self.buffer.allocate()
        for kept, source in zip(self._kept, self._sources, strict=True):
            kept.copy_(source)

    def gather(self, stream: Stream) -> Work:
        """All-gather the gathered buffers from the post-forward shards of the neighbouring ranks."""
        for full_bytes, kept in zip(self._gathered, self._kept, strict=True):
            work = self._comm.all_gather(full_bytes, kept, stream=stream)
        return work


class Gather(ABC):
    """Shards the parameters of one group over the ranks of a 1-D mesh, and gathers them.

    The constructor, which every rank calls, plans the layout and keeps this rank's shards; `attach` makes the buffers.
    Invariant: `full` is allocated and released on the gather stream only.
    """

    windowed: ClassVar[bool]  # what is gathered may go through a symmetric window
    params: Sequence[ShardedParam]
    mesh: DeviceMesh
    comm: Communicator
    layout: Layout
    offloads: bool  # the shards are on the host, the mesh on another device
    resident: bool  # the modules compute with the shards' own memory: a step copies and frees nothing; written by attach()
    full: FlatBuffer  # what is gathered; written by attach()
    needs_launch: bool  # launch() does something: something is gathered, or the ranks meet; written by attach()
    custom: AllGather | None  # what gathers instead of `comm.all_gather`; written by attach()
    _policies: Policies
    _settings: StepSettings  # written by attach()
    _buffers: BufferMaker  # written by attach()
    _pool: Pool | None  # written by attach()
    _dtypes: list[torch.dtype]  # in which the parameters are gathered
    _fills: bool  # a gather first copies the shards to where it sends from
    _pairs: Sequence[Pair]  # written by attach()
    _parts: dict[int, PostForwardShard]  # by the number of ranks that share
    _part: PostForwardShard  # the one that was filled last; written by keep_part()

    def __init__(
        self,
        params: Sequence[ShardedParam],
        device_mesh: DeviceMesh,
        mesh: DeviceMesh,
        policies: Policies,
    ) -> None:
        self.params = params
        self.mesh = mesh
        self.comm = mesh.communicator("gather")
        self.offloads = policies.offload.applies_to(mesh.device)
        self.custom, self.resident, self.needs_launch = None, False, True
        self._policies = policies
        self._dtypes = [policies.mixed_precision.compute_dtype(param.dtype) for param in params]
        self._pairs = ()
        self._parts = {}
        specs = [
            ParamSpec(param.name, tuple(param.shape), dtype.itemsize, param.dim, rows_only=param.rows_only)
            for param, dtype in zip(params, self._dtypes, strict=True)
        ]
        self.layout = self._plan(specs)
        self._fills = self._shard(device_mesh)

    @abstractmethod
    def _plan(self, specs: Sequence[ParamSpec]) -> Layout:
        """Plan which rank keeps what of the parameters."""

    @abstractmethod
    def _shard(self, device_mesh: DeviceMesh) -> bool:
        """Keep this rank's shards of the parameters and register them. Returns: `_fills`."""

    @property
    @abstractmethod
    def on_meta(self) -> bool:
        """Whether the shards are on the meta device, and so have no values yet."""

    @property
    @abstractmethod
    def shard_nbytes(self) -> int:
        """Bytes of this rank's shards, padding included."""

    @property
    def may_be_resident(self) -> bool:
        """Whether the modules may compute with the shards, unless a custom all-gather makes something else."""
        return False

    def _become_resident(self) -> bool:
        """Let the modules compute with the shards' own memory, if they can. Collective."""
        return False

    @property
    def joint(self) -> bool:
        """Whether its collectives may be launched together with other groups': nothing reads at once what they gather."""
        return self.custom is None and not self.is_local

    @property
    def is_local(self) -> bool:
        """Whether a gather needs no collective: a single rank copies, or casts, its shards."""
        return self._fills and self.comm.size == 1 and self.custom is None

    @property
    def shard_device(self) -> torch.device:
        """Where the shards are, once they have values."""
        return torch.device("cpu") if self.offloads else self.mesh.device

    def check_ready(self, name: str) -> None:
        """Raise RuntimeError, which names the group, if the parameters have no values yet."""
        if self.on_meta and self.mesh.device.type != "meta":
            raise RuntimeError(
                f"'{name}' runs while its parameters are on the meta device (rank {self.mesh.rank}): call to_empty() and "
                "initialise them, or load a state dict"
            )

    def attach(self, context: Context, settings: StepSettings, window: AllGather | None, group: HasName) -> None:
        """Make the buffers, and everything that a step only replays.

        window: an all-gather through a symmetric window, if the group has one.   group: for its name.
        """
        self._settings = settings
        self.custom = window or settings.all_gather
        self.resident = self.custom is None and self._become_resident()
        self.needs_launch = not self.resident or self.mesh.size > 1
        self._buffers = BufferMaker(self.mesh.device, context.memory, group)
        self._pool = (settings.comm_memory and self.comm.pool()) or context.pool
        self.full, self._pairs = self._make_full(settings)
        try:
            self._make_unsharded(context, group)
        except BaseException:  # views that were made would keep its memory
            self.full.release()
            self.full.seal()
            raise

    @abstractmethod
    def _make_full(self, settings: StepSettings) -> tuple[FlatBuffer, list[Pair]]:
        """Make the buffer to gather into, and its views. Returns: `full`, `_pairs`."""

    @abstractmethod
    def _make_unsharded(self, context: Context, group: HasName) -> None:
        """Make the unsharded parameters, and free `full` until the first gather."""

    def detach(self, stream: Stream) -> None:
        """Give the buffers up; nothing is gathered at the moment. stream: the gather stream."""
        self.drop_part(stream)
        self._parts.clear()
        if self._pairs:  # attach() has made it; its memory may have been kept
            stream.submit(self.full.release)

    def launch(self, stream: Stream, *, keeps: bool) -> Work:
        """Gather the shards into `full`. keeps: what is gathered is kept beyond the root's forward or backward."""
        stream.submit(self.full.allocate)
        return self._gather_shards(stream)

    def launch_part(self, stream: Stream) -> Work:
        """Gather the post-forward shards that keep_part() has filled, which are freed, into `full`."""
        stream.submit(self.full.allocate)
        work = self._part.gather(stream)
        self.drop_part(stream)
        return work

    def _gather_shards(self, stream: Stream) -> Work:
        """Gather the shards of all ranks into `full`."""
        if self._fills:
            stream.submit(self._fill_own)
        if self.is_local:
            return Work(stream.record())
        for full_bytes, own_bytes in self._pairs:
            if self.custom is None:
                work = self.comm.all_gather(full_bytes, own_bytes, stream=stream)
            else:
                work = self.custom(full_bytes, own_bytes, self.comm, stream)
        return work

    @abstractmethod
    def _fill_own(self) -> None:
        """Copy this rank's shards to where the all-gather sends from. On the gather stream."""

    @abstractmethod
    def fill_unsharded(self, stream: Stream) -> None:
        """Make the unsharded parameters of what was gathered, on `stream`, the current one; or let it wait if another has."""

    def release(self, stream: Stream, readers: Iterable[Stream]) -> None:
        """Free what was gathered, on the gather stream. If the settings keep its memory, it may be written again.

        Hazard: its readers, the streams on which it was used, may still run: its memory must outlive that.
        """
        for reader in readers:
            stream.wait(reader.record())
        if not self._settings.keep_storage:
            stream.submit(self.full.release)

    @property
    def is_paused(self) -> bool:
        """Whether what stays gathered has to be resumed before it is read."""
        return False

    def pause(self, *, reads_late: bool = False) -> None:
        """What stays gathered is not read until resume(). reads_late: code around the modules may, until the next pause()."""
        return None

    def resume(self, stream: Stream, *, keeps: bool) -> Work:
        """What has stayed gathered is read again, once the Work is done. Only if it is paused. keeps: as for launch()."""
        raise AssertionError("it is never paused")

    def keep(self, stream: Stream) -> None:
        """What is gathered is kept from now on, as if it had been launched so. After fill_unsharded(), on its stream."""
        return None

    def wait_for_readers(self) -> bool:
        """Wait until this rank's shards may be written: no other rank reads them. Returns: False if this one does."""
        return True

    def keep_part(self, ranks: int, stream: Stream) -> None:
        """Fill a post-forward shard, from which this rank and its neighbours, `ranks` in all, gather next time."""
        if ranks not in self._parts:
            gathered = [full_bytes for full_bytes, _ in self._pairs]
            self._parts[ranks] = PostForwardShard(ranks, self.mesh, gathered, self._buffers)
        self._part = self._parts[ranks]
        stream.submit(self._part.fill)

    def drop_part(self, stream: Stream) -> None:
        """Free the post-forward shard, on the gather stream. No-op if there is none."""
        for part in self._parts.values():
            stream.submit(part.buffer.release)


class FlatGather(Gather):
    """All parameters of a group in one flat buffer, of which every rank keeps one segment.

    The unsharded parameters are views of the buffer: nothing is copied out.
    """

    windowed = True
    _casts: bool  # some parameters are gathered in another dtype than their own
    _flat_shard: torch.Tensor  # bytes of this rank's shards; without casts (S,), and what the all-gather sends
    _locals: list[torch.Tensor]  # views of it, one for each parameter
    _own_views: list[torch.Tensor]  # where _fill_own() copies them; written by attach()

    def _plan(self, specs: Sequence[ParamSpec]) -> Layout:
        # Quantised gathers and reductions cut both segments and parameters into whole blocks.
        alignment = BLOCK * self._dtypes[0].itemsize if self._policies.quantization else ALIGNMENT
        return plan(specs, self.mesh.size, alignment)

    def _shard(self, device_mesh: DeviceMesh) -> bool:
        """Keep this rank's part of every parameter, in one flat storage.

        Without casts that storage has the layout of the segment, so it is what the all-gather sends.
        """
        rank = self.mesh.rank
        self._casts = any(param.dtype != dtype for param, dtype in zip(self.params, self._dtypes, strict=True))
        offsets, nbytes = self._place_own()
        self._flat_shard = self._allocate(nbytes)
        storage = self._flat_shard.untyped_storage()
        self._locals = []
        for index, param in enumerate(self.params):
            shape, stride = local_geometry(param.shape, placement_of(index, self.layout), rank)
            local = torch.empty(0, dtype=param.dtype, device=self._flat_shard.device)
            local.set_(storage, offsets[index] // param.dtype.itemsize, shape, stride)
            param.shard(param.spec(index, self.layout, device_mesh), local)
            self._locals.append(local)
        return self._casts or self.offloads

    def _place_own(self) -> tuple[list[int], int]:
        """Where in `_flat_shard` this rank's part of each parameter begins, and its size; both in bytes."""
        ranges = [self.layout.owned(index, self.mesh.rank) for index in range(len(self.params))]
        if not self._casts:
            return [owned.offset for owned in ranges], self.layout.segment_nbytes
        end, offsets = 0, []
        for param, owned in zip(self.params, ranges, strict=True):
            offsets.append(end)
            end += round_up((owned.stop - owned.start) * param.dtype.itemsize, ALIGNMENT)
        return offsets, end

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if any(param.original.is_meta for param in self.params):  # then all are: a mix was refused
            return torch.empty(nbytes, dtype=torch.uint8, device="meta")
        if not self.offloads:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.mesh.device)
        assert isinstance(self._policies.offload, CPUOffloadPolicy)
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu", pin_memory=self._policies.offload.pin_memory)

    @property
    def on_meta(self) -> bool:
        return self._flat_shard.is_meta

    @property
    def shard_nbytes(self) -> int:
        return self._flat_shard.numel()

    def _make_full(self, settings: StepSettings) -> tuple[FlatBuffer, list[Pair]]:
        nbytes, custom, device = self.layout.nbytes, settings.all_gather, self.mesh.device
        if custom is None:
            full = self._buffers.make(BufferKind.GATHERED, nbytes, pool=self._pool)
        else:
            comm_buffer = CommBuffer.given(custom.allocate(nbytes, device), nbytes, device, self._buffers.group.name)
            full = self._buffers.make_in(comm_buffer, BufferKind.GATHERED, nbytes)
        size = self.layout.segment_nbytes
        own_bytes = full.view(torch.uint8, self.mesh.rank * size, (size,)) if self._fills else self._flat_shard
        return full, [(full.view(torch.uint8, 0, (nbytes,)), own_bytes)]

    def _make_unsharded(self, context: Context, group: HasName) -> None:
        for index, (param, dtype) in enumerate(zip(self.params, self._dtypes, strict=True)):
            param.make_unsharded(self.full, self.layout.placed[index].offset, dtype)
        self._make_own_views()
        self.full.seal()

    def _make_own_views(self) -> None:
        """Make what a gather needs beside `full`, which is not sealed yet."""
        self._own_views = [own_bytes for _, own_bytes in self._pairs]
        if self._casts:
            self._own_views = self._views_of_own(self.full, self.mesh.rank * self.layout.segment_nbytes)

    def _views_of_own(self, buffer: FlatBuffer, first: int) -> list[torch.Tensor]:
        """Where this rank's shards are gathered from, in a buffer that has its segment from byte `first` on."""
        return [
            buffer.view(dtype, first + self.layout.owned(index, self.mesh.rank).offset, local.shape, local.stride())
            for index, (local, dtype) in enumerate(zip(self._locals, self._dtypes, strict=True))
        ]

    def _fill_own(self) -> None:
        pack_into(self._own_views, self._locals if self._casts else [self._flat_shard])

    def fill_unsharded(self, stream: Stream) -> None:
        """No-op: the unsharded parameters are views of what was gathered."""
