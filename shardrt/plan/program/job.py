"""What is to be forecast: how many ranks, how the model is distributed over them, and what a step is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from ... import comm
from ...comm import DeviceMesh
from ...fsdp.base.policy import MixedPrecisionPolicy, OffloadPolicy, PrefetchPolicy, QuantizationPolicy
from ...parallel import context_parallel
from ...parallel.context.cut import SequenceCut
from .names import GRADIENT_SYNCS, OPTIMIZERS, SCHEDULES
from .pipeline import Message, receive


class PlanError(ValueError):
    """What was asked for cannot be forecast: a wrong factory, sheet or combination of options."""


@dataclass(frozen=True, slots=True)
class Job:
    """A training job. What `fully_shard` takes has its names, and None means its default.

    ranks: of the whole job, `pp` * `replicas` * `shards` * `tp`.   tp: ranks of tensor parallelism, neighbours.
    cp: ranks that have parts of the same sequences.   ep: ranks that divide the experts of a layer among them. Parameters are
    sharded over these ranks as well, so that they are among the `shards`; an expert over `shards` / `ep`.
    pp: stages of a pipeline.   stage: which of them the rank has that is forecast.   schedule: one of `SCHEDULES`.
    replicas: of the sharded model (hybrid sharding).   batch, sequence: rows and tokens of a micro-batch of each rank, or
    `cp` ranks together.   micro_batches: forwards and backwards of a step.
    gradient_sync: which of them reduce gradients; in a pipeline, always the last one. "every" is what FSDP2 does unless it is
    told otherwise; "last" is `set_requires_gradient_sync(False)` until the last one: fewer reductions, and unsharded gradients
    are kept in between.
    optimizer: one of `OPTIMIZERS`.   checkpoint_activations: what the backward computes again, of the blocks: True: all of each
    block; a number n: all of every n-th one; "op": each block but for attention and every second matrix multiplication.
    observer: the planner's, of the job that a factory and its step get.
    Raises PlanError for numbers below 1, parts that do not divide the ranks, an unknown optimizer or other name, and codes that
    no rank gets.
    """

    ranks: int
    tp: int = 1
    cp: int = 1
    ep: int = 1
    pp: int = 1
    stage: int = 0
    schedule: str = "1f1b"
    replicas: int = 1
    batch: int = 1
    sequence: int | None = None
    micro_batches: int = 1
    gradient_sync: str = "every"
    optimizer: str = "adamw"
    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    offload_policy: OffloadPolicy = field(default_factory=OffloadPolicy)
    quantization_policy: QuantizationPolicy = field(default_factory=QuantizationPolicy)
    prefetch_policy: PrefetchPolicy = field(default_factory=PrefetchPolicy)
    checkpoint_activations: bool | int | str = False
    observer: JobObserver | None = field(default=None, kw_only=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("ranks", "tp", "cp", "ep", "pp", "replicas", "batch", "micro_batches", "sequence"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name}={value}: expected a number of at least 1")
            if value is not None and value >= 1 << 31:
                raise PlanError(f"{name}={value}: expected less than 2**31")
        self._check_ranks()
        kept, sharing = self.reshard_after_forward, self.shards // self.ep  # the ranks of an expert divide those of the rest
        if isinstance(kept, int) and not isinstance(kept, bool) and (kept < 1 or sharing % kept):
            what = "ranks sharded over" if self.ep == 1 else f"ranks that share an expert, with ep={self.ep}"
            raise PlanError(f"reshard_after_forward={kept}: expected a divisor of the {sharing} {what}")
        for name, known in (("optimizer", OPTIMIZERS), ("gradient_sync", GRADIENT_SYNCS), ("schedule", SCHEDULES)):
            if getattr(self, name) not in known:
                raise PlanError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(known)}")
        again = self.checkpoint_activations
        if again != "op" if isinstance(again, str) else (again < 1 and again is not False):
            raise PlanError(f'checkpoint_activations={again!r}: expected True, False, "op" or a number of at least 1')
        codes_over_replicas = self.quantization_policy.reduce is not None and self.replicas > 1
        if self.quantization_policy and self.shards == 1 and not codes_over_replicas:
            raise PlanError(f"{self.quantization_policy} with one rank to shard over: it has nobody to send codes to")

    def _check_ranks(self) -> None:
        sizes = {name: getattr(self, name) for name in ("pp", "tp", "replicas")}
        if self.ranks % math.prod(sizes.values()):
            given = ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)
            raise PlanError(f"ranks={self.ranks} with {given}: expected a multiple of {math.prod(sizes.values())} ranks")
        for name in ("cp", "ep"):
            if self.shards % getattr(self, name):
                raise PlanError(f"{name}={getattr(self, name)}: expected a divisor of the {self.shards} ranks sharded over")
        if not 0 <= self.stage < self.pp:
            raise PlanError(f"stage={self.stage} of pp={self.pp}: expected 0 to {self.pp - 1}")
        if self.cp > 1 and self.sequence is not None and self.sequence < self.cp:
            raise PlanError(f"cp={self.cp} with sequence={self.sequence}: expected a token for each rank at least")

    @property
    def shards(self) -> int:
        """The ranks that a parameter, or this rank's part of it by tensor parallelism, is sharded over."""
        return self.ranks // (self.pp * self.tp * self.replicas)

    @property
    def rows(self) -> int:
        """Rows of all ranks in a step."""
        return self.batch * self.micro_batches * self.replicas * self.shards // self.cp

    @property
    def local_sequence(self) -> int | None:
        """Tokens of a row on this rank."""
        return None if self.sequence is None else SequenceCut(self.sequence, self.cp, balanced=True).length(0)

    def sequences(self) -> AbstractContextManager[None]:
        """A block in which attention reaches the tokens of all `cp` ranks: around forward and backward."""
        if self.cp == 1:
            return nullcontext()
        if self.sequence is None:
            raise PlanError(f"cp={self.cp} without a sequence length: expected sequence=, the tokens of a row on all ranks")
        shards = self.mesh()["shard"]
        return context_parallel(shards.unflatten((self.shards // self.cp, self.cp), ("dp", "cp"))["cp"], seq_len=self.sequence)

    def receive(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """What the stage before this one sends, for a step of a stage of a pipeline: a tensor on the meta device.

        dtype: None: that in which parameters are gathered, or torch's default. Raises PlanError on the first stage.
        """
        if self.stage == 0:
            raise PlanError(f"receive{shape} on stage 0 of {self.pp}: expected a later stage; the first one makes its input")
        found = Message(shape, dtype or self.mp_policy.param_dtype or torch.get_default_dtype())
        if self.observer is not None:
            self.observer.received.append(found)
        return receive(self.mesh()["pp"], *found)

    def mesh(self) -> DeviceMesh:
        """Over the ranks of the world: axes "pp", "replicate", "shard", "tp". One of one rank is left out, but for "shard"."""
        return self._mesh({"shard": self.shards})

    def expert_mesh(self) -> DeviceMesh:
        """The same ranks, for experts: axes "shard" and "ep" in the place of "shard"; an expert is sharded over the former."""
        return self._mesh({"shard": self.shards // self.ep, "ep": self.ep})

    def _mesh(self, shards: Mapping[str, int]) -> DeviceMesh:
        sizes = {"pp": self.pp, "replicate": self.replicas, **shards, "tp": self.tp}
        kept = {name: size for name, size in sizes.items() if size > 1 or name in shards}
        return comm.world().mesh.unflatten(tuple(kept.values()), tuple(kept))

    def shard_options(self, *, experts: bool = False) -> dict[str, Any]:
        """The keywords of `fully_shard`; experts: for modules whose experts are divided over `expert_mesh()["ep"]`."""
        names = ("replicate", "shard") if self.replicas > 1 else ("shard",)
        return {
            "mesh": (self.expert_mesh() if experts else self.mesh())[names],
            "reshard_after_forward": self.reshard_after_forward,
            "mp_policy": self.mp_policy,
            "offload_policy": self.offload_policy,
            "quantization_policy": self.quantization_policy,
        }


class JobObserver:
    """What a factory and its step do with a job, and with the copies that `dataclasses.replace` has made of it.

    job: the same one, for them.   reads: its fields that they have read, or kept in a copy; what nobody reads has no effect,
    which whoever has asked for it is to be told.   received: what they have received.
    """

    def __init__(self, asked: Job) -> None:
        self.reads = set[str]()
        self.received = list[Message]()
        self._asked = asked
        self.job = replace(asked, observer=self)
        self.reads.clear()  # what its checks have read

    def note(self, name: str, value: object) -> None:
        """A field has been read. What a copy has got in its place is not what was asked for."""
        if value is getattr(self._asked, name):
            self.reads.add(name)


def _observed(name: str, slot: Any) -> property:
    """The field of a job that `slot` keeps; the job's observer is told when it is read."""

    def read(job: Job) -> Any:
        value = slot.__get__(job)
        if job.observer is not None:
            job.observer.note(name, value)
        return value

    return property(read, slot.__set__)


for _field in fields(Job):
    if _field.compare:
        setattr(Job, _field.name, _observed(_field.name, getattr(Job, _field.name)))


@dataclass(frozen=True, slots=True)
class Program:
    """A sharded model, or stage of one, on the meta device, made in the world that it is forecast for.

    reads: the fields of the job that the factory and the step have read so far.   received: what the step has received.
    """

    model: nn.Module
    step: Callable[[], torch.Tensor]  # the forward of one micro-batch: the loss, or what the stage sends to the next one
    reads: Set[str] = frozenset()
    received: Sequence[Message] = ()
