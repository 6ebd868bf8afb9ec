"""`GatheredView`: what indexing, slicing and reshaping a `DTensor` gives.

row = w[0]          gathers w; row holds its values on every rank
row.sum()           reads those values, without communication
row.zero_()         changes w as well: each rank writes its part
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..comm import DeviceMesh
from ..torch_internals import OpOverload, disabled_torch_function, tree_map, tree_map_only
from .dtensor import DTensor
from .operands import check_gradients, refuse, tensors_in, whole_of, written
from .placement import Replicate, Spec
from .random import RANDOM, agree_on_seed, agreed

aten = torch.ops.aten

# In-place operations of which each element depends on no other element of the tensor that they write.
_ALONE = "copy_ fill_ index_add_ index_copy_ index_fill_ index_put_ masked_fill_ scatter_ scatter_add_ zero_"
_DRAWS = {aten.rand_like: "uniform_", aten.randn_like: "normal_", aten.randint_like: "random_"}


class GatheredView(torch.Tensor):
    """A view of a whole sharded tensor, gathered when the view was made.

    It reads as a plain tensor of the values of that moment, on any rank alone. In-place operations on it change the sharded
    tensor, as those on a view do: every rank makes them, with the same arguments. They begin from the tensor's present values.
    What is computed of it is plain. Pickling and deepcopy make a plain copy; `numpy()` is read-only.
    Cost: the whole tensor on every rank while a view lives. Operations of which elements depend on others gather again.
    """

    __slots__ = ("_origin", "_viewed", "_whole")
    _origin: DTensor
    _viewed: torch.Tensor  # a view of `_whole`
    _whole: torch.Tensor  # contiguous

    @staticmethod
    def __new__(cls, values: torch.Tensor, whole: torch.Tensor, origin: DTensor) -> GatheredView:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=values.device,
        )
        made._origin, made._viewed, made._whole = origin, values, whole
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
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return _write(func, args, kwargs)
        if func in (aten.new_empty.default, aten.empty_like.default):
            return new_empty(func, args, kwargs)
        if func.overloadpacket in _DRAWS:
            return random_like(func, args, kwargs)
        views = [view for view in tensors_in(args) if isinstance(view, GatheredView)]
        check_gradients(func, args, [view._origin for view in views if view.requires_grad])
        out = func(*_plain(args), **_plain(kwargs))
        if func.is_view:
            return args[0]._alike(out)
        drawn = next((view for view in views if view._whole is view._origin._local_tensor), None)
        return _fresh(out, drawn._origin.spec.mesh) if drawn is not None and torch.Tag.pointwise in func.tags else out

    def _alike(self, out: Any) -> Any:
        """Views of the same tensor, for what a view operation gave."""
        return tree_map_only(torch.Tensor, lambda values: GatheredView(values, self._whole, self._origin), out)

    def _update(self, func: Any) -> None:
        """Take the present values of the tensor as far as `func` depends on them."""
        origin, whole = self._origin, self._whole
        if whole is origin._local_tensor:
            return
        if torch.Tag.pointwise in func.tags or func._schema.name.removeprefix("aten::") in _ALONE.split():
            places = torch.arange(whole.numel(), device=whole.device).view(whole.shape)
            whole.view(-1)[origin.spec.local_part(places).reshape(-1)] = origin._local_tensor.reshape(-1).to(whole.device)
        else:
            whole.copy_(whole_of(origin))

    def _keep_part(self) -> None:
        """Write the elements of this view that are in this rank's part of the tensor."""
        values, local, spec = self._viewed, self._origin._local_tensor, self._origin.spec
        if self._whole is local:
            return
        covered = torch.zeros(self._whole.shape, dtype=torch.bool, device=local.device)
        covered.as_strided(values.size(), values.stride(), values.storage_offset()).fill_(True)
        local.copy_(torch.where(spec.local_part(covered), spec.local_part(self._whole).to(local.device), local))

    def numpy(self, *, force: bool = False) -> Any:
        """A read-only array: what is written into it would not reach the sharded tensor."""
        array = self._viewed.numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self._viewed.tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._viewed)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return memo.setdefault(id(self), self._viewed.clone())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._viewed.clone().__reduce_ex__(protocol)


def gathered_view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view operation on a sharded tensor. Cost: an all-gather, and a copy."""
    tensor = args[0]
    whole = whole_of(tensor).clone(memory_format=torch.contiguous_format)
    return GatheredView(whole, whole, tensor)._alike(func(whole, *args[1:], **kwargs))


def new_empty(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GatheredView:
    """`new_empty`, and `empty_like` of a view: a tensor that all ranks hold, and into which they draw the same numbers."""
    mesh = args[0].spec.mesh if isinstance(args[0], DTensor) else args[0]._origin.spec.mesh
    size = torch.Size(args[1]) if func is aten.new_empty.default else args[0].shape
    dtype = kwargs.get("dtype") or args[0].dtype
    return _fresh(torch.empty(size, dtype=dtype, device=kwargs.get("device") or args[0].device), mesh)


def _fresh(values: torch.Tensor, mesh: DeviceMesh) -> GatheredView:
    """A view of a tensor of its own, which all ranks hold: numbers may be drawn into it, and into what is computed of it."""
    whole = values.contiguous()
    return GatheredView(whole, whole, DTensor(whole, Spec(mesh, (Replicate(),) * len(mesh.shape), whole.shape)))


def random_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """`rand_like` and the others: the same whole tensor on any number of ranks. It lies as the tensor that it is like."""
    made = torch.empty_like(args[0], dtype=kwargs.get("dtype"))
    bounds = args[1:] if len(args) != 2 else (0, args[1])
    return getattr(made, _DRAWS[func.overloadpacket])(*bounds)


def _plain(value: Any) -> Any:
    return tree_map_only(GatheredView, lambda view: view._viewed, value)


def _write(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Do it to the gathered values, then let each rank keep its part of the whole."""
    views = {id(tensor._viewed): tensor for tensor in written(func, args, kwargs) if isinstance(tensor, GatheredView)}
    if any(view._origin.spec.partial for view in views.values()):
        refuse(func, args, kwargs)
    if torch.Tag.inplace_view in func.tags:
        return _reshape(func, args, kwargs)
    if func in RANDOM:
        mesh, given = args[0]._origin.spec.mesh, kwargs.get("generator")
        generator = torch.Generator(args[0].device).manual_seed(agree_on_seed(mesh, given))
        kwargs = {**kwargs, "generator": generator}
    if func is aten.index_put_.default and views:
        args = (args[0], agreed(args[0]._origin.spec.mesh, args[1]), *args[2:])
    for view in views.values():
        view._update(func)
    out = func(*_plain(args), **_plain(kwargs))
    for view in views.values():
        view._keep_part()
        increment_version(view._origin)  # of lists the dispatcher does not
    return tree_map(lambda value: views.get(id(value), value), out)


def _reshape(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GatheredView:
    """`t_`, `unsqueeze_` and the like: another view in the place of this one."""
    view = args[0]
    values = view._viewed.detach()
    func(values, *args[1:], **kwargs)
    view.data = GatheredView(values, view._whole, view._origin)
    view._viewed = values
    return view
