"""What a job of the step benchmark is told, and what each of its ranks measures."""

from __future__ import annotations

from dataclasses import dataclass

Call = tuple[str, float, float]  # a collective, by the same name on all of its ranks; when this rank came and left, in seconds


@dataclass(frozen=True, slots=True)
class Run:
    """The options of one job."""

    device: str
    steps: int  # timed, after WARMUP
    fused: bool  # AdamW's fused loop, not foreach
    tp: int = 1  # tensor-parallel ranks
    replicate: bool = False  # every rank has the whole model


@dataclass(frozen=True, slots=True)
class Timing:
    """The measurements of one rank. Lists but `losses` have an entry for each timed step."""

    seconds: list[float]
    forward: list[float]  # seconds, as are the next two; on a GPU of the host, which does not wait for the device
    backward: list[float]
    optimizer: list[float]  # with the wait for the end of the step
    calls: list[list[Call]]  # of collectives of shardrt.comm on the host; otherwise none
    losses: list[float]  # per step, warm-up included
    start_mb: float  # in use before the model was built; this and the next are of `memory.py`
    peak_mb: float
    reserved_mb: float  # on a GPU with the memory that torch's allocator cached; otherwise peak_mb
