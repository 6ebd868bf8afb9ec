"""Forecasts: a training step, run by the real runtime on meta tensors in a dry world, with simulated clocks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import nn

from ..comm.dry import DryWorld, dry_world
from ..fsdp.api.module import FSDPModule
from ..fsdp.base.events import observing
from ..fsdp.params.layout import fsdp2_padding
from ..fsdp.schedule.param_group import ParamGroup
from ..timeline.recording import is_recording
from ..timeline.timeline import Timeline
from .attention import FusedAttention
from .cost import Costs, bounding
from .forecast_result import Forecast, GroupForecast
from .history import History
from .job import OPTIMIZERS, Job, Program
from .meter import CollectiveMeter, Meter
from .operations import Operations

_OFFLOADED = ("parameters", "gradients", "optimizer")  # kinds of memory


class _Measured(NamedTuple):
    """What the forwards and backwards of a step take, and its optimizer; times in seconds."""

    trained: float
    finished: float
    computed: float  # while it trained
    waited: float
    forward_flops: int


def forecast(
    make: Callable[[Job], Program], job: Job, costs: Costs, *, timeline: Timeline | None = None, history: History | None = None
) -> Forecast:
    """A step of rank 0, once the order of the groups is known.

    make: makes the program in the dry world that is current when it is called.
    timeline, history: record the step.
    Raises what `make` and the program raise; ValueError if no module is sharded; SheetError for a machine without links that
    the job needs; RuntimeError while a timeline of another world is being recorded, which would get simulated times.
    """
    if is_recording():
        raise RuntimeError("a timeline is being recorded: close it before you make a forecast")
    inline, collectives = costs.sheet.device == "cpu", CollectiveMeter(costs)
    world_of = partial(dry_world, job.ranks, ranks_per_node=costs.per_node, inline=inline, costs=collectives.collective)
    with _no_collections(), world_of() as world:
        program = make(job)
        groups = _groups(program.model)
        offloads = costs.sheet.device != "cpu" and any(group.offloads for group in groups)
        meter = Meter(world, costs, history, host_kinds=_OFFLOADED if offloads else ())
        meter.add("parameters", sum(group.gather.shard_nbytes for group in groups) + _other_nbytes(program.model, groups))
        meter.add("process", costs.sheet.memory.reserved_nbytes)
        operations = Operations(meter)
        with observing(meter), FusedAttention(world.machine), operations:
            optimizer = OPTIMIZERS[job.optimizer](program.model.parameters())
            _train(program, job, groups, operations)  # records in which order groups are used
            meter.live.kind = "optimizer"
            _finish(optimizer)
            meter.live.kind = "activations"
            world.compute.synchronize()
            for each in (meter, collectives, operations):
                each.restart()
            with timeline or nullcontext():
                measured = _measure(world, program, job, groups, operations, optimizer)
        meter.add_up(operations)
        return _forecast(meter, collectives, operations, costs, groups, measured)


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


def _measure(
    world: DryWorld,
    program: Program,
    job: Job,
    groups: list[ParamGroup],
    operations: Operations,
    optimizer: torch.optim.Optimizer,
) -> _Measured:
    compute = world.compute
    start, busy, waited = compute.now(), compute.busy, compute.waited
    forward_flops = _train(program, job, groups, operations)
    trained, computed = compute.now(), compute.busy - busy
    _finish(optimizer)
    return _Measured(trained - start, compute.now() - trained, computed, compute.waited - waited, forward_flops)


def _forecast(
    meter: Meter,
    collectives: CollectiveMeter,
    operations: Operations,
    costs: Costs,
    groups: list[ParamGroup],
    measured: _Measured,
) -> Forecast:
    seconds = measured.trained + measured.finished
    exposed = collectives.seconds if costs.sheet.device == "cpu" else measured.waited
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


def _train(program: Program, job: Job, groups: list[ParamGroup], operations: Operations) -> int:
    """All forwards and backwards of a step. Returns the flops of the forwards."""
    forward_flops = 0
    roots = [module for group in groups if group.parent is None for module in group.modules]
    for micro_batch in range(1, job.micro_batches + 1):
        for module in roots:
            assert isinstance(module, FSDPModule), "it has a group"
            module.set_requires_gradient_sync(job.gradient_sync == "every" or micro_batch == job.micro_batches)
        before = operations.flops
        with job.sequences():
            loss = program.step()
            forward_flops += operations.flops - before
            loss.backward()
    return forward_flops


def _finish(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


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
