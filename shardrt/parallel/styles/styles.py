"""Styles: how a module's computation is distributed over the ranks of a tensor parallel mesh.

The names, arguments and defaults are those of torch.distributed.tensor.parallel. Layouts say how a plain tensor lies; a DTensor
on the mesh brings its own placement. A user's own style derives from `ParallelStyle` and defines `_apply`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from torch import nn

from ...comm import DeviceMesh
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.placement.placement import Partial, Placement, Replicate, Shard
from ..boundaries.axis import axis_of
from ..boundaries.relayout import REPLICATE
from .modules import (
    LAST,
    ColwiseEmbedding,
    ColwiseLinear,
    OwnForwardModule,
    PreparedModule,
    RowwiseEmbedding,
    RowwiseLinear,
    SequenceParallelModule,
    calls_super,
    give_class,
)
from .parameters import PARTIAL_GRADIENT, Split, mark_terms, split_parameter
from .state import AppliedStyle, Preparation, state_of

Layouts = Placement | tuple[Placement | None, ...] | None


class ParallelStyle(ABC):
    """How one module is parallelized. `parallelize_module` calls `_apply` on every rank, for each module that a key matches.

    src_data_rank: the rank of the mesh whose parameters are taken; None: each rank keeps its own.   name: of the module that
    is parallelized, in the plan's root.   mesh: that it is parallelized over. `parallelize_module` sets them.
    """

    src_data_rank: int | None = 0
    name: str = ""
    mesh: DeviceMesh
    changes_parameters: ClassVar[bool] = False  # a module can have one such style
    one_batch: ClassVar[bool] = True  # the ranks of the mesh work on one batch together; False: each on its own

    @abstractmethod
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Parallelize `module` and return it, or what is to stand in its place."""

    def check(self, module: nn.Module) -> None:  # noqa: B027
        """Raise for a module that the style does not support, before anything is changed. Called on every rank."""

    def splits(self, module: nn.Module) -> list[Split]:
        """How the style distributes parameters, asked before anything is changed. A style that changes none returns none."""
        return []

    def __repr__(self) -> str:
        given = {name: value for name, value in vars(self).items() if name not in ("src_data_rank", "name", "mesh")}
        fields = ", ".join(f"{name}={value!r}" for name, value in given.items())
        return f"{type(self).__name__}({fields})"


class _SplitStyle(ParallelStyle):
    """What Colwise and Rowwise share."""

    changes_parameters = True
    _default_input: ClassVar[Placement]
    _default_output: ClassVar[Placement]

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        async_tp: bool = False,
    ) -> None:
        self.input_layouts = input_layouts or self._default_input
        self.output_layouts = output_layouts or self._default_output
        self.use_local_output = use_local_output
        self.async_tp = async_tp

    def check(self, module: nn.Module) -> None:
        what = f"{type(self).__name__} of '{self.name}'"
        if not isinstance(module, nn.Linear | nn.Embedding):
            raise NotImplementedError(
                f"{what}, a {type(module).__name__}: expected an nn.Linear or an nn.Embedding, or a subclass"
            )
        if isinstance(module, nn.Embedding) and module.max_norm is not None:
            raise NotImplementedError(f"{what}: max_norm reads whole rows in every forward; expected None")
        if isinstance(self.output_layouts, Partial) or isinstance(self.input_layouts, Partial):
            raise NotImplementedError(f"{what}: expected layouts of Shard or Replicate, found {self!r}")
        if "weight" not in module._parameters:
            raise NotImplementedError(f"{what}: its weight is not a parameter (a parametrization?); expected one")

    def bind(self, module: nn.Module, device_mesh: DeviceMesh, added: type) -> nn.Module:
        """Distribute the module's parameters, and give it its class and its style."""
        for split in self.splits(module):
            split_parameter(split, device_mesh, self.src_data_rank)
        source = REPLICATE if self.input_layouts == REPLICATE else self.input_layouts
        target = LAST if self.output_layouts == LAST else self.output_layouts
        axis = axis_of(device_mesh)
        state_of(module).style = AppliedStyle(axis, self.name, source, target, self.use_local_output, self.async_tp)
        give_class(module, added, below=not issubclass(added, OwnForwardModule))
        return module


class ColwiseParallel(_SplitStyle):
    """Split an nn.Linear by its outputs, or an nn.Embedding by its columns: each rank computes a part of the last dim.

    input_layouts: of a plain input; None: `Replicate()`.   output_layouts: of the output; None: `Shard(-1)`.
    use_local_output: return this rank's part as a plain tensor (True), or a DTensor.
    async_tp: with a sharded input of an nn.Linear, gather it in chunks, each beside the matmul of the chunk before it.
    Cost: nothing in the forward, an all-reduce of the input's gradient in the backward, beside the weight's gradient; modules
    that read the same tensor share it. With input_layouts=Shard(d): an all-gather, and one more with a reduce-scatter in the
    backward; the gathered input is not kept.
    Raises NotImplementedError for another module.
    """

    _default_input, _default_output = Replicate(), Shard(-1)

    def splits(self, module: nn.Module) -> list[Split]:
        is_linear = isinstance(module, nn.Linear)
        weight = Split(module, "weight", Shard(0 if is_linear else 1))
        return [weight, Split(module, "bias", Shard(0))] if is_linear and module.bias is not None else [weight]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        is_linear = isinstance(module, nn.Linear)
        if not calls_super(type(module)):
            return self.bind(module, device_mesh, OwnForwardModule)
        return self.bind(module, device_mesh, ColwiseLinear if is_linear else ColwiseEmbedding)


class RowwiseParallel(_SplitStyle):
    """Split an nn.Linear by its inputs, or an nn.Embedding by its rows: each rank computes a term of the output's sum.

    input_layouts: of a plain input; None: `Shard(-1)`, also of an embedding, as in torch: tokens that are the same on every
    rank need `Replicate()`.   output_layouts: of the output; None: `Replicate()`.
    use_local_output: return a plain tensor (True), or a DTensor.
    async_tp: with a sharded output of an nn.Linear, reduce it in chunks, each beside the matmul of the next one.
    The bias is added after the reduction. Cost: an all-reduce in the forward, nothing in the backward; with
    output_layouts=Shard(d) a reduce-scatter, and an all-gather in the backward.
    Raises NotImplementedError for another module.
    """

    _default_input, _default_output = Shard(-1), Replicate()

    def check(self, module: nn.Module) -> None:
        super().check(module)
        if isinstance(module, nn.Embedding) and (module.scale_grad_by_freq or module.sparse):
            raise NotImplementedError(
                f"RowwiseParallel of '{self.name}', whose rows are split, with scale_grad_by_freq={module.scale_grad_by_freq}, "
                f"sparse={module.sparse}: expected False; or split its columns (ColwiseParallel)"
            )
        if not calls_super(type(module)):
            raise NotImplementedError(
                f"RowwiseParallel of '{self.name}': the forward of {type(module).__name__} does not call super().forward, so "
                "its result cannot be reduced before the bias is added"
            )

    def splits(self, module: nn.Module) -> list[Split]:
        is_linear = isinstance(module, nn.Linear)
        weight = Split(module, "weight", Shard(1 if is_linear else 0))
        partial = PARTIAL_GRADIENT if isinstance(self.output_layouts, Shard) else None
        return [weight, Split(module, "bias", Replicate(), partial)] if is_linear and module.bias is not None else [weight]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return self.bind(module, device_mesh, RowwiseLinear if isinstance(module, nn.Linear) else RowwiseEmbedding)


class SequenceParallel(ParallelStyle):
    """Run any module that treats rows alike (nn.LayerNorm, RMSNorm, nn.Dropout) on this rank's part of the sequence.

    sequence_dim: the dim that is split, of input and output. A plain input is this rank's part already.
    use_local_output: return a plain tensor, or a DTensor (False).
    Its parameters are whole on every rank, and their gradients are summed over the ranks, all of them at once.
    Cost: no communication, unless the input is a DTensor of another placement.
    """

    changes_parameters = True

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        self.sequence_dim = sequence_dim
        self.use_local_output = use_local_output

    def splits(self, module: nn.Module) -> list[Split]:
        owned = [(owner, name, param) for owner in module.modules() for name, param in owner._parameters.items()]
        return [
            Split(owner, name, Replicate(), PARTIAL_GRADIENT)
            for owner, name, param in owned
            if param is not None and not isinstance(param, DTensor)
        ]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for split in self.splits(module):
            split_parameter(split, device_mesh, self.src_data_rank)
        layout = Shard(self.sequence_dim)
        state_of(module).style = AppliedStyle(axis_of(device_mesh), self.name, layout, layout, self.use_local_output)
        give_class(module, SequenceParallelModule)
        return module


class SummedGradients(ParallelStyle):
    """Sum the gradients of a module's own parameters over the ranks: each uses them on its part of the activations alone.

    names: of the parameters; none: all that the module itself has.
    The parameters are whole on every rank, and stay plain. For those of which `parallelize_module` does not find out by itself
    how they are used, since an `autograd.Function` of another package may communicate.
    Cost: an all-reduce in the backward for all such parameters together; under `fully_shard`, for each group.
    Raises ValueError for a name that the module lacks, and for a module without parameters of its own.
    """

    changes_parameters = True

    def __init__(self, *names: str) -> None:
        self.names = names

    def check(self, module: nn.Module) -> None:
        found = [name for name, param in module._parameters.items() if param is not None]
        if not found or not set(self.names) <= set(found):
            raise ValueError(
                f"{self!r} of '{self.name}', a {type(module).__name__}: expected names of its own parameters, of which it has "
                f"{found or 'none'}; name the modules inside that have them"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.names or [*module._parameters]:
            if not isinstance(module._parameters[name], DTensor):
                mark_terms(module, name, device_mesh)
        return module


class PrepareModuleInput(ParallelStyle):
    """Change the placement of a module's arguments before its forward.

    input_layouts, desired_input_layouts: of each positional argument, given and desired; None: as it is. One placement: of the
    only argument.   input_kwarg_layouts, desired_input_kwarg_layouts: by name.
    use_local_output: pass plain tensors to the module, or DTensors (False).
    Cost: that of the change. A gathered argument that several Colwise modules read has one reduce-scatter in the backward.
    Raises ValueError for layouts of different lengths, and in the forward for another number of arguments.
    """

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_output: bool = False,
    ) -> None:
        self.input_layouts, self.desired_input_layouts = _pairs("input", input_layouts, desired_input_layouts)
        self.input_kwarg_layouts = dict(input_kwarg_layouts or {})
        self.desired_input_kwarg_layouts = dict(desired_input_kwarg_layouts or {})
        self.use_local_output = use_local_output
        if set(self.input_kwarg_layouts) != set(self.desired_input_kwarg_layouts):
            raise ValueError(
                f"input_kwarg_layouts of {sorted(self.input_kwarg_layouts)}, desired_input_kwarg_layouts of "
                f"{sorted(self.desired_input_kwarg_layouts)}: expected the same names"
            )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        give_class(module, PreparedModule)
        made = Preparation(
            axis_of(device_mesh),
            self.name,
            self.input_layouts,
            self.desired_input_layouts,
            self.input_kwarg_layouts,
            self.desired_input_kwarg_layouts,
            self.use_local_output,
        )
        state_of(module).inputs += (made,)
        return module


class PrepareModuleOutput(ParallelStyle):
    """Change the placement of a module's results after its forward.

    output_layouts, desired_output_layouts: of each result, given and desired; None: as it is. One placement: of the only one.
    use_local_output: return plain tensors (True), or DTensors.
    Raises ValueError for layouts of different lengths, and in the forward for another number of results.
    """

    def __init__(self, *, output_layouts: Layouts, desired_output_layouts: Layouts, use_local_output: bool = True) -> None:
        self.output_layouts, self.desired_output_layouts = _pairs("output", output_layouts, desired_output_layouts)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        give_class(module, PreparedModule)
        layouts = self.output_layouts, self.desired_output_layouts
        made = Preparation(axis_of(device_mesh), self.name, *layouts, {}, {}, self.use_local_output, of_results=True)
        state_of(module).outputs += (made,)
        return module


class PrepareModuleInputOutput(ParallelStyle):
    """`PrepareModuleInput` and `PrepareModuleOutput` of one module. use_local_input: the former's `use_local_output`."""

    def __init__(
        self,
        *,
        input_layouts: Layouts = None,
        desired_input_layouts: Layouts = None,
        input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        desired_input_kwarg_layouts: Mapping[str, Placement | None] | None = None,
        use_local_input: bool = False,
        output_layouts: Layouts,
        desired_output_layouts: Layouts,
        use_local_output: bool = True,
    ) -> None:
        self.prepare_module_input = PrepareModuleInput(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_input,
        )
        self.prepare_module_output = PrepareModuleOutput(
            output_layouts=output_layouts, desired_output_layouts=desired_output_layouts, use_local_output=use_local_output
        )

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for style in (self.prepare_module_input, self.prepare_module_output):
            style.name = self.name
            style._apply(module, device_mesh)
        return module


_Tuple = tuple[Placement | None, ...] | None


def _pairs(what: str, given: Layouts, desired: Layouts) -> tuple[_Tuple, _Tuple]:
    """Both as tuples. Raises ValueError unless they have the same length."""
    layouts, wanted = (value if value is None else _tuple(value) for value in (given, desired))
    if layouts is not None and (wanted is None or len(layouts) != len(wanted)):
        raise ValueError(
            f"{what}_layouts={layouts}, desired_{what}_layouts={wanted}: expected as many desired layouts as layouts"
        )
    return layouts, wanted


def _tuple(layouts: Placement | tuple[Placement | None, ...]) -> tuple[Placement | None, ...]:
    return (layouts,) if isinstance(layouts, Placement) else tuple(layouts)
