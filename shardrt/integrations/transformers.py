"""`transformers.Trainer` for a model that is sharded over shardrt's world."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.state import SharedDict
from torch import nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from .. import comm
from ..comm import without_launcher_variables
from .accelerate import Accelerator, check_no_process_group
from .world import full_optimizer_state, full_state_dict, is_sharded, load_full_optimizer_state, shard_blocks

_UNSUPPORTED = ("fsdp", "deepspeed", "parallelism_config", "auto_find_batch_size")


def shard_model(model: nn.Module, **options: Any) -> None:
    """`fully_shard` every block of a `PreTrainedModel`, then the model. In place, collective.

    Blocks are the modules of the classes that the model names in `_no_split_modules`. options: those of `fully_shard`.
    Raises ValueError for a model that names no such classes.
    """
    names = getattr(model, "_no_split_modules", None)
    if not names:
        raise ValueError(
            f"shard_model on rank {comm.world().rank}: '{type(model).__name__}' names no blocks in _no_split_modules; call "
            "fully_shard on its blocks and on the model, before or in ShardedTrainer.shard_model()"
        )
    shard_blocks(model, [module for module in model.modules() if type(module).__name__ in names], **options)


class ShardedTrainerMixin:
    """Trains a sharded model on the ranks of `shardrt.init()`. List it before `transformers.Trainer` or a subclass as a base.

    - The constructor shards the model with `shard_model`, unless it is sharded already.
    - The batches are split among the ranks; sizes and steps in `TrainingArguments` mean the same as for several processes.
    - Losses are averaged over all ranks' tokens, in training and in the logs; metrics are computed from all ranks' predictions.
    - Rank 0 logs, and saves full models and optimizer states, which `from_pretrained` and any number of ranks can load.

    Every rank must create the same model and call the same methods of the trainer in the same order: most are collective.
    Raises RuntimeError if torch.distributed has a process group; ValueError for arguments that select other ways to distribute
    training, and for auto_find_batch_size.
    """

    args: Any
    model: Any
    accelerator: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any
    control: Any
    current_flos: Any
    _tr_loss: torch.Tensor
    _globalstep_last_logged: int

    def shard_model(self, model: nn.Module) -> None:
        """Shard `model` in place. Override it to shard differently, or with options of `fully_shard`."""
        shard_model(model)

    def create_accelerator_and_postprocess(self) -> None:
        """Join the world and shard the model. The Trainer calls this before it uses its arguments otherwise."""
        _join_world(self.args)
        with without_launcher_variables():
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator.__class__ = Accelerator
        self.accelerator._join_world()
        if self.model is not None:
            self._shard(self.model)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model: nn.Module = super().call_model_init(trial)  # type: ignore[misc]
        self._shard(model)
        return model

    def _shard(self, model: nn.Module) -> None:
        if is_sharded(model):
            return
        name = type(model).__name__
        self.shard_model(model)
        # The Trainer decides by this name whether labels are shifted.
        model._get_name = lambda: name  # type: ignore[method-assign]

    # ------------------------------------------------------------------ logs

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if self.control.should_log and self.state.global_step > self._globalstep_last_logged:
            tr_loss.copy_(comm.world().mean(tr_loss))  # the Trainer's own sum, which it logs and resets
        super()._maybe_log_save_evaluate(tr_loss, *args, **kwargs)  # type: ignore[misc]

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._tr_loss.copy_(comm.world().mean(self._tr_loss))
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def store_flos(self) -> None:
        self.current_flos = float(comm.world().sum(float(self.current_flos)))
        super().store_flos()  # type: ignore[misc]

    # ------------------------------------------------------------------ checkpoints

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None:
            state_dict = full_state_dict(self.model, keep=self.args.should_save)
        with comm.world().comm.agree():
            super()._save(output_dir, state_dict=state_dict)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        comm.world().barrier()  # no rank may read the checkpoint while rank 0 writes it

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = full_optimizer_state(self._plain_optimizer(), keep=self.args.should_save)
        with comm.world().comm.agree():
            if self.args.should_save:
                torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
                torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not all((Path(checkpoint) / name).is_file() for name in (OPTIMIZER_NAME, SCHEDULER_NAME)):
            return
        load: Callable[..., Any] = torch.load
        # mmap: each rank reads only its own shards
        state = load(os.path.join(checkpoint, OPTIMIZER_NAME), map_location="cpu", mmap=True, weights_only=True)
        load_full_optimizer_state(self._plain_optimizer(), state)
        self.lr_scheduler.load_state_dict(load(os.path.join(checkpoint, SCHEDULER_NAME), weights_only=True))

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without Accelerate's wrapper."""
        optimizer: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return optimizer


class ShardedTrainer(ShardedTrainerMixin, transformers.Trainer):
    """`transformers.Trainer` that trains a sharded model. See `ShardedTrainerMixin`."""


# ---------------------------------------------------------------------- ranks


class _WorldState(PartialState):
    """The state from which `TrainingArguments` read world size and rank."""

    _shared_state = SharedDict()  # not PartialState's, which every new TrainingArguments clears


def _join_world(args: transformers.TrainingArguments) -> None:
    """Give `args` this process's rank and device. Raises ValueError for arguments that a sharded model does not support."""
    world = comm.world()
    check_no_process_group("ShardedTrainer")
    unsupported = [name for name in _UNSUPPORTED if getattr(args, name, None)]
    if unsupported:
        raise ValueError(f"ShardedTrainer on rank {world.rank}: expected no {', '.join(unsupported)} in TrainingArguments")
    with without_launcher_variables():
        args.device  # noqa: B018  # creates the cached state now, before Accelerate chooses a device
        state = _WorldState(cpu=world.device.type == "cpu")
    state.num_processes, state.process_index, state.local_process_index = world.size, world.rank, world.local_rank
    state.device = world.device
    args.distributed_state = state
    args.__dict__["_setup_devices"] = world.device  # a cached property
    args._n_gpu = int(world.device.type == "cuda")  # a larger value would wrap the model in nn.DataParallel
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # TrainingArguments set the first
