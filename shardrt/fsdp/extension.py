"""Parameters that say themselves what is gathered, by FSDP2's two methods: for an all-gather in fp8, say.

The methods belong to the tensor subclass of the parameter, or are set on its local tensor (`param._local_tensor`) before the
first forward. Such a parameter is a group of its own. Rank r owns ceil(rows / N) rows of it, the last ranks fewer or none,
as torch's `Shard(0)` cuts it.

| step        | what                                                                                          |
|-------------|-----------------------------------------------------------------------------------------------|
| unshard     | `fsdp_pre_all_gather` on the local tensor; each tensor that it returns is gathered             |
| wait        | `fsdp_post_all_gather` makes the full parameter of the outputs, the first time, or fills it again |
| reshard     | the storages of the outputs, and of the tensors that the parameter consists of, are resized to 0 |
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import nn

from ..comm import DeviceMesh
from ..tensor.dtensor import DTensor
from ..tensor.placement import RaggedShard
from ..torch_internals import preserve_version, tree_leaves
from .buffers import FlatBuffer, FlatBuffers
from .layout import Layout, ParamSpec, equal_runs
from .param import ShardedParam, local_shard, placement_of
from .param_group import ParamGroup
from .policy import MixedPrecisionPolicy
from .registered import hook_state_dicts

if TYPE_CHECKING:
    from .runtime import Runtime


_log = logging.getLogger("shardrt")


class AllGatherExtension(Protocol):
    """The two methods of a parameter that says itself what is gathered."""

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """On a rank's rows: the tensors to gather, of any dtype, and metadata. It may take `mesh` alone.

        mesh: of one axis, the ranks that share the parameter.   outer_size, outer_stride: of the whole parameter.
        module: the one that owns it.
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
    """Whether it says itself what is gathered of it."""
    return len(_methods_of(tensor)) == 2


def _methods_of(tensor: torch.Tensor) -> list[str]:
    return [method for method in _METHODS if hasattr(tensor, method)]


def check_methods(name: str, tensor: torch.Tensor) -> None:
    """TypeError for a tensor with one of the methods only, or with one that takes other arguments."""
    found = _methods_of(tensor)
    if len(found) == 1:
        raise TypeError(
            f"parameter '{name}' has {found[0]} alone: an all-gather extension has both of {' and '.join(_METHODS)}"
        )
    if found and _arguments(tensor) not in (1, 5):
        raise TypeError(
            f"fsdp_pre_all_gather of parameter '{name}' takes {_arguments(tensor)} arguments; expected (mesh) or (mesh, "
            "outer_size, outer_stride, module, mp_policy)"
        )


def _arguments(tensor: torch.Tensor) -> int:
    return len(inspect.signature(cast(AllGatherExtension, tensor).fsdp_pre_all_gather).parameters)


class Gather(NamedTuple):
    """How one of the tensors is gathered."""

    dtype: torch.dtype
    row: tuple[int, ...]  # the shape of one
    own_rows: int  # that this rank gives
    most_rows: int  # that a rank gives: the others leave the rest of their place in the output unwritten
    rows: int  # of the output


def plan_gathers(
    name: str, everyone: Sequence[Sequence[tuple[torch.dtype, tuple[int, ...]]]], owned: Sequence[int], rank: int
) -> list[Gather]:
    """What to gather, by the dtypes and shapes that every rank gives and the rows it owns.

    Raises ValueError, on every rank alike, if they do not go together.
    """
    planned, total, chunk = [], sum(owned), max(owned)
    for given in zip(*everyone, strict=True) if len({len(tensors) for tensors in everyone}) == 1 else [()]:
        kinds = {(dtype, shape[1:]) for dtype, shape in given}
        counts = [shape[0] for _, shape in given]
        by_rows = all(count in (own, chunk) for count, own in zip(counts, owned, strict=False))
        if len(kinds) != 1 or not (by_rows or len(set(counts)) == 1):
            found = "; ".join(f"rank {place}: {tensors}" for place, tensors in enumerate(everyone))
            raise ValueError(
                f"fsdp_pre_all_gather of '{name}': expected tensors of the same dtypes and shapes on all ranks, or of {owned} "
                f"rows, padded to {chunk} or not; found {found}"
            )
        ((dtype, row),) = kinds
        most = chunk if by_rows else counts[0]
        planned.append(Gather(dtype, row, counts[rank], most, total if by_rows else most * len(owned)))
    return planned


class ExtensionGroup(ParamGroup):
    """One such parameter: gathered as its methods say, reduced and stepped as any other."""

    stages = False

    def _plan(self, specs: Sequence[ParamSpec]) -> Layout:
        return equal_runs(specs[0], self.mesh.size)

    def _shard_params(self) -> None:
        (param,) = self.params
        spec, original = param.spec(0, self.layout, self.device_mesh), param.original
        device = torch.device("cpu") if self.offloads else self.mesh.device
        with torch.no_grad():
            inner = local_shard(original, spec)
            inner = inner.clone() if inner.is_meta or inner.device == device else inner.to(device)
            if isinstance(original, DTensor) and has_methods(original._local_tensor) and not has_methods(inner):
                # They are set on this very object, and bound to it.
                original._local_tensor.data = inner
                inner = original._local_tensor
        if has_methods(original) and not has_methods(inner):
            raise TypeError(
                f"parameter '{param.name}' is a {type(original).__name__}, but its rows are a {type(inner).__name__}: "
                "let narrow() and clone() of the subclass return the subclass, or set the methods on the local tensor"
            )
        param.register(DTensor(inner, spec))
        cast(DTensor, param.sharded)._local_tensor = inner  # nn.Parameter detaches, which a subclass may not survive

    def refuse_meta(self) -> None:
        super().refuse_meta()
        (param,) = self.params
        if not has_methods(self._inner):
            raise RuntimeError(
                f"parameter '{param.name}' of '{self.name}' has lost {' and '.join(_METHODS)} (rank {self.mesh.rank}): to(), "
                "deepcopy and the like make another local tensor; set them on that one again"
            )

    @property
    def _inner(self) -> torch.Tensor:
        return _local(self.params[0])

    @property
    def _extension(self) -> AllGatherExtension:
        return cast(AllGatherExtension, self._inner)

    @property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's part, as the subclass says."""
        return self._inner.nbytes

    @property
    def on_meta(self) -> bool:
        """The shard has no values yet."""
        return self._inner.is_meta

    @property
    def _sends_shard(self) -> bool:
        return False

    def _make_full(self, runtime: Runtime) -> None:
        """A storage for each tensor that is gathered: this rank's rows go into their place, and come out with all others."""
        self._takes_all = _arguments(self._inner) == 5
        with self.gather_comm.agree():
            mine = [(tensor.dtype, tuple(tensor.shape) or (1,)) for tensor in self._inputs()]
        (param,), placement = self.params, placement_of(0, self.layout)
        assert isinstance(placement, RaggedShard), "cut between rows"
        rank, pool = self.mesh.rank, self._pool(runtime)
        answers = self.gather_comm.exchange((mine, _described(self._metadata)))
        planned = plan_gathers(param.name, [shapes for shapes, _ in answers], placement.rows, rank)
        if rank == 0 and any(metadata != answers[0][1] for _, metadata in answers):
            _warn_of_metadata(param.name, [metadata for _, metadata in answers])
        parts, outputs = [], []
        self._gathers, self._own_views = [], []
        for gather in planned:
            size = gather.most_rows * torch.Size(gather.row).numel() * gather.dtype.itemsize
            part = FlatBuffer(self.mesh.size * size, self.mesh.device, runtime.memory, pool)
            everything = part.view(torch.uint8, 0, (part.nbytes,))
            self._gathers.append((everything, part.view(torch.uint8, rank * size, (size,))))
            self._own_views.append(part.view(gather.dtype, rank * size, (gather.own_rows, *gather.row)))
            outputs.append(part.view(gather.dtype, 0, (gather.rows, *gather.row)))
            parts.append(part)
        self._outputs = tuple(outputs)
        self.full = FlatBuffers(parts)
        self.full.seal()
        self._make_unsharded()

    def _make_unsharded(self) -> None:
        (param,) = self.params
        self._streams.begin()  # outside of an iteration: the shard was written on the caller's stream
        self.unshard()
        assert self.ready is not None, "gathered just now"
        self.ready.wait(self._streams.compute)
        made = self._extension.fsdp_post_all_gather(self._outputs, self._metadata, self._gather_dtypes[0])
        if made is None or made[0].shape != param.shape:
            found = "nothing" if made is None else f"one of shape {tuple(made[0].shape)}"
            raise ValueError(
                f"fsdp_post_all_gather of '{param.name}' without `out`: expected a tensor of shape {tuple(param.shape)} and "
                f"the tensors that it consists of, found {found}"
            )
        param.unsharded = nn.Parameter(made[0], requires_grad=param.sharded.requires_grad)
        self._made = [tensor for tensor in made[1] if not self.full.holds(tensor)]
        self._made_nbytes = [tensor.untyped_storage().nbytes() for tensor in self._made]
        self.reshard()

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        (param,) = self.params
        local = self._inner.to(self.mesh.device, non_blocking=True) if self.offloads else self._inner
        about: tuple[Any, ...] = (self.mesh,)
        if self._takes_all:
            stride = torch.empty(param.shape, device="meta").stride()
            about = (self.mesh, param.shape, stride, param.owners[0].module, self.mp_policy)
        inputs, self._metadata = cast(AllGatherExtension, local).fsdp_pre_all_gather(*about)
        if not isinstance(inputs, (tuple, list)):
            raise TypeError(
                f"fsdp_pre_all_gather of '{param.name}': expected a tuple of tensors, found {type(inputs).__name__}"
            )
        return tuple(inputs)

    def _fill_own(self) -> None:
        for view, tensor in zip(self._own_views, self._inputs(), strict=True):
            if tensor.dim() and tensor.shape != view.shape:
                raise ValueError(
                    f"fsdp_pre_all_gather of '{self.params[0].name}' returned a tensor of shape {tuple(tensor.shape)} on rank "
                    f"{self.mesh.rank}; expected {tuple(view.shape)}, as the first time"
                )
            view.copy_(tensor)

    def _fill_unsharded(self) -> None:
        for tensor, nbytes in zip(self._made, self._made_nbytes, strict=True):
            tensor.untyped_storage().resize_(nbytes)
        (param,) = self.params
        dtype = self._gather_dtypes[0]
        with torch.no_grad(), preserve_version(param.unsharded):
            self._extension.fsdp_post_all_gather(self._outputs, self._metadata, dtype, out=param.unsharded)

    def reshard(self) -> None:
        """Let the module see the shards and free what was gathered and made of it."""
        if self.ready is not None:
            for tensor in self._made:
                tensor.untyped_storage().resize_(0)
        super().reshard()


def _described(metadata: object) -> list[str]:
    """What can be compared of it cheaply."""
    return [
        repr(leaf.tolist() if isinstance(leaf, torch.Tensor) and leaf.numel() <= 16 else type(leaf))
        for leaf in tree_leaves(metadata)
    ]


def _warn_of_metadata(name: str, metadata: Sequence[object]) -> None:
    found = "; ".join(f"rank {rank}: {values}" for rank, values in enumerate(metadata))
    _log.warning(
        f"fsdp_pre_all_gather of '{name}' returns other metadata on each rank, but a rank sees only its own beside the rows of "
        f"all: {found}. A scale, say, has to be that of the whole parameter (said for the first gather only)"
    )


# ---------------------------------------------------------------------- methods set after fully_shard


def split_hooked(root: ParamGroup) -> list[ParamGroup]:
    """Give each parameter whose local tensor has got the methods since `fully_shard` a group of its own. Collective.

    Returns: all groups under `root`, the new ones included.

    Cost: the group that it leaves is planned anew; its other parameters are gathered once.
    Raises, on every rank alike: RuntimeError if the ranks differ, TypeError or ValueError for what cannot be gathered so.
    """
    hooked = list(_hooked(root))
    _agree(root, [f"{param.name}: {', '.join(_methods_of(_local(param)))}" for _, param in hooked])
    for _, param in hooked:
        check_methods(param.name, _local(param))
        if param.dim != 0:
            raise ValueError(f"parameter '{param.name}' is cut along dim {param.dim}; an all-gather extension expects Shard(0)")
    for group in dict.fromkeys(group for group, _ in hooked):
        taken = [param for owner, param in hooked if owner is group]
        left = [param.clone_spec() for param in group.params if param not in taken]
        for param in taken:
            _split(group, param)
        group._take(left)
    return list(root.with_descendants())


def _hooked(root: ParamGroup) -> Iterator[tuple[ParamGroup, ShardedParam]]:
    for group in root.with_descendants():
        if not isinstance(group, ExtensionGroup):
            yield from ((group, param) for param in group.params if _methods_of(_local(param)))


def _local(param: ShardedParam) -> torch.Tensor:
    return cast(DTensor, param.sharded)._local_tensor  # the object itself: `to_local()` may return another


def _agree(root: ParamGroup, hooked: list[str]) -> None:
    answers = root.device_mesh.exchange(hooked)
    if any(answer != answers[0] for answer in answers):
        found = "; ".join(f"rank {rank}: {names or 'none'}" for rank, names in enumerate(answers))
        raise RuntimeError(
            f"'{root.modules[0].__class__.__name__}': the local tensors that say themselves what is gathered are not the same "
            f"on all ranks; found {found}; set fsdp_pre_all_gather and fsdp_post_all_gather alike on all"
        )


def _split(group: ParamGroup, param: ShardedParam) -> None:
    options = (group.mp_policy, group.offload_policy, group.settings.reshard_after_forward)
    made = ExtensionGroup(group.modules, [param.clone_spec()], group.device_mesh, *options)
    made.settings, made.name = group.settings, group.name
    first = cast(Any, group.modules[0]).param_groups[0]
    made.parent = first
    first.children.append(made)
    for module in group.modules:
        cast(Any, module).param_groups += (made,)
    hook_state_dicts({owner.module for owner in param.owners}, made)
