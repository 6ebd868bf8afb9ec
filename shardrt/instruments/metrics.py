"""`Metrics`: figures of training steps under torchtitan's names, as JSON lines and for TensorBoard."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

import torch

from ..comm import ReduceOp, World, world
from ..comm.recorder.exposure import Exposure
from ..memory.process import lifetime_peak

if TYPE_CHECKING:
    from torch.utils.flop_counter import FlopCounterMode

_log = logging.getLogger("shardrt")
_GIB = 2**30

Record = dict[str, Any]


class Metrics:
    """Measures the steps of a training loop, and writes a line for each, or for several together, on rank 0.

        with shardrt.Metrics("metrics.jsonl", flops_per_token=6 * numel) as metrics:
            for step in range(steps):
                with metrics.step(tokens=batch * context):
                    loss, norm = train_step()
                metrics.log(step, loss=loss, grad_norm=norm, lr=lr)

    | figure                                  | over the ranks | what                                                       |
    |-----------------------------------------|----------------|------------------------------------------------------------|
    | step, and what `log` is given           | mean of tensors| numbers are those of rank 0                                |
    | throughput(tps)                         | rank 0         | tokens per second and rank                                 |
    | tflops, mfu(%)                          | rank 0         | per rank, if known; the share of `peak_flops`              |
    | memory/max_active(GiB), max_reserved    | largest        | of torch's allocator; on the host the peak of the process  |
    | memory/num_alloc_retries, num_ooms      | largest        | of torch's allocator, since the process began              |
    | time_metrics/end_to_end(s)              | rank 0         | of a step                                                  |
    | time_metrics/exposed_communication(s)   | mean           | of a step: computation stood still for communication       |
    | time_metrics/exposed_communication(%)   | mean           | its share of the step                                      |

    path: of the file, to which lines are added. None: nothing is written; `log` returns the figures all the same.
    every: steps to a line; its figures are of all of them and of the time between them, but the values that `log` is given.
    flops_per_token: floating-point operations of forward and backward: 6 for each parameter (Kaplan et al. 2020), and those of
        attention. None: no `tflops`.   count_flops: instead, count those of matrices in the first step. Forwards that run again
        for the backward count as well; what is compiled does not.
    peak_flops: per second, of one device, such as a hardware sheet has. None: no `mfu(%)`.
    tensorboard: a folder for TensorBoard, if that is installed.
    Cost: a few microseconds for each collective and step; for each line two small all-reduces in one group, and the host waits
    for the GPU.
    Making one is collective. Raises ValueError for arguments that contradict each other; RemoteError, on every rank, for a file
    that rank 0 cannot open.
    """

    _world: World
    _every: int
    _flops_per_token: float | None
    _counts_flops: bool  # in the next step
    _counted: tuple[int, int] | None  # this rank's operations in that step, and all ranks' tokens, until the next line
    _peak_flops: float | None
    _exposure: Exposure
    _steps: int  # since the last line, as are the next two
    _tokens: int
    _seconds: float  # from `_begun` to the end of the newest step
    _begun: float  # the first step since the last line
    _file: TextIO | None  # on rank 0
    _board: Any  # likewise, TensorBoard's writer

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        every: int = 1,
        flops_per_token: float | None = None,
        count_flops: bool = False,
        peak_flops: float | None = None,
        tensorboard: str | os.PathLike[str] | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"Metrics(every={every}): expected a number of steps, at least 1")
        if count_flops and flops_per_token is not None:
            raise ValueError(f"Metrics(flops_per_token={flops_per_token}, count_flops=True): give one of them")
        self._world = world()
        self._every = every
        self._flops_per_token, self._counts_flops, self._peak_flops = flops_per_token, count_flops, peak_flops
        self._counted = None
        self._steps, self._tokens, self._seconds = 0, 0, 0.0
        self._file = self._board = None
        with self._world.comm.agree():
            if self._world.rank == 0:
                self._file = None if path is None else open(path, "a", buffering=1)  # noqa: SIM115
                self._board = None if tensorboard is None else _board(Path(tensorboard))
        self._exposure = Exposure()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    @contextmanager
    def step(self, tokens: int) -> Iterator[None]:
        """Measure the `with` block as a step, of so many tokens on all ranks together."""
        if tokens < 1:
            raise ValueError(f"Metrics.step(tokens={tokens}): expected at least 1")
        with ExitStack() as stack:
            counter = stack.enter_context(_counter()) if self._counts_flops else None
            if self._steps == 0:
                self._begun = perf_counter()
            stack.enter_context(self._exposure.timed())
            yield
            if self._steps + 1 >= self._every:
                self._world.stream.synchronize()
        self._seconds = perf_counter() - self._begun
        self._steps += 1
        self._tokens += tokens
        if counter is not None:
            self._counts_flops, self._counted = False, (counter.get_total_flops(), tokens)

    def log(self, step: int, **values: float | torch.Tensor | None) -> Record | None:
        """Add a line, if it is due: after each `every`-th `step()`. Collective then.

        step: its number.   values: tensors of one element, which are averaged over the ranks, numbers, and None.
        Returns: the line's figures, on every rank; None if no line is due. Raises TypeError for other values.
        """
        for name, value in values.items():
            if not _is_figure(value):
                raise TypeError(f"Metrics.log({name}={value!r}): expected a number, a tensor of one element, or None")
        if self._steps < self._every:
            return None
        tensors = {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
        exposed, flops, means, peaks = self._reduce(tensors)
        if self._counted is not None:
            self._flops_per_token, self._counted = flops / self._counted[1], None
        record: Record = {"step": step, **values, **means, **self._speeds(), **peaks}
        record["time_metrics/end_to_end(s)"] = self._seconds / self._steps
        record["time_metrics/exposed_communication(s)"] = exposed / self._steps
        record["time_metrics/exposed_communication(%)"] = 100 * exposed / self._seconds
        self._steps, self._tokens = 0, 0
        self._write(record)
        return record

    def close(self) -> None:
        """Close the files."""
        for written in (self._file, self._board):
            if written is not None:
                written.close()
        self._file = self._board = None

    def _speeds(self) -> Record:
        speed = self._tokens / self._seconds / self._world.size
        found: Record = {"throughput(tps)": speed}
        if self._flops_per_token is not None:
            flops = self._flops_per_token * speed
            found["tflops"] = flops / 1e12
            if self._peak_flops is not None:
                found["mfu(%)"] = 100 * flops / self._peak_flops
        return found

    @torch.no_grad()
    def _reduce(self, tensors: Mapping[str, torch.Tensor]) -> tuple[float, float, Record, Record]:
        """Reduce over the ranks: the mean of seconds of exposed communication, the sum of counted operations, the means of
        these tensors, and the peaks of memory.
        """
        comm, stream, memory = self._world.comm, self._world.stream, _memory(self._world.device)
        given = [value.detach().reshape(()).to(comm.device, torch.float64) for value in tensors.values()]
        own = torch.tensor([self._exposure.take(), 0 if self._counted is None else self._counted[0]], dtype=torch.float64)
        sums = torch.cat([own.to(comm.device), *(value.reshape(1) for value in given)])
        peaks = torch.tensor(list(memory.values()), dtype=torch.float64, device=comm.device)
        with comm.group():
            comm.all_reduce(sums, sums, ReduceOp.SUM, stream=stream)
            comm.all_reduce(peaks, peaks, ReduceOp.MAX, stream=stream)
        exposed, flops, *means = (sums / comm.size).tolist()  # stages of a pipeline have different numbers of operations
        return (
            exposed,
            flops * comm.size,
            dict(zip(tensors, means, strict=True)),
            dict(zip(memory, peaks.tolist(), strict=True)),
        )

    def _write(self, record: Record) -> None:
        if self._file is not None:
            # JSON has no NaN.
            known = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in record.items()}
            self._file.write(json.dumps(known) + "\n")
        if self._board is not None:
            for name, value in record.items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, record["step"])


def _is_figure(value: object) -> bool:
    return value is None or (value.numel() == 1 if isinstance(value, torch.Tensor) else isinstance(value, (int, float)))


def _counter() -> FlopCounterMode:
    from torch.utils.flop_counter import FlopCounterMode  # torch imports private names for it

    from .flops import FORMULAS

    counter = FlopCounterMode(display=False)
    counter.flop_registry.update(FORMULAS)
    return counter


def _memory(device: torch.device) -> dict[str, float]:
    """Read this rank's memory. On a GPU, its peaks begin anew."""
    if device.type != "cuda":
        peak = lifetime_peak() / _GIB
        active, reserved, retries, ooms = peak, peak, 0, 0
    else:
        stats = torch.cuda.memory_stats(device)
        active, reserved = (stats[f"{kind}_bytes.all.peak"] / _GIB for kind in ("active", "reserved"))
        retries, ooms = stats["num_alloc_retries"], stats["num_ooms"]
        torch.cuda.reset_peak_memory_stats(device)
    return {
        "memory/max_active(GiB)": active,
        "memory/max_reserved(GiB)": reserved,
        "memory/num_alloc_retries": retries,
        "memory/num_ooms": ooms,
    }


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        _log.warning(f"Metrics: TensorBoard is not installed, so {folder} stays empty: pip install tensorboard")
        return None
    return SummaryWriter(folder)
