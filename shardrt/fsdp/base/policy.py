"""Strategy as data. What is given once is frozen, and validated when it is made; what setters change is in `StepSettings`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple, Protocol

import torch

from ...comm import Communicator, DeviceMesh, Event, Op, Stream, Work
from ...kernels.reference import BLOCK
from ...tensor.placement import Shard
from .two_levels import neighbours


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

    So does a small group beside a large one of the same module, such as the biases beside quantised matrices.

    max_groups: gathered and not yet used at a time (default: two in forward, one in backward; none where gathers run on the
        caller's thread, as on the host by default, since they overlap nothing there).
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


_CODES = {"gather": (torch.int8, torch.float8_e4m3fn), "reduce": (torch.int8,)}
_QUANTIZED = frozenset((torch.float32, torch.float16, torch.bfloat16))


@dataclass(frozen=True, slots=True)
class QuantizationPolicy:
    """Which collectives send 8-bit codes, with a float32 scale for each block of 256 elements. The default: none.

    It holds for parameters of two and more dims and at least `min_numel` elements, the whole parameter counted, that are
    float32, float16 or bfloat16 and are gathered as one of these. Others stay whole; so do those with an all-gather extension,
    and those that a `shard_placement_fn` has cut between rows that are no multiple of 256 elements.
    gather: the codes of gathered parameters, int8 or float8_e4m3fn. Shards stay in full precision.
    reduce: the codes of gradients, int8.
    full_precision_ranks: so many neighbouring ranks reduce in full precision before codes are sent, on whatever nodes they are
        (default: those of a node, if the mesh spans several nodes). A divisor of the ranks sharded over; or, with replicas, a
        multiple of them by a power of two, which reduces as many neighbouring replicas in full precision too. On a mesh with
        no more ranks than that, all reduce in full precision.
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
        """Some collective is quantised."""
        return self.gather is not None or self.reduce is not None

    def takes(self, param: torch.Tensor, mp_policy: MixedPrecisionPolicy, placement: Shard | None) -> bool:
        """Whether it holds for this parameter, which may be a `DTensor`. placement: None: it may be cut between elements."""
        if not self or param.dim() < 2 or param.numel() < self.min_numel or not _has_codes(param.dtype, mp_policy):
            return False
        # Cost: cuts between both rows and blocks could be 256 rows apart, which pads more bytes than codes save.
        return placement is None or param.numel() // param.shape[placement.dim] % BLOCK == 0

    def of_group(self, dtypes: Iterable[torch.dtype], mp_policy: MixedPrecisionPolicy, mesh: DeviceMesh) -> QuantizationPolicy:
        """What holds for a group of parameters of these dtypes on `mesh`, of one axis, or two, of which the first replicates.

        No gather of a single rank, no reduction over a single rank; nothing after a `to()` that has given the parameters
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
        """Those given, and the defaults of the others."""
        return cls(mixed_precision or MixedPrecisionPolicy(), offload or OffloadPolicy(), quantization or UNQUANTISED)

    def check(self) -> None:
        """TypeError for a policy of another class; ValueError for policies that contradict each other."""
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
        """Whether this parameter on `mesh` is quantised. ValueError if the policy contradicts the mesh then."""
        taken = self.quantization.takes(param, self.mixed_precision, placement)
        if taken and self.quantization.full_precision_ranks is not None:
            neighbours(mesh, self.quantization.full_precision_ranks)
        return taken


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
        """Reduce as `comm.reduce_scatter(out, inp, op, stream=stream)` does.

        op: as FSDP2 gives it. AVG, or a PreMulSum by another divide factor; SUM for float16, which is divided before and after,
        and with `set_force_sum_reduction_for_comms`, which divides after.
        """


@dataclass(slots=True)
class StepSettings:
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
    post_optim_event: Event | None = None  # holds for one iteration

    def take_post_optim_event(self) -> Event | None:
        """The event of the iteration that begins, which no later one waits for."""
        event, self.post_optim_event = self.post_optim_event, None
        return event
