"""Stages of torch's pipelines whose modules `shardrt.fully_shard` has sharded.

torch's `torch.distributed.pipelining` needs a process group, which `shardrt.integrations.torch_distributed` makes. Its own
stage knows FSDP2's modules only: it would reduce the gradients of shardrt's after every microbatch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import pipelining

from ..fsdp.api.module import FSDPModule


class PipelineStage(pipelining.PipelineStage):
    """torch's stage, for a module that `fully_shard` has sharded over the ranks that have the same stage.

    Making one is collective over all ranks of the mesh that the module's is a part of: every rank makes as many.
    Gradients of the microbatches are added up unsharded, and reduced once, in the backward of the last one. Groups of shardrt's
    mesh come from `torch_distributed.process_group(mesh["pp"])`.

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
        self._keeps = keep_parameters
        self._backwards = 0  # those of a step that have begun
        if keep_parameters:
            submodule.set_reshard_after_forward(False)

    def clear_runtime_states(self) -> None:
        """Begin a step; torch's schedules call it."""
        super().clear_runtime_states()
        self._backwards = 0

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Run the whole backward of a microbatch; torch's schedules call it."""
        sharded = self.submod
        assert isinstance(sharded, FSDPModule), "checked when it was made"
        self._backwards += 1
        is_last = self._backwards == self.chunks
        sharded.set_requires_gradient_sync(is_last)
        sharded.set_is_last_backward(is_last)
        sharded.set_reshard_after_backward(is_last or not self._keeps)
        super().backward_one_chunk(bwd_chunk_id, loss=loss, full_backward=True, last_backward=is_last)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Do nothing: the gradients of weights came with those of inputs."""

    def _post_metadata_inference_cleanup(self) -> None:
        """Forget what torch's run for shapes has left: gathered parameters, gradients."""
        super()._post_metadata_inference_cleanup()
        for module in self.submod.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.submod.zero_grad()
