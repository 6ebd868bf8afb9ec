"""An `accelerate.Accelerator` over the ranks of shardrt's world."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from .. import checkpoint, comm
from ..comm import ReduceOp, without_launcher_variables
from ..optim import clip_grad_norm_
from . import processes
from .world import check_sharded, full_state_dict, gradient_sync, reduce


class Accelerator(accelerate.Accelerator):
    """Accelerate's `Accelerator` whose processes are the ranks of `shardrt.init()`. It starts no process group.

    Shard the model with `fully_shard` before you create the optimizer. `prepare` leaves both unchanged, splits the batches
    among the ranks, and applies autocast. `gather`, `reduce`, `pad_across_processes`, `gather_for_metrics`, `no_sync`,
    `accumulate`, `clip_grad_norm_`, `wait_for_everyone`, `get_state_dict`, `save_state` and `load_state` span the ranks, and so
    do `accelerate.PartialState` and the functions of `accelerate.utils`, by whatever name a program has imported them.
    `prepare` raises ValueError for a trainable parameter that is not sharded, and for a data loader that has not the same
    number of batches on every rank.
    These raise RuntimeError: other plugins for distributed training, and an existing process group.
    """

    def __init__(self, **options: Any) -> None:
        with without_launcher_variables():
            super().__init__(cpu=comm.world().device.type == "cpu", **options)
        self._join_world()

    def _join_world(self) -> None:
        """Give Accelerate this process's rank and device."""
        check_no_process_group("shardrt.integrations.accelerate.Accelerator")
        if self.distributed_type != accelerate.DistributedType.NO:
            raise RuntimeError(
                f"Accelerator on rank {self.process_index}: distributed_type is {self.distributed_type}; expected NO, because "
                "shardrt distributes the model; remove FSDP, DeepSpeed and other plugins for it"
            )
        if self.dataloader_config.dispatch_batches:
            raise RuntimeError(
                f"Accelerator(dispatch_batches=True) on rank {self.process_index}: each rank reads its own batches; remove it"
            )
        self.dataloader_config.dispatch_batches = False
        self._share_ranks()

    def _share_ranks(self) -> None:
        """Let the state that Accelerate's objects and functions share be the world's; other `TrainingArguments` clear it."""
        with without_launcher_variables():
            for state in (accelerate.PartialState(), self.state):
                processes.join_world(state)

    # Properties, since creating another `TrainingArguments` clears the shared state.

    @property
    def num_processes(self) -> int:
        return comm.world().size

    @property
    def process_index(self) -> int:
        return comm.world().rank

    @property
    def local_process_index(self) -> int:
        return comm.world().local_rank

    @property
    def is_main_process(self) -> bool:
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        return self.local_process_index == 0

    @property
    def device(self) -> torch.device:
        return comm.world().device

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if not evaluation_mode:
            check_sharded(model)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def gather(self, tensor: Any) -> Any:
        """The ranks' tensors concatenated along dim 0, in which they may differ; a 0-dim tensor is one row. Collective."""
        return processes.gather(tensor)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Split the batches among the ranks, as Accelerate does. All ranks draw rows in the order of rank 0."""
        if not getattr(data_loader, "_is_accelerate_prepared", False):
            _share_order(data_loader)
        prepared = super().prepare_data_loader(data_loader, *args, **kwargs)
        # The order is shared already: that Accelerate exchanges its generator each epoch would make iterating collective.
        prepared.rng_types = [kind for kind in getattr(prepared, "rng_types", None) or () if kind != "generator"]
        sampler, batches = _sampler_of(prepared), getattr(prepared, "batch_sampler", None)
        if isinstance(sampler, SeedableRandomSampler):
            sampler.initial_seed = comm.world().comm.exchange(sampler.initial_seed)[0]
        if isinstance(batches, BatchSamplerShard) and not (batches.even_batches or batches.drop_last or batches.split_batches):
            count = len(batches.batch_sampler)
            if count % self.num_processes:
                raise ValueError(
                    f"even_batches=False on rank {self.process_index}: {count} batches cannot be shared equally by "
                    f"{self.num_processes} ranks, which have to run as many steps each; leave even_batches=True, or give "
                    "drop_last=True"
                )
        return prepared

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean or maximum of the ranks' tensors. Collective."""
        return processes.reduce(tensor, reduction, scale)

    def pad_across_processes(self, tensor: Any, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
        """The tensors padded along `dim` to the largest size on any rank. Collective."""

        def pad(one: torch.Tensor) -> torch.Tensor:
            if not -one.dim() <= dim < one.dim():
                return one
            missing = int(reduce(torch.tensor(one.size(dim)), ReduceOp.MAX)) - one.size(dim)
            if not missing:
                return one
            shape = list(one.shape)
            shape[dim] = missing
            padding = one.new_full(shape, pad_index)
            return torch.cat([padding, one] if pad_first else [one, padding], dim)

        return recursively_apply(pad, tensor, error_on_other_type=True)

    def wait_for_everyone(self) -> None:
        comm.world().barrier()

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """In the `with` block, backwards accumulate gradients without reducing them."""
        return gradient_sync(model, False)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """In the `with` block, inside that of `no_sync`, a backward reduces the gradients, those accumulated before as well."""
        return gradient_sync(model, True)

    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> AbstractContextManager[None]:
        """No-op where batches are even, as by default. Raises ValueError where they may not be."""
        if self.num_processes > 1 and not (self.even_batches and even_batches in (None, True)):
            raise ValueError(
                f"join_uneven_inputs on rank {self.process_index}: all ranks have to run the same number of steps; leave the "
                "call out, and even_batches=True, or give the data loader drop_last=True"
            )
        return nullcontext()

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state dict on rank 0, an empty one on other ranks. Collective."""
        return full_state_dict(self.unwrap_model(model) if unwrap else model, keep=self.is_main_process)

    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any) -> str:
        """Save what was prepared, and what was registered for checkpointing, with `shardrt.checkpoint.save`. Collective.

        That is models, optimizers, schedulers, the loss scale, random numbers, and where data loaders are.
        output_dir: a folder that all ranks share. With `ProjectConfiguration(automatic_checkpoint_naming=True)` it is the next
        one of the project's, of which `total_limit` are kept.   safe_serialization: has no effect.   Returns: the folder.
        Raises ValueError for a next one that exists, and for other options; otherwise as `checkpoint.save`.
        """
        folder, keep = self._state_folder(output_dir, "save_state", options)
        if self.project_configuration.automatic_checkpoint_naming and any(comm.world().comm.exchange(folder.exists())):
            raise ValueError(
                f"save_state on rank {self.process_index}: '{folder}' exists already; call load_state() first, or set "
                "project_configuration.iteration to the number of the next one"
            )
        checkpoint.save(folder, self._checkpointed(), keep=keep)
        self.project_configuration.iteration += 1
        return str(folder)

    def load_state(self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **options: Any) -> None:
        """Load what `save_state` has saved, on any number of ranks, into what was prepared in the same order. Collective.

        input_dir: None: the newest one of `ProjectConfiguration(automatic_checkpoint_naming=True)`.
        Raises ValueError for other options; otherwise as `checkpoint.load`.
        """
        if load_kwargs is not None:
            options["load_kwargs"] = load_kwargs
        if input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            found = checkpoint.latest(Path(self.project_dir or ".") / "checkpoints")
            input_dir = None if found is None else str(found)
        folder, _ = self._state_folder(input_dir, "load_state", options)
        checkpoint.load(folder, self._checkpointed())
        number = folder.name.removeprefix("checkpoint_")
        if self.project_configuration.automatic_checkpoint_naming and number.isdecimal():
            self.project_configuration.iteration = int(number) + 1

    def register_save_state_pre_hook(self, hook: Any) -> Any:
        """Raises ValueError: a checkpoint of shards has no list of whole weights that a hook could change."""
        raise self._no_hooks("register_save_state_pre_hook", "get_state_dict(model) on every rank, and write it on rank 0")

    def register_load_state_pre_hook(self, hook: Any) -> Any:
        """Raises ValueError, as `register_save_state_pre_hook`."""
        raise self._no_hooks("register_load_state_pre_hook", "model.load_state_dict(...) on every rank")

    def _no_hooks(self, name: str, instead: str) -> ValueError:
        return ValueError(
            f"{name} on rank {self.process_index}: save_state and load_state take shards of what was prepared, and give a "
            f"hook no list of whole weights; leave the hook out, and do its work beside them: {instead}; other objects by "
            "register_for_checkpointing"
        )

    def _state_folder(self, given: str | None, name: str, options: Any) -> tuple[Path, int | None]:
        """The folder, and how many of its kind are kept. Raises ValueError for what is not supported."""
        if options:
            raise ValueError(
                f"{name} on rank {self.process_index}: expected no {', '.join(options)}; use shardrt.checkpoint directly for "
                "others"
            )
        project = self.project_configuration
        if name == "save_state" and project.automatic_checkpoint_naming:
            return Path(self.project_dir or ".") / "checkpoints" / f"checkpoint_{self.save_iteration}", project.total_limit
        if given is None:
            raise ValueError(f"{name} on rank {self.process_index}: expected a folder, found None")
        return Path(given), None

    def _checkpointed(self) -> dict[str, Any]:
        """Everything with a state, by names that do not depend on the ranks."""
        named: list[tuple[str, list[Any]]] = [
            ("model", [self.unwrap_model(model) for model in self._models]),
            ("optimizer", [getattr(wrapper, "optimizer", wrapper) for wrapper in self._optimizers]),
            ("scheduler", [getattr(wrapper, "scheduler", wrapper) for wrapper in self._schedulers]),
            ("loader", [_Position(loader) for loader in self._dataloaders]),
            ("registered", list(self._custom_objects)),
            ("scaler", [] if self.scaler is None else [self.scaler]),
        ]
        state = {f"{kind}_{number}": value for kind, values in named for number, value in enumerate(values)}
        return {**state, "step": _BatchCount(self), "random": checkpoint.RandomState()}


class _BatchCount:
    """The number of batches that `accumulate` has counted, for a checkpoint."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]


class _Position:
    """The epoch of a prepared data loader and the seed of its order, for a checkpoint.

    Where rank 0 alone draws, the generators of the other ranks stay behind.
    """

    def __init__(self, loader: Any) -> None:
        self._loader, self._sampler = loader, _sampler_of(loader)

    def state_dict(self) -> dict[str, Any]:
        generator = getattr(self._sampler, "generator", None)
        seed = getattr(self._sampler, "initial_seed", None)
        drawn = generator.get_state().tolist() if isinstance(generator, torch.Generator) else None
        return {
            "epoch": getattr(self._loader, "iteration", 0),
            "seed": seed if isinstance(seed, int) else None,
            "generator": checkpoint.PerRank(drawn, itemgetter(0)),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self._loader, "iteration"):
            self._loader.iteration = state["epoch"]
        if state["seed"] is not None and hasattr(self._sampler, "initial_seed"):
            self._sampler.initial_seed = state["seed"]
        drawn, generator = state["generator"].value, getattr(self._sampler, "generator", None)
        if drawn is not None and isinstance(generator, torch.Generator):
            generator.set_state(torch.tensor(drawn, dtype=torch.uint8))


# ---------------------------------------------------------------------- data


class _SharedOrder(Sampler[Any]):
    """A sampler of which all ranks get the order that rank 0 draws. Cost: each epoch sends the order to every rank."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        world = comm.world()
        return iter(world.comm.exchange(list(self._sampler) if world.rank == 0 else [])[0])


def _sampler_of(loader: Any) -> Any:
    """What draws the rows of a prepared loader."""
    batches = getattr(loader, "batch_sampler", None)
    return getattr(getattr(batches, "batch_sampler", batches), "sampler", None)


def _share_order(data_loader: DataLoader[Any]) -> None:
    """Let a loader that is not prepared yet draw the same rows on every rank, in the order of rank 0. Collective."""
    sampler, batches = getattr(data_loader, "sampler", None), getattr(data_loader, "batch_sampler", None)
    if isinstance(sampler, RandomSampler):
        seed = int(torch.randint(2**62, ()) if sampler.generator is None else sampler.generator.initial_seed())
        sampler.generator = torch.Generator().manual_seed(comm.world().comm.exchange(seed)[0])
    elif (
        type(batches) is BatchSampler
        and not isinstance(sampler, (SequentialSampler, _SharedOrder))
        and hasattr(sampler, "__len__")
    ):
        batches.sampler = _SharedOrder(sampler)


def check_no_process_group(who: str) -> None:
    """Raise RuntimeError if torch.distributed has a process group: the framework would then use its ranks as well."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError(
            f"{who} on rank {comm.world().rank}: torch.distributed has a process group, which Accelerate starts when it "
            "finds a launcher's variables; make TrainingArguments and the like in `with shardrt.without_launcher_variables():`"
        )
