"""An `accelerate.Accelerator` over the ranks of shardrt's world."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import accelerate
import torch
from accelerate.utils import recursively_apply
from torch import nn
from torch.utils.data import DataLoader, RandomSampler

from .. import comm
from ..comm import ReduceOp, without_launcher_variables
from ..optim import clip_grad_norm_
from ..torch_internals import tree_leaves
from .world import check_sharded, full_state_dict, gather, no_gradient_sync, reduce

_OPERATIONS = {"sum": ReduceOp.SUM, "mean": ReduceOp.AVG, "max": ReduceOp.MAX}


class Accelerator(accelerate.Accelerator):
    """Accelerate's `Accelerator` whose processes are the ranks of `shardrt.init()`. It starts no process group.

    Shard the model with `fully_shard` before you create the optimizer. `prepare` leaves both unchanged, splits the batches
    among the ranks, and applies autocast. `gather`, `reduce`, `pad_across_processes`, `gather_for_metrics`, `no_sync`,
    `accumulate`, `clip_grad_norm_`, `wait_for_everyone` and `get_state_dict` span the ranks.
    `prepare` raises ValueError for a trainable parameter that is not sharded.
    These raise RuntimeError: `save_state` and `load_state`, other plugins for distributed training, and an existing process
    group.
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
        world = comm.world()
        # Accelerate's own helpers, such as its logger, read the state that its objects share.
        for state in (accelerate.PartialState(), self.state):
            state.num_processes, state.process_index, state.local_process_index = world.size, world.rank, world.local_rank
            state.device = world.device

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
    def is_last_process(self) -> bool:
        return self.process_index == self.num_processes - 1

    @property
    def device(self) -> torch.device:
        return comm.world().device

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        if not evaluation_mode:
            check_sharded(model)
        return super().prepare_model(model, device_placement, evaluation_mode)

    def gather(self, tensor: Any) -> Any:
        """The ranks' tensors concatenated along dim 0; a 0-dim tensor counts as one row. Collective."""
        return recursively_apply(lambda one: gather(torch.atleast_1d(one)).flatten(0, 1), tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather tensors without the samples that fill the last batch. Raises RuntimeError for other objects. Collective."""
        leaves = tree_leaves(input_data)
        if use_gather_object or not all(isinstance(leaf, torch.Tensor) for leaf in leaves):
            raise RuntimeError(
                f"gather_for_metrics on rank {self.process_index}: expected tensors, found "
                f"{sorted({type(leaf).__name__ for leaf in leaves})}; use shardrt.world().comm.exchange() for other objects"
            )
        return super().gather_for_metrics(input_data)

    def prepare_data_loader(self, data_loader: DataLoader[Any], *args: Any, **kwargs: Any) -> DataLoader[Any]:
        """Split the batches among the ranks, as Accelerate does. A shuffling sampler gets one seed on all ranks."""
        sampler = getattr(data_loader, "sampler", None)
        if isinstance(sampler, RandomSampler):
            seed = int(torch.randint(2**62, ()) if sampler.generator is None else sampler.generator.initial_seed())
            sampler.generator = torch.Generator().manual_seed(comm.world().comm.exchange(seed)[0])
        return super().prepare_data_loader(data_loader, *args, **kwargs)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """The sum, mean or maximum of the ranks' tensors. Collective."""
        if reduction == "none":
            return tensor
        return recursively_apply(lambda one: reduce(one, _OPERATIONS[reduction]) * scale, tensor, error_on_other_type=True)

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
        return no_gradient_sync(model)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        self.unscale_gradients()
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The full state dict on rank 0, an empty one on other ranks. Collective."""
        return full_state_dict(self.unwrap_model(model) if unwrap else model, keep=self.is_main_process)

    def save_state(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"save_state on rank {self.process_index}: save get_state_dict(model), which gathers from all ranks, instead"
        )

    def load_state(self, *args: object, **kwargs: object) -> NoReturn:
        raise RuntimeError(
            f"load_state on rank {self.process_index}: load a full state dict with model.load_state_dict() instead"
        )


def check_no_process_group(who: str) -> None:
    """Raise RuntimeError if torch.distributed has a process group: the framework would then use its ranks as well."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        raise RuntimeError(
            f"{who} on rank {comm.world().rank}: torch.distributed has a process group, which Accelerate starts when it "
            "finds a launcher's variables; make TrainingArguments and the like in `with shardrt.without_launcher_variables():`"
        )
