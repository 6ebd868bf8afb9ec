"""Stages of torch's pipelines whose modules `shardrt.fully_shard` has sharded.

torch's `torch.distributed.pipelining` needs a process group, which `shardrt.integrations.torch_distributed` makes. Its own
stage knows FSDP2's modules only: it would reduce the gradients of shardrt's after every microbatch.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import pipelining

from ..comm import Communicator, ReduceOp, world
from ..fsdp.api.module import FSDPModule, set_stage_backward
from ..tensor.dtensor.group_registry import stages_of
from ..tensor.operations.reductions import combine_on
from ..torch_internals import Found, after_unscaling

_made: WeakKeyDictionary[Communicator, dict[tuple[int, ...], Communicator]] = WeakKeyDictionary()  # of a world, by ranks


class PipelineStage(pipelining.PipelineStage):
    """torch's stage, for a module that `fully_shard` has sharded over the ranks that have the same stage.

    Making one is collective over all ranks of the mesh that the module's is a part of: every rank makes as many.
    Gradients of the microbatches are added up unsharded, and reduced once, in the backward of the last one. Groups of shardrt's
    mesh come from `torch_distributed.process_group(mesh["pp"])`.
    From then on the module's parameters are known to be those of a stage: `shardrt.clip_grad_norm_` takes the norm of all
    stages, and `torch.amp.GradScaler` skips a step on all of them; so all stages call these alike.

    submodule, stage_index, num_stages, device, and what follows: as torch's.
    keep_parameters: leave parameters gathered from the first forward of a step until its last backward, as torch does with
    FSDP2's modules: one gather in a step. False: free them after each forward and backward, and gather them again.
    Schedules that compute gradients of inputs and of weights apart (zero-bubble, DualPipeV) run, but get both with those of
    inputs, since a sharded module's backward is one: the bubble is no smaller than that of interleaved 1F1B.
    Raises: ValueError for a module that is not sharded.
    """

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        *args: Any,
        keep_parameters: bool = False,
        **kwargs: Any,
    ) -> None:
        if not isinstance(submodule, FSDPModule):
            raise ValueError(
                f"stage {stage_index} of {num_stages}: expected a module sharded by shardrt.fully_shard, found a "
                f"{type(submodule).__name__}; shard it as a whole, after its blocks, or use torch's PipelineStage"
            )
        submodule.unshard()  # makes what would be made in the first forward, which the stages come to one after the other
        submodule.reshard()
        super().__init__(submodule, stage_index, num_stages, device, *args, **kwargs)
        settings = submodule.param_group.root.root_settings
        assert settings is not None, "a root has them"
        settings.stages = _communicator_of(dist.get_process_group_ranks(self.group))
        _scale_alike()
        self._unused: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # copies of gradients that were there before the step
        self._keeps = keep_parameters
        self._backwards = 0  # those of a step that have begun
        if keep_parameters:
            submodule.set_reshard_after_forward(False)

    def clear_runtime_states(self) -> None:
        """Begin a step, or an evaluation; torch's schedules call it."""
        super().clear_runtime_states()
        self._backwards = 0
        params = [getattr(param, "sharded", param) for param in self.submod.parameters()]  # an evaluation leaves gathered ones
        self._unused = [(param, param.grad.clone()) for param in params if param.grad is not None]

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divide what this step has added to the gradients; torch's schedules call it at the end, also of an evaluation."""
        if self.has_backward:
            before = [(param.grad, grad) for param, grad in self._unused if param.grad is not None]
            for grad, unused in before:
                grad.sub_(unused)
            super().scale_grads(grad_scale_factor)
            for grad, unused in before:
                grad.add_(unused)
            self._unused.clear()

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the whole backward of a microbatch; torch's schedules call it."""
        if not self.has_backward:
            return
        sharded = self.submod
        assert isinstance(sharded, FSDPModule), "checked when it was made"
        self._backwards += 1
        is_last = self._backwards == self.chunks
        set_stage_backward(sharded, is_last=is_last, keeps_parameters=self._keeps)
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=True, last_backward=is_last)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Do nothing: the gradients of weights came with those of inputs."""

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """The gradients for a stage of this rank; none in an evaluation, in which torch's V schedules ask for them as well."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int) -> None:
        """Take the gradients of a stage of this rank; nothing in an evaluation."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _post_metadata_inference_cleanup(self) -> None:
        """Forget what torch's run for shapes has left: gathered parameters, what it has added to gradients.

        It runs in the first step, and after each change between training and evaluation.
        """
        super()._post_metadata_inference_cleanup()
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.submod.zero_grad()
        for param, grad in self._unused:
            param.grad = grad.clone()


def _communicator_of(ranks: Sequence[int]) -> Communicator:
    """For what concerns all stages: of the ranks of one pipeline, which alone call this."""
    of_world = _made.setdefault(world().comm, {})
    if (key := tuple(ranks)) not in of_world:
        of_world[key] = world().comm.subset(ranks, "stages")
    return of_world[key]


@functools.cache
def _scale_alike() -> None:
    """Let `torch.amp.GradScaler` skip a step of all stages, if a gradient of one is not finite."""
    after_unscaling(_tell_stages)


def _tell_stages(optimizer: torch.optim.Optimizer, found: Found) -> None:
    """What the gradients of an optimizer's stages are, on each. Collective over the stages, if they are those of a pipeline."""
    stages = stages_of(param for group in optimizer.param_groups for param in group["params"])
    if stages is None:
        return
    mine = torch.stack([torch.zeros((), device=stages.device), *(each.to(stages.device) for each in found.values())]).max()
    everyones = combine_on(mine, ReduceOp.MAX, stages)
    found.setdefault(stages.device, everyones)  # a stage without gradients
    for each in found.values():
        each.copy_(everyones)
