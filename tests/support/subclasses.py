"""Tensor subclasses that define what is gathered of them."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter


class Narrow(torch.Tensor):
    """A float64 weight that is gathered as float32 values and a scale per row."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> Narrow:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=data.dtype, device=data.device)

    def __init__(self, data: torch.Tensor) -> None:
        self.data64 = data

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        args, kwargs = torch.utils._pytree.tree_map_only(Narrow, lambda x: x.data64, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func is torch.ops.aten.copy_.default or isinstance(out, float):
            return out
        return torch.utils._pytree.tree_map_only(torch.Tensor, Narrow, out)

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):  # type: ignore[no-untyped-def]
        scale = self.data64.abs().amax(1).clamp(min=1e-12) if self.data64.numel() else self.data64.new_empty(0)
        return ((self.data64 / scale[:, None]).float(), scale), outer_size

    def fsdp_post_all_gather(self, outputs, metadata, param_dtype, *, out=None):  # type: ignore[no-untyped-def]
        values, scales = outputs
        assert values.shape == metadata
        full = values.to(param_dtype) * scales[:, None]
        if out is None:
            return full, (full,)
        out.copy_(full)
        return None


Parts = tuple[torch.Tensor, ...]


def pre_bfloat16(
    self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
) -> tuple[Parts, torch.dtype]:
    return (self.to(torch.bfloat16),), self.dtype


@torch.no_grad()
def post_bfloat16(
    self: Any, outputs: Parts, metadata: torch.dtype, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, Parts] | None:
    (tensor,) = outputs
    assert (tensor.dtype, metadata) == (torch.bfloat16, torch.float32)
    if out is not None:
        with _unsafe_preserve_version_counter(out):
            out.copy_(tensor)
        return None
    whole = tensor.to(param_dtype)
    return whole, (tensor, whole)


def set_on_locals(model: nn.Module, name: str = "weight", post: Any = post_bfloat16) -> None:
    for param_name, param in model.named_parameters():
        if name in param_name:
            local = param._local_tensor
            local.fsdp_pre_all_gather = pre_bfloat16.__get__(local)
            if post is not None:
                local.fsdp_post_all_gather = post.__get__(local)


class PadsItself(torch.Tensor):
    """Gathered in bfloat16. Ranks with fewer rows pad them to the number of the other ranks, as FSDP2 requires."""

    @staticmethod
    def __new__(cls, data: torch.Tensor) -> PadsItself:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, data.stride(), dtype=data.dtype, device=data.device)

    def __init__(self, data: torch.Tensor) -> None:
        self.inside = data

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:  # type: ignore[override]
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda x: x.inside, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        ranks = len(mesh.ranks)
        padded = torch.zeros(math.ceil(outer_size[0] / ranks), *outer_size[1:], dtype=torch.bfloat16)
        padded[: self.inside.shape[0]] = self.inside
        return (padded, torch.tensor(1.0)), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        tensor, ones = outputs
        assert torch.equal(ones, torch.ones_like(ones)), "a value of each rank, whatever its rows"
        if out is None:
            made = tensor.to(param_dtype)
            return made, (made,)
        out.copy_(tensor)
        return None
