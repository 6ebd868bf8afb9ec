"""Pipelines: the order of a stage's forwards and backwards, what stages send, and when each of them is done.

A stage is forecast alone, as a rank of it runs; what it receives is always there. When it would have to wait is then found from
the times of all stages' turns: one begins when the turn before it on its stage is done, and what it needs from a neighbour has
come. Of equal stages p and micro-batches m, the bubble is the part (p - 1) / (m + p - 1) of the step (GPipe: arXiv:1811.06965;
1F1B, which has fewer micro-batches in flight: arXiv:2104.04473).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import NamedTuple

import torch

from ... import comm
from ...comm import DeviceMesh
from ...comm.startup.dry import uncounted
from .forecast_result import Forecast, StageForecast

BUBBLE = "pipeline bubble"


class Pass(Enum):
    FORWARD = auto()
    BACKWARD = auto()


class Message(NamedTuple):
    """What a stage sends to the next one."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} of shape {self.shape}"


class Turn(NamedTuple):
    """A forward or backward of one micro-batch."""

    kind: Pass
    micro_batch: int


def turns(schedule: str, stage: int, stages: int, micro_batches: int) -> Iterator[Turn]:
    """What a stage does in a step, in order; of one stage, a forward and a backward in turn.

    schedule: "gpipe": all forwards, then all backwards; "1f1b": as many forwards first as there are stages behind this one.
    """
    ahead = forwards_ahead(schedule, stage, stages, micro_batches)
    for index in range(ahead):
        yield Turn(Pass.FORWARD, index)
    for index in range(micro_batches):
        if ahead + index < micro_batches:
            yield Turn(Pass.FORWARD, ahead + index)
        yield Turn(Pass.BACKWARD, index)


def forwards_ahead(schedule: str, stage: int, stages: int, micro_batches: int) -> int:
    """How many forwards come before the first one that a backward follows."""
    return micro_batches if schedule == "gpipe" else min(stages - 1 - stage, micro_batches)


def blocks_of_stage(blocks: int, stage: int, stages: int) -> range:
    """Which of a model's blocks a stage has: neighbours, as evenly as can be."""
    return range(blocks * stage // stages, blocks * (stage + 1) // stages)


# ---------------------------------------------------------------------- messages

# torch's stages have a buffer for each message that they receive in a step, which stays until the next one.


def receive(pipeline: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """What the stage before this one sends, on the meta device; its gradient is sent back when the backward has made it."""
    received, back = uncounted(math.prod(shape), dtype).view(shape).requires_grad_(), pipeline.rank - 1
    _transfer(pipeline, "recv", received.detach(), back)

    def send_back(received: torch.Tensor) -> None:
        assert received.grad is not None, "autograd has just made it"
        _transfer(pipeline, "send", received.grad, back)
        received.grad = None

    received.register_post_accumulate_grad_hook(send_back)
    return received


def send(pipeline: DeviceMesh, made: torch.Tensor) -> None:
    """Send what a stage has made to the next one."""
    _transfer(pipeline, "send", made.detach(), pipeline.rank + 1)


def backward(pipeline: DeviceMesh, made: torch.Tensor) -> None:
    """Run the backward of a stage that is not the last, with the gradient that the next one sends."""
    gradient = uncounted(made.numel(), made.dtype).view(made.shape)
    _transfer(pipeline, "recv", gradient, pipeline.rank + 1)
    made.backward(gradient)


def _transfer(pipeline: DeviceMesh, call: str, tensor: torch.Tensor, peer: int) -> None:
    """Nothing waits for it here: `finish_times` does."""
    world = comm.world()
    stream = world.stream_for("pipeline")
    stream.wait(world.stream.record())
    getattr(pipeline.communicator("pipeline"), call)(tensor.contiguous(), peer, stream=stream)


# ---------------------------------------------------------------------- times of all stages


@dataclass(slots=True)
class StageRun:
    """What a stage's turns took.

    sent: the shape and dtype of what it sends on, None on the last stage.   message: the seconds that takes on its link.
    """

    turns: list[tuple[Turn, float]] = field(default_factory=list)
    sent: Message | None = None
    message: float = 0.0


def finish_times(runs: Sequence[StageRun]) -> list[float]:
    """The seconds at which the stages, in order, have done all of their turns. A link carries one message at a time."""
    arrives = dict[tuple[int, Turn], float]()  # by the stage that waits for it
    links = dict[tuple[int, Pass], float]()  # when they are free
    clocks, places = [0.0] * len(runs), [0] * len(runs)
    while any(place < len(run.turns) for place, run in zip(places, runs, strict=True)):
        before = sum(places)
        for stage, run in enumerate(runs):
            for turn, seconds in run.turns[places[stage] :]:
                is_first = stage == (0 if turn.kind is Pass.FORWARD else len(runs) - 1)
                if not is_first and (stage, turn) not in arrives:
                    break
                clocks[stage] = max(clocks[stage], arrives.get((stage, turn), 0.0)) + seconds
                places[stage] += 1
                needs_it = stage + (1 if turn.kind is Pass.FORWARD else -1)
                link = min(stage, needs_it), turn.kind
                if 0 <= needs_it < len(runs):
                    links[link] = max(links.get(link, 0.0), clocks[stage]) + runs[link[0]].message
                    arrives[needs_it, turn] = links[link]
        assert sum(places) > before, "no stage can go on: not the turns of one schedule"
    return clocks


class StageAlone(NamedTuple):
    """What a stage does if it waits for no other. numel: of its parameters.   received: in the forward of a micro-batch."""

    forecast: Forecast
    run: StageRun
    numel: int
    received: list[Message]


def pipelined(stages: Sequence[StageAlone]) -> Forecast:
    """The forecast of a step of all stages, in order: memory and times are those of the stage that needs most memory.

    The step ends when the last of them has done its optimizer's.
    """
    ends = finish_times([stage.run for stage in stages])
    step = max(end + stage.forecast.optimizer_seconds for end, stage in zip(ends, stages, strict=True))
    fullest = max(range(len(stages)), key=lambda stage: stages[stage].forecast.peak_nbytes)
    found = stages[fullest].forecast
    bubble = step - found.step_seconds
    bounds = {bound: part * found.step_seconds / step for bound, part in found.bounds.items()} if step else {}
    bounds = dict(sorted([*bounds.items(), (BUBBLE, bubble / step)], key=lambda item: -item[1])) if step else {}
    return replace(
        found,
        step_seconds=step,
        bubble_seconds=bubble,
        model_flops=sum(stage.forecast.model_flops for stage in stages) // len(stages),
        bound=next(iter(bounds), ""),
        bounds=bounds,
        stages=tuple(
            StageForecast(numel, alone.peak_nbytes, alone.step_seconds, step - alone.step_seconds)
            for alone, _, numel, _ in stages
        ),
        fullest_stage=fullest,
    )
