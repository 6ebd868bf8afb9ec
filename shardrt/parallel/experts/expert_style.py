"""`ExpertParallel`: the style of modules of grouped experts, of which each rank of a mesh has some."""

from __future__ import annotations

from torch import nn

from ...comm import DeviceMesh
from ...tensor.placement.placement import Shard
from ..boundaries.expert_exchange import ExpertExchange
from ..styles.modules import give_class
from ..styles.parameters import Split, split_parameter
from ..styles.state import state_of
from ..styles.styles import ParallelStyle
from .expert_modules import RoutedExpertsModule, SortedExpertsModule


class ExpertParallel(ParallelStyle):
    """Give each rank E / N of a module's E experts; rows of activations go to the experts' ranks and come back.

    The module: all of its parameters have the shape (E, ...), one of them at least three dims; its forward keeps the shape of
    the rows (T, H). An attribute `num_experts` becomes the number of this rank's.
    sorted_rows: False: the forward takes (hidden_states (T, H), top_k_index (T, K), top_k_weights (T, K)), as the experts of
    transformers; the weights are applied on the rows' own rank, so the module must only multiply by them. True: it takes
    (x (S, H) sorted by expert, num_tokens_per_expert (E,)), as torchtitan's `GroupedExperts`.
    The ranks of the mesh have batches of their own, as data parallel ones: a part of their mesh. A plan with this style has no
    others. Gradients of the experts are the mean over the ranks' losses, as `fully_shard` makes them of all others: shard the
    experts over the remaining data parallel ranks, and the rest over all. No row is dropped, however uneven the choices are.
    Cost, of S rows of H elements: two all-to-alls forward and two backward, S * H elements each way, and one of E + N integers,
    for which the host waits.
    Raises, in the forward, on every rank of the mesh alike before a row is sent: ValueError for arguments, shapes, an expert
    that does not exist, counts that do not add up, and ranks that call different modules, or whose rows differ in dtype or
    width. A dry world, where tokens choose nothing, has every expert chosen as often as any other.
    """

    changes_parameters = True
    one_batch = False

    def __init__(self, *, sorted_rows: bool = False) -> None:
        self.sorted_rows = sorted_rows

    def check(self, module: nn.Module) -> None:
        """NotImplementedError for a module without grouped experts; ValueError if the ranks do not divide their number."""
        what = f"ExpertParallel of '{self.name}', a {type(module).__name__}"
        shapes = {name: tuple(param.shape) for name, param in module.named_parameters()}
        leading = {shape[:1] for shape in shapes.values()}
        if len(leading) != 1 or min(map(len, shapes.values())) < 2 or max(map(len, shapes.values())) < 3:
            found = ", ".join(f"'{name}' of {shape}" for name, shape in shapes.items()) or "none"
            raise NotImplementedError(
                f"{what}: expected parameters of shapes (experts, ...), some of three dims, with one number of experts; found "
                f"{found}; name the module that has the weights of all experts in one parameter"
            )
        experts = leading.pop()[0]
        if vars(module).get("num_experts", experts) != experts:
            raise NotImplementedError(f"{what}: its num_experts is {module.num_experts}, its parameters have {experts} experts")
        if buffers := [name for name, buffer in module.named_buffers() if buffer.shape[:1] == (experts,)]:
            raise NotImplementedError(
                f"{what}: its buffers {', '.join(map(repr, buffers))} have a value for each of its {experts} experts, as it "
                "seems, and stay whole on every rank: expected parameters (requires_grad=False for a constant), or none"
            )
        if "forward" in vars(module):
            raise ValueError(
                f"{what}: it has a forward as an attribute of its own, which would run in the place of the exchange: set it "
                "after parallelize_module"
            )
        if experts % self.mesh.size:
            raise ValueError(
                f"{what}: its {experts} experts are not divisible by the {self.mesh.size} ranks of {self.mesh}: expected a "
                "mesh whose size divides them; make its axis smaller, and let fully_shard share experts among the ranks that "
                "remain"
            )

    def splits(self, module: nn.Module) -> list[Split]:
        return [
            Split(owner, name, Shard(0))
            for owner in module.modules()
            for name, param in owner._parameters.items()
            if param is not None
        ]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts = len(next(module.parameters()))
        for split in self.splits(module):
            split_parameter(split, device_mesh, self.src_data_rank)
        exchange = state_of(module).experts = ExpertExchange(device_mesh, self.name, experts)
        if "num_experts" in vars(module):
            vars(module)["num_experts"] = exchange.local
        give_class(module, SortedExpertsModule if self.sorted_rows else RoutedExpertsModule)
        return module
