"""`transformers.Trainer` for a model that is sharded over shardrt's world."""

from __future__ import annotations

import copy
import functools
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import PartialState
from accelerate.state import SharedDict
from torch import nn
from torch.utils.data import IterableDataset
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_pt_utils import LengthGroupedSampler

from .. import comm
from ..checkpoint.state_dicts.get import full_optimizer_state
from ..checkpoint.state_dicts.set import load_full_optimizer_state
from ..comm import without_launcher_variables
from .accelerate import Accelerator, check_no_process_group
from .evaluation import OwnRows, exact_evaluation, own_average
from .pretrained import make_methods_collective
from .processes import join_world, replace
from .world import Originals, full_state_dict, is_sharded, shard_blocks

_UNSUPPORTED = ("fsdp", "deepspeed", "parallelism_config", "auto_find_batch_size", "eval_use_gather_object")


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
    make_methods_collective(model)


class ShardedTrainerMixin:
    """Trains a sharded model on the ranks of `shardrt.init()`. List it before `transformers.Trainer` or a subclass as a base.

    - The constructor shards the model with `shard_model`, unless it is sharded already.
    - The batches are split among the ranks; sizes and steps in `TrainingArguments` mean the same as for several processes.
    - Losses are averaged over all ranks' tokens, in training and in the logs; metrics are computed from all ranks' predictions.
    - Rank 0 logs, and saves full models and optimizer states, which `from_pretrained` and any number of ranks can load.

    Every rank must create the same model and call the same methods of the trainer in the same order: most are collective.
    An optimizer in `optimizers` may be made of the model before it is sharded: it gets the sharded parameters.
    Raises RuntimeError if torch.distributed has a process group; ValueError for arguments that select other ways to distribute
    training, or that make several ranks compute something else than one process, and for an optimizer of other parameters.
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
    _originals: Originals | None = None  # of a model that the constructor has sharded

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.optimizer is not None:
            (self._originals or Originals(self.model)).replace_in(self._plain_optimizer(), self.model)
        self._originals = None

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
        self.gather_function = self.accelerator.gather_for_metrics
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
        self._originals = Originals(model)
        self.shard_model(model)
        make_methods_collective(model)
        # The Trainer decides by this name whether labels are shifted.
        model._get_name = lambda: name  # type: ignore[method-assign]

    # ------------------------------------------------------------------ data

    def _get_dataloader(self, dataset: Any, *args: Any, **options: Any) -> Any:
        """As the Trainer's. A stream to evaluate is read whole first, since its end tells which rows are repeated."""
        if isinstance(dataset, IterableDataset) and not options.get("is_training") and comm.world().size > 1:
            dataset = list(dataset)
        return super()._get_dataloader(dataset, *args, **options)  # type: ignore[misc]

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return _for_all_ranks(super()._get_train_sampler(*args, **kwargs))  # type: ignore[misc]

    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return _for_all_ranks(super()._get_eval_sampler(*args, **kwargs))  # type: ignore[misc]

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator._share_ranks()
        _check_layer_drop(self.model)
        _seed_other_ranks()
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    # ------------------------------------------------------------------ losses

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """The mean over the ranks of their numbers of items: gradients are averaged, so that no loss need be multiplied."""
        count = super()._get_num_items_in_batch(batch_samples, device)  # type: ignore[misc]
        if count is None or not self.args.average_tokens_across_devices:
            return count
        return torch.as_tensor(count, dtype=torch.float64, device=device) / comm.world().size

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # The Trainer would multiply the loss by the number of ranks, also of a model that does not divide by the items.
        with own_average(self.args):
            loss: torch.Tensor = super().training_step(*args, **kwargs)  # type: ignore[misc]
        return loss

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        self.accelerator._share_ranks()
        own = OwnRows(dataloader)
        with exact_evaluation(self, own):
            return super().evaluation_loop(own, *args, **kwargs)  # type: ignore[misc]

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


# ---------------------------------------------------------------------- what several ranks must have alike, and what not


def _for_all_ranks(sampler: Any) -> Any:
    """A sampler that groups rows by length, for batches of all ranks; any other as it is."""
    if isinstance(sampler, LengthGroupedSampler):
        sampler = copy.copy(sampler)  # which may be asked for again
        sampler.batch_size *= comm.world().size
    return sampler


def _seed_other_ranks() -> None:
    """Let the other ranks draw other random numbers than rank 0, which goes on as one process would. Collective."""
    world = comm.world()
    state = bytes(torch.get_rng_state().tolist()) if world.rank == 0 else b""
    seeded_by = hashlib.blake2b(world.comm.exchange(state)[0] + world.rank.to_bytes(8, "little"), digest_size=4)
    if world.rank:
        transformers.set_seed(int.from_bytes(seeded_by.digest(), "little"))


def _check_layer_drop(model: nn.Module) -> None:
    """Raise ValueError for a model that would leave out layers on one rank while others gather their parameters."""
    if comm.world().size == 1:
        return
    for name, module in model.named_modules():
        for holder in (module, getattr(module, "config", None)):  # such as config.encoder_layerdrop
            for attribute, rate in vars(holder).items() if holder is not None else ():
                if attribute.endswith("layerdrop") and isinstance(rate, (int, float)) and rate > 0:
                    raise ValueError(
                        f"ShardedTrainer on rank {comm.world().rank}: {attribute} of '{name or type(model).__name__}' is "
                        f"{rate}; expected 0.0, because ranks gather a layer's parameters together: make the model with "
                        f"{attribute}=0.0"
                    )


def _check_batches(args: transformers.TrainingArguments) -> None:
    """Raise ValueError for arguments with which several ranks would compute something else than one process."""
    rank, who = comm.world().rank, "ShardedTrainer"
    if not args.average_tokens_across_devices:
        raise ValueError(
            f"{who} on rank {rank}: average_tokens_across_devices=False divides the loss of each rank by its own number of "
            "tokens, so that tokens weigh differently and training differs from one process; leave it True"
        )
    if getattr(args.accelerator_config, "split_batches", False):
        raise ValueError(
            f"{who} on rank {rank}: split_batches=True in accelerator_config divides the per_device batch sizes by the "
            "number of ranks, of which the Trainer knows nothing; leave it False, and give each rank's batch size"
        )
    if args.batch_eval_metrics and "inputs" in args.include_for_metrics:
        raise ValueError(
            f"{who} on rank {rank}: batch_eval_metrics gives compute_metrics the inputs of this rank beside the predictions of "
            "all; remove 'inputs' from include_for_metrics, or batch_eval_metrics"
        )


# ---------------------------------------------------------------------- ranks


class _WorldState(PartialState):
    """The state from which `TrainingArguments` read world size and rank."""

    _shared_state = SharedDict()  # not PartialState's, which every new TrainingArguments clears


def _main_process_first(args: transformers.TrainingArguments, local: bool = True, desc: str = "work") -> Iterator[None]:
    state = PartialState()
    with state.local_main_process_first() if local else state.main_process_first():
        yield


@functools.cache
def _replace_main_process_first() -> None:
    replace(transformers.TrainingArguments.main_process_first, _main_process_first)  # which makes a context manager of it


@contextmanager
def world_state() -> Iterator[None]:
    """In the block, `TrainingArguments` and states of Accelerate that are made have the world's ranks, and no process group.

    Arguments that are computed from the number of processes need it, such as those of TRL's `GRPOConfig`.
    """
    _replace_main_process_first()
    plain = PartialState.__init__

    def init(state: Any, *args: Any, **options: Any) -> None:
        plain(state, *args, **options)
        join_world(state)

    PartialState.__init__ = init
    try:
        with without_launcher_variables():
            yield
    finally:
        PartialState.__init__ = plain


def _join_world(args: transformers.TrainingArguments) -> None:
    """Give `args` this process's rank and device. Raises ValueError for arguments that a sharded model does not support."""
    world = comm.world()
    _replace_main_process_first()
    check_no_process_group("ShardedTrainer")
    unsupported = [name for name in _UNSUPPORTED if getattr(args, name, None)]
    if unsupported:
        raise ValueError(f"ShardedTrainer on rank {world.rank}: expected no {', '.join(unsupported)} in TrainingArguments")
    if world.size > 1:
        _check_batches(args)
    with without_launcher_variables():
        args.device  # noqa: B018  # creates the cached state now, before Accelerate chooses a device
        state = _WorldState(cpu=world.device.type == "cpu")
    join_world(state)
    args.distributed_state = state
    args.__dict__["_setup_devices"] = world.device  # a cached property
    args._n_gpu = int(world.device.type == "cuda")  # a larger value would wrap the model in nn.DataParallel
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # TrainingArguments set the first
