"""A strategy for `lightning.pytorch.Trainer` that trains a `LightningModule` sharded over shardrt's world."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.utilities import rank_zero_only
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ParallelStrategy
from torch import nn

from .. import comm
from ..batch_norm import convert_sync_batchnorm
from ..checkpoint.state_dicts.get import full_optimizer_state
from ..checkpoint.state_dicts.set import load_full_optimizer_state
from ..comm import ReduceOp
from ..fsdp.api.module import FSDPModule, register_fsdp_forward_method, unsharded
from ..optim import clip_grad_norm_
from .world import check_sharded, full_state_dict, gather, gradient_sync, is_sharded, reduce, repeated_blocks, shard_blocks

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_OPERATIONS = {"mean": ReduceOp.AVG, **{op.value: op for op in ReduceOp}}


def shard_module(module: LightningModule, **options: Any) -> None:
    """`fully_shard` the repeated blocks of `module`, then `module`. In place, collective.

    Blocks are the modules of a class that occurs more than once in an `nn.ModuleList` or `nn.Sequential`.
    With manual optimization (`automatic_optimization=False`) a training step may have several forwards, backwards and steps of
    optimizers, which begin and end with each network: then not `module` is sharded, but each network in it.
    options: those of `fully_shard`.
    Raises ValueError with manual optimization for a parameter of `module` itself.
    """
    blocks = repeated_blocks(module)
    if module.automatic_optimization:
        shard_blocks(module, blocks, **options)
        return
    for name, _ in module.named_parameters(recurse=False):
        raise ValueError(
            f"parameter '{name}' of '{type(module).__name__}' itself (rank {comm.world().rank}), which is not sharded with "
            "automatic_optimization=False, but the networks in it: put the parameter into a module, or shard by a function of "
            "your own, ShardedStrategy(shard)"
        )
    for network in _networks(module):
        shard_blocks(network, [block for block in blocks if any(block is inner for inner in network.modules())], **options)


def _networks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost modules with parameters in `module` that have a forward."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _networks(child)
        elif any(True for _ in child.parameters()):
            yield child


class ShardedStrategy(ParallelStrategy):
    """Pass it as `Trainer(strategy=ShardedStrategy())` on every rank, after `shardrt.init()`. It starts no process group.

    - `fit` and the other entry points shard the module after `configure_model`, unless that has sharded it or a part of it.
    - A `DistributedSampler` splits the batches among the ranks.
    - `self.log(..., sync_dist=True)`, `self.all_gather`, early stopping and gradient clipping by norm cover all ranks.
    - Rank 0 writes full checkpoints, which any number of ranks can load, also without shardrt.

    shard: a function that shards the module in place; None means `shard_module`.
    Raises RuntimeError before `shardrt.init()`.
    """

    def __init__(self, shard: Callable[[LightningModule], None] | None = None, **options: Any) -> None:
        """options: `precision_plugin` and `checkpoint_io`, as for Lightning's strategies."""
        device = comm.world().device
        super().__init__(parallel_devices=[device], cluster_environment=_WorldEnvironment(), **options)
        self._shard = shard_module if shard is None else shard
        self._predicting = ExitStack()

    # ------------------------------------------------------------------ ranks

    is_distributed = True  # read by the Trainer, which then gives each rank its own sampler

    @property
    def root_device(self) -> torch.device:
        return comm.world().device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Called by the Trainer: only rank 0 logs and shows progress."""
        vars(rank_zero_only)["rank"] = self.global_rank

    def reduce(self, tensor: Any, group: object = None, reduce_op: Any = "mean") -> Any:
        """The reduced tensor of all ranks; other objects are returned unchanged. Collective for tensors.

        reduce_op: "mean", "sum", "min", "max", "product" or torch.distributed's ReduceOp of these names.
        """
        if not isinstance(tensor, torch.Tensor):
            return tensor
        name = str(reduce_op).rpartition(".")[2].lower()
        if name not in _OPERATIONS:
            raise ValueError(
                f"ShardedStrategy.reduce on rank {self.global_rank}: {reduce_op!r}; expected {', '.join(_OPERATIONS)}"
            )
        return reduce(tensor, _OPERATIONS[name])

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        decisions = comm.world().comm.exchange(bool(decision))
        return False not in decisions if all else True in decisions

    def barrier(self, name: str | None = None) -> None:
        comm.world().barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return comm.world().comm.exchange(obj if self.global_rank == src else None)[src]

    def all_gather(self, tensor: torch.Tensor, group: object = None, sync_grads: bool = False) -> torch.Tensor:
        """The ranks' tensors of shape (...) stacked as (N, ...). Collective.

        Raises RuntimeError if `sync_grads` is true and `tensor` requires a gradient.
        """
        if sync_grads and tensor.requires_grad:
            raise RuntimeError(f"all_gather(sync_grads=True) on rank {self.global_rank}: all_gather is not differentiable")
        return gather(tensor)

    # ------------------------------------------------------------------ the module

    def model_to_device(self) -> None:
        """Shard the module, unless it is sharded, and move its buffers to the device. Collective.

        Raises ValueError for a trainable parameter that is not sharded.
        """
        module = self._module
        if self._layer_sync:  # of Trainer(sync_batchnorm=True); its own conversion is to torch's, which needs a process group
            convert_sync_batchnorm(module)
        if not is_sharded(module):
            self._shard(module)
        check_sharded(module)
        for name in _STEPS:
            if name not in vars(module):
                register_fsdp_forward_method(module, name)
        if any(tensor.device != self.root_device for tensor in itertools.chain(module.parameters(), module.buffers())):
            module.to(self.root_device)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin

        def clip(optimizer: torch.optim.Optimizer, clip_val: float) -> None:
            clip_grad_norm_(plugin.main_params(optimizer), clip_val)

        vars(plugin)["clip_grad_by_norm"] = clip  # replaces the method

    def pre_backward(self, closure_loss: torch.Tensor) -> None:
        """RuntimeError if a sharded module has not noticed a change of `requires_grad`, as `toggle_optimizer` makes.

        It would, at its next forward: but in a training step that is one forward of the whole module there is none.
        """
        super().pre_backward(closure_loss)
        if not self._module.automatic_optimization and isinstance(self._module, FSDPModule):
            _check_trainable(self._module)

    def block_backward_sync(self) -> Any:
        return gradient_sync(self._module, False)

    @property
    def _module(self) -> LightningModule:
        module = self.lightning_module
        if module is None:
            raise RuntimeError(
                f"ShardedStrategy on rank {self.global_rank}: no module yet; the Trainer sets it in fit() and the like"
            )
        return module

    # ------------------------------------------------------------------ checkpoints

    restore_checkpoint_after_setup = True  # parameters are sharded by then

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The full state dict on rank 0, an empty one on other ranks. Collective."""
        return full_state_dict(self._module, keep=self.is_global_zero)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The full state dict on rank 0, an empty one on other ranks. Collective."""
        return full_optimizer_state(_plain(optimizer), keep=self.is_global_zero)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            load_full_optimizer_state(_plain(optimizer), state)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        with comm.world().comm.agree():
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def on_predict_start(self) -> None:
        """Gather all parameters once: Lightning may give the ranks different numbers of batches to predict."""
        super().on_predict_start()
        assert self.lightning_module is not None, "set before"
        self._predicting.enter_context(unsharded(self.lightning_module))

    def on_predict_end(self) -> None:
        self._predicting.close()
        super().on_predict_end()

    def teardown(self) -> None:
        """End an entry point. The module stays sharded and on its device, while other strategies move it to the host."""
        self._predicting.close()  # still open after an exception in a prediction
        self.precision_plugin.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
        self.checkpoint_io.teardown()


def _check_trainable(module: FSDPModule) -> None:
    for group in module.param_group.with_descendants():
        for param in group.params:
            if param.sharded.requires_grad != (param in group.trainable):
                raise RuntimeError(
                    f"requires_grad of parameter '{param.name}' changed within a forward of '{group.root.name}' (rank "
                    f"{group.mesh.rank}), which would not follow it: with automatic_optimization=False shard the networks in "
                    "the module, as ShardedStrategy() does, not the module itself"
                )


class _WorldEnvironment(ClusterEnvironment):
    """Gives Lightning the ranks of `shardrt.init()`, whichever launcher started them."""

    creates_processes_externally = True
    main_address, main_port = "", 0  # those of a process group, which does not exist

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return comm.world().size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return comm.world().rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return comm.world().local_rank

    def node_rank(self) -> int:
        return int(self.local_rank() != self.global_rank())  # Lightning only tests whether it is 0


def _plain(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
