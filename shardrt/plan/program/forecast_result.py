"""What a forecast says of a step on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Moment(NamedTuple):
    """A time in the step, in seconds from its start, and the group whose buffer was allocated or freed last."""

    seconds: float
    group: str


@dataclass(frozen=True, slots=True)
class GroupForecast:
    """One group of parameters. Bytes of the gathered parameters, padding included; of this rank's shards as they are kept."""

    name: str
    ranks: int  # that share the parameters
    numel: int  # of the parameters
    gathered_nbytes: int
    shard_nbytes: int
    padding_nbytes: int  # of the gathered ones
    fsdp2_padding_nbytes: int  # that FSDP2 would have


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage of a pipeline: its parameters, and a rank's peak memory in bytes, and seconds of a step at work and waiting."""

    numel: int
    peak_nbytes: int
    busy_seconds: float
    bubble_seconds: float


@dataclass(frozen=True, slots=True)
class Forecast:
    """A step of one rank: memory in bytes, times in seconds. Of a pipeline, a rank of the stage that needs most memory.

    memory: by kind, each at its own peak: the kinds of buffers (`BufferKind`); parameters, with the model's buffers; gradients,
    the sharded ones; activations, which include gradients before they are packed and all temporary tensors; optimizer;
    process, what the sheet reserves.
    peak_nbytes: of the sum of what is on the device.   received_*, flops: by this rank in a step; flops of matrices.
    model_flops: three times those of the forwards, so without what is computed again: the numerator of MFU.
    compute_seconds: of operations on the stream that computes, without the optimizer's.   communication_seconds: of all
    collectives.   exposed_seconds: in which compute waits for communication, or is on its stream.
    dtype: of most of the flops, without "torch.".   bound: what limits the step most.
    stages: of a pipeline, of which `fullest_stage` needs most memory; its step_seconds and bubble_seconds, in which the rank
    waits for other stages, are those of all stages together, and model_flops the mean over them.
    """

    memory: dict[str, int]
    peak_nbytes: int
    peak_at: Moment
    received_within_nbytes: int
    received_across_nbytes: int
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_seconds: float
    optimizer_seconds: float
    flops: int
    model_flops: int
    dtype: str
    bound: str
    bounds: dict[str, float]  # parts of the step by what bounds them, the largest first
    groups: tuple[GroupForecast, ...]
    stages: tuple[StageForecast, ...] = ()
    fullest_stage: int = 0
    bubble_seconds: float = 0.0

    @property
    def padding_nbytes(self) -> int:
        """The bytes of padding in the gathered parameters of all groups."""
        return sum(group.padding_nbytes for group in self.groups)

    @property
    def fsdp2_padding_nbytes(self) -> int:
        """The same, as FSDP2 would pad them: each parameter's first dim to a multiple of the ranks."""
        return sum(group.fsdp2_padding_nbytes for group in self.groups)
