"""The public names of `shardrt`, which takes them from here when one of them is used first."""

from . import torch_names as torch_names  # first: it logs what is gone from torch before that is missed

# isort: split
from .batch_norm import SyncBatchNorm, convert_sync_batchnorm
from .checkpoint import Run, Survival
from .comm import DeviceMesh, World, finalize, init, init_device_mesh, without_launcher_variables, world
from .fsdp.api.fully_shard import fully_shard, replicate
from .fsdp.api.module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    disable_fsdp_module_new_init,
    register_fsdp_forward_method,
    share_comm_ctx,
    unsharded,
)
from .fsdp.base.policy import (
    CPUOffloadPolicy,
    CustomAllGather,
    CustomReduceScatter,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
    PrefetchPolicy,
    QuantizationPolicy,
    ShardPlacementResult,
)
from .instruments.metrics import Metrics
from .memory.account import MemoryAccount
from .memory.summary import memory_summary
from .optim import clip_grad_norm_, offload_state_to_disk
from .parallel.boundaries.random import manual_seed
from .replicas.check import check_replicas
from .tensor import DTensor, FlatShard, Partial, RaggedShard, Replicate, Shard, distribute_tensor
from .tensor.operations.local_ops import register_local_op
from .tensor.optimizers.optimizer_state import shard_optimizer_state
from .tensor.optimizers.other_optimizers import register_local_optimizer
from .timeline.timeline import Timeline

__all__ = [
    "CPUOffloadPolicy",
    "CustomAllGather",
    "CustomReduceScatter",
    "DTensor",
    "DataParallelMeshDims",
    "DeviceMesh",
    "FSDPModule",
    "FlatShard",
    "GradientReductionHandle",
    "MemoryAccount",
    "Metrics",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Partial",
    "PrefetchPolicy",
    "QuantizationPolicy",
    "RaggedShard",
    "Replicate",
    "Run",
    "Shard",
    "ShardPlacementResult",
    "Survival",
    "SyncBatchNorm",
    "Timeline",
    "UnshardHandle",
    "World",
    "check_replicas",
    "clip_grad_norm_",
    "convert_sync_batchnorm",
    "disable_fsdp_module_new_init",
    "distribute_tensor",
    "finalize",
    "fully_shard",
    "init",
    "init_device_mesh",
    "manual_seed",
    "memory_summary",
    "offload_state_to_disk",
    "register_fsdp_forward_method",
    "register_local_op",
    "register_local_optimizer",
    "replicate",
    "shard_optimizer_state",
    "share_comm_ctx",
    "unsharded",
    "without_launcher_variables",
    "world",
]
