"""`DTensor`: a sharded tensor that optimizers can step on.

It has the shape of the whole tensor and holds this rank's part. What an operation does with it is one table:

| operations                                         | done                                             |
|----------------------------------------------------|--------------------------------------------------|
| elementwise (torch's `pointwise` tag), `*_like`, copies, `_foreach_*`, `_fused_*` | on the local parts, no communication |
| sum, mean, norm, max, min, any, all of everything  | on the local parts, then one all-reduce of a scalar |
| the few others that torch's optimizers use (`mm`, reductions along a dim, `view`, ...) | on the whole tensors, gathered |
| anything else                                      | refused, by name                                 |

Plain tensors may take part: 0-dim ones as they are, ones of the global shape by this rank's part of them.
Results of reductions and gathered operations are plain tensors, the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_map

from .comm import DeviceMesh, ReduceOp, current_stream
from .placement import FlatShard, Placement, RaggedShard

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Spec:
    """Where the parts of a tensor are."""

    mesh: DeviceMesh
    placement: Placement
    shape: torch.Size  # of the whole tensor

    def local_part(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor of the whole shape: a view, or for a `FlatShard` of a strided one a copy."""
        rank, placement = self.mesh.rank, self.placement
        if isinstance(placement, RaggedShard):
            if not self.shape:
                full = full.reshape(1)  # a scalar's part is 1-D: one element, or none
            return full.narrow(placement.dim, placement.start(rank), placement.rows[rank])
        bounds = placement.bounds()
        outermost = full.movedim(placement.dim, 0) if full.dim() else full
        return outermost.reshape(-1)[bounds[rank] : bounds[rank + 1]]

    def assemble(self, local: torch.Tensor) -> torch.Tensor:
        """The whole tensor from every rank's part. Collective. Cost: one all-gather, parts padded to the largest."""
        placement, mesh = self.placement, self.mesh
        numels = self._numels()
        widest = max(numels)
        padded = local.new_empty(widest)
        flat = local.movedim(placement.dim, 0) if local.dim() > 1 else local
        padded[: local.numel()].copy_(flat.reshape(-1))
        rows = local.new_empty((mesh.size, widest))
        stream = current_stream(mesh.device)
        mesh.communicator("tensor").all_gather(rows, padded, stream=stream).wait(stream)
        elements = torch.cat([rows[rank, :numel] for rank, numel in enumerate(numels)])
        if not self.shape:
            return elements.view(())
        outermost = list(self.shape)
        outermost.insert(0, outermost.pop(placement.dim))
        return elements.view(outermost).movedim(0, placement.dim).contiguous()

    def _numels(self) -> tuple[int, ...]:
        if isinstance(self.placement, FlatShard):
            return self.placement.numels
        row_numel = self.shape.numel() // max(1, self.shape[self.placement.dim]) if self.shape else 1
        return tuple(rows * row_numel for rows in self.placement.rows)


class DTensor(torch.Tensor):
    """A tensor of which every rank of `spec.mesh` holds a part. `to_local()` is the part, `full_tensor()` the whole."""

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

    def to_local(self) -> torch.Tensor:
        """This rank's part, sharing memory: (rows, ...) of a `RaggedShard`, 1-D of a `FlatShard`. Not differentiable."""
        return self._local_tensor

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor, on every rank. Collective over the mesh. Not differentiable."""
        with torch.no_grad():
            return self.spec.assemble(self._local_tensor)

    @property
    def placement(self) -> Placement:
        """How the tensor lies along the mesh axis."""
        return self.spec.placement

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DTensor(shape={tuple(self.shape)}, {self.spec.placement}, local={self._local_tensor})"

    def __reduce_ex__(self, protocol: object) -> Any:
        raise RuntimeError(
            "a DTensor holds one rank's part and cannot be pickled: save full_tensor(), or to_local() of every rank"
        )


# ---------------------------------------------------------------------- methods that skip the dispatcher

# Cost: torch's dispatch to Python is 8 us per operation, an optimizer's for-loop makes eight per parameter, and small
# parameters take 2 us for the arithmetic itself. These are the operations that torch's optimizers loop over.
_IN_PLACE = ("add_", "addcdiv_", "addcmul_", "div_", "lerp_", "mul_", "sqrt_", "sub_", "zero_")
_OUT_OF_PLACE = ("__add__", "__mul__", "__sub__", "__truediv__", "add", "addcdiv", "div", "mul", "sqrt")


def _directly(name: str) -> Callable[..., torch.Tensor]:
    """The method for sharded tensors that lie alike, and numbers; what else there is takes the dispatcher's way."""
    method, in_place = getattr(torch.Tensor, name), name in _IN_PLACE

    def call(self: DTensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        local_args = []
        for arg in args:
            if type(arg) is DTensor and arg.spec is self.spec:
                local_args.append(arg._local_tensor)
            elif isinstance(arg, torch.Tensor):
                return method(self, *args, **kwargs)
            else:
                local_args.append(arg)
        if torch.is_grad_enabled():  # autograd records the operation on the whole tensor
            return method(self, *args, **kwargs)
        out = method(self._local_tensor, *local_args, **kwargs)
        if not in_place:
            return DTensor(out, self.spec)
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
    if spec is None or type(args[0]) is not DTensor or "out" in kwargs:
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
    local_args = [_unwrap(arg, specs, func) for arg in args]
    local_kwargs = {key: _unwrap(value, specs, func) for key, value in kwargs.items()}
    out = func(*local_args, **local_kwargs)
    if isinstance(out, torch.Tensor):
        written = local_kwargs.get("out", local_args[0])
        return destination if out is written else DTensor(out, specs[0])
    if isinstance(out, (list, tuple)):
        return [DTensor(part, spec) for part, spec in zip(out, specs, strict=True)]
    return out


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
        return [_local_of(part, spec, func) for part, spec in zip(value, specs, strict=True)]
    return value


def _local_of(value: torch.Tensor, spec: Spec, func: Any) -> torch.Tensor:
    if isinstance(value, DTensor):
        if value.spec is spec or value.spec == spec:
            return value._local_tensor
        raise ValueError(f"{func} on tensors that lie differently: {value.spec} against {spec}; use full_tensor()")
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

    def whole(value: Any) -> Any:
        return value.full_tensor() if isinstance(value, DTensor) else value

    full_args, full_kwargs = tree_map(whole, (args, kwargs))
    return func(*full_args, **full_kwargs)


def _to_scalar(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func is aten.equal.default:
        specs = _specs(args)
        same = func(*[_unwrap(arg, specs, func) for arg in args])
        return bool(combine(torch.tensor(same, device=specs[0].mesh.device), ReduceOp.MIN, specs[0].mesh))
    whole, local, mesh, op = args[0], args[0]._local_tensor, args[0].spec.mesh, _TO_SCALAR[func]
    if func is aten.mean.default:
        return combine(local.sum(**kwargs), op, mesh) / whole.numel()
    if local.numel() == 0 and op is not ReduceOp.SUM:
        return combine(_neutral(func, op, local), op, mesh)
    return combine(func(local, **kwargs), op, mesh)


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
    return _norms([args[0]], order)[0]


def _foreach_norm(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _norms(args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2))


def _norms(tensors: list[DTensor], order: float) -> list[torch.Tensor]:
    """The norm of each whole tensor, combined in float64. Cost: one all-reduce for all; they must lie on one mesh."""
    if order <= 0:
        raise NotImplementedError(f"the {order}-norm of sharded tensors is not defined here: use full_tensor()")
    parts = [t._local_tensor for t in tensors]
    norms = [torch.linalg.vector_norm(part.double(), order) if part.numel() else part.new_zeros(()).double() for part in parts]
    local, mesh = torch.stack(norms), tensors[0].spec.mesh
    if order == float("inf"):
        whole = combine(local, ReduceOp.MAX, mesh)
    else:
        whole = combine(local**order, ReduceOp.SUM, mesh) ** (1.0 / order)
    return [norm.to(t.dtype) for norm, t in zip(whole, tensors, strict=True)]


def combine(value: torch.Tensor, op: ReduceOp, mesh: DeviceMesh) -> torch.Tensor:
    """All-reduce a small local result over the mesh."""
    sent = value.to(torch.uint8) if value.dtype == torch.bool else value.contiguous()
    out = torch.empty_like(sent)
    stream = current_stream(mesh.device)
    mesh.communicator("tensor").all_reduce(out, sent, op, stream=stream).wait(stream)
    return out.to(value.dtype)


def _tensors(args: object) -> list[torch.Tensor]:
    if isinstance(args, torch.Tensor):
        return [args]
    return [t for arg in args for t in _tensors(arg)] if isinstance(args, (list, tuple)) else []


_RULES: dict[Any, Rule] = {}
