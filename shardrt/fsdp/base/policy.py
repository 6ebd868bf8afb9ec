"""Policies and settings as data.

Policies are given once: they are frozen, and validated when they are made. What setters change later is in `StepSettings` (of a
group) and `RootSettings` (of a root).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Protocol

import torch

from ...comm import Communicator, DeviceMesh, Event, Op, Stream, Work
from ...kernels.reference import BLOCK
from ...tensor.placement.placement import Shard
from .two_levels import neighbours


@dataclass(frozen=True, slots=True)
class MixedPrecisionPolicy:
    """The dtypes in which a group computes, reduces and returns outputs. None keeps the dtype that is there.

    param_dtype: that of the gathered parameters, hence of compute and of the gradients autograd makes.
    reduce_dtype: that in which gradients are accumulated and reduced (default: param_dtype, else the parameters' own).
    output_dtype: that to which floating-point outputs of the module's forward are cast.
    cast_forward_inputs: cast floating-point inputs of the module's forward to param_dtype.
    Raises ValueError for a dtype that is not floating-point.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter of `dtype` is gathered. Integers and complex numbers are not cast."""
        return self.param_dtype if self.param_dtype is not None and dtype.is_floating_point else dtype

    def reduction_dtype(self, dtypes: Iterable[torch.dtype]) -> torch.dtype:
        """The dtype in which the gradients of parameters of these dtypes are accumulated and reduced together."""
        own = reduce(torch.promote_types, [self.compute_dtype(dtype) for dtype in dtypes])
        return self.reduce_dtype if self.reduce_dtype is not None and not own.is_complex else own

    def __post_init__(self) -> None:
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            dtype = getattr(self, name)
            if dtype is not None and not dtype.is_floating_point:
                raise ValueError(f"MixedPrecisionPolicy({name}={dtype}): expected a floating-point dtype or None")


@dataclass(frozen=True, slots=True)
class PrefetchPolicy:
    """How far to gather ahead of use. Small groups that are gathered in one go count as one group.

    A small group beside a large one of the same module, such as the biases beside quantised matrices, counts as one with it.

    max_groups: how many groups may be gathered and not yet used at a time (default: two in forward, one in backward; none where
        gathers run on the caller's thread, as on the host by default, since they overlap nothing there).
    max_bytes: how many bytes of parameters may be gathered and not yet used at a time (default: no limit).
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
        """`max_groups`; if it is None, `default`, which is that of a forward or a backward."""
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
    a backward blocks the caller until the gradients are there. On a CPU mesh all of it is on the host anyway: no effect.
    pin_memory: page-locked host memory, which copies need to run beside compute.
    """

    pin_memory: bool = True

    def applies_to(self, device: torch.device) -> bool:
        return device.type != "cpu"


_CODES = {"gather": (torch.int8, torch.float8_e4m3fn), "reduce": (torch.int8,)}
_QUANTIZED = frozenset((torch.float32, torch.float16, torch.bfloat16))


@dataclass(frozen=True, slots=True)
class QuantizationPolicy:
    """Which collectives send 8-bit codes, with a float32 scale for each block of 256 elements. The default: none.

    It applies to parameters with two or more dims and at least `min_numel` elements (of the whole parameter, not of a shard)
    that are float32, float16 or bfloat16 and are gathered as one of these. Others are sent as they are; so are those with an
    all-gather extension, and those that a `shard_placement_fn` cuts between rows whose size is no multiple of 256 elements.
    gather: dtype of the codes of gathered parameters, int8 or float8_e4m3fn. Shards stay in full precision.
    reduce: dtype of the codes of gradients, int8.
    full_precision_ranks: how many neighbouring ranks reduce in full precision before codes are sent, whatever nodes they are on
        (default: the ranks of a node, if the mesh spans several nodes). It must divide the number of ranks sharded over. With
        replicas it may also be that number times a power of two that divides the number of replicas; then so many neighbouring
        replicas reduce in full precision too. On a mesh with no more ranks than this, all ranks reduce in full precision.
    Raises ValueError for other dtypes, for a number below 1, and for `full_precision_ranks` without `reduce`.
    """

    gather: torch.dtype | None = None
    reduce: torch.dtype | None = None
    min_numel: int = 1 << 16
    full_precision_ranks: int | None = None

    def __post_init__(self) -> None:
        for name, codes in _CODES.items():
            if getattr(self, name) not in (None, *codes):
                expected = ", ".join(map(str, (*codes, None)))
                raise ValueError(f"QuantizationPolicy({name}={getattr(self, name)!r}): expected one of {expected}")
        for name in ("min_numel", "full_precision_ranks"):
            number = getattr(self, name)
            if number is not None and (type(number) is not int or number < 1):
                raise ValueError(f"QuantizationPolicy({name}={number!r}): expected a whole number from 1 on")
        if self.full_precision_ranks is not None and self.reduce is None:
            raise ValueError("QuantizationPolicy(full_precision_ranks=...): it is about reductions; give reduce=torch.int8 too")

    def __bool__(self) -> bool:
        """Whether any collective is quantised."""
        return self.gather is not None or self.reduce is not None

    def takes(self, param: torch.Tensor, mp_policy: MixedPrecisionPolicy, placement: Shard | None) -> bool:
        """Whether the policy applies to this parameter, which may be a `DTensor`.

        placement: how it is cut between rows; None: it may be cut between elements.
        """
        if not self or param.dim() < 2 or param.numel() < self.min_numel or not _has_codes(param.dtype, mp_policy):
            return False
        # Cost: if rows are no whole blocks, cuts that respect both may be 256 rows apart: padding costs more than codes save.
        return placement is None or param.numel() // param.shape[placement.dim] % BLOCK == 0

    def of_group(self, dtypes: Iterable[torch.dtype], mp_policy: MixedPrecisionPolicy, mesh: DeviceMesh) -> QuantizationPolicy:
        """The part of the policy that applies to a group of parameters of these dtypes on `mesh`.

        mesh: of one axis, or two, of which the first replicates. On a single rank nothing is quantised, and gathers are not if
        the parameters are sharded over one rank. Nothing is quantised either after a `to()` that has given the parameters
        several dtypes, or one that has no codes.
        """
        found = set(dtypes)
        alike = len(found) == 1 and all(_has_codes(dtype, mp_policy) for dtype in found)
        if not alike or mesh.size == 1:
            return UNQUANTISED
        return self if mesh.shape[-1] > 1 else QuantizationPolicy(None, self.reduce)


UNQUANTISED = QuantizationPolicy()


def _has_codes(dtype: torch.dtype, mp_policy: MixedPrecisionPolicy) -> bool:
    return _QUANTIZED.issuperset((dtype, mp_policy.compute_dtype(dtype)))


class Policies(NamedTuple):
    """The policies of one `fully_shard` call."""

    mixed_precision: MixedPrecisionPolicy
    offload: OffloadPolicy
    quantization: QuantizationPolicy

    @classmethod
    def of(
        cls,
        mixed_precision: MixedPrecisionPolicy | None,
        offload: OffloadPolicy | None,
        quantization: QuantizationPolicy | None,
    ) -> Policies:
        """The given policies, with the default in the place of each None."""
        return cls(mixed_precision or MixedPrecisionPolicy(), offload or OffloadPolicy(), quantization or UNQUANTISED)

    def check(self) -> None:
        """Raise TypeError for a policy of another class, ValueError for policies that contradict each other."""
        kinds = {"mp_policy": MixedPrecisionPolicy, "offload_policy": OffloadPolicy, "quantization_policy": QuantizationPolicy}
        for given, (name, kind) in zip(self, kinds.items(), strict=True):
            if not isinstance(given, kind):
                raise TypeError(f"fully_shard({name}={given!r}): expected a shardrt.{kind.__name__} or None")
        dtype = self.mixed_precision.reduce_dtype
        if self.quantization.reduce is not None and dtype is torch.float64:
            raise ValueError(
                f"QuantizationPolicy(reduce={self.quantization.reduce}) with MixedPrecisionPolicy(reduce_dtype={dtype}): codes "
                "are made of 16 or 32 bits; choose float32, or leave one of the two out"
            )

    def takes(self, param: torch.Tensor, mesh: DeviceMesh, placement: Shard | None) -> bool:
        """Whether this parameter on `mesh` is quantised. Raises ValueError if it is, and the policy does not fit the mesh."""
        taken = self.quantization.takes(param, self.mixed_precision, placement)
        if taken and self.quantization.full_precision_ranks is not None:
            neighbours(mesh, self.quantization.full_precision_ranks)
        return taken


@dataclass(frozen=True, slots=True)
class ShardPlacementResult:
    """What a `shard_placement_fn` may return: the dim to cut along (None: as without the function), and the mesh."""

    placement: Shard | None
    mesh: DeviceMesh


@dataclass(frozen=True, slots=True)
class DataParallelMeshDims:
    """The names of the axes of a larger mesh that `fully_shard` shards over, and of those that it replicates over.

    Several axes are taken as one. Along axes that are not named, each rank has parameters of its own.
    Raises ValueError if no axis is named.
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
        """The part of `mesh` with these axes: a mesh of one axis to shard over, or of two, of which the first replicates.

        Raises ValueError if `mesh` lacks one of the axes, or does not have those to replicate over before those to shard over.
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
    """An all-gather of the user's, as `set_custom_all_gather` takes it."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory for the gathered parameters of a group. Called when buffers are made.

        Returns: a contiguous (nbytes,) uint8 tensor on `device`, aligned to 16 bytes.
        """

    def __call__(self, out: torch.Tensor, inp: torch.Tensor, comm: Communicator, stream: Stream) -> Work:
        """Gather bytes as `comm.all_gather(out, inp, stream=stream)` does."""


class CustomReduceScatter(Protocol):
    """A reduce-scatter of the user's, as `set_custom_reduce_scatter` takes it."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        """Memory for the packed gradients of a group. Called when buffers are made.

        Returns: a contiguous (nbytes,) uint8 tensor on `device`, aligned to 16 bytes.
        """

    def __call__(self, out: torch.Tensor, inp: torch.Tensor, op: Op, comm: Communicator, stream: Stream) -> Work:
        """Reduce as `comm.reduce_scatter(out, inp, op, stream=stream)` does.

        op: the one that FSDP2 gives: AVG, or PreMulSum for a divide factor other than the number of shard ranks. SUM for
        float16 gradients, divided before and after, and with `set_force_sum_reduction_for_comms`, which divides after.
        """


@dataclass(slots=True)
class StepSettings:
    """A group's settings, which the setters of `FSDPModule` change, and `unsharded` for a while. They are read at each use."""

    reshard_after_forward: bool | int | None
    sync_gradients: bool = True
    all_reduce: bool = True  # over the replicas, after the reduce-scatter
    reshard_after_backward: bool = True
    keep_storage: bool = False  # of gathered parameters, while they are sharded
    unshard_in_backward: bool = True
    divide_factor: float | None = None  # of the summed gradients; None: the number of ranks that are reduced over
    force_sum: bool = False
    reduce_unused: bool = False
    may_be_skipped: bool = False  # some ranks may not run its modules; then reduce_unused is set as well
    reduce_hook: Callable[[torch.Tensor], None] | None = None
    reduce_hook_stream: Stream | None = None  # None: the stream that reduced
    comm_memory: bool = False  # gather into memory that the communicator has registered
    symmetric: bool = False  # gather through, and reduce from, symmetric windows
    all_gather: CustomAllGather | None = None
    reduce_scatter: CustomReduceScatter | None = None
    reductions_in_flight: int = 1  # the largest value of any group holds for all groups under a root


@dataclass(slots=True)
class RootSettings:
    """Settings of a whole iteration, which the setters of `FSDPModule` change. The root's group has them."""

    prefetch: PrefetchPolicy = PrefetchPolicy()
    is_last_backward: bool = True
    finalizes_by_hand: bool = False  # finalize_backward() ends backwards; then `is_last_backward` has no effect
    post_optim_event: Event | None = None  # holds for one iteration
    stages: Communicator | None = None  # the ranks that have the other stages, if the root is one of a pipeline

    def take_post_optim_event(self) -> Event | None:
        """Take the event for which the iteration that begins waits, if any. Later iterations do not wait for it."""
        event, self.post_optim_event = self.post_optim_event, None
        return event
