"""Strategy as data. What is given once is frozen, and validated when it is made; what setters change is in `Settings`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Protocol

import torch

from ..comm import Communicator, DeviceMesh, Event, Op, Stream, Work
from ..tensor.placement import Shard


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """In which dtypes a group computes, reduces and returns. None keeps what is there.

    param_dtype: of the gathered parameters, hence of compute and of the gradients autograd makes.
    reduce_dtype: in which gradients are accumulated and reduced (default: param_dtype, else the parameters' own).
    output_dtype: to which floating-point outputs of the module's forward are cast.
    cast_forward_inputs: cast floating-point inputs of the module's forward to param_dtype.
    Raises ValueError for a dtype that is not floating-point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """In which a parameter of `dtype` is gathered: integers stay what they are."""
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def reduction_dtype(self, dtypes: Iterable[torch.dtype]) -> torch.dtype:
        """In which the gradients of parameters of these dtypes are accumulated and reduced together."""
        return self.reduce_dtype or reduce(torch.promote_types, [self.compute_dtype(dtype) for dtype in dtypes])

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"MixedPrecisionPolicy({name}={dtype}): expected a floating-point dtype or None")


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """How far to gather ahead of use. Small groups that are gathered in one go count as one.

    max_groups: gathered and not yet used at a time (default: two in forward, one in backward).
    max_bytes: of gathered and not yet used parameters at a time (default: no limit).
    Raises ValueError for a negative number.
    """

    max_bytes: int | None = None
    max_groups: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_bytes", "max_groups"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"PrefetchPolicy({name}={value}): expected a number >= 0 or None")

    def groups(self, default: int) -> int:
        """`max_groups`, or the default of a pass."""
        return default if self.max_groups is None else self.max_groups


@dataclass(frozen=True, slots=True)
class OffloadPolicy:
    """Nothing is offloaded."""

    def applies_to(self, device: torch.device) -> bool:
        """Whether shards are kept on another device than this one, the mesh's."""
        return False


@dataclass(frozen=True, slots=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Shards, their gradients, and so the optimizer's state lie on the host; gathered parameters on the mesh's device.

    Cost: every gather copies this rank's segment to the device, every reduction copies it back, beside compute; the end of
    a backward blocks the caller until the gradients are there. On a CPU mesh all of it is on the host anyway: a no-op.
    pin_memory: page-locked host memory, which copies need to run beside compute.
    """

    pin_memory: bool = True

    def applies_to(self, device: torch.device) -> bool:
        return device.type != "cpu"


@dataclass(frozen=True, slots=True)
class ShardPlacementResult:
    """What a `shard_placement_fn` may return: a dim to cut along (None: as without the function), and over which mesh."""

    placement: Shard | None
    mesh: DeviceMesh


@dataclass(frozen=True, slots=True)
class DataParallelMeshDims:
    """Which axes of a larger mesh, by name, `fully_shard` shards over and which it replicates over; one of both at least.

    Several are taken as one axis. Axes that are not named take no part: this rank's parameters are its own along them.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise ValueError("DataParallelMeshDims(): name at least one axis, in shard or in replicate")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The axes to shard over."""
        return _names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """The axes to replicate over."""
        return _names(self.replicate)

    def of(self, mesh: DeviceMesh) -> DeviceMesh:
        """The part of `mesh` with these axes, as `fully_shard` takes it: of one axis to shard over, or of two.

        Raises ValueError for axes that `mesh` has not, or not in this order, those to replicate over before the others.
        """
        names = (*self.replicate_names, *self.shard_names)
        if [name for name in mesh.axis_names if name in names] != list(names):
            raise ValueError(
                f"dp_mesh_dims={self} of {mesh}: expected axes in the mesh's order, those to replicate over before those to "
                "shard over"
            )
        part = mesh[names]
        if not self.replicate_names:
            return part.flatten()
        shards = math.prod(part.shape[len(self.replicate_names) :])
        both = ("_".join(self.replicate_names), "_".join(self.shard_names) or f"{'_'.join(self.replicate_names)}_shard")
        return part.unflatten((part.size // shards, shards), both)


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (axes,) if isinstance(axes, str) else tuple(axes or ())


class CustomAllGather(Protocol):
    """What `set_custom_all_gather` takes."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory for the gathered parameters of a group, a (nbytes,) uint8 tensor. Called when buffers are made."""

    def __call__(self, out: torch.Tensor, inp: torch.Tensor, comm: Communicator, stream: Stream) -> Work:
        """Gather bytes as `comm.all_gather(out, inp, stream=stream)` does."""


class CustomReduceScatter(Protocol):
    """What `set_custom_reduce_scatter` takes."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory for the packed gradients of a group, a (nbytes,) uint8 tensor. Called when buffers are made."""

    def __call__(self, out: torch.Tensor, inp: torch.Tensor, op: Op, comm: Communicator, stream: Stream) -> Work:
        """Reduce as `comm.reduce_scatter(out, inp, op, stream=stream)` does."""


@dataclass(slots=True)
class Settings:
    """What the setters of `FSDPModule` change in a group, and `unsharded` for a while. Read at the next use."""

    reshard_after_forward: bool | int | None
    sync_gradients: bool = True
    all_reduce: bool = True  # over the replicas, after the reduce-scatter
    reshard_after_backward: bool = True
    unshard_in_backward: bool = True
    divide_factor: float | None = None  # None: the number of ranks that are reduced over
    force_sum: bool = False
    reduce_unused: bool = False
    reduce_hook: Callable[[torch.Tensor], None] | None = None
    reduce_hook_stream: Stream | None = None  # None: the one that reduced
    comm_memory: bool = False  # gather into memory that the communicator has registered
    symmetric: bool = False  # gather through, and reduce from, symmetric windows
    all_gather: CustomAllGather | None = None
    reduce_scatter: CustomReduceScatter | None = None
    reductions_in_flight: int = 1  # the largest number of any group holds for all groups of a root


@dataclass(slots=True)
class RootSettings:
    """What the setters of `FSDPModule` change for a whole iteration. The root's group has them."""

    prefetch: PrefetchPolicy = PrefetchPolicy()
    is_last_backward: bool = True
    free_gradients: bool = False  # between zero_grad() and the next backward
    post_optim_event: Event | None = None  # holds for one iteration

    def take_post_optim_event(self) -> Event | None:
        """The event of the iteration that begins, which no later one waits for."""
        event, self.post_optim_event = self.post_optim_event, None
        return event
