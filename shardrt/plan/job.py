"""What is to be forecast: how many ranks, how the model is distributed over them, and what a step is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import comm
from ..comm import DeviceMesh
from ..fsdp.policy import MixedPrecisionPolicy, OffloadPolicy, PrefetchPolicy, QuantizationPolicy

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


class PlanError(ValueError):
    """What was asked for cannot be forecast: a wrong factory, sheet or combination of options."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training job. What `fully_shard` takes has its names, and None means its default.

    ranks: of the whole job, `replicas` * `shards` * `tp`.   tp: ranks of tensor parallelism, neighbours.
    replicas: of the sharded model (hybrid sharding).   batch, sequence: rows and tokens of a micro-batch of
    each rank of the data-parallel mesh.   micro_batches: forwards and backwards of a step, of which the last one reduces.
    optimizer: one of `OPTIMIZERS`.   checkpoint_activations: recompute each block in the backward.
    Raises PlanError for numbers below 1, parts that do not divide the ranks, an unknown optimizer, and codes that no rank gets.
    """

    ranks: int
    tp: int = 1
    replicas: int = 1
    batch: int = 1
    sequence: int | None = None
    micro_batches: int = 1
    optimizer: str = "adamw"
    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    quantization_policy: QuantizationPolicy = field(default_factory=QuantizationPolicy)
    prefetch_policy: PrefetchPolicy = field(default_factory=PrefetchPolicy)
    checkpoint_activations: bool = False

    def __post_init__(self) -> None:
        for name in ("ranks", "tp", "replicas", "batch", "micro_batches", "sequence"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name}={value}: expected a number of at least 1")
            if value is not None and value >= 1 << 31:
                raise PlanError(f"{name}={value}: expected less than 2**31")
        if self.ranks % (self.tp * self.replicas):
            raise PlanError(
                f"ranks={self.ranks} with tp={self.tp} and replicas={self.replicas}: expected a multiple of {self.tp} x "
                f"{self.replicas} = {self.tp * self.replicas} ranks"
            )
        kept = self.reshard_after_forward
        if isinstance(kept, int) and not isinstance(kept, bool) and (kept < 1 or self.shards % kept):
            raise PlanError(f"reshard_after_forward={kept}: expected a divisor of the {self.shards} ranks sharded over")
        if self.optimizer not in OPTIMIZERS:
            raise PlanError(f"optimizer={self.optimizer!r}: expected one of {', '.join(OPTIMIZERS)}")
        codes_over_replicas = self.quantization_policy.reduce is not None and self.replicas > 1
        if self.quantization_policy and self.shards == 1 and not codes_over_replicas:
            raise PlanError(f"{self.quantization_policy} with one rank to shard over: it has nobody to send codes to")

    @property
    def shards(self) -> int:
        """The ranks that a parameter, or this rank's part of it by tensor parallelism, is sharded over."""
        return self.ranks // (self.tp * self.replicas)

    @property
    def rows(self) -> int:
        """Rows of all ranks in a step."""
        return self.batch * self.micro_batches * self.replicas * self.shards

    def mesh(self) -> DeviceMesh:
        """Over the ranks of the world: axes "replicate", "shard" and "tp". An axis of one rank is left out, but for "shard"."""
        sizes = {"replicate": self.replicas, "shard": self.shards, "tp": self.tp}
        kept = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        return comm.world().mesh.unflatten(tuple(kept.values()), tuple(kept))

    def shard_options(self) -> dict[str, Any]:
        """The keywords of `fully_shard`."""
        names = ("replicate", "shard") if self.replicas > 1 else ("shard",)
        return {
            "mesh": self.mesh()[names],
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": self.mp_policy,
            "offload_policy": self.offload_policy,
            "quantization_policy": self.quantization_policy,
        }


@dataclass(frozen=True, slots=True)
class Program:
    """A sharded model on the meta device, made in the world that it is forecast for."""

    model: nn.Module
    step: Callable[[], torch.Tensor]  # the forward of one micro-batch: the loss, which has yet to go backward
