"""`DTensor`: a tensor that is distributed over a mesh, with autograd and optimizer support.

It has the global shape and holds this rank's local shard. `dispatch.py` has the table of the operations that are defined on it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import is_grad_enabled
from torch.autograd.graph import increment_version

from ..comm import DeviceMesh, ReduceOp
from ..torch_internals import OpOverload, disabled_torch_function
from .placement import Partial, Placement, Replicate, Shard, Sharded, Spec, local_shape
from .redistribute import check_replicas, redistribute

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Rules(dict[Any, Rule]):
    """The rule of each operation on `DTensor`s, cached. `find`, which `dispatch.py` sets, gives the rule at its first use."""

    find: Callable[[Any], Rule]

    def __missing__(self, func: Any) -> Rule:
        rule = self[func] = self.find(func)
        return rule


RULES = Rules()


class DTensor(torch.Tensor):
    """A tensor of which every rank of a mesh holds a local shard: `to_local()` returns it, `full_tensor()` the full tensor.

    `shape` is the global shape, `dtype` and `device` are those of the local shard. Created by `fully_shard`,
    `distribute_tensor` and `from_local`.
    `from_local`, `to_local`, `redistribute` and `full_tensor` are differentiable. A gradient has the placements of its tensor,
    with `Replicate` in the place of `Partial`.
    An operation that is not defined on sharded tensors raises NotImplementedError.
    """

    __slots__ = ("_local_tensor", "spec")  # Cost: a for-loop optimizer creates two per parameter and step
    _local_tensor: torch.Tensor
    spec: Spec
    full_name: str | None = None  # a sharded parameter's name in the root module
    # On a parameter: each rank's gradient is only a term of what these placements say, until it is reduced. None: it is whole.
    grad_placements: tuple[Placement, ...] | None = None
    gathered_spec: Spec | None = None  # of what a module sees of a sharded parameter, if that is not all of it

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
        """The tensor whose local shard on this rank is `local_tensor`; they share memory.

        local_tensor: on the mesh's device, any dtype, of the shape that the placements give this rank.
        placements: one for each mesh axis.
        shape: the global shape; None: all ranks have local shards of the same shape.
        stride: the global stride; only that of a contiguous tensor is accepted.
        run_check: compare replicas, which must hold the same bits. Collective; without it there is no communication.
        Cost: of `run_check` a broadcast along each replicated axis, and an all-reduce.
        The gradient of `local_tensor` is its shard of the gradient. Through `Partial("sum")` it is the full gradient, through
        `Partial("avg")` the full gradient divided by the number of ranks; other reductions raise NotImplementedError.
        Raises ValueError for placements that do not fit the mesh or the shape, for a local tensor of another shape or device,
        for another stride, and on every rank for replicas that differ. Raises TypeError for what is not a `Placement`.
        """
        global_shape = _shape_from_equal_shards(local_tensor.shape, device_mesh, placements) if shape is None else shape
        spec = Spec.of(device_mesh, placements, global_shape)
        expected = local_shape(device_mesh, spec.placements, spec.shape)
        if local_tensor.shape != expected or local_tensor.device != device_mesh.device:
            raise ValueError(
                f"from_local on rank {device_mesh.rank}: expected a local shard of shape {tuple(expected)} on "
                f"{device_mesh.device}, by {spec}; found {tuple(local_tensor.shape)} on {local_tensor.device}; pass the global "
                "shape if the local shards differ"
            )
        if stride is not None and tuple(stride) != torch.empty(spec.shape, device="meta").stride():
            raise ValueError(
                f"from_local with stride {tuple(stride)} of shape {tuple(spec.shape)}: expected that of a contiguous tensor"
            )
        if run_check:
            check_replicas(local_tensor.detach(), spec)
        return _FromLocal.apply(local_tensor, spec)

    def to_local(self, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's local shard; it shares memory with the tensor. No communication.

        Its shape: (..., rows, ...) for a `RaggedShard` or `Shard`, 1-D for a `FlatShard`, the global shape for a `Replicate`
        and for a `Partial`, where it is this rank's term of the reduction.
        grad_placements: the placements of the gradient, of which each rank's local gradient is the shard; None: those of the
        tensor, with `Replicate` in the place of `Partial`. Raises ValueError for those that do not fit the mesh or the shape.
        """
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._local_tensor
        spec = _grad_spec(self.spec) if grad_placements is None else Spec.of(self.spec.mesh, grad_placements, self.shape)
        return _ToLocal.apply(self, spec)

    def redistribute(
        self, device_mesh: DeviceMesh | Sequence[Placement] | None = None, placements: Sequence[Placement] | None = None
    ) -> DTensor:
        """The same tensor with other placements on the same mesh; `self` if it has them already. Collective.

        Accepts the placements alone, or the tensor's mesh and the placements. placements: one for each mesh axis; None:
        `Replicate` on each.
        Cost: for each axis that changes, as in the table of `redistribute.py`. To change an outer axis of a dim that inner axes
        shard too, those are gathered first.
        Raises ValueError for another mesh, and for placements that do not fit the mesh or the shape.
        """
        if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
            device_mesh, placements = None, device_mesh
        if device_mesh is not None and device_mesh is not self.spec.mesh:
            raise ValueError(f"redistribute to {device_mesh} of a tensor of {self.spec}: expected its own mesh")
        spec = Spec.of(self.spec.mesh, self.spec.replicated if placements is None else placements, self.shape)
        return self if spec == self.spec else _Redistribute.apply(self, spec)

    def full_tensor(self, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The full tensor, of the global shape, on every rank; it shares memory with a replicated tensor. Collective.

        grad_placements: the placements of the gradient, of which each rank's gradient is the shard; None: each rank has the
        full gradient. Raises ValueError for those that do not fit the mesh or the shape.
        Cost: an all-gather for each sharded axis, an all-reduce for each partial one.
        """
        return self.redistribute(self.spec.replicated).to_local(grad_placements)

    @property
    def data(self) -> torch.Tensor:
        """The tensor without autograd. An assignment copies the values into the tensor's own memory.

        A `DTensor` of another dtype and the same placements, which `module.to(dtype)` assigns, gives the tensor its dtype and
        its memory, unless `fully_shard` has the tensor.
        A plain tensor that is assigned has the global shape and the same values on every rank. Collective if a `DTensor` with
        other placements is assigned. Raises ValueError for another shape or dtype, RuntimeError on the meta device.
        """
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, DTensor) and value.dtype != self.dtype and value.spec == self.spec and self.full_name is None:
            torch.Tensor.data.__set__(self, value.detach())  # type: ignore[attr-defined]
            self._local_tensor = value._local_tensor
            increment_version(self)
            return
        name = "a DTensor" if self.full_name is None else f"parameter '{self.full_name}'"
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ValueError(
                f".data of {name} (rank {self.spec.mesh.rank}): expected a tensor of shape {tuple(self.shape)} and "
                f"{self.dtype}, plain or a DTensor; found {tuple(value.shape)} {value.dtype}; "
                "to() of the sharded module changes dtypes"
            )
        if self.is_meta and not value.is_meta:
            raise RuntimeError(f".data of {name} (rank {self.spec.mesh.rank}): it is on the meta device; call to_empty() first")
        with torch.no_grad():
            if isinstance(value, DTensor) and value.spec.mesh is self.spec.mesh:
                shard = redistribute(value._local_tensor, value.spec, self.spec.placements)
            else:
                shard = self.spec.local_shard(value.full_tensor() if isinstance(value, DTensor) else value)
            self._local_tensor.copy_(shard)
        increment_version(self)  # the new version makes the next forward gather again

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis."""
        return self.spec.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over which the tensor is distributed."""
        return self.spec.mesh

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DTensor(shape={tuple(self.shape)}, {self.spec.placements}, local={self._local_tensor})"

    def tolist(self) -> Any:
        """The full tensor as nested lists, on every rank. Collective."""
        return self.full_tensor().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """A leaf tensor with copies of this rank's shard and of the gradient, on the same mesh. No communication."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(f"deepcopy of a DTensor of shape {tuple(self.shape)} that is not a leaf: detach() it first")
        made = memo[id(self)] = DTensor(self._local_tensor.detach().clone(), self.spec)
        made.requires_grad = self.requires_grad
        made.__dict__ = copy.deepcopy(self.__dict__, memo)  # holds the mark of an nn.Parameter
        if self.grad is not None:
            made.grad = copy.deepcopy(self.grad, memo)
        return made

    def __reduce_ex__(self, protocol: object) -> Any:
        raise RuntimeError(
            f"a DTensor (of shape {tuple(self.shape)}) cannot be pickled, since a rank holds only its shard: call "
            "full_tensor() on every rank, and torch.save a state dict of the full tensors on one rank"
        )


def dtensor_of(local: torch.Tensor, spec: Spec) -> DTensor:
    """`DTensor.from_local` without its checks. Differentiable."""
    return _FromLocal.apply(local, spec)


def distribute_tensor(tensor: torch.Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A new leaf tensor on the mesh with the values of `tensor`. No communication; not differentiable.

    tensor: the full tensor, the same on every rank; any shape, dtype and device.   placements: one for each mesh axis.
    Through a `Partial`, each rank holds the term that `Partial.local_shard` gives it.
    Cost: a copy of the local shard, on the mesh's device.
    Raises ValueError for placements that do not fit the mesh or the shape, TypeError for what is not a `Placement`.
    """
    spec = Spec.of(device_mesh, placements, tensor.shape)
    shard = spec.local_shard(tensor.detach())
    made = DTensor(shard.to(device_mesh.device, copy=True, memory_format=torch.contiguous_format), spec)
    made.requires_grad = tensor.requires_grad
    return made


def _shape_from_equal_shards(local: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    shape = list(local)
    for placement, size in zip(placements, mesh.shape, strict=False):
        if type(placement) is Shard and -len(shape) <= placement.dim < len(shape):
            shape[placement.dim] *= size
        elif isinstance(placement, Sharded):
            raise ValueError(f"from_local with {placement} of a local shard of shape {tuple(local)}: pass the global shape")
    return shape


# ---------------------------------------------------------------------- autograd: gradients have the global shape


def _grad_spec(spec: Spec) -> Spec:
    """The spec of a gradient: that of its tensor, with `Replicate` in the place of `Partial`."""
    if not spec.partial:
        return spec
    placements = tuple(Replicate() if isinstance(p, Partial) else p for p in spec.placements)
    return Spec(spec.mesh, placements, spec.shape)


def _redistribute_grad(grad: torch.Tensor, spec: Spec) -> DTensor:
    """The gradient with the placements of `spec`. A plain one is the full gradient, the same on every rank."""
    if not isinstance(grad, DTensor):
        return DTensor(spec.local_shard(grad).contiguous(), spec)
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
        local = _redistribute_grad(grad, _grad_spec(ctx.spec)).to_local()
        return local if ranks == 1 else local / ranks, None


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, grad_spec: Spec) -> torch.Tensor:
        ctx.grad_spec = grad_spec
        return tensor._local_tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[DTensor, None]:
        # Hazard: the gradient of a sum is one expanded element; an optimizer writes to the gradient, so it must be contiguous.
        return _FromLocal.apply(grad.contiguous(), ctx.grad_spec), None


class _Redistribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: DTensor, spec: Spec) -> DTensor:
        ctx.source = tensor.spec
        return DTensor(redistribute(tensor._local_tensor, tensor.spec, spec.placements), spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[DTensor, None]:
        return _redistribute_grad(grad, _grad_spec(ctx.source)), None


# ---------------------------------------------------------------------- methods that skip the dispatcher

# Cost: torch's dispatch to Python takes 8 us per operation; a for-loop optimizer runs eight operations per parameter, whose
# arithmetic takes 2 us for a small one. These are the operations of torch's for-loop optimizers.
_IN_PLACE = ("add_", "addcdiv_", "addcmul_", "div_", "lerp_", "mul_", "sqrt_", "sub_", "zero_")
_OUT_OF_PLACE = ("__add__", "__mul__", "__sub__", "__truediv__", "add", "addcdiv", "div", "mul", "sqrt")


def _without_dispatcher(name: str) -> Callable[..., torch.Tensor]:
    """The method for sharded tensors of one spec and numbers; other arguments go through the dispatcher."""
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
        if spec.partial or is_grad_enabled():  # autograd records the operation on the DTensor
            return method(self, *args, **kwargs)
        out = method(self._local_tensor, *local_args, **kwargs)
        if not in_place:
            return DTensor(out, spec)
        increment_version(self)  # as the dispatcher does: a new version marks the shards as changed
        return self

    return call


for _name in (*_IN_PLACE, *_OUT_OF_PLACE):
    setattr(DTensor, _name, _without_dispatcher(_name))
