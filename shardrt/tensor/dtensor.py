"""`DTensor`: a tensor spread over a mesh, that optimizers can step on.

It has the shape of the whole tensor and holds this rank's part. `dispatch.py` has the table of what operations do with it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import ref

import torch
from torch import is_grad_enabled, nn
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from ..comm import DeviceMesh, ReduceOp
from ..torch_internals import OpOverload, disabled_torch_function
from .placement import Partial, Placement, Replicate, Shard, Sharded, Spec, local_shape
from .redistribute import check_replicas, redistribute

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Rules(dict[Any, Rule]):
    """What is done for each operation on a `DTensor`: looked up by `find`, which `dispatch.py` sets, at its first use."""

    find: Callable[[Any], Rule]

    def __missing__(self, func: Any) -> Rule:
        rule = self[func] = self.find(func)
        return rule


RULES = Rules()


class Group(Protocol):
    """What has taken parameters of modules, to shard them."""

    name: str
    mesh: DeviceMesh
    modules: Sequence[nn.Module]


_groups: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weak references to groups, by their parameters


def set_group(param: torch.Tensor, group: Group) -> None:
    """Let `group_of` find the group by this parameter."""
    _groups[param] = ref(group)


def group_of(param: torch.Tensor) -> Group | None:
    """The group that has taken this parameter, as the original or as the sharded one."""
    found = _groups.get(param)
    return None if found is None else found()


class DTensor(torch.Tensor):
    """A tensor of which every rank of a mesh holds a part. `to_local()` is the part, `full_tensor()` the whole.

    Autograd goes through `from_local`, `to_local`, `redistribute` and `full_tensor`; gradients lie as the tensors do, but
    replicated where those are `Partial`.
    """

    __slots__ = ("_local_tensor", "spec")  # Cost: an optimizer's for-loop makes two of these per parameter
    _local_tensor: torch.Tensor
    spec: Spec
    full_name: str | None = None  # of a sharded parameter

    @staticmethod
    def __new__(cls, local: torch.Tensor, spec: Spec) -> DTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, spec.shape, dtype=local.dtype, device=local.device)
        made._local_tensor = local
        made.spec = spec
        return made

    __torch_function__ = disabled_torch_function()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return RULES[func](func, args, kwargs or {})

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh,
        placements: Sequence[Placement],
        shape: Sequence[int] | None = None,
        *,
        run_check: bool = False,
        stride: Sequence[int] | None = None,
    ) -> DTensor:
        """The tensor of which this rank's part is `local_tensor`, sharing its memory. No communication without `run_check`.

        placements: one for each mesh axis.   shape: of the whole; None: every rank's part has the shape of this one.
        stride: of the whole; only that of a contiguous tensor.
        run_check: compare replicas, which must hold the same values. Collective. Cost: a broadcast along each replicated axis.
        The gradient of `local_tensor` is its part of the whole gradient; through a `Partial` it is the whole one, divided by N
        of an average; through other reductions there is none.
        Raises ValueError for placements that do not fit the mesh or the shape, for a part of another shape or device, for
        another stride, and on every rank for replicas that differ.
        """
        whole = _shape_of_equal_parts(local_tensor.shape, device_mesh, placements) if shape is None else shape
        spec = Spec.of(device_mesh, placements, whole)
        expected = local_shape(device_mesh, spec.placements, spec.shape)
        if local_tensor.shape != expected or local_tensor.device != device_mesh.device:
            raise ValueError(
                f"from_local on rank {device_mesh.rank}: expected a part of shape {tuple(expected)} on {device_mesh.device}, "
                f"by {spec}; found {tuple(local_tensor.shape)} on {local_tensor.device}; give the shape of the whole if the "
                "parts differ"
            )
        if stride is not None and tuple(stride) != torch.empty(spec.shape, device="meta").stride():
            raise ValueError(
                f"from_local with stride {tuple(stride)} of shape {tuple(spec.shape)}: expected a contiguous tensor's"
            )
        if run_check:
            check_replicas(local_tensor.detach(), spec)
        return _FromLocal.apply(local_tensor, spec)

    def to_local(self, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part, sharing memory: rows of a `RaggedShard` or `Shard`, 1-D of a `FlatShard`, what is to be reduced
        of a `Partial`.

        grad_placements: how the gradients of the ranks' parts make up the whole gradient; None: as the tensor lies.
        """
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._local_tensor
        spec = _grad_spec(self.spec) if grad_placements is None else Spec.of(self.spec.mesh, grad_placements, self.shape)
        return _ToLocal.apply(self, spec)

    def redistribute(
        self, device_mesh: DeviceMesh | Sequence[Placement] | None = None, placements: Sequence[Placement] | None = None
    ) -> DTensor:
        """The same tensor, lying otherwise on the same mesh; itself if it lies so already. Collective.

        Takes the placements alone, or the tensor's mesh and the placements; None: replicated.
        Cost: of the axes that change, as in the table of `redistribute.py`; an outer change of a dim that inner axes cut too
        gathers along those first.
        Raises ValueError for another mesh, and for placements that do not fit the mesh or the shape.
        """
        if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
            device_mesh, placements = None, device_mesh
        if device_mesh is not None and device_mesh is not self.spec.mesh:
            raise ValueError(f"redistribute to {device_mesh} of a tensor of {self.spec}: expected its own mesh")
        spec = Spec.of(self.spec.mesh, self.spec.replicated if placements is None else placements, self.shape)
        return self if spec == self.spec else _Redistribute.apply(self, spec)

    def full_tensor(self, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank; shares memory if it lies so already. Collective.

        grad_placements: how the gradients of the ranks' results make up the whole gradient; None: each rank has all of it.
        Cost: an all-gather for each sharded axis, an all-reduce for each partial one.
        """
        return self.redistribute(self.spec.replicated).to_local(grad_placements)

    @property
    def data(self) -> torch.Tensor:
        """The values, without autograd. Assigned to, the tensor keeps its memory and takes the values.

        Collective if what is assigned is a `DTensor` that lies otherwise; a plain tensor is the whole, the same on every
        rank. Raises ValueError for another shape or dtype, RuntimeError while there is no memory (meta).
        """
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        name = "a DTensor" if self.full_name is None else f"parameter '{self.full_name}'"
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ValueError(
                f".data of {name} (rank {self.spec.mesh.rank}): expected a tensor of shape {tuple(self.shape)} and "
                f"{self.dtype}, the whole or a DTensor; found {tuple(value.shape)} {value.dtype}; "
                "to() of the sharded module changes dtypes"
            )
        if self.is_meta and not value.is_meta:
            raise RuntimeError(f".data of {name} (rank {self.spec.mesh.rank}): it is on the meta device; call to_empty() first")
        with torch.no_grad():
            if isinstance(value, DTensor) and value.spec.mesh is self.spec.mesh:
                part = redistribute(value._local_tensor, value.spec, self.spec.placements)
            else:
                part = self.spec.local_part(value.full_tensor() if isinstance(value, DTensor) else value)
            self._local_tensor.copy_(part)
        increment_version(self)  # what is gathered is gathered anew

    @property
    def placements(self) -> tuple[Placement, ...]:
        """How the tensor lies along each mesh axis."""
        return self.spec.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh that it is spread over."""
        return self.spec.mesh

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DTensor(shape={tuple(self.shape)}, {self.spec.placements}, local={self._local_tensor})"

    def tolist(self) -> Any:
        """The whole tensor as nested lists, on every rank. Collective."""
        return self.full_tensor().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """A leaf tensor with a copy of this rank's part and of the gradient; they lie on the same mesh. No communication."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(f"deepcopy of a DTensor of shape {tuple(self.shape)} that autograd computed: detach() it first")
        made = memo[id(self)] = DTensor(self._local_tensor.detach().clone(), self.spec)
        made.requires_grad = self.requires_grad
        made.__dict__ = copy.deepcopy(self.__dict__, memo)  # it says what is an nn.Parameter
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: object) -> Any:
        raise RuntimeError(
            f"a DTensor, here of shape {tuple(self.shape)}, cannot be pickled, since a rank holds only a part of it: call "
            "full_tensor() on every rank, and torch.save a state dict of such whole tensors on one"
        )


def distribute_tensor(tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A new leaf tensor on the mesh with the values of `tensor`, which every rank passes whole. No communication.

    Of a `Partial` each rank holds what `Partial.local_shard` gives it. Cost: a copy of the part, moved to the mesh's device.
    Raises ValueError for placements that do not fit the mesh or the shape. Not differentiable.
    """
    spec = Spec.of(device_mesh, placements, tensor.shape)
    part = spec.local_part(tensor.detach())
    made = DTensor(part.to(device_mesh.device, copy=True, memory_format=torch.contiguous_format), spec)
    made.requires_grad = tensor.requires_grad
    return made


def _shape_of_equal_parts(local: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    shape = list(local)
    for placement, size in zip(placements, mesh.shape, strict=False):
        if type(placement) is Shard and -len(shape) <= placement.dim < len(shape):
            shape[placement.dim] *= size
        elif isinstance(placement, Sharded):
            raise ValueError(f"from_local with {placement} of a part of shape {tuple(local)}: give the shape of the whole")
    return shape


# ---------------------------------------------------------------------- autograd: the gradient is of the whole tensor


def _grad_spec(spec: Spec) -> Spec:
    """How a gradient lies: as its tensor, replicated where that is partial."""
    if not spec.partial:
        return spec
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
    return Spec(spec.mesh, placements, spec.shape)


def _lying_as(grad: torch.Tensor, spec: Spec) -> DTensor:
    """A gradient as `spec` has it; a plain one is the whole, the same on every rank."""
    if not isinstance(grad, DTensor):
        return DTensor(spec.local_part(grad).contiguous(), spec)
    return grad if grad.spec == spec else _Redistribute.apply(grad, spec)


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Spec) -> DTensor:
        ctx.spec = spec
        return DTensor(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ranks = 1
        for placement, size in zip(ctx.spec.placements, ctx.spec.mesh.shape, strict=True):
            if isinstance(placement, Partial):
                if not placement.linear:
                    raise NotImplementedError(f"the gradient of from_local with {placement}: expected a sum or an average")
                ranks *= size if placement.reduce_op is ReduceOp.AVG else 1
        local = _lying_as(grad, _grad_spec(ctx.spec)).to_local()
        return local if ranks == 1 else local / ranks, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_spec: Spec) -> torch.Tensor:
        ctx.grad_spec = grad_spec
        return tensor._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[DTensor, None]:
        # Hazard: the gradient of a sum is one element, seen as many; an optimizer writes to it.
        return _FromLocal.apply(grad.contiguous(), ctx.grad_spec), None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, spec: Spec) -> DTensor:
        ctx.source = tensor.spec
        return DTensor(redistribute(tensor._local_tensor, tensor.spec, spec.placements), spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[DTensor, None]:
        return _lying_as(grad, _grad_spec(ctx.source)), None


# ---------------------------------------------------------------------- methods that skip the dispatcher

# Cost: torch's dispatch to Python is 8 us per operation, an optimizer's for-loop makes eight per parameter, and small
# parameters take 2 us for the arithmetic itself. These are the operations that torch's optimizers loop over.
_IN_PLACE = ("add_", "addcdiv_", "addcmul_", "div_", "lerp_", "mul_", "sqrt_", "sub_", "zero_")
_OUT_OF_PLACE = ("__add__", "__mul__", "__sub__", "__truediv__", "add", "addcdiv", "div", "mul", "sqrt")


def _directly(name: str) -> Callable[..., torch.Tensor]:
    """The method for sharded tensors that lie alike, and numbers; what else there is takes the dispatcher's way."""
    method, in_place = getattr(torch.Tensor, name), name in _IN_PLACE

    def call(self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        spec, local_args = self.spec, []
        for arg in args:
            kind = type(arg)
            if kind is DTensor and arg.spec is spec:
                local_args.append(arg._local_tensor)
            elif kind is float or kind is int:
                local_args.append(arg)
            else:
                return method(self, *args, **kwargs)
        if spec.partial or is_grad_enabled():  # autograd records the operation on the whole tensor
            return method(self, *args, **kwargs)
        out = method(self._local_tensor, *local_args, **kwargs)
        if not in_place:
            return DTensor(out, spec)
        increment_version(self)  # as the dispatcher would: it is how a change of the shards is noticed
        return self

    return call


for _name in (*_IN_PLACE, *_OUT_OF_PLACE):
    setattr(DTensor, _name, _directly(_name))
