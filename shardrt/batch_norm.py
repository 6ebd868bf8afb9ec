"""Batch normalization over the rows of all ranks: torch's `nn.SyncBatchNorm`, without a process group.

Legend   C channels   n elements of a channel on this rank   N of them on all ranks

Each rank sends its mean, its sum of squared deviations (both (C,)) and n; every rank combines them in rank order, so that
running statistics are the same bits everywhere. As in torch, a rank's weight and bias get the gradients of its own loss, which
`fully_shard` averages as it does all others; the gradient of the input is that of the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from .comm import DeviceMesh, ReduceOp, current_stream, world
from .comm.core.calls import about
from .torch_internals import hide_package_from_compiler

_ROLE = "batch_norm"
_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_BASE = nn.BatchNorm1d.__base__ or nn.Module  # of them all, of lazy ones and of what others derive from it


class SyncBatchNorm(nn.SyncBatchNorm):
    """Batch normalization whose statistics are those of all ranks' rows, of which each may have another number, or none.

    mesh: the ranks whose batches are one batch (default: all of them); with tensor parallelism the data-parallel ones. For
        other arguments see `torch.nn.SyncBatchNorm`.
    Input: (rows, C, ...), float, on the mesh's device. Sums are float32, of float64 float64.
    Collective in training, and then alike on every rank: an all-gather of 2 C + 1 elements in forward, an all-reduce of 2 C in
    backward, if the input needs a gradient. In eval mode nothing is sent: without running statistics each rank uses those of
    its own rows, as torch does.
    Raises ValueError for an input of another number of channels; on the CPU for fewer than two elements of a channel.
    """

    mesh: DeviceMesh
    name: str = ""  # the full name, once it is known: ranks compare it; written by name_batch_norms()

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype)
        self.mesh = world().mesh if mesh is None else mesh
        _prepare(self.mesh)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm of {self.num_features} channels: expected an input of shape (rows, {self.num_features}, ...), "
                f"found {tuple(input.shape)} (rank {self.mesh.rank})"
            )
        if not self.training or self.mesh.size == 1:
            return nn.BatchNorm1d.forward(cast(Any, self), input)  # every kind's; torch's own looks for a process group
        output, mean, squares, total = _Normalize.apply(input, self.weight, self.bias, self.eps, _Among(self.mesh, self.name))
        if self.track_running_stats:
            self._track(mean, squares / (total - 1))
        return output

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.num_batches_tracked is not None, "it tracks"
        assert self.running_mean is not None, "it tracks"
        assert self.running_var is not None, "it tracks"
        self.num_batches_tracked.add_(1)
        share = self.num_batches_tracked.double().reciprocal() if self.momentum is None else self.momentum
        self.running_mean.add_((mean - self.running_mean) * share)
        self.running_var.add_((variance - self.running_var) * share)

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: DeviceMesh | None = None) -> nn.Module:
        """`shardrt.convert_sync_batchnorm(module, mesh)`, where torch has it."""
        return convert_sync_batchnorm(module, process_group)


def convert_sync_batchnorm(model: nn.Module, mesh: DeviceMesh | None = None) -> nn.Module:
    """Make every `nn.BatchNorm1d`, `2d`, `3d` and torch's `nn.SyncBatchNorm` in `model` a `SyncBatchNorm`. Collective.

    In place, before or after the modules around them are sharded: the modules stay what they are, with parameters, buffers
    and hooks, and only their class changes.
    mesh: see `SyncBatchNorm`.   Returns: `model`.
    Raises ValueError, on every rank alike, for a module of a class derived from these, whose forward may do more, for one that
    is lazy, or sharded itself, or has a process group, and if the ranks have different ones. Nothing is changed then.
    """
    mesh = world().mesh if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"convert_sync_batchnorm(mesh={mesh!r}): expected a DeviceMesh, such as shardrt.world().mesh")
    found = {name: child for name, child in model.named_modules() if _is_batch_norm(child)}
    refusal = next((why for name, child in found.items() if (why := _why_not(name, child))), None)
    described = [f"'{name}': {type(child).__name__}({child.extra_repr()})" for name, child in found.items()]
    answers = mesh.differing((described, refusal)) or [(described, refusal)]
    for rank, (_, why) in enumerate(answers):
        if why is not None:
            raise ValueError(f"convert_sync_batchnorm: {why} (rank {rank})")
    if len(answers) > 1:
        lists = "; ".join(f"rank {rank}: {', '.join(theirs) or 'none'}" for rank, (theirs, _) in enumerate(answers))
        raise ValueError(f"convert_sync_batchnorm: the ranks have different batch normalizations: {lists}")
    _prepare(mesh)
    for child in found.values():
        child.__class__ = SyncBatchNorm
        child.mesh, child.process_group = mesh, None
    name_batch_norms(found)
    return model


def name_batch_norms(modules: Mapping[str, nn.Module]) -> None:
    """Name those of the modules that normalize over ranks and have no name: statistics of two of one size are not mixed up."""
    for name, module in modules.items():
        if isinstance(module, SyncBatchNorm) and not module.name:
            module.name = f"'{name}'"


def check_converted(name: str, module: nn.Module) -> None:
    """ValueError for torch's `nn.SyncBatchNorm`: without a process group it normalizes with each rank's own statistics."""
    if isinstance(module, nn.SyncBatchNorm) and not isinstance(module, SyncBatchNorm):
        raise ValueError(
            f"'{name or type(module).__name__}' is torch's SyncBatchNorm, which would use the statistics of each rank alone, "
            "since there is no process group: call shardrt.convert_sync_batchnorm(model)"
        )


def _prepare(mesh: DeviceMesh) -> None:
    mesh.communicator(_ROLE)
    hide_package_from_compiler()


def _is_batch_norm(module: nn.Module) -> bool:
    return isinstance(module, _BASE) and not isinstance(module, SyncBatchNorm)


def _why_not(name: str, module: nn.Module) -> str | None:
    kind = type(module)
    if kind not in _KINDS:
        return (
            f"'{name}' is a {kind.__name__}; expected one of {', '.join(each.__name__ for each in _KINDS)}: a class of its own "
            "may compute something else; run lazy modules once, convert before fully_shard of the module itself, or write it "
            "with a shardrt.SyncBatchNorm"
        )
    if getattr(module, "process_group", None) is not None:
        return f"'{name}' has a process_group of torch.distributed; give convert_sync_batchnorm a mesh of the same ranks"
    return None


# ---------------------------------------------------------------------- the function


class _Among(NamedTuple):
    """The ranks that normalize together, and which module it is."""

    mesh: DeviceMesh
    name: str


class _Statistics(NamedTuple):
    """The statistics of all ranks' rows."""

    mean: torch.Tensor  # (C,)
    squares: torch.Tensor  # (C,), the sum of squared deviations
    total: torch.Tensor  # (), the elements of a channel


class _Normalize(torch.autograd.Function):
    """(x - mean) / sqrt(squares / total + eps) * weight + bias, with the statistics of all ranks, which it returns as well."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, among: _Among
    ) -> tuple[torch.Tensor, ...]:
        mean, squares, total = stats = _statistics(x, among)
        scale = (squares / total + eps).rsqrt()
        ctx.save_for_backward(x, weight, mean, scale, total)
        ctx.eps, ctx.among, ctx.bias_dtype = eps, among, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(*stats)
        ctx.set_materialize_grads(False)
        output = (x - _of_channels(mean, x)).mul_(_of_channels(scale if weight is None else scale * weight, x))
        if bias is not None:
            output.add_(_of_channels(bias, x))
        return output.to(x.dtype), *stats

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: None) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale, total = ctx.saved_tensors
        if torch.is_grad_enabled():
            return *_gradients_with_graph(ctx, grad), None, None
        grad = grad.to(mean.dtype)
        normalized = (x - _of_channels(mean, x)).mul_(_of_channels(scale, x))
        sums = torch.stack([_over_rows(grad), _over_rows(grad * normalized)])
        for_weight = sums[1].to(weight.dtype) if ctx.needs_input_grad[1] else None
        for_bias = sums[0].to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, for_weight, for_bias, None, None
        means = _all_reduce(sums, ctx.among) / total
        grad = grad - _of_channels(means[0], x) - normalized.mul_(_of_channels(means[1], x))
        for_x = grad.mul_(_of_channels(scale if weight is None else scale * weight, x)).to(x.dtype)
        return for_x, for_weight, for_bias, None, None


def _gradients_with_graph(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """The gradients of input, weight and bias, to be differentiated again: by differentiable operations all through."""
    x, weight, mean, _, total = ctx.saved_tensors
    wide = x.to(mean.dtype)
    centred = wide - _of_channels(_SumOverRanks.apply(_over_rows(wide), ctx.among) / total, x)
    variance = _SumOverRanks.apply(_over_rows(centred.square()), ctx.among) / total
    scale = (variance + ctx.eps).rsqrt()
    output = centred * _of_channels(scale if weight is None else scale * weight, x)
    wanted = [each for each, needed in zip((x, weight), ctx.needs_input_grad, strict=False) if needed]
    found = iter(torch.autograd.grad(output, wanted, grad.to(mean.dtype), create_graph=True) if wanted else ())
    for_x, for_weight = (next(found) if needed else None for needed in ctx.needs_input_grad[:2])
    return for_x, for_weight, _over_rows(grad).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None


class _SumOverRanks(torch.autograd.Function):
    """The sum over the ranks. Its gradient is that of the sum of the ranks' losses: again a sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, among: _Among) -> torch.Tensor:
        ctx.among = among
        return _all_reduce(local, among)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _SumOverRanks.apply(grad, ctx.among), None


def _statistics(x: torch.Tensor, among: _Among) -> _Statistics:
    channels = x.shape[1]
    dtype = torch.promote_types(x.dtype, torch.float32)
    own = torch.zeros(2 * channels + 1, dtype=dtype, device=x.device)
    if x.numel():
        variance, mean = torch.var_mean(x.to(dtype), _rows(x), correction=0)
        count = x.numel() // channels
        torch.cat([mean, variance * count, mean.new_full((1,), count)], out=own)
    everyone = own.new_empty((among.mesh.size, len(own)))
    stream = current_stream(x.device)
    with about(among.name):
        among.mesh.communicator(_ROLE).all_gather(everyone, own, stream=stream).wait(stream)
    means, squares, counts = everyone.split([channels, channels, 1], dim=1)
    total = counts.sum()
    # Cost: on a GPU, to look would be a host sync; there, running statistics become NaN.
    if total.device.type == "cpu" and total < 2:
        raise ValueError(f"SyncBatchNorm: expected at least 2 elements of a channel on all ranks together, found {int(total)}")
    mean = (means * counts).sum(0) / total
    return _Statistics(mean, (squares + counts * (means - mean).square()).sum(0), total)


def _all_reduce(local: torch.Tensor, among: _Among) -> torch.Tensor:
    inp, stream = local.contiguous(), current_stream(local.device)
    out = torch.empty_like(inp)
    with about(among.name):
        among.mesh.communicator(_ROLE).all_reduce(out, inp, ReduceOp.SUM, stream=stream).wait(stream)
    return out


def _rows(x: torch.Tensor) -> list[int]:
    """The dims over which a channel extends."""
    return [dim for dim in range(x.dim()) if dim != 1]


def _over_rows(x: torch.Tensor) -> torch.Tensor:
    """Sum a tensor (rows, C, ...) up to (C,)."""
    return x.sum(_rows(x))


def _of_channels(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Shape a tensor (C,) so that it is broadcast against `x`."""
    return values.view(1, -1, *[1] * (x.dim() - 2))
