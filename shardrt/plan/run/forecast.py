"""Forecasts: a training step, run by the real runtime on meta tensors in a dry world, with simulated clocks."""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import nn

from ...comm.startup.dry import DryWorld, dry_world
from ...fsdp.api.module import FSDPModule, set_stage_backward
from ...fsdp.base.events import observing
from ...fsdp.params.layout import fsdp2_padding
from ...fsdp.schedule.param_group import ParamGroup
from ...timeline.recording import is_recording
from ...timeline.timeline import Timeline
from ..machine.cost import Costs, bounding
from ..program.forecast_result import Forecast, GroupForecast
from ..program.job import Job, PlanError, Program
from ..program.names import OPTIMIZERS
from ..program.pipeline import Message, Pass, StageAlone, StageRun, Turn, backward, forwards_ahead, pipelined, send, turns
from .attention import FusedAttention
from .history import History
from .lap import Lap
from .meter import CollectiveMeter, Meter
from .operations import Operations

_FIRST = 3  # pairs of a forward and a backward that run before others count as the last one of them
_OFFLOADED = ("parameters", "gradients", "optimizer")  # kinds of memory


def forecast(
    make: Callable[[Job], Program], job: Job, costs: Costs, *, timeline: Timeline | None = None, history: History | None = None
) -> Forecast:
    """A step of rank 0, once the order of the groups is known; in a pipeline, of the first rank of each stage.

    make: makes the program, of the stage that its job names, in the dry world that is current when it is called.
    timeline, history: record the step; in a pipeline, that of the first stage, as if it waited for no other.
    Raises what `make` and the program raise; ValueError if no module is sharded; SheetError for a machine without links that
    the job needs; RuntimeError while a timeline of another world is being recorded, which would get simulated times.
    """
    if is_recording():
        raise RuntimeError("a timeline is being recorded: close it before you make a forecast")
    first = _stage(make, replace(job, stage=0), costs, timeline, history)
    if job.pp == 1:
        return first.forecast
    stages = [first, *(_stage(make, replace(job, stage=stage), costs) for stage in range(1, job.pp))]
    for number, (one, other) in enumerate(pairwise(stages)):
        if (sent := [one.run.sent]) != other.received:
            found = [" and ".join(map(str, messages)) or "nothing" for messages in (sent, other.received)]
            raise PlanError(
                f"stage {number} of {job.pp} sends {found[0]}, and stage {number + 1} receives {found[1]}: expected the same. "
                "A factory makes the model of job.stage, and its step takes what job.receive(*shape) returns, but for the "
                "first stage, and returns what it sends, but for the last"
            )
    return pipelined(stages)


def _stage(
    make: Callable[[Job], Program], job: Job, costs: Costs, timeline: Timeline | None = None, history: History | None = None
) -> StageAlone:
    collectives, rank, per_node = CollectiveMeter(costs), job.stage * (job.ranks // job.pp), costs.per_node
    with (
        _no_collections(),
        dry_world(job.ranks, rank=rank, ranks_per_node=per_node, inline=costs.is_host, costs=collectives.collective) as world,
    ):
        program = make(job)
        groups = _groups(program.model)
        offloads = not costs.is_host and any(group.offloads for group in groups)
        meter = Meter(world, costs, history, host_kinds=_OFFLOADED if offloads else ())
        meter.add("parameters", sum(group.gather.shard_nbytes for group in groups) + _other_nbytes(program.model, groups))
        meter.add("process", costs.sheet.memory.reserved_nbytes)
        operations = Operations(meter)
        with observing(meter), FusedAttention(world.machine), operations:
            if job.pp > 1 and not any(True for _ in program.model.parameters()):
                raise PlanError(f"stage {job.stage} of {job.pp} has no parameters: expected some on each; take fewer stages")
            optimizer = getattr(torch.optim, OPTIMIZERS[job.optimizer])(program.model.parameters())
            laps = None if timeline or history else partial(Lap, world, costs, operations, collectives)
            steps = _ProgramSteps(world, program, job, groups, operations, collectives, laps)
            recorded, _ = replace(steps, job=replace(job, micro_batches=1)).train()  # in which order groups are used
            received = list(program.received)
            messages = [message for message in (*received, recorded.sent) if message is not None]
            meter.add("messages", job.micro_batches * sum(message.nbytes for message in messages))
            meter.live.kind = "optimizer"
            _finish(optimizer)
            meter.live.kind = "activations"
            world.compute.synchronize()
            for each in (meter, collectives, operations):
                each.restart()
            with timeline or nullcontext():
                measured = _measure(steps, optimizer)
        meter.add_up(operations)
        numel = sum(param.numel() for param in program.model.parameters())
        return StageAlone(_forecast(meter, collectives, operations, costs, groups, measured), measured.run, numel, received)


@contextmanager
def _no_collections() -> Iterator[None]:
    """Keep Python from looking for reference cycles in the block. Cost: going through all objects was a fifth of a forecast."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---------------------------------------------------------------------- a step


@dataclass(frozen=True, slots=True)
class _ProgramSteps:
    """The forwards and backwards of a program's steps, in a dry world.

    laps: begins what counts several times; None: all micro-batches run, as it is needed where they are recorded.
    """

    world: DryWorld
    program: Program
    job: Job
    groups: list[ParamGroup]
    operations: Operations
    collectives: CollectiveMeter
    laps: Callable[[], Lap] | None

    def train(self) -> tuple[StageRun, int]:
        """All forwards and backwards of a step. Returns what each took, and the flops of the forwards."""
        job, run, made, lap = self.job, StageRun(), deque[torch.Tensor](), None
        flops, last = 0, dict[Pass, tuple[float, int]]()
        ahead = forwards_ahead(job.schedule, job.stage, job.pp, job.micro_batches)
        # Pairs of a forward and a backward that are as the one before: the first ones gather first, the last one reduces.
        alike = range(0) if self.laps is None else range(_FIRST, job.micro_batches - ahead - 1)
        with job.sequences():
            for turn in turns(job.schedule, job.stage, job.pp, job.micro_batches):
                pair = turn.micro_batch - (ahead if turn.kind is Pass.FORWARD else 0)
                if alike and self.laps is not None and turn.kind is Pass.FORWARD:
                    if pair == alike.start - 1:
                        lap = self.laps()
                    elif pair == alike.start and lap is not None:
                        lap.repeat(len(alike))
                if pair not in alike:
                    last[turn.kind] = self._take(turn, made, run)
                run.turns.append((turn, last[turn.kind][0]))
                flops += last[turn.kind][1]
        return run, flops

    def _take(self, turn: Turn, made: deque[torch.Tensor], run: StageRun) -> tuple[float, int]:
        """Run a forward or backward. Returns its seconds, and the flops if it is a forward."""
        start, flops = self.world.compute.now(), self.operations.flops
        if turn.kind is Pass.FORWARD:
            made.append(self.program.step())
            flops = self.operations.flops - flops
            self._send(made[-1], run)
        else:
            self._backward(turn.micro_batch, made.popleft())
            flops = 0
        return self.world.compute.now() - start, flops

    def _send(self, made: torch.Tensor, run: StageRun) -> None:
        """Send it to the next stage, if there is one. On the host, where the caller's thread sends, it is in its time."""
        if self._is_last_stage():
            return
        before = self.collectives.seconds
        send(self.job.mesh()["pp"], made)
        run.message = 0.0 if self.world.inline else self.collectives.seconds - before
        run.sent = Message(tuple(made.shape), made.dtype)

    def _backward(self, micro_batch: int, made: torch.Tensor) -> None:
        job, is_last = self.job, micro_batch == self.job.micro_batches - 1
        roots = (module for group in self.groups if group.parent is None for module in group.modules)
        for module in roots:
            assert isinstance(module, FSDPModule), "it has a group"
            if job.pp > 1:
                set_stage_backward(module, is_last=is_last, keeps_parameters=job.reshard_after_forward is False)
            else:
                module.set_requires_gradient_sync(is_last or job.gradient_sync == "every")
        if self._is_last_stage():
            made.backward()
        else:
            backward(job.mesh()["pp"], made)

    def _is_last_stage(self) -> bool:
        return self.job.stage == self.job.pp - 1


def _finish(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


class _StepTimes(NamedTuple):
    """What the forwards and backwards of a step take, and its optimizer; times in seconds."""

    trained: float
    finished: float
    computed: float  # while it trained
    waited: float
    forward_flops: int
    run: StageRun


def _measure(steps: _ProgramSteps, optimizer: torch.optim.Optimizer) -> _StepTimes:
    compute = steps.world.compute
    start, busy, waited = compute.now(), compute.busy, compute.waited
    run, forward_flops = steps.train()
    trained, computed = compute.now(), compute.busy - busy
    _finish(optimizer)
    return _StepTimes(trained - start, compute.now() - trained, computed, compute.waited - waited, forward_flops, run)


# ---------------------------------------------------------------------- what it comes to


def _forecast(
    meter: Meter,
    collectives: CollectiveMeter,
    operations: Operations,
    costs: Costs,
    groups: list[ParamGroup],
    measured: _StepTimes,
) -> Forecast:
    seconds = measured.trained + measured.finished
    exposed = collectives.seconds if costs.is_host else measured.waited
    bounds = bounding(costs.spent, seconds, exposed) if seconds else {}
    return Forecast(
        memory=meter.peaks,
        peak_nbytes=meter.peak_nbytes,
        peak_at=meter.peak_at,
        received_within_nbytes=round(collectives.received_within),
        received_across_nbytes=round(collectives.received_across),
        step_seconds=seconds,
        compute_seconds=measured.computed,
        communication_seconds=collectives.seconds,
        exposed_seconds=exposed,
        optimizer_seconds=measured.finished,
        flops=operations.flops,
        model_flops=3 * measured.forward_flops,
        dtype=str(operations.dtype).removeprefix("torch."),
        bound=next(iter(bounds)).value if bounds else "",
        bounds={bound.value: part for bound, part in bounds.items()},
        groups=tuple(map(_described, groups)),
    )


def _groups(model: nn.Module) -> list[ParamGroup]:
    """All groups of the model's sharded modules, from the outside in."""
    found = [group for module in model.modules() if isinstance(module, FSDPModule) for group in module.param_groups]
    if not found:
        raise ValueError(f"'{type(model).__name__}' has no sharded module: call fully_shard on it")
    return list(dict.fromkeys(found))


def _other_nbytes(model: nn.Module, groups: list[ParamGroup]) -> int:
    """Bytes of buffers, and of parameters that are in no group."""
    ours = {id(param.sharded) for group in groups for param in group.params}
    return sum(tensor.nbytes for tensor in chain(model.parameters(), model.buffers()) if id(tensor) not in ours)


def _described(group: ParamGroup) -> GroupForecast:
    specs = [placed.spec for placed in group.layout.placed]
    return GroupForecast(
        name=group.name,
        ranks=group.mesh.size,
        numel=sum(spec.numel for spec in specs),
        gathered_nbytes=group.nbytes,
        shard_nbytes=group.gather.shard_nbytes,
        padding_nbytes=group.layout.padding_nbytes,
        fsdp2_padding_nbytes=fsdp2_padding(specs, group.mesh.size),
    )
