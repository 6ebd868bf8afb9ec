"""`DTensor`: a tensor spread over a mesh, that optimizers can step on.

It has the shape of the whole tensor and holds this rank's part. What an operation does with it is one table:

| operations                                         | done                                             |
|----------------------------------------------------|--------------------------------------------------|
| elementwise (torch's `pointwise` tag), `*_like`, copies, `_foreach_*`, `_fused_*` | on the local parts, no communication |
| sum, mean, norm, max, min, any, all of everything  | on the local parts, then one all-reduce of a scalar |
| `normal_`, `uniform_` and the like                 | the same whole tensor on any number of ranks (`rng.py`) |
| the few others that torch's optimizers use (`mm`, reductions along a dim, `view`, ...) | on the whole tensors, gathered |
| anything else                                      | refused, by name                                 |

All of it counts replicas once. With a `Partial` placement only copies, and of sums and averages what is linear, are done on
the local parts; the gathered operations reduce first, and everything else is refused.
Plain tensors may take part: 0-dim ones as they are, ones of the global shape by this rank's part of them.
Results of reductions and gathered operations are plain tensors, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import is_grad_enabled
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map

from .comm import DeviceMesh, ReduceOp, current_stream
from .placement import Partial, Placement, Replicate, Shard, Sharded, Spec, local_shape
from .redistribute import redistribute
from .rng import agree_on_seed, fill

aten = torch.ops.aten


class DTensor(torch.Tensor):
    """A tensor of which every rank of a mesh holds a part. `to_local()` is the part, `full_tensor()` the whole.

    Autograd goes through `from_local`, `to_local`, `redistribute` and `full_tensor`; gradients lie as the tensors do, but
    replicated where those are `Partial`.
    """

    __slots__ = ("_local_tensor", "spec")  # Cost: an optimizer's for-loop makes two of these per parameter
    _local_tensor: torch.Tensor
    spec: Spec

    @staticmethod
    def __new__(cls, local: torch.Tensor, spec: Spec) -> DTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, spec.shape, dtype=local.dtype, device=local.device)
        made._local_tensor = local
        made.spec = spec
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        rule = _RULES.get(func)
        if rule is None:
            rule = _RULES[func] = _find_rule(func)
        return rule(func, args, kwargs or {})

    @staticmethod
    def from_local(
        local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int] | None = None
    ) -> DTensor:
        """The tensor of which this rank's part is `local`, sharing its memory. No communication.

        placements: one for each mesh axis.   shape: of the whole; None: every rank's part has the shape of this one.
        Replicas must hold the same values; nobody checks. The gradient of `local` is its part of the whole gradient; through
        a `Partial` it is the whole one, divided by N of an average; through other reductions there is none.
        Raises ValueError for placements that do not fit the mesh or the shape, and for a part of another shape or device.
        """
        whole = _shape_of_equal_parts(local.shape, mesh, placements) if shape is None else shape
        spec = Spec.of(mesh, placements, whole)
        expected = local_shape(mesh, spec.placements, spec.shape)
        if local.shape != expected or local.device != mesh.device:
            raise ValueError(
                f"from_local on rank {mesh.rank}: expected a part of shape {tuple(expected)} on {mesh.device}, by {spec}; "
                f"found {tuple(local.shape)} on {local.device}; give the shape of the whole if the parts differ"
            )
        return _FromLocal.apply(local, spec)

    def to_local(self, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's part, sharing memory: rows of a `RaggedShard` or `Shard`, 1-D of a `FlatShard`, what is to be reduced
        of a `Partial`.

        grad_placements: how the gradients of the ranks' parts make up the whole gradient; None: as the tensor lies.
        """
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._local_tensor
        spec = _grad_spec(self.spec) if grad_placements is None else Spec.of(self.spec.mesh, grad_placements, self.shape)
        return _ToLocal.apply(self, spec)

    def redistribute(self, placements: Sequence[Placement]) -> DTensor:
        """The same tensor, lying otherwise on the same mesh; itself if it lies so already. Collective.

        Cost: of the axes that change, as in the table of `redistribute.py`; an outer change of a dim that inner axes cut too
        gathers along those first.   Raises ValueError for placements that do not fit the mesh or the shape.
        """
        spec = Spec.of(self.spec.mesh, placements, self.shape)
        return self if spec == self.spec else _Redistribute.apply(self, spec)

    def full_tensor(self, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The whole tensor, on every rank; shares memory if it lies so already. Collective.

        grad_placements: how the gradients of the ranks' results make up the whole gradient; None: each rank has all of it.
        Cost: an all-gather for each sharded axis, an all-reduce for each partial one.
        """
        return self.redistribute(_replicated(self.spec)).to_local(grad_placements)

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

    def __reduce_ex__(self, protocol: object) -> Any:
        raise RuntimeError(
            f"a DTensor holds one rank's part, here of {self.spec}, and cannot be pickled: save full_tensor(), or to_local() "
            "of every rank"
        )


def distribute_tensor(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """A new leaf tensor on `mesh` with the values of `tensor`, which every rank passes whole. No communication.

    Of a `Partial` each rank holds what `Partial.part_of` gives it. Cost: a copy of the part, moved to the mesh's device.
    Raises ValueError for placements that do not fit the mesh or the shape. Not differentiable.
    """
    spec = Spec.of(mesh, placements, tensor.shape)
    part = spec.local_part(tensor.detach())
    made = DTensor(part.to(mesh.device, copy=True, memory_format=torch.contiguous_format), spec)
    made.requires_grad = tensor.requires_grad
    return made


def _shape_of_equal_parts(local: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    shape = list(local)
    for placement, size in zip(placements, mesh.shape, strict=False):
        if isinstance(placement, Shard) and -len(shape) <= placement.dim < len(shape):
            shape[placement.dim] *= size
        elif isinstance(placement, Sharded):
            raise ValueError(f"from_local with {placement} of a part of shape {tuple(local)}: give the shape of the whole")
    return shape


def _replicated(spec: Spec) -> list[Placement]:
    return [Replicate() for _ in spec.placements]


def _whole(value: Any) -> Any:
    """A tensor's whole, detached; anything else as it is. Collective."""
    return redistribute(value._local_tensor, value.spec, _replicated(value.spec)) if isinstance(value, DTensor) else value


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


# ---------------------------------------------------------------------- rules

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_COPIES = {
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.copy_.default,
    aten._to_copy.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.zero_.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
}
_GATHERED = {
    aten._local_scalar_dense.default,
    aten._unsafe_view.default,
    aten.addmm.default,
    aten.cat.default,
    aten.dot.default,
    aten.mean.dim,
    aten.mm.default,
    aten.new_zeros.default,
    aten.permute.default,
    aten.sum.dim_IntList,
    aten.t.default,
    aten.transpose.int,
    aten.view.default,
}
_NOT_ELEMENTWISE = {"_foreach_max", "_foreach_mm", "_foreach_powsum"}
_TO_SCALAR = {
    aten.sum.default: ReduceOp.SUM,
    aten.mean.default: ReduceOp.SUM,
    aten.max.default: ReduceOp.MAX,
    aten.min.default: ReduceOp.MIN,
    aten.any.default: ReduceOp.MAX,
    aten.all.default: ReduceOp.MIN,
    aten.equal.default: ReduceOp.MIN,
}
_RANDOM = {
    aten.bernoulli_.float,
    aten.cauchy_.default,
    aten.exponential_.default,
    aten.geometric_.default,
    aten.log_normal_.default,
    aten.normal_.default,
    aten.random_.default,
    aten.random_.to,
    aten.random_.__getattr__("from"),
    aten.uniform_.default,
}
# What may be done to each part of what a reduction will make one tensor of.
_PARTIAL_COPIES = {
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.copy_.default,
    aten.empty_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
}
_PARTIAL_SUMS = {aten.add.Tensor, aten.add_.Tensor, aten.neg.default, aten.neg_.default, aten.sub.Tensor, aten.sub_.Tensor}


def _find_rule(func: Any) -> Rule:
    name = func._schema.name.removeprefix("aten::")
    if func in _TO_SCALAR:
        return _to_scalar
    if name == "linalg_vector_norm":
        return _vector_norm
    if name == "_foreach_norm":
        return _foreach_norm
    if func in _GATHERED:
        return _gathered
    if func in _RANDOM:
        return _random
    if func is aten.index_put_.default:
        return _masked_put
    if torch.Tag.pointwise in func.tags or func in _COPIES:
        return _elementwise
    if name.startswith(("_foreach_", "_fused_")) and name not in _NOT_ELEMENTWISE:
        return _local
    return _refuse


def _refuse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    shapes = [tuple(x.shape) for x in _tensors(args)]
    raise NotImplementedError(
        f"{func} is not defined on sharded tensors (shapes {shapes}): its result would depend on other ranks' parts. "
        "Use .full_tensor() for the whole tensor, or .to_local() for this rank's part"
    )


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_local` for what optimizers call most: sharded tensors that lie alike, numbers and 0-dim tensors, no lists."""
    spec: Spec | None = None
    local_args = []
    for arg in args:
        if type(arg) is DTensor:
            spec = arg.spec if spec is None else spec
            if arg.spec is not spec:
                return _local(func, args, kwargs)
            local_args.append(arg._local_tensor)
        elif isinstance(arg, torch.Tensor) and arg.dim() != 0:
            return _local(func, args, kwargs)
        else:
            local_args.append(arg)
    if spec is None or spec.partial or type(args[0]) is not DTensor or "out" in kwargs:
        return _local(func, args, kwargs)
    out = func(*local_args, **kwargs)
    if not isinstance(out, torch.Tensor):
        return out
    return args[0] if out is local_args[0] else DTensor(out, spec)


def _local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on the local parts; what comes out has the placement of the first sharded argument (list: element by element)."""
    destination = kwargs.get("out", args[0])
    if func._schema.is_mutable and not isinstance(_first_of(destination), DTensor):
        return _gathered(func, args, kwargs)  # a plain tensor is written: it needs all of the values
    specs = _specs(args)
    if any(spec.partial for spec in specs):
        _check_partial(func, args, kwargs)
    local_args = [_unwrap(arg, specs, func) for arg in args]
    local_kwargs = {key: _unwrap(value, specs, func) for key, value in kwargs.items()}
    out = func(*local_args, **local_kwargs)
    if func._schema.is_mutable and isinstance(destination, (list, tuple)):
        increment_version(destination)  # of lists the dispatcher does not
    if isinstance(out, torch.Tensor):
        written = local_kwargs.get("out", local_args[0])
        return destination if out is written else DTensor(out, specs[0])
    if isinstance(out, (list, tuple)):
        return [DTensor(part, spec) for part, spec in zip(out, specs, strict=True)]
    return out


def _check_partial(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what does not commute with the reductions that are still to be made."""
    if func in _PARTIAL_COPIES:
        return
    summed = func in _PARTIAL_SUMS and all(isinstance(arg, DTensor) for arg in args)
    if not summed or not all(p.linear for arg in args for p in arg.placements if isinstance(p, Partial)):
        _refuse(func, args, kwargs)


def _first_of(value: Any) -> Any:
    return value[0] if isinstance(value, (list, tuple)) and value else value


def _masked_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x[mask] = scalar`, which is elementwise; other indices are not."""
    whole, indices, values = args[:3]
    mask = indices[0]
    if len(indices) == 1 and isinstance(mask, DTensor) and mask.dtype == torch.bool and values.dim() == 0:
        return _local(func, args, kwargs)
    return _refuse(func, (whole, *indices, values), kwargs)


def _specs(args: tuple[Any, ...]) -> list[Spec]:
    """The specs of the first argument that has any: of one tensor, or of each in a list."""
    for arg in args:
        if isinstance(arg, DTensor):
            return [arg.spec]
        if isinstance(_first_of(arg), DTensor):
            return [part.spec for part in arg]
    raise AssertionError("dispatched without a sharded argument")


def _unwrap(value: Any, specs: list[Spec], func: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _local_of(value, specs[0], func)
    if isinstance(_first_of(value), torch.Tensor):
        return [
            part._local_tensor if type(part) is DTensor and part.spec is spec else _local_of(part, spec, func)
            for part, spec in zip(value, specs, strict=True)
        ]
    return value


def _local_of(value: torch.Tensor, spec: Spec, func: Any) -> torch.Tensor:
    if isinstance(value, DTensor):
        if value.spec is spec or value.spec == spec:
            return value._local_tensor
        how = "that lie differently" if value.spec.mesh is spec.mesh else "of different meshes"
        raise ValueError(f"{func} on tensors {how}: {value.spec} against {spec}; use redistribute() or full_tensor()")
    if value.dim() == 0:
        return value
    if value.shape == spec.shape:
        return spec.local_part(value)
    raise ValueError(
        f"{func}: a plain tensor of shape {tuple(value.shape)} with a sharded one of shape {tuple(spec.shape)}; "
        "expected a 0-dim tensor or one of the same shape"
    )


def _gathered(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on the whole tensors, on every rank alike. Cost: an all-gather of every sharded argument."""
    full_args, full_kwargs = tree_map(_whole, (args, kwargs))
    return func(*full_args, **full_kwargs)


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, given = args[0], kwargs.get("generator")
    if tensor.spec.partial or tensor.device.type == "meta":
        raise NotImplementedError(
            f"{func} on a tensor of {tensor.spec} on {tensor.device}: it has no values of its own to draw"
        )
    func(tensor._local_tensor.new_empty(0), *args[1:], generator=given)  # bad arguments raise here, on every rank alike
    seed = agree_on_seed(tensor.spec.mesh, given)
    fill(tensor._local_tensor, tensor.spec, seed, lambda block, generator: func(block, *args[1:], generator=generator))
    return tensor


def _to_scalar(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    spec, op = _specs(args)[0], _TO_SCALAR[func]
    if spec.partial:
        _refuse(func, args, kwargs)
    locals_ = [_unwrap(arg, [spec], func) for arg in args]
    local = locals_[0]
    if func is aten.equal.default:
        return bool(combine(torch.tensor(func(*locals_), device=spec.mesh.device), op, spec.parts))
    if func is aten.mean.default:
        return combine(local.sum(**kwargs), op, spec.parts) / spec.shape.numel()
    if local.numel() == 0 and op is not ReduceOp.SUM and spec.shape.numel():
        return combine(_neutral(func, op, local), op, spec.parts)
    return combine(func(local, **kwargs), op, spec.parts)


def _neutral(func: Any, op: ReduceOp, local: torch.Tensor) -> torch.Tensor:
    """What a rank without elements contributes to a maximum or minimum."""
    if func in (aten.any.default, aten.all.default):
        return local.new_full((), op is ReduceOp.MIN, dtype=torch.bool)
    limits = torch.finfo(local.dtype) if local.dtype.is_floating_point else torch.iinfo(local.dtype)
    lowest = float("-inf") if local.dtype.is_floating_point else limits.min
    highest = float("inf") if local.dtype.is_floating_point else limits.max
    return local.new_full((), lowest if op is ReduceOp.MAX else highest)


def _vector_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    if dim is not None and len(dim) != args[0].dim():
        return _gathered(func, args, kwargs)
    return _norms(func, [args[0]], order)[0]


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _norms(func, args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2))


def _norms(func: Any, tensors: list[torch.Tensor], order: float) -> list[torch.Tensor]:
    """The norm of each whole tensor, combined in float64. Cost: one all-reduce for all that are spread over the same ranks."""
    if order <= 0:
        raise NotImplementedError(f"the {order}-norm of sharded tensors is not defined here: use full_tensor()")
    spread: dict[DeviceMesh | None, list[int]] = {}
    for index, tensor in enumerate(tensors):
        if isinstance(tensor, DTensor) and tensor.spec.partial:
            _refuse(func, (tensor,), {})
        spread.setdefault(tensor.spec.parts if isinstance(tensor, DTensor) else None, []).append(index)
    parts = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    norms = [torch.linalg.vector_norm(part.double(), order) if part.numel() else part.new_zeros(()).double() for part in parts]
    for mesh, indices in spread.items():
        local = torch.stack([norms[index] for index in indices])
        if order == float("inf"):
            whole = combine(local, ReduceOp.MAX, mesh)
        else:
            whole = combine(local**order, ReduceOp.SUM, mesh) ** (1.0 / order)
        for index, norm in zip(indices, whole, strict=True):
            norms[index] = norm.to(tensors[index].dtype)
    return norms


def combine(value: torch.Tensor, op: ReduceOp, mesh: DeviceMesh | None) -> torch.Tensor:
    """All-reduce a small local result over the mesh, on whose device it comes out; as it is without one."""
    if mesh is None:
        return value
    sent = value.to(mesh.device, torch.uint8 if value.dtype == torch.bool else value.dtype).contiguous()
    out = torch.empty_like(sent)
    stream = current_stream(mesh.device)
    mesh.communicator("tensor").all_reduce(out, sent, op, stream=stream).wait(stream)
    return out.to(value.dtype)


def _tensors(args: object) -> list[torch.Tensor]:
    if isinstance(args, torch.Tensor):
        return [args]
    return [t for arg in args for t in _tensors(arg)] if isinstance(args, (list, tuple)) else []


_RULES: dict[Any, Rule] = {}
