"""One parameter: its sharded and its unsharded tensor, and the modules that register it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self, cast
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import increment_version

from ...comm import DeviceMesh, world
from ...comm.startup import malloc
from ...kernels import round_trip
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.replaced import name_of_gathered, note_gathered, note_replaced
from ...tensor.placement.placement import FlatShard, Partial, RaggedShard, Replicate, ResolvedShard, Spec
from ...tensor.placement.snapshots import wait_to_write
from ...torch_internals import as_plain_tensors, in_backward, requires_grad, same_storage
from ..memory.buffers import FlatBuffer
from .by_hand import HandUse, run_by_hand
from .first_values import FirstValues
from .layout import Layout
from .tensor_parallel import OuterSharding

Slot = tuple[ref[nn.Module], str]  # where a parameter is registered: module and attribute


class Owner(NamedTuple):
    """A module that registers a parameter; writing to `registry` replaces it there.

    Groups refer to modules weakly: the hooks in an autograd graph refer to groups, which the garbage collector cannot see, and
    a module may refer to the graph, for example because it remembers its loss. Strong references would keep it alive for ever.
    """

    reference: ref[nn.Module]
    attribute: str
    registry: dict[str, nn.Parameter | None] | Attributes

    @classmethod
    def of(cls, module: nn.Module, attribute: str) -> Owner:
        """The owner for the parameter that `module` registers under this name."""
        # Cost: setattr on a module takes 2 us, and a step registers every parameter four times. Modules that override
        # __setattr__ (recurrent layers keep a list of their weights) still get it.
        is_usual = type(module).__setattr__ is nn.Module.__setattr__
        return cls(ref(module), attribute, module._parameters if is_usual else Attributes(module))

    @property
    def module(self) -> nn.Module | None:
        """The module; None if it was removed from the model and nobody else refers to it."""
        return self.reference()

    @property
    def registered(self) -> nn.Parameter | None:
        """What is registered there now."""
        return self.registry.get(self.attribute)


class ShardedParam:
    """One parameter of a group, tied or not.

    `sharded` is for the optimizer and always valid. `unsharded` is for the module's forward and backward: a view of the
    group's full buffer, valid only while that is gathered.
    shape: that of what is planned and gathered. For a tensor-parallel parameter this is this rank's part by `outer`.
    """

    name: str  # written by rename()
    shape: torch.Size
    dtype: torch.dtype
    dim: int  # along which it is sharded
    rows_only: bool  # never cut between elements
    outer: OuterSharding | None  # how it lies on another mesh before it is cut
    owners: Sequence[Owner]  # where it is registered; several if tied
    sharded: nn.Parameter  # written by register() and replace_sharded()
    unsharded: nn.Parameter  # written by make_unsharded() and use_unsharded()
    first: FirstValues | None  # of the original; written by shard(), until the ranks have compared it
    codes: torch.dtype | None  # dtype of the 8-bit codes that its gather sends, if it sends codes; written by that gather
    was_named: bool  # in a warning that modules write it; written by `visible.warn_of_writes`
    before: nn.Parameter | None  # the earlier sharded parameter, if there was one; deleted by register()
    original: nn.Parameter  # deleted by register()
    values: torch.Tensor  # the original's, of which shard() keeps this rank's part; deleted by register()

    def __init__(
        self,
        name: str,
        original: nn.Parameter,
        owners: Sequence[Owner],
        dim: int,
        *,
        rows_only: bool,
        outer: OuterSharding | None = None,
        part: torch.Tensor | None = None,
    ) -> None:
        """part: what an extension made of the original: this rank's part by `outer`. None if the original is on both meshes."""
        self.name = name
        self.shape = original.shape if outer is None else outer.shape
        self.dtype = original.dtype
        self.dim = dim
        self.rows_only = rows_only
        self.outer = outer
        self.first = None
        self.codes = None
        self.was_named = False
        self.before = None
        self.original = original
        self.values = original if outer is None or part is None else DTensor(part.detach(), outer.spec)
        self.owners = owners

    def spec(self, index: int, layout: Layout, mesh: DeviceMesh) -> Spec:
        """The spec of parameter `index`: cut along the last axis of the mesh as the layout says, replicated along others.

        If the parameter is tensor-parallel, these placements come after its outer ones.
        """
        inner = (*[Replicate()] * (len(mesh.shape) - 1), placement_of(index, layout))
        return Spec(mesh, inner, self.shape) if self.outer is None else self.outer.inside(mesh, inner)

    @property
    def most_nbytes(self) -> int:
        """The bytes of the largest part by the outer placements: the same on all ranks."""
        numel = self.shape.numel() if self.outer is None else self.outer.most_numel
        return numel * self.dtype.itemsize

    def part_of(self, original: torch.Tensor, spec: Spec) -> torch.Tensor:
        """This rank's part of a parameter or gradient, whole or sharded. Collective if it is sharded with other placements.

        A plain tensor is the whole parameter, or this rank's part of it by the outer placements; its shape tells which.
        """
        outer = self.outer
        if outer is None:
            return local_shard(original, spec)
        if not isinstance(original, DTensor):
            if original.shape == spec.shape:  # a gradient that the user has set; a part of this shape is all of it
                return spec.local_shard(original)
            return spec.local_shard(original, axis=outer.spec.mesh.ndim)
        return outer.part(original, spec)

    def shard(self, spec: Spec, local: torch.Tensor) -> None:
        """Keep this rank's part of the original in `local` and register the sharded parameter.

        Collective if the original is sharded with other placements.
        """
        if not self.values.is_meta:
            with torch.no_grad():
                local.copy_(self.part_of(self.values, spec))
            if self.before is None:
                self.first = FirstValues.of(self.values, local, tensor_parallel=self.outer is not None)
        self.register(DTensor(local, spec))

    def register(self, sharded: DTensor) -> None:
        """Use `sharded` as the sharded parameter; an earlier one of the same dtype and device stays and takes its values."""
        before = self.before
        if before is None or (before.dtype, before.device) != (sharded.dtype, sharded.device):
            self.sharded = nn.Parameter(sharded, requires_grad=self.original.requires_grad)
            note_replaced(self.original if before is None else before, self.sharded)
        else:
            self.sharded = before
            cast(DTensor, before).move_to(sharded)
        if before is not None and self.original.grad is not None:
            grad = self.part_of(self.original.grad, sharded.spec)
            self.sharded.grad = self.sharded_like(grad.to(sharded._local_tensor.device).clone())
        trims = before is None and self.original.device.type == "cpu" and self.original.nbytes >= malloc.LARGE
        del self.original, self.values, self.before
        self.sharded.full_name = self.name  # type: ignore[attr-defined]
        if self.outer is not None:
            self.sharded.grad_placements = self.outer.grad_placements  # type: ignore[attr-defined]
            self.sharded.gathered_spec = self.outer.gathered(sharded.spec)  # type: ignore[attr-defined]
        for owner in self.owners:
            owner.registry[owner.attribute] = self.sharded
        if trims:  # the original is free now, perhaps in the middle of the heap
            malloc.trim()

    def sum_terms(self) -> None:
        """From now on each rank of the outer mesh, over which the parameter is replicated, has a term of its gradient."""
        assert self.outer is not None, "it is replicated over an outer mesh"
        self.outer = replace(self.outer, grad_placements=(Partial(),) * self.outer.spec.mesh.ndim)
        self.sharded.grad_placements = self.outer.grad_placements  # type: ignore[attr-defined]

    def rename(self, name: str) -> None:
        """Give the parameter its full name."""
        self.name = name
        self.sharded.full_name = name  # type: ignore[attr-defined]

    def replace_sharded(self, sharded: nn.Parameter) -> None:
        """The sharded parameter is this object from now on, which other code has registered."""
        if sharded is not self.sharded:
            note_replaced(self.sharded, sharded)
        self.sharded = sharded

    def clone_spec(self) -> ShardedParam:
        """The same parameter as before shard(); its original is what is registered now."""
        original = self.registered
        assert original is not None, "only parameters are sharded"
        made = ShardedParam(self.name, original, self.owners, self.dim, rows_only=self.rows_only, outer=self.outer)
        made.before = self.sharded
        return made

    def copied(self, memo: dict[int, Any]) -> ShardedParam:
        """The parameter of a deep copy, before shard(). memo: that of `copy.deepcopy`, with copies of the modules."""
        alias = memo[id(self.sharded)]
        holders = [(holder, owner.attribute) for owner in self.owners if (holder := owner.module) is not None]
        owners = [Owner.of(copy.deepcopy(holder, memo), attribute) for holder, attribute in holders]
        made = ShardedParam(self.name, alias, owners, self.dim, rows_only=self.rows_only, outer=self.outer)
        made.before = alias
        return made

    @property
    def registered(self) -> nn.Parameter | None:
        """The parameter that its first module registers now."""
        return self.owners[0].registered

    def make_unsharded(self, full: FlatBuffer, offset: int, dtype: torch.dtype) -> None:
        """Make the view of the full buffer that the module will compute with."""
        view = full.view(dtype, offset, self.shape, outermost_stride(self.shape, self.dim))
        if self.outer is not None:
            view = self.outer.extensions.post_unflatten_transform(view, self.outer.spec)
        self.use_unsharded(view)

    def use_unsharded(self, made: torch.Tensor) -> None:
        """Let the module compute with this tensor: a view of what is gathered, or what an all-gather extension has made."""
        self.unsharded = nn.Parameter(made, requires_grad=self.sharded.requires_grad)
        note_gathered(self.unsharded, self.sharded)

    @torch.no_grad()
    def keep_writes(self) -> None:
        """Write to this rank's part what the user has written in place to the unsharded parameter."""
        # Where one storage is the other's memory, the write is in the shard already.
        is_shard = same_storage(self.local.untyped_storage(), self.unsharded.untyped_storage())
        if is_shard or not self.keep_part(self.unsharded_part()):
            increment_version(self.sharded)  # on all ranks alike, whatever has changed in this rank's part

    def unsharded_part(self) -> torch.Tensor:
        """This rank's part of the unsharded parameter, a view of it."""
        return self.part_of(self.unsharded.detach(), cast(DTensor, self.sharded).spec)

    @torch.no_grad()
    def keep_part(self, part: torch.Tensor) -> bool:
        """Write to this rank's part what differs in `part`, that of the unsharded parameter. Returns: whether anything may."""
        local = self.local.detach()
        # Only elements that were changed: the rest may be less precise than the shard, or NaN beside a NaN in a block of codes.
        part, same = self._compared(part)
        if local.device.type == "cpu" and bool(same.all()):  # Cost: on a GPU the host would wait
            return False
        wait_to_write([local])
        local.copy_(torch.where(same, local, part.to(local.dtype)))
        increment_version(self.sharded)
        return True

    @torch.no_grad()
    def differs(self) -> bool:
        """Whether this rank's shard is not what was gathered of it."""
        return not bool(self._compared(self.unsharded_part())[1].all())

    def _compared(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`part`, of the unsharded parameter, on the shard's device, and where it is what a gather makes of the shard."""
        part = part.to(self.local.device)
        gathered = self._as_gathered(part.dtype)
        return part, (part == gathered) | (part.isnan() & gathered.isnan())

    def _as_gathered(self, dtype: torch.dtype) -> torch.Tensor:
        """What a gather makes of this rank's part, in `dtype`."""
        local = self.local.detach()
        if self.codes is None:
            return local.to(dtype)
        outermost = local.movedim(self.dim, 0) if local.dim() > 1 else local
        return round_trip(outermost.reshape(-1), self.codes, dtype).view(outermost.shape).movedim(0, self.dim)

    @property
    def local(self) -> torch.Tensor:
        """This rank's part."""
        return cast(DTensor, self.sharded)._local_tensor

    @torch.no_grad()
    def sharded_for_loading(self, value: torch.Tensor) -> DTensor:
        """`value` as a DTensor with the placements of this tensor-parallel parameter.

        value: of the global shape, plain or on any mesh.
        """
        assert self.outer is not None, "others are loaded as they are"
        spec: Spec = self.sharded.spec  # type: ignore[attr-defined]
        if isinstance(value, DTensor):
            value, _ = self.outer.extensions.pre_load_state_dict_transform(value)
        return DTensor(self.outer.part(value, spec), spec)

    def sharded_like(self, local: torch.Tensor) -> DTensor:
        """`local`, such as this rank's part of the gradient, as a DTensor with the parameter's placements."""
        return DTensor(local, self.sharded.spec)  # type: ignore[attr-defined]


def check_assigned(param: nn.Parameter, found: torch.Size, expected: torch.Size) -> None:
    """Raise RuntimeError for a tensor of another shape that a module assigns to the `data` of an unsharded parameter."""
    if found != expected:
        raise RuntimeError(
            f"{name_of_gathered(param)}.data = a tensor of shape {tuple(found)} in the forward of its module (rank "
            f"{world().rank}): expected {tuple(expected)}, since every rank has a part of it"
        )


_grad: Any = torch.Tensor.grad  # the descriptor


class RunningParameter(nn.Parameter):
    """The class of an unsharded parameter in some forwards: what is written to its `data`, no version counter of it shows."""

    handed: list[tuple[nn.Parameter, torch.Tensor]] | None = None  # what `data` has returned; a copy has none

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    @property
    def data(self) -> torch.Tensor:
        """As torch's."""
        made: torch.Tensor = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        if self.handed is not None:
            self.handed.append((self, made))
        return made

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.handed is None:
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            return
        # Hazard: torch would give this tensor the memory of the other one, and no gather would reach it any more.
        check_assigned(self, value.shape, self.shape)
        mine = [made for param, made in self.handed if param is self]
        if any(made is value for made in mine):
            return  # the values are there
        # What `data` has returned keeps its values, as torch's does: `old = p.data; p.data = new; ...; p.data = old`.
        self.handed[:] = [each for each in self.handed if each[0] is not self]
        with torch.no_grad():
            if mine:
                kept = super().detach().clone()
                for made in mine:
                    made.data = kept
            self.data.copy_(value)


class GatheredParameter(nn.Parameter):
    """The class of an unsharded parameter while the user can reach it, such as between a forward and its backward.

    Assignments to its `data` and `requires_grad`, and in-place writes, are passed on to the sharded parameter. Its group is
    told of operations on it.
    """

    sharded: DTensor | None = None  # a copy has none
    aliases: Sequence[ref[torch.Tensor]] = ()  # what was detached from it while it had this class
    hand_use: HandUse | None = None  # a copy has none

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        return run_by_hand(func, types, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with as_plain_tensors():
            return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)

    def detach(self) -> torch.Tensor:
        """The values, without autograd. They stay the same when `.data` is assigned."""
        made = super().detach()
        if self.sharded is not None:
            self.aliases = [*(each for each in self.aliases if each() is not None), ref(made)]
        return made

    @property
    def requires_grad(self) -> bool:
        """As that of the sharded parameter, which both get."""
        with as_plain_tensors():
            return requires_grad(self if self.sharded is None else self.sharded)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        with as_plain_tensors():
            torch.Tensor.requires_grad.__set__(self, value)  # type: ignore[attr-defined]
        if self.sharded is not None:
            self.sharded.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> torch.Tensor | None:
        """That of the sharded parameter, as clipping and logging look for it between backwards."""
        with as_plain_tensors():
            own: torch.Tensor | None = _grad.__get__(self)
        return own if own is not None or self.sharded is None or in_backward() else self.sharded.grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self.sharded is not None and not in_backward() and (value is None or isinstance(value, DTensor)):
            self.sharded.grad, value = value, None
        with as_plain_tensors():
            _grad.__set__(self, value)

    @property
    def data(self) -> torch.Tensor:
        """As `detach()`. (Unlike torch's, this shares the version counter, which reveals writes.)"""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        # Hazard: torch would give this tensor the memory of the other one. A DTensor has none: reading it would crash.
        if self.sharded is None:
            torch.Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
            return
        found = [alias for each in self.aliases if (alias := each()) is not None]
        if any(alias is value for alias in found):
            return  # the values are there
        self.aliases = ()
        if found:
            kept = super().detach().clone()
            for alias in found:
                alias.data = kept
        gathered = self.sharded.gathered_spec
        given = value if gathered is None or isinstance(value, DTensor) else DTensor(value.detach(), gathered)
        self.sharded.data = given.to(self.sharded.dtype) if value.dtype == self.dtype else given
        with torch.no_grad():
            super().detach().copy_(whole(value, gathered) if isinstance(value, DTensor) else value)


def times_written(params: Sequence[ShardedParam]) -> list[int]:
    """How often torch has written the shards: first each through the DTensor and what was detached from it; then each through
    its local tensor, which one rank may do alone.

    What writes by other means (numpy, kernels that are given an address) adds nothing.
    """
    through_locals = [param.sharded._local_tensor._version for param in params]  # type: ignore[attr-defined]
    return [param.sharded._version for param in params] + through_locals


def whole(value: DTensor, gathered: Spec | None) -> torch.Tensor:
    """What a module sees of a sharded value: all of it, or this rank's part by the outer placements. Collective."""
    if gathered is None:
        return value.full_tensor()
    if value.spec.mesh is gathered.mesh:
        return value.redistribute(gathered.placements).to_local()
    return gathered.local_shard(value.full_tensor())


def local_shard(original: torch.Tensor, spec: Spec) -> torch.Tensor:
    """This rank's part of a parameter, whole or sharded. Collective if it is sharded with other placements."""
    if not isinstance(original, DTensor):
        return spec.local_shard(original)
    if original.spec.mesh is spec.mesh:
        return original.redistribute(spec.placements).to_local()
    return spec.local_shard(original.full_tensor())


class Attributes:
    """A module's parameters as a mapping that writes by `setattr` on the module."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._params = ref(module), module._parameters

    def __setitem__(self, attribute: str, param: nn.Parameter | None) -> None:
        if (module := self._module()) is not None:
            setattr(module, attribute, param)

    def get(self, attribute: str) -> nn.Parameter | None:
        """What is registered under that name."""
        return self._params.get(attribute)


def placement_of(index: int, layout: Layout) -> ResolvedShard:
    """The placement that the layout gives its parameter `index`."""
    param = layout.placed[index]
    return FlatShard(param.spec.dim, layout.numels(index)) if param.flat else RaggedShard(param.spec.dim, layout.rows(index))


def local_geometry(shape: torch.Size, placement: ResolvedShard, rank: int) -> tuple[torch.Size, tuple[int, ...]]:
    """Shape and strides of a rank's part in its segment; that of a scalar is 1-D."""
    part = placement.shard_shape(shape, rank)
    return part, outermost_stride(part, placement.dim)


def outermost_stride(shape: torch.Size, dim: int) -> tuple[int, ...]:
    """The strides of a tensor of `shape` that lies in memory with `dim` outermost."""
    if len(shape) < 2 or dim == 0:
        return torch.empty(shape, device="meta").stride()
    moved = [shape[dim], *shape[:dim], *shape[dim + 1 :]]
    stride = list(torch.empty(moved, device="meta").stride())
    stride.insert(dim, stride.pop(0))
    return tuple(stride)


def same_memory(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether two parameters share one tensor."""
    if not isinstance(one, DTensor) or not isinstance(other, DTensor) or one.spec != other.spec:
        return False
    parts = one._local_tensor, other._local_tensor
    return parts[0].is_meta == parts[1].is_meta and parts[0].data_ptr() == parts[1].data_ptr()
