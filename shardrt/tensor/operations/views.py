"""`GatheredView`: the result of indexing, slicing or reshaping a `DTensor`.

row = w[0]          gathers w: every rank has the values of the row
row.sum()           reads these values, without communication
row.zero_()         changes w too: each rank writes the elements of its shard
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from ...comm import DeviceMesh
from ...torch_internals import OpOverload, disabled_torch_function, tree_map, tree_map_only
from ..dtensor.dtensor import DTensor
from ..dtensor.inference_mode import run_in_inference_mode
from ..dtensor.operands import check_gradients, gather_full, mutated_tensors, raise_undefined, tensors_in, wait_to_write
from ..placement.placement import Replicate, Spec
from ..placement.random import RANDOM, broadcast_seed, with_indices_of_rank_0

aten = torch.ops.aten

# In-place operations in which an element of the mutated tensor depends on no other element of it, besides pointwise ones.
_ELEMENTWISE_IN_PLACE = "copy_ fill_ index_add_ index_copy_ index_fill_ index_put_ masked_fill_ scatter_ scatter_add_ zero_"
_FILL_METHODS = {aten.rand_like: "uniform_", aten.randn_like: "normal_", aten.randint_like: "random_"}


class GatheredView(torch.Tensor):
    """A view of the full tensor of a `DTensor`, which is gathered when the view is created.

    Reads return the values of that time, without communication, so one rank may read alone. In-place operations also change
    the sharded tensor: every rank must run them with the same arguments. They start from the tensor's current values.
    Other results are plain tensors. Pickling and deepcopy make a plain copy; `numpy()` is read-only.
    Cost: the full tensor on every rank while a view exists. In-place operations with dependent elements gather again.
    """

    __slots__ = ("_full", "_origin", "_plain_view")
    _origin: DTensor
    _plain_view: torch.Tensor  # a view of `_full`
    _full: torch.Tensor  # contiguous

    @staticmethod
    def __new__(cls, values: torch.Tensor, full: torch.Tensor, origin: DTensor) -> GatheredView:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        made._origin, made._plain_view, made._full = origin, values, full
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
        if torch.is_inference_mode_enabled():
            return run_in_inference_mode(cls._run, func, args, kwargs or {})
        return cls._run(func, args, kwargs or {})

    @classmethod
    def _run(cls, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._schema.is_mutable:
            return _run_in_place(func, args, kwargs)
        if func in (aten.new_empty.default, aten.empty_like.default):
            return new_empty(func, args, kwargs)
        if func.overloadpacket in _FILL_METHODS:
            return random_like(func, args, kwargs)
        views = [view for view in tensors_in(args) if isinstance(view, GatheredView)]
        check_gradients(func, args, [view._origin for view in views if view.requires_grad])
        out = func(*_plain(args), **_plain(kwargs))
        if func.is_view:
            lazy = isinstance(out, torch.Tensor) and (out.is_conj() or out.is_neg())  # which a wrapper cannot show
            return out.resolve_conj().resolve_neg() if lazy else args[0]._wrap_views(out)
        replicated = next((view for view in views if view._full is view._origin._local_tensor), None)
        return (
            _replicated_view(out, replicated._origin.spec.mesh)
            if replicated is not None and torch.Tag.pointwise in func.tags
            else out
        )

    def _wrap_views(self, out: Any) -> Any:
        """Wrap the results of a view operation, which share memory with `_full`."""
        return tree_map_only(torch.Tensor, lambda values: GatheredView(values, self._full, self._origin), out)

    def _refresh(self, func: Any) -> None:
        """Update the gathered values to the sharded tensor's current ones: this rank's shard, or all if `func` needs them."""
        origin, full = self._origin, self._full
        if full is origin._local_tensor:
            return
        if torch.Tag.pointwise in func.tags or func._schema.name.removeprefix("aten::") in _ELEMENTWISE_IN_PLACE.split():
            places = torch.arange(full.numel(), device=full.device).view(full.shape)
            full.view(-1)[origin.spec.local_shard(places).reshape(-1)] = origin._local_tensor.reshape(-1).to(full.device)
        else:
            full.copy_(gather_full(origin))

    def _write_back(self) -> None:
        """Copy the elements that both this view and this rank's shard cover into the shard."""
        values, local, spec = self._plain_view, self._origin._local_tensor, self._origin.spec
        if self._full is local:
            return
        covered = torch.zeros(self._full.shape, dtype=torch.bool, device=local.device)
        covered.as_strided(values.size(), values.stride(), values.storage_offset()).fill_(True)
        local.copy_(torch.where(spec.local_shard(covered), spec.local_shard(self._full).to(local.device), local))

    def numpy(self, *, force: bool = False) -> Any:
        """A read-only array, since writes to it could not reach the sharded tensor."""
        array = self._plain_view.numpy(force=force)
        array.flags.writeable = False
        return array

    def data_ptr(self) -> int:
        """The address of the gathered values, in this rank's memory."""
        return self._plain_view.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """That of the gathered values."""
        return self._plain_view.untyped_storage()

    def tolist(self) -> Any:
        return self._plain_view.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._plain_view)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self._plain_view.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain_view.clone().__reduce_ex__(protocol)


def gathered_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The rule of view operations. Cost: an all-gather, and a copy of the full tensor."""
    tensor = args[0]
    full = gather_full(tensor).clone(memory_format=torch.contiguous_format)
    return GatheredView(full, full, tensor)._wrap_views(func(full, *args[1:], **kwargs))


def new_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GatheredView:
    """`new_empty`, and `empty_like` of a view: a replicated tensor, which random operations fill alike on every rank."""
    mesh = args[0].spec.mesh if isinstance(args[0], DTensor) else args[0]._origin.spec.mesh
    size = torch.Size(args[1]) if func is aten.new_empty.default else args[0].shape
    dtype = kwargs.get("dtype") or args[0].dtype
    return _replicated_view(torch.empty(size, dtype=dtype, device=kwargs.get("device") or args[0].device), mesh)


def _replicated_view(values: torch.Tensor, mesh: DeviceMesh) -> GatheredView:
    """A view of a new replicated tensor: random operations on it, and on what is computed from it, agree between ranks."""
    full = values.contiguous()
    return GatheredView(full, full, DTensor(full, Spec(mesh, (Replicate(),) * len(mesh.shape), full.shape)))


def random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`rand_like`, `randn_like`, `randint_like`: values that do not depend on the number of ranks, with the same spec."""
    made = torch.empty_like(args[0], dtype=kwargs.get("dtype"))
    bounds = args[1:] if len(args) != 2 else (0, args[1])
    return getattr(made, _FILL_METHODS[func.overloadpacket])(*bounds, generator=kwargs.get("generator"))


def _plain(value: Any) -> Any:
    return tree_map_only(GatheredView, lambda view: view._plain_view, value)


def _run_in_place(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an in-place operation on the gathered values; each rank then writes its shard back."""
    views = {
        id(tensor._plain_view): tensor for tensor in mutated_tensors(func, args, kwargs) if isinstance(tensor, GatheredView)
    }
    if any(view._origin.spec.partial for view in views.values()):
        raise_undefined(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags:
        return _reshape(func, args, kwargs)
    if func in RANDOM:
        seed = broadcast_seed(args[0]._origin.spec.mesh, kwargs.get("generator"))
        kwargs = {**kwargs, "generator": torch.Generator(args[0].device).manual_seed(seed)}
    if views:
        args = with_indices_of_rank_0(func, args, next(iter(views.values()))._origin.spec.mesh)
    for view in views.values():
        view._refresh(func)
    wait_to_write(view._origin for view in views.values())
    out = func(*_plain(args), **_plain(kwargs))
    for view in views.values():
        view._write_back()
        increment_version(view._origin)  # the dispatcher does not increment it for tensors in lists
    return tree_map(lambda value: views.get(id(value), value), out)


def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GatheredView:
    """`t_`, `unsqueeze_` and the like: change the view's shape in place."""
    view = args[0]
    values = view._plain_view.detach()
    func(values, *args[1:], **kwargs)
    view.data = GatheredView(values, view._full, view._origin)
    view._plain_view = values
    return view
