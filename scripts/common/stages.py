"""A GPT in pipeline stages, which torch's 1F1B schedule runs over `shardrt.integrations`.

Of five blocks and two stages:

    stage 0   tokens, positions, blocks.0, blocks.1              activations go from stage 0 to 1,
    stage 1   blocks.2, blocks.3, blocks.4, norm, head           and their gradients from 1 to 0
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import shardrt
from common.models import GPT
from shardrt.comm import DeviceMesh, current_stream
from shardrt.integrations import torch_distributed
from shardrt.integrations.pipelining import PipelineStage

Loss = Callable[[Tensor, Tensor], Tensor]  # logits, targets -> ()


class GPTStage(nn.Module):
    """Neighbouring blocks of a GPT; the first stage has the embeddings as well, the last the norm and the head.

    Everything has the name that it has in the GPT, so that checkpoints have the same names for any number of stages.
    """

    def __init__(self, whole: nn.Module, index: int, count: int) -> None:
        super().__init__()
        assert isinstance(whole, GPT)
        is_first, is_last = index == 0, index == count - 1
        blocks = list(whole.blocks.named_children())
        start, stop = (len(blocks) * each // count for each in (index, index + 1))
        self.tokens = whole.tokens if is_first else None
        self.positions = whole.positions if is_first else None
        self.blocks = nn.ModuleDict(dict(blocks[start:stop]))
        self.norm = whole.norm if is_last else None
        self.head = whole.head if is_last else None

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """x: bytes (B, T) in the first stage, else activations (B, T, C).   positions: (B, T), in the first stage.

        All rows of the positions are the same: torch cuts every input of a batch into micro-batches. Returns activations or,
        in the last stage, logits (B, T, V).
        """
        if self.tokens is not None and self.positions is not None:
            assert positions is not None
            x = self.tokens(x) + self.positions(positions[0])
        for block in self.blocks.values():
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


class Pipeline:
    """The stages of a pipeline, of which this rank has one.

    stage: this rank's, sharded.   mesh: the ranks that have the others.   loss: its mean over a micro-batch.
    count: of micro-batches, at least as many as stages.
    shapes: a micro-batch's bytes and activations on this rank, on the meta device.
    Making one is collective over all ranks.
    """

    def __init__(self, stage: nn.Module, mesh: DeviceMesh, loss: Loss, count: int, shapes: tuple[Tensor, Tensor]) -> None:
        if not dist.is_initialized():  # by another pipeline of this process
            torch_distributed.init_process_group()
        self.stage, self.mesh, self.last = stage, mesh, int(mesh.size) - 1
        self.comm = mesh.communicator("stages")
        tokens, activations = shapes
        self.zero = torch.zeros((), dtype=torch.promote_types(activations.dtype, torch.float32), device=mesh.device)
        # Shapes are given, since torch would find them by one more forward, in which experts would count rows.
        made = PipelineStage(
            stage,
            mesh.rank,
            int(mesh.size),
            mesh.device,
            input_args=(tokens, tokens) if mesh.rank == 0 else activations,
            output_args=activations,
            group=torch_distributed.process_group(mesh),
        )
        self.schedule = Schedule1F1B(made, count, lambda *given: loss(*given) / count, scale_grads=False)

    def step(self, inputs: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        """Add up this rank's gradients over its micro-batches. Returns the mean loss, (), on the ranks of every stage."""
        return self._run(self.schedule.step, inputs, targets, positions)

    def evaluate(self, inputs: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        """The mean loss, (), on the ranks of every stage, without gradients."""
        return self._run(self.schedule.eval, inputs, targets, positions)

    def _run(self, run: Callable[..., object], inputs: Tensor, targets: Tensor, positions: Tensor) -> Tensor:
        losses: list[Tensor] = []
        given = (inputs, positions.expand_as(inputs)) if self.mesh.rank == 0 else ()
        wanted = {"target": targets, "losses": losses} if self.mesh.rank == self.last else {}
        run(*given, **wanted, return_outputs=False)
        total = torch.stack(losses).detach().sum() if losses else self.zero.clone()
        return self._from(self.last, total)

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """The logits (B, T, V) of bytes (B, T), on the ranks of every stage. The stages run one after the other."""
        x, positions = tokens, torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        for index in range(self.last + 1):
            if index == self.mesh.rank:
                x = self.stage(x, positions)
                x = x.full_tensor() if isinstance(x, shardrt.DTensor) else x
            shape, dtype = self.mesh.exchange((x.shape, x.dtype))[index]
            x = self._from(index, x if index == self.mesh.rank else x.new_empty(shape, dtype=dtype))
        return x

    def _from(self, index: int, value: Tensor) -> Tensor:
        """The value of the ranks of stage `index`, on those of every stage, whose own have its shape and dtype."""
        value, stream = value.contiguous(), current_stream(self.mesh.device)
        self.comm.broadcast(value, value, index, stream=stream).wait(stream)
        return value
