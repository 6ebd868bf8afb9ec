"""Parameters that say themselves what is gathered: tensor subclasses with FSDP2's two methods, for an fp8 all-gather, say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from .buffers import FlatBuffer
from .comm import DeviceMesh
from .group import ParamGroup
from .layout import Layout, ParamSpec, equal_runs
from .param import part_of
from .policy import MixedPrecisionPolicy
from .runtime import Runtime
from .tensor import DTensor


@runtime_checkable
class AllGatherExtension(Protocol):
    """What a parameter's tensor subclass has. Its rows (slices along dim 0) are cut as any other parameter's."""

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """On a rank's part, of (rows, ...): what to gather of it, tensors of (rows, ...) of any dtype, and metadata."""

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Make the full parameter of what all ranks gave, (all rows, ...) each, and name the tensors it consists of.

        The outputs are the same tensors every time. out: the parameter returned the first time, to be filled anew.
        """


class ExtensionGroup(ParamGroup):
    """One such parameter: gathered as its methods say, reduced and stepped as any other."""

    def _plan(self, specs: Sequence[ParamSpec]) -> Layout:
        return equal_runs(specs[0], self.mesh.size)

    def _shard_params(self) -> None:
        (param,) = self.params
        spec = param.spec(0, self.layout, self.device_mesh)
        with torch.no_grad():
            inner = part_of(param.original, spec).clone()
        if not isinstance(inner, AllGatherExtension):
            raise TypeError(
                f"parameter '{param.name}' is a {type(param.original).__name__}, but its rows are a {type(inner).__name__}: "
                "let narrow() and clone() of the subclass return the subclass"
            )
        self._inner, self._extension = inner, cast(AllGatherExtension, inner)
        param.register(DTensor(self._inner, spec))
        self._locals = [self._inner]

    @property
    def shard_nbytes(self) -> int:
        """Bytes of this rank's part, as the subclass says."""
        return self._inner.nbytes

    @property
    def on_meta(self) -> bool:
        """The shard has no values yet."""
        return self._inner.is_meta

    @property
    def _sends_shard(self) -> bool:
        return False

    def _make_full(self, runtime: Runtime) -> None:
        """One area for each tensor that is gathered: this rank's rows go into its place, and come out with all others."""
        (param,) = self.params
        inputs = self._inputs()
        ranks, rows = self.mesh.size, param.shape[0]
        most = max(self.layout.numels(0)) * rows // max(1, param.shape.numel())
        sizes = [most * tensor.shape[1:].numel() * tensor.itemsize for tensor in inputs]
        areas = [-(-size // 16) * 16 * ranks for size in sizes]
        self.full = FlatBuffer(sum(areas), self.mesh.device, runtime.account, self._pool(runtime))
        self._full_bytes = self.full.view(torch.uint8, 0, (self.full.nbytes,))
        self._gathers, self._own_views, outputs, start = [], [], [], 0
        for tensor, size, nbytes in zip(inputs, sizes, areas, strict=True):
            place = start + self.mesh.rank * size
            area = self.full.view(torch.uint8, start, (ranks * size,))
            self._gathers.append((area, self.full.view(torch.uint8, place, (size,))))
            self._own_views.append(self.full.view(tensor.dtype, place, tensor.shape))
            outputs.append(self.full.view(tensor.dtype, start, (rows, *tensor.shape[1:])))
            start += nbytes
        self._outputs = tuple(outputs)
        self.full.seal()
        self._make_unsharded()

    def _make_unsharded(self) -> None:
        (param,) = self.params
        self._streams.begin()  # outside of an iteration: the shard was written on the caller's stream
        self.unshard()
        assert self.ready is not None, "gathered just now"
        self.ready.wait(self._streams.compute)
        made = self._extension.fsdp_post_all_gather(self._outputs, self._metadata, self._gather_dtypes[0])
        assert made is not None, f"fsdp_post_all_gather of '{param.name}' without `out` returns a tensor and its parts"
        param.unsharded = nn.Parameter(made[0], requires_grad=param.sharded.requires_grad)
        self._made = [tensor for tensor in made[1] if not self.full.holds(tensor)]
        self._made_nbytes = [tensor.untyped_storage().nbytes() for tensor in self._made]
        self.reshard()

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        (param,) = self.params
        stride = torch.empty(param.shape, device="meta").stride()
        about = (self.mesh, param.shape, stride, self.modules[0], self.mp_policy)
        inputs, self._metadata = self._extension.fsdp_pre_all_gather(*about)
        return inputs

    def _fill_own(self) -> None:
        for view, tensor in zip(self._own_views, self._inputs(), strict=True):
            view.copy_(tensor)

    def wait_unsharded(self) -> None:
        """Let compute wait for the gather, make the full parameter of it, and let the module see that."""
        if self.installed or self.ready is None:
            return
        self.ready.wait(self._streams.compute)
        for tensor, nbytes in zip(self._made, self._made_nbytes, strict=True):
            tensor.untyped_storage().resize_(nbytes)
        (param,) = self.params
        dtype = self._gather_dtypes[0]
        with torch.no_grad(), _unsafe_preserve_version_counter(param.unsharded):
            self._extension.fsdp_post_all_gather(self._outputs, self._metadata, dtype, out=param.unsharded)
        super().wait_unsharded()

    def reshard(self) -> None:
        """Let the module see the shards and free what was gathered and made of it."""
        if self.ready is not None:
            for tensor in self._made:
                tensor.untyped_storage().resize_(0)
        super().reshard()
