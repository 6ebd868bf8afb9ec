"""All-gather extensions: parameters whose own methods define what is gathered, in fp8 for example. The methods are FSDP2's.

The methods belong to the tensor subclass of the parameter, or are set on its local tensor (`param._local_tensor`) before the
first forward. Such a parameter is a group of its own. Rank r owns ceil(rows / N) rows of it, the last ranks fewer or none,
as torch's `Shard(0)` cuts it.

| step           | what                                                                                              |
|----------------|---------------------------------------------------------------------------------------------------|
| launch         | `fsdp_pre_all_gather` on the local tensor; each tensor that it returns is gathered                |
| fill_unsharded | `fsdp_post_all_gather` makes the full parameter of the outputs, the first time, or fills it again |
| release        | the storages of the outputs, and of the tensors that the parameter consists of, are resized to 0  |
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn

from ...comm import DeviceMesh, Event, Stream, Work, current_stream, world
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.placement.placement import RaggedShard
from ...tensor.placement.rank_counts import RankCounts
from ...torch_internals import preserve_version, tree_leaves
from ..base.events import BufferKind, HasName, Step, during
from ..base.policy import MixedPrecisionPolicy, StepSettings
from ..memory.buffers import FlatBuffer, FlatBuffers
from ..memory.context import Context
from ..params.layout import Layout, ParamSpec, equal_rows
from ..params.param import ShardedParam, placement_of
from .gather import Gather, Pair
from .whole_scales import WholeScale, scale_kind

_log = logging.getLogger("shardrt")


class AllGatherExtension(Protocol):
    """The two methods of a parameter that defines what is gathered of it."""

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Called on a rank's rows. Returns: the tensors to gather, of any dtype, and metadata. It may take `mesh` alone.

        mesh: the 1-D mesh of the ranks that share the parameter.   outer_size, outer_stride: those of the whole parameter.
        module: the one that owns the parameter.
        Each tensor has the same shape on every rank, or as many rows as the rank owns. Ranks with fewer rows than others may
        return padded tensors, of ceil(rows / N) rows.
        """

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Make the full parameter of the outputs, and name the tensors that it consists of.

        all_gather_outputs: one for each tensor, the ranks' rows one after the other: as many rows as the parameter has,
        without padding, if the tensors had the ranks' rows, and N times those of each rank otherwise. They are the same
        tensors every time, each at the start of its own storage.
        metadata: what this rank's `fsdp_pre_all_gather` returned beside them.
        out: the parameter returned the first time, to be filled anew; then nothing is returned.
        """


_METHODS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def has_methods(tensor: torch.Tensor) -> bool:
    """Whether this tensor defines what is gathered of it."""
    return len(methods_of(tensor)) == 2


def methods_of(tensor: torch.Tensor) -> list[str]:
    """The names of those of the two methods that it has."""
    return [method for method in _METHODS if hasattr(tensor, method)]


def local_of(param: ShardedParam) -> torch.Tensor:
    """The local tensor itself, which may have the methods; `to_local()` may return another object."""
    return cast(DTensor, param.sharded)._local_tensor


def check_methods(name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError for a tensor with only one of the two methods, or with one that takes other arguments.

    Also for a tensor without the methods that consists of more than its elements: quantised weights of torchao and bitsandbytes
    have scales in other tensors, or in attributes of the parameter, which a gather of rows would lose.
    """
    found = methods_of(tensor)
    if not found and _is_more_than_elements(tensor):
        raise TypeError(
            f"parameter '{name}' is a {type(tensor).__name__} of {type(tensor).__module__.partition('.')[0]}, which consists "
            "of more than its elements and does not say how it is gathered: keep such parameters whole on every rank, with "
            "fully_shard(..., ignored_params=[p for p in model.parameters() if type(p) is not nn.Parameter])"
        )
    if len(found) == 1:
        raise TypeError(
            f"parameter '{name}' has {found[0]} alone: an all-gather extension has both of {' and '.join(_METHODS)}"
        )
    if found and not _arguments(tensor):
        raise TypeError(
            f"fsdp_pre_all_gather of parameter '{name}' takes {_signature(tensor)}; expected (mesh) or (mesh, outer_size, "
            "outer_stride, module, mp_policy)"
        )


def _is_more_than_elements(tensor: torch.Tensor) -> bool:
    if type(tensor).__module__.partition(".")[0] == "bitsandbytes":
        return True
    return hasattr(tensor, "__tensor_flatten__") and not isinstance(tensor, DTensor)


def _signature(tensor: torch.Tensor) -> inspect.Signature:
    return inspect.signature(cast(AllGatherExtension, tensor).fsdp_pre_all_gather)


def _arguments(tensor: torch.Tensor) -> int:
    """How many arguments `fsdp_pre_all_gather` is given: 5 if it takes them, else 1; 0 if it takes neither.

    With a single parameter, such as `*args`, 1 is tried first.
    """
    signature = _signature(tensor)
    for count in (1, 5) if len(signature.parameters) == 1 else (5, 1):
        try:
            signature.bind(*range(count))
        except TypeError:
            continue
        return count
    return 0


class ExtensionGather(Gather):
    """Gathers one parameter as its methods say. Its gradient is reduced, and the optimizer steps it, like any other's."""

    windowed = False
    # Written when the buffers are made.
    _takes_all: bool  # fsdp_pre_all_gather takes five arguments
    _scale: WholeScale | None  # the scale with which torchao's weights are gathered
    _own_views: list[torch.Tensor]  # where this rank's tensors are copied to
    _outputs: tuple[torch.Tensor, ...]
    _metadata: Any  # what this rank's newest fsdp_pre_all_gather has returned
    _made: list[torch.Tensor]  # tensors that the parameter consists of, outside of the buffers
    # The stream that has filled the parameter, and when; None if what is gathered was not used. Written by fill_unsharded() and
    # release()
    _filled: tuple[Stream, Event] | None
    _made_nbytes: list[int]

    def _plan(self, specs: Sequence[ParamSpec]) -> Layout:
        return equal_rows(specs[0], self.mesh.size)

    def _shard(self, device_mesh: DeviceMesh) -> bool:
        (param,) = self.params
        spec, original, device = param.spec(0, self.layout, device_mesh), param.original, self.shard_device
        with torch.no_grad():
            inner = param.part_of(param.values, spec)
            inner = inner.clone() if inner.is_meta or inner.device == device else inner.to(device)
            if isinstance(original, DTensor) and has_methods(original._local_tensor) and not has_methods(inner):
                # The methods are set on this very object, and bound to it: it stays, and takes the new memory.
                original._local_tensor.data = inner
                inner = original._local_tensor
        if has_methods(original) and not has_methods(inner):
            raise TypeError(
                f"parameter '{param.name}' is a {type(original).__name__}, but its rows are a {type(inner).__name__}: "
                "let narrow() and clone() of the subclass return the subclass, or set the methods on the local tensor"
            )
        param.register(DTensor(inner, spec))
        cast(DTensor, param.sharded)._local_tensor = inner  # nn.Parameter detaches, which a subclass may not survive
        return True

    def check_ready(self, name: str) -> None:
        super().check_ready(name)
        (param,) = self.params
        if not has_methods(self._inner):
            raise RuntimeError(
                f"parameter '{param.name}' of '{name}' has lost {' and '.join(_METHODS)} (rank {self.mesh.rank}): to(), "
                "deepcopy and the like make another local tensor; set them on that one again"
            )

    @property
    def joint(self) -> bool:
        """Also False if a gather reduces a scale first."""
        return super().joint and (self._scale is None or not self._scale.lacking(self._inner))

    @property
    def _inner(self) -> torch.Tensor:
        return local_of(self.params[0])

    @property
    def _extension(self) -> AllGatherExtension:
        return cast(AllGatherExtension, self._inner)

    @property
    def shard_nbytes(self) -> int:
        return self._inner.nbytes  # as the subclass says

    @property
    def on_meta(self) -> bool:
        return self._inner.is_meta

    def _make_full(self, settings: StepSettings) -> tuple[FlatBuffer, list[Pair]]:
        """Make a storage for each tensor. This rank's rows are copied to their part of it, and gathered in place."""
        rank, ranks = self.mesh.rank, self.mesh.size
        parts, pairs, outputs = [], [], []
        self._takes_all = _arguments(self._inner) == 5
        kind = scale_kind(self._inner)
        self._scale = None if kind is None else WholeScale(kind, self.params[0].shape.numel(), self.comm)
        self._own_views = []
        for planned in self._plan_tensors():
            size = planned.most_rows * torch.Size(planned.row).numel() * planned.dtype.itemsize
            part = self._buffers.make(BufferKind.GATHERED, ranks * size, pool=self._pool)
            everything = part.view(torch.uint8, 0, (part.nbytes,))
            pairs.append((everything, part.view(torch.uint8, rank * size, (size,))))
            self._own_views.append(part.view(planned.dtype, rank * size, (planned.own_rows, *planned.row)))
            outputs.append(part.view(planned.dtype, 0, (planned.rows, *planned.row)))
            parts.append(part)
        self._outputs = tuple(outputs)
        self._made, self._made_nbytes, self._filled = [], [], None
        return FlatBuffers(parts), pairs

    def _plan_tensors(self) -> list[TensorPlan]:
        """Call `fsdp_pre_all_gather` once, and compare what it returns on the ranks. Collective."""
        stream = world().stream_for("gather")
        stream.wait(current_stream(self.mesh.device).record())
        self._reduce_scale(stream)
        stream.synchronize()
        with self.comm.agree():
            mine = [(tensor.dtype, tuple(tensor.shape) or (1,)) for tensor in self._inputs()]
        (param,), rank, placement = self.params, self.mesh.rank, placement_of(0, self.layout)
        assert isinstance(placement, RaggedShard), "cut between rows"
        owned, metadata = RankCounts.of(placement.rows), _described(self._metadata)
        by_rows = [has_own_rows(tensor, owned, rank) for tensor in mine]
        alike = [(dtype, "rows" if own else shape[0], shape[1:]) for (dtype, shape), own in zip(mine, by_rows, strict=True)]
        if self.comm.differing((alike, metadata)) is None:
            return [TensorPlan.of(tensor, own, owned) for tensor, own in zip(mine, by_rows, strict=True)]
        answers = self.comm.exchange((mine, metadata))
        planned = plan_gathers(param.name, [shapes for shapes, _ in answers], owned, rank)
        if rank == 0 and any(metadata != answers[0][1] for _, metadata in answers):
            _warn_of_metadata(param.name, [metadata for _, metadata in answers])
        return planned

    def _make_unsharded(self, context: Context, group: HasName) -> None:
        """Gather once, for `fsdp_post_all_gather` to make the full parameter."""
        self.full.seal()
        (param,), streams = self.params, context.streams
        streams.begin()  # outside of an iteration: the shard was written on the caller's stream
        with during(Step.GATHER, group):
            gathered = self.launch(streams.gather, keeps=False)
        gathered.wait(streams.compute)
        made = self._extension.fsdp_post_all_gather(self._outputs, self._metadata, self._dtypes[0])
        if made is None or made[0].shape != param.shape:
            found = "nothing" if made is None else f"one of shape {tuple(made[0].shape)}"
            raise ValueError(
                f"fsdp_post_all_gather of '{param.name}' without `out`: expected a tensor of shape {tuple(param.shape)} and "
                f"the tensors that it consists of, found {found}"
            )
        param.use_unsharded(made[0])
        self._made = [tensor for tensor in made[1] if not self.full.holds(tensor)]
        self._made_nbytes = [tensor.untyped_storage().nbytes() for tensor in self._made]
        with during(Step.FREE, group):
            self.release(streams.gather, [streams.compute])

    def _gather_shards(self, stream: Stream) -> Work:
        self._reduce_scale(stream)
        return super()._gather_shards(stream)

    def _reduce_scale(self, stream: Stream) -> None:
        if self._scale is not None and self._scale.lacking(self._inner):
            self._scale.launch(self._inner, stream)

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        (param,) = self.params
        local = self._inner.to(self.mesh.device, non_blocking=True) if self.offloads else self._inner
        about: tuple[Any, ...] = (self.mesh,)
        if self._takes_all:
            stride = torch.empty(param.shape, device="meta").stride()
            about = (self.mesh, param.shape, stride, param.owners[0].module, self._policies.mixed_precision)
        if self._scale is not None:
            local = self._scale.given_to(local, self._inner)
        inputs, self._metadata = cast(AllGatherExtension, local).fsdp_pre_all_gather(*about)
        if not isinstance(inputs, (tuple, list)) or not inputs:
            found = "an empty one" if isinstance(inputs, (tuple, list)) else type(inputs).__name__
            raise TypeError(f"fsdp_pre_all_gather of '{param.name}': expected a tuple of tensors, found {found}")
        return tuple(inputs)

    def _fill_own(self) -> None:
        for view, tensor in zip(self._own_views, self._inputs(), strict=True):
            if tensor.dim() and tensor.shape != view.shape:
                raise ValueError(
                    f"fsdp_pre_all_gather of '{self.params[0].name}' returned a tensor of shape {tuple(tensor.shape)} on rank "
                    f"{self.mesh.rank}; expected {tuple(view.shape)}, as the first time"
                )
            view.copy_(tensor)

    def fill_unsharded(self, stream: Stream) -> None:
        if self._filled is not None:
            stream.wait(self._filled[1])
            return
        for tensor, nbytes in zip(self._made, self._made_nbytes, strict=True):
            if (storage := tensor.untyped_storage()).nbytes() != nbytes:  # else resize_() would move what is kept
                storage.resize_(nbytes)
        (param,) = self.params
        with torch.no_grad(), preserve_version(param.unsharded):
            self._extension.fsdp_post_all_gather(self._outputs, self._metadata, self._dtypes[0], out=param.unsharded)
        self._filled = stream, stream.record()

    def release(self, stream: Stream, readers: Iterable[Stream]) -> None:
        if self._filled is not None:  # the tensors were allocated on the stream that filled
            filled_on, self._filled = self._filled[0], None
            for reader in readers:
                if reader != filled_on:
                    filled_on.wait(reader.record())
        for tensor in () if self._settings.keep_storage else self._made:
            tensor.untyped_storage().resize_(0)
        super().release(stream, readers)


def _described(metadata: object) -> list[str]:
    """The metadata in a form that ranks can compare cheaply."""
    return [
        repr(leaf.tolist() if isinstance(leaf, torch.Tensor) and leaf.numel() <= 16 else type(leaf))
        for leaf in tree_leaves(metadata)
    ]


def _warn_of_metadata(name: str, metadata: Sequence[object]) -> None:
    found = "; ".join(f"rank {rank}: {values}" for rank, values in enumerate(metadata))
    _log.warning(
        f"fsdp_pre_all_gather of '{name}' returns other metadata on each rank, but a rank receives only its own with the rows "
        f"of all: {found}. A scale, for example, has to be that of the whole parameter (logged for the first gather only)"
    )


# ---------------------------------------------------------------------- what is gathered of each rank: its rows, or a tensor

Gathered = tuple[torch.dtype, tuple[int, ...]]  # a tensor's dtype and shape, the latter of one dim at least


class TensorPlan(NamedTuple):
    """How one of the tensors that `fsdp_pre_all_gather` returns is gathered."""

    dtype: torch.dtype
    row: tuple[int, ...]  # the shape of one row
    own_rows: int  # rows that this rank sends
    most_rows: int  # the most rows that any rank sends: others leave the rest of their part of the output unwritten
    rows: int  # rows of the output

    @classmethod
    def of(cls, tensor: Gathered, by_rows: bool, owned: RankCounts) -> TensorPlan:
        """tensor: this rank's.   by_rows: each rank's tensor has as many rows as the rank owns, or is padded to the most."""
        dtype, (count, *row) = tensor
        most, rows = (owned.largest, owned.total) if by_rows else (count, count * len(owned))
        return cls(dtype, tuple(row), count, most, rows)


def has_own_rows(tensor: Gathered, owned: RankCounts, rank: int) -> bool:
    """Whether the tensor has as many rows as the rank owns, or is padded to the most that any rank owns."""
    return tensor[1][0] in (owned[rank], owned.largest)


def plan_gathers(name: str, everyone: Sequence[Sequence[Gathered]], owned: RankCounts, rank: int) -> list[TensorPlan]:
    """Plan the gathers, by the dtypes and shapes of every rank's tensors and the rows it owns.

    Raises ValueError, on every rank alike, if they are not compatible.
    """
    planned = []
    for given in zip(*everyone, strict=True) if len({len(tensors) for tensors in everyone}) == 1 else [()]:
        kinds = {(dtype, shape[1:]) for dtype, shape in given}
        counts = [shape[0] for _, shape in given]
        by_rows = all(has_own_rows(tensor, owned, each) for each, tensor in enumerate(given))
        if len(kinds) != 1 or not (by_rows or len(set(counts)) == 1):
            found = "; ".join(f"rank {each}: {tensors}" for each, tensors in enumerate(everyone))
            raise ValueError(
                f"fsdp_pre_all_gather of '{name}': expected tensors of the same dtypes and shapes on all ranks, or of {owned} "
                f"rows, padded to {owned.largest} or not; found {found}"
            )
        planned.append(TensorPlan.of(given[rank], by_rows, owned))
    return planned
