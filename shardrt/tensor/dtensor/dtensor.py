"""`DTensor`: a tensor that is distributed over a mesh, with autograd and optimizer support.

It has the global shape, and holds this rank's local shard. `dispatch.py` has the table of the operations that it takes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import is_grad_enabled, is_inference_mode_enabled
from torch.autograd.graph import increment_version

from ...comm import DeviceMesh, ReduceOp, current_mesh
from ...comm.core.calls import about
from ...torch_internals import OpOverload, disabled_torch_function
from ..placement import snapshots
from ..placement.placement import Partial, Placement, Replicate, Shard, Sharded, Spec, local_shape
from ..placement.redistribute import check_replicas, redistribute
from ..placement.strides import with_stride, with_stride_of
from . import aliases
from .group_registry import group_of
from .inference_mode import outside_inference_mode, run_in_inference_mode
from .storage import storage_of

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class Rules(dict[Any, Rule]):
    """The rule of each operation on `DTensor`s, cached. `find`, which `dispatch.py` sets, gives the rule at its first use."""

    find: Callable[[Any], Rule]

    def __missing__(self, func: Any) -> Rule:
        rule = self[func] = self.find(func)
        return rule


class FlagWrites:
    """How often the `requires_grad` of a `DTensor` has changed since the process began."""

    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times = 0


RULES = Rules()
flag_writes = FlagWrites()
at_a_parameter: list[Callable[[], None]] = []  # called when a `DTensor` becomes a parameter; written by `optimizer_steps.py`


class DTensor(torch.Tensor):
    """A tensor of which every rank of a mesh holds a local shard: `to_local()` returns it, `full_tensor()` the full tensor.

    `shape` is the global shape, `dtype` and `device` are those of the local shard. `stride()` is that of the whole tensor it is
    made from, or of a contiguous one. Created by `fully_shard`, `distribute_tensor`, `from_local`, and `shardrt.tensor.zeros`
    and the like.
    `from_local`, `to_local`, `redistribute` and `full_tensor` are differentiable. The gradient of a leaf has the placements of
    the leaf, with `Replicate` in the place of `Partial`. A plain gradient of a sharded module's parameter is averaged.
    An operation that is not defined on sharded tensors raises NotImplementedError.
    """

    # Cost: a for-loop optimizer creates two per parameter and step.
    __slots__ = ("_aliases", "_grad_hook", "_local_tensor", "spec")
    _aliases: list[ref[DTensor]]  # see `aliases.py`
    _grad_hook: Any  # the hook of a leaf that has required a gradient, see `_set_requires_grad`
    _local_tensor: torch.Tensor
    spec: Spec
    full_name: str | None = None  # a sharded parameter's name in the root module
    # On a parameter: each rank's gradient is only a term of what these placements say, until it is reduced. None: it is whole.
    grad_placements: tuple[Placement, ...] | None = None
    tp_leaf: object | None = None  # a tensor-parallel forward reads this in the parameter's place; written by shardrt.parallel
    handed_out: bool = False  # somebody had its local tensor, and may write it so that no version shows it
    gathered_spec: Spec | None = None  # the spec of what a module sees of a sharded parameter, if that is not all of it

    @staticmethod
    def __new__(cls, local: torch.Tensor, spec: Spec) -> DTensor:
        made = torch.Tensor._make_wrapper_subclass(cls, spec.shape, strides=spec.stride, dtype=local.dtype, device=local.device)
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
        if is_inference_mode_enabled():
            return run_in_inference_mode(RULES[func], func, args, kwargs or {})
        return RULES[func](func, args, kwargs or {})

    @staticmethod
    @outside_inference_mode()
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        shape: Sequence[int] | None = None,
        *,
        run_check: bool = False,
        stride: Sequence[int] | None = None,
        grad_placements: Sequence[Placement] | None = None,
    ) -> DTensor:
        """The tensor whose local shard on this rank is `local_tensor`; they share memory.

        local_tensor: plain, any dtype, on the mesh's or the meta device, of the shape that the placements give this rank.
        device_mesh: None: that of the `with mesh:` around the call.   placements: one for each mesh axis; None: `Replicate`.
        shape: the global shape; None: all ranks have local shards of the same shape.
        stride: what `stride()` of the result says: that of a dense tensor. None: its dims in the order of the local tensor's.
        run_check: compare replicas, which must hold the same bits. Collective; without it there is no communication.
        grad_placements: those that the gradient of `local_tensor` has, of which each rank gets its shard. None: those of the
            tensor, with `Replicate` in the place of `Partial`.
        Cost: of `run_check` a broadcast along each replicated axis, and an all-reduce.
        The gradient of `local_tensor` is its shard of the gradient. Through `Partial("sum")` it is the full gradient, through
        `Partial("avg")` the full gradient divided by the number of ranks; other reductions raise NotImplementedError.
        Raises ValueError for placements that do not fit the mesh or the shape, for a local tensor of another shape or device,
        for a stride that leaves gaps, for `grad_placements` that give another local shape, and on every rank for replicas that
        differ. Raises TypeError for what is not a `Placement` and for a `DTensor`, RuntimeError without a mesh.
        """
        mesh = current_mesh() if device_mesh is None else device_mesh
        placements = (Replicate(),) * mesh.ndim if placements is None else placements
        if isinstance(local_tensor, DTensor):
            raise TypeError(f"from_local on rank {mesh.rank} of a DTensor of {local_tensor.spec}: expected a plain tensor")
        global_shape = _shape_from_equal_shards(local_tensor.shape, mesh, placements) if shape is None else shape
        spec = Spec.of(mesh, placements, global_shape)
        expected = local_shape(mesh, spec.placements, spec.shape)
        if local_tensor.shape != expected or local_tensor.device not in (mesh.device, torch.device("meta")):
            raise ValueError(
                f"from_local on rank {mesh.rank}: expected a local shard of shape {tuple(expected)} on {mesh.device}, by "
                f"{spec}; found {tuple(local_tensor.shape)} on {local_tensor.device}; pass the global shape if the local "
                "shards differ"
            )
        if stride is not None:
            spec = with_stride(spec, stride)
        elif local_tensor.dim() == len(spec.shape):
            spec = with_stride_of(spec, local_tensor)
        grad_spec = None if grad_placements is None else _checked_grad_spec(spec, grad_placements, expected)
        if run_check:
            check_replicas(local_tensor.detach(), spec)
        return _FromLocal.apply(local_tensor, spec, grad_spec)

    def to_local(self, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """This rank's local shard; it shares memory with the tensor, so writes to it change the tensor. No communication.

        Its shape: (..., rows, ...) for a `RaggedShard` or `Shard`, 1-D for a `FlatShard`, the global shape for a `Replicate`
        and for a `Partial`, where it is this rank's term of the reduction.
        It is contiguous, but for a shard of a sharded module's parameter along another dim than 0: that is a view of the
        group's flat buffer, which holds this dim outermost. `.contiguous()` makes a copy, which writes do not reach.
        grad_placements: the placements of the gradient, of which each rank's local gradient is the shard; None: those of the
        tensor, with `Replicate` in the place of `Partial`. Raises ValueError for those that do not fit the mesh or the shape,
        and for those that give this rank another shape than its local shard's.
        """
        if snapshots.current is not None or snapshots.read_elsewhere:
            snapshots.wait_to_write([self._local_tensor])
        for each in getattr(self, "_aliases", ()):
            if (alias := each()) is not None:
                alias.handed_out = True
        if not (self.requires_grad and torch.is_grad_enabled()):
            return self._local_tensor
        if grad_placements is None:
            return _ToLocal.apply(self, self.spec.of_gradient())
        return _ToLocal.apply(self, _checked_grad_spec(self.spec, grad_placements, self._local_tensor.shape))

    @outside_inference_mode()
    def redistribute(
        self,
        device_mesh: DeviceMesh | Sequence[Placement] | None = None,
        placements: Sequence[Placement] | None = None,
        *,
        async_op: bool = False,
        forward_dtype: torch.dtype | None = None,
        backward_dtype: torch.dtype | None = None,
    ) -> DTensor:
        """The same tensor with other placements on the same mesh; `self` if it has them already. Collective.

        Accepts the placements alone, or the tensor's mesh and the placements. placements: one for each mesh axis; None:
        `Replicate` on each.
        async_op: makes no difference: the collectives run in the order of the current stream, as what uses the result does. A
            GPU's host waits for none; MPI's calls block.
        forward_dtype: of the values that are sent, and of the result; None: the tensor's.
        backward_dtype: of the gradient that is sent; None: the tensor's, which the gradient gets in the end in any case.
        Cost: for each axis that changes, as in the table of `redistribute.py`. To change an outer axis of a dim that inner axes
        shard too, those are gathered first.
        Raises ValueError for another mesh, and for placements that do not fit the mesh or the shape.
        """
        if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
            device_mesh, placements = None, device_mesh
        if device_mesh is not None and device_mesh is not self.spec.mesh:
            raise ValueError(f"redistribute to {device_mesh} of a tensor of {self.spec}: expected its own mesh")
        spec = self.spec.moved(self.spec.replicated if placements is None else placements)
        if spec == self.spec and forward_dtype in (None, self.dtype):
            return self
        with about(getattr(self, "full_name", "")):  # that of a parameter
            return _Redistribute.apply(self, spec, forward_dtype, backward_dtype)

    def full_tensor(self, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
        """The full tensor, of the global shape, on every rank; it shares memory with a replicated tensor. Collective.

        grad_placements: the placements of the gradient, of which each rank's gradient is the shard; None: each rank has the
        full gradient. `Partial("avg")` for each axis averages gradients that differ between ranks, as those of their own rows.
        Raises ValueError for those that do not fit the mesh or the shape.
        Cost: an all-gather for each sharded axis, an all-reduce for each partial one.
        """
        return self.redistribute(self.spec.replicated).to_local(grad_placements)

    def requires_grad_(self, requires_grad: bool = True) -> DTensor:
        """Set `requires_grad`, as torch's method does. Returns the tensor."""
        self.requires_grad = requires_grad
        return self

    def detach(self) -> DTensor:
        """The tensor without autograd, in the same memory, until `.data` is assigned to either of them. No communication.

        Also in inference mode this makes no inference tensor, which could not reveal writes.
        """
        if torch.is_inference_mode_enabled() and not self.is_inference():
            with torch.inference_mode(False):
                return self.detach()
        made: DTensor = torch.Tensor.detach(self)  # type: ignore[assignment]
        made._local_tensor = self._local_tensor.detach()  # shares its version, as what a rule detaches does not
        aliases.note(self, made)
        return made

    @property
    def data(self) -> torch.Tensor:
        """The tensor without autograd, as `detach` gives it: it shares the version, which reveals writes.

        An assignment copies the values into the tensor's own memory. What was detached from it before, by `.data` too, keeps
        the old values, as with plain tensors; unlike those, the tensor shares no memory with what is assigned. What `to_local`
        has returned stays the tensor's memory.
        A `DTensor` of another dtype and the same placements, which `module.to(dtype)` assigns, gives the tensor its dtype and
        its memory, unless `fully_shard` has the tensor.
        A plain tensor that is assigned has the global shape and the same values on every rank. Collective if a `DTensor` with
        other placements is assigned. Raises ValueError for another shape or dtype, RuntimeError on the meta device.
        """
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if isinstance(value, DTensor) and value.dtype != self.dtype and value.spec == self.spec and self.full_name is None:
            aliases.leave(self)
            torch.Tensor.data.__set__(self, value.detach())  # type: ignore[attr-defined]
            self._local_tensor = value._local_tensor
            increment_version(self)
            return
        name = "a DTensor" if self.full_name is None else f"parameter '{self.full_name}'"
        if value.shape != self.shape or value.dtype != self.dtype:
            raise ValueError(
                f".data of {name} (rank {self.spec.mesh.rank}): expected a tensor of shape {tuple(self.shape)} and "
                f"{self.dtype}, plain or a DTensor; found {tuple(value.shape)} {value.dtype}; "
                "to() of the sharded module changes dtypes; shapes, as by resize_token_embeddings(), change before sharding"
            )
        if self.is_meta and not value.is_meta:
            raise RuntimeError(f".data of {name} (rank {self.spec.mesh.rank}): it is on the meta device; call to_empty() first")
        with torch.no_grad():
            if isinstance(value, DTensor) and value.spec.mesh is self.spec.mesh:
                shard = redistribute(value._local_tensor, value.spec, self.spec.placements)
            else:
                shard = self.spec.local_shard(value.full_tensor() if isinstance(value, DTensor) else value)
            self._assign(shard)
        increment_version(self)  # the new version makes the next forward gather again

    def _assign(self, shard: torch.Tensor) -> None:
        if aliases.same_memory(self._local_tensor, shard):
            return
        if aliases.keep_values(self):
            snapshots.wait_to_write([self._local_tensor])
            self._local_tensor.copy_(shard)
        else:
            self._local_tensor = aliases.copied(shard)

    def move_to(self, other: DTensor) -> None:
        """Be in the memory of another tensor from now on, and lie over the ranks as it does."""
        aliases.leave(self)
        self._local_tensor, self.spec = other._local_tensor, other.spec

    @property
    def placements(self) -> tuple[Placement, ...]:
        """One placement for each mesh axis."""
        return self.spec.placements

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh over which the tensor is distributed."""
        return self.spec.mesh

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """As torch's method. RuntimeError for a part of a `register_multi_grad_hook` on a parameter of a sharded module.

        Such a hook would wait for nodes of autograd: those of sharded parameters run in no backward.
        """
        if getattr(hook, "__qualname__", "").startswith("register_multi_grad_hook.") and group_of(self) is not None:
            raise RuntimeError(
                f"register_multi_grad_hook on parameter '{self.full_name}' of a sharded module (rank {self.spec.mesh.rank}): "
                'it would never be called; use mode="any", or register_post_accumulate_grad_hook or register_hook on each '
                "parameter, which are called with sharded gradients once they are reduced"
            )
        return super().register_hook(hook)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DTensor(shape={tuple(self.shape)}, {self.spec.placements}, local={self._local_tensor})"

    def data_ptr(self) -> int:
        """The address of this rank's local shard. A shard without memory has one that no other tensor has."""
        return self._local_tensor.data_ptr() or self.untyped_storage().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """This rank's local shard as a storage of its own; other shards lie in the same memory, and are no part of it.

        It cannot be resized, and is another object in each call. A shard without elements has one byte, so that packages which
        tell tensors apart by their addresses take no two for one.
        """
        found = storage_of(self._local_tensor)
        if found is None:
            found = self.__dict__.setdefault("_place", torch.empty(1, dtype=torch.uint8, device=self.device)).untyped_storage()
        return found

    def share_memory_(self) -> NoReturn:
        """Raises RuntimeError: other processes cannot have the memory of a shard."""
        raise RuntimeError(
            f"share_memory_() of '{self.full_name or 'a DTensor'}' (rank {self.spec.mesh.rank}): its memory cannot be moved; "
            "share a copy, such as .full_tensor().clone().share_memory_()"
        )

    def tolist(self) -> Any:
        """The full tensor as nested lists, on every rank. Collective."""
        return self.full_tensor().tolist()

    @outside_inference_mode()
    def __deepcopy__(self, memo: dict[int, Any]) -> DTensor:
        """A leaf tensor with copies of this rank's shard and of the gradient, on the same mesh. No communication."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(f"deepcopy of a DTensor of shape {tuple(self.shape)} that is not a leaf: detach() it first")
        made = memo[id(self)] = DTensor(self._local_tensor.detach().clone(), self.spec)
        made.requires_grad = self.requires_grad
        made.__dict__ = copy.deepcopy(self.__dict__, memo)  # the mark of an nn.Parameter is there
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


def _shape_from_equal_shards(local: torch.Size, mesh: DeviceMesh, placements: Sequence[Placement]) -> list[int]:
    shape = list(local)
    for placement, size in zip(placements, mesh.shape, strict=False):
        if type(placement) is Shard and -len(shape) <= placement.dim < len(shape):
            shape[placement.dim] *= size
        elif isinstance(placement, Sharded):
            raise ValueError(f"from_local with {placement} of a local shard of shape {tuple(local)}: pass the global shape")
    return shape


# ---------------------------------------------------------------------- autograd: gradients have the global shape


def _checked_grad_spec(spec: Spec, placements: Sequence[Placement], local: torch.Size) -> Spec:
    """The spec of the gradient of a local tensor of shape `local`. Raises ValueError if it gives the gradient another shape."""
    made = spec.moved(placements)
    if (found := local_shape(made.mesh, made.placements, made.shape)) != local:
        raise ValueError(
            f"grad_placements {tuple(placements)} of a shard by {spec}, on rank {spec.mesh.rank}: expected those that give its "
            f"gradient the shape {tuple(local)}, found {tuple(found)}"
        )
    return made


def _redistribute_grad(grad: torch.Tensor, spec: Spec) -> DTensor:
    """The gradient with the placements of `spec`. A plain one is the full gradient, the same on every rank."""
    if not isinstance(grad, DTensor):
        if not (grad.requires_grad and torch.is_grad_enabled()):
            return DTensor(spec.local_shard(grad).contiguous(), spec)
        return _Redistribute.apply(_FromLocal.apply(grad, replace(spec, placements=spec.replicated)), spec)
    return grad if grad.spec == spec else _Redistribute.apply(grad, spec)


def _set_requires_grad(tensor: DTensor, value: bool) -> None:
    """Set `requires_grad`. From then on a leaf's gradients get the leaf's placements, as autograd's other nodes give them.

    Some operations make plain gradients, or sharded ones of what is replicated: sums, matrix products, mixed operands.
    """
    flag_writes.times += value is not tensor.requires_grad
    torch.Tensor.requires_grad.__set__(tensor, value)  # type: ignore[attr-defined]
    for call in at_a_parameter:
        call()
    if value and tensor.is_leaf and not hasattr(tensor, "_grad_hook"):
        leaf = ref(tensor)  # Hazard: a hook that held the tensor would keep it alive
        tensor._grad_hook = tensor.register_hook(lambda grad: _leaf_grad(grad, leaf()))


def _leaf_grad(grad: torch.Tensor, leaf: DTensor | None) -> torch.Tensor:
    if leaf is None:
        return grad
    if not isinstance(grad, DTensor) and group_of(leaf) is not None:
        # Plain tensors take part in what makes it, which each rank may have of its own. Cost: a reduce-scatter.
        grad = _FromLocal.apply(grad, leaf.spec.moved([Partial(ReduceOp.AVG)] * leaf.spec.mesh.ndim))
    return _redistribute_grad(grad, leaf.spec.of_gradient())


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: Spec, grad_spec: Spec | None = None) -> DTensor:
        ctx.spec, ctx.grad_spec = spec, grad_spec
        return DTensor(local.detach(), spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ranks, spec = 1, ctx.spec
        for placement, size in zip(spec.placements, spec.mesh.shape, strict=True):
            if isinstance(placement, Partial):
                if not placement.linear:
                    raise NotImplementedError(f"the gradient of from_local with {placement}: expected a sum or an average")
                ranks *= size if placement.reduce_op is ReduceOp.AVG else 1
        local = _redistribute_grad(grad, ctx.grad_spec or spec.of_gradient()).to_local()
        return local if ranks == 1 else local / ranks, None, None


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
    def forward(
        ctx: Any, tensor: DTensor, spec: Spec, dtype: torch.dtype | None = None, grad_dtype: torch.dtype | None = None
    ) -> DTensor:
        ctx.source, ctx.dtype, ctx.grad_dtype = tensor.spec, tensor.dtype, grad_dtype or tensor.dtype
        return DTensor(redistribute(tensor._local_tensor.to(dtype or tensor.dtype), tensor.spec, spec.placements), spec)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        moved = _redistribute_grad(grad.to(ctx.grad_dtype), ctx.source.of_gradient())
        return moved.to(ctx.dtype), None, None, None


def gradient_spec_of(node: Any) -> Spec | None:
    """The spec of the gradient that a node of `from_local`, `to_local` or `redistribute` passes on; None for other nodes."""
    kind = getattr(node, "_forward_cls", None)
    found: Spec | None = None
    if kind is _FromLocal:
        found = node.grad_spec or node.spec
    elif kind is _ToLocal:
        found = node.grad_spec
    elif kind is _Redistribute:
        found = node.source
    return found


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
        # Autograd records the operation on the DTensor. A tensor may be given by keyword, as in `add_(other=x)`.
        if spec.partial or is_grad_enabled() or (kwargs and any(isinstance(each, torch.Tensor) for each in kwargs.values())):
            return method(self, *args, **kwargs)
        if not in_place and is_inference_mode_enabled():
            return method(self, *args, **kwargs)
        if kwargs and any(isinstance(value, torch.Tensor) for value in kwargs.values()):
            return method(self, *args, **kwargs)
        if in_place and (snapshots.current is not None or snapshots.read_elsewhere):
            snapshots.wait_to_write([self._local_tensor])
        out = method(self._local_tensor, *local_args, **kwargs)
        if not in_place:
            return DTensor(out, spec)
        increment_version(self)  # as the dispatcher does: a new version marks the shards as changed
        return self

    return call


DTensor.requires_grad = property(torch.Tensor.requires_grad.__get__, _set_requires_grad)  # type: ignore[assignment, attr-defined]

for _name in (*_IN_PLACE, *_OUT_OF_PLACE):
    setattr(DTensor, _name, _without_dispatcher(_name))
