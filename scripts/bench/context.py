"""Time a transformer block over a sequence that is cut over ranks: shardrt's context parallelism, and torch's.

    python scripts/bench/context.py                                  # 2 ranks, 4096 and 8192 tokens
    python scripts/bench/context.py --ranks 2 4 --tokens 4096
    python scripts/bench/context.py --peaks --tokens 8192            # peak memory on 1, 2 and 4 ranks

Timed is forward and backward of one GPT block with causal attention; the tokens are those of all ranks. Each side is a job of
its own, `mpirun` for shardrt and torch's launcher on gloo for the peer, and jobs alternate in rounds. The result is the median
over the steps of all rounds of the slowest rank. The averaged gradients are compared with those of one process.

torch 2.13's `context_parallel` has no handler for attention on the CPU. The peer is its ring as it is, with its head-tail
chunks, rotation and merging, given torch's fused attention for the CPU, which shardrt uses as well: `torch` with its default,
an all-gather, and `torch-rotate` with `set_rotate_method("alltoall")`. `alone` is one process on the whole sequence, its time
divided by the number of ranks: nothing beside the arithmetic, which the ranks divide among them.

Peak memory is that of `step.py`. Progress goes to stderr; the last line on stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
from bench.memory import peaks_mb
from common.jobs import mpirun, run_job, torchrun, write_stacks_before_end
from common.models import Block, GPTConfig
from common.options import Parser, at_least

WARMUP = 1
OURS = ("ring", "all_gather", "ulysses")
PEERS = ("torch", "torch-rotate")


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, one field per flag."""

    ranks: list[int]
    tokens: list[int]
    channels: int
    heads: int
    steps: int
    rounds: int
    peaks: bool
    timeout: float
    worker: str | None
    results: Path


class Measured(NamedTuple):
    """What a rank measures."""

    seconds: list[float]
    gradients: list[float]  # of all parameters, averaged over the ranks
    peak_mb: float


def parse_options() -> Options:
    parser = Parser(description=__doc__)
    add, hidden = parser.add_argument, argparse.SUPPRESS
    add("--ranks", type=at_least(1), nargs="+", default=[2])
    add("--tokens", type=at_least(1), nargs="+", default=[4096, 8192], help="of the sequence, over all ranks")
    add("--channels", type=at_least(1), default=256)
    add("--heads", type=at_least(1), default=8)
    add("--steps", type=at_least(1), default=3, help="timed steps of each job")
    add("--rounds", type=at_least(1), default=3)
    add("--peaks", action="store_true", help="only shardrt, one round on 1, 2 and 4 ranks: its memory")
    add("--timeout", type=at_least(1, float), default=600, help="seconds for each job")
    add("--worker", help=hidden)
    add("--results", type=Path, default=Path(), help=hidden)
    options = Options(**vars(parser.parse_args()))
    for ranks in (1, 2, 4) if options.peaks else options.ranks:
        for tokens in options.tokens if options.worker is None else ():
            if tokens % (2 * ranks):
                parser.error(f"--tokens {tokens} on {ranks} ranks: expected a multiple of {2 * ranks}, as torch's chunks need")
    return options


# ---------------------------------------------------------------------- workers, one rank each


class Side(NamedTuple):
    """This rank's part of a sequence (B, T, C), a context for a step, a barrier, and the mean over the ranks."""

    cut: Callable[[torch.Tensor], torch.Tensor]
    context: Callable[[], AbstractContextManager[object]]
    barrier: Callable[[], object]
    mean: Callable[[torch.Tensor], torch.Tensor]


def measure(options: Options, side: Side, parts: int) -> Measured:
    """Time the steps. parts: of how many equal parts of the loss this rank has one."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = options.tokens[0]
    block = Block(GPTConfig(1, options.heads, options.channels, tokens))
    x = side.cut(torch.randn(1, tokens, options.channels)).requires_grad_()
    seconds = []
    for _ in range(WARMUP + options.steps):
        x.grad = None
        block.zero_grad()
        side.barrier()
        start = time.perf_counter()
        with side.context():
            (block(x).square().sum() / tokens * parts).backward()
        seconds.append(time.perf_counter() - start)
    grads = [side.mean(parameter.grad) for parameter in block.parameters() if parameter.grad is not None]
    found = Measured(seconds[WARMUP:], torch.cat([grad.flatten() for grad in grads]).tolist(), peaks_mb("cpu")[0])
    side.barrier()
    return found


def shardrt_worker(options: Options, method: Any) -> tuple[int, Measured]:
    import shardrt
    from shardrt.comm import ReduceOp, current_stream

    world = shardrt.init("cpu")
    mesh = shardrt.DeviceMesh(world.comm, (world.size,), ("cp",))
    tokens = options.tokens[0]

    def mean(grad: torch.Tensor) -> torch.Tensor:
        stream = current_stream(world.device)
        world.comm.all_reduce(grad, grad, ReduceOp.AVG, stream=stream).wait(stream)
        return grad

    side = Side(
        lambda x: shardrt.parallel.context_parallel_shard(mesh, [x], [1])[0],
        lambda: shardrt.parallel.context_parallel(mesh, seq_len=tokens, method=method),
        world.barrier,
        mean,
    )
    found = measure(options, side, world.size)
    shardrt.finalize()
    return world.rank, found


def torch_worker(options: Options, rotate: str) -> tuple[int, Measured]:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

    distributed.init_process_group("gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    theirs.set_rotate_method(rotate)

    def cut(x: torch.Tensor) -> torch.Tensor:
        chunks = x.chunk(2 * size, 1)
        return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], 1)

    def mean(grad: torch.Tensor) -> torch.Tensor:
        distributed.all_reduce(grad)
        return grad / size

    side = Side(cut, lambda: _TheirAttention(mesh), distributed.barrier, mean)
    found = measure(options, side, size)
    distributed.destroy_process_group()
    return rank, found


class _TheirAttention(AbstractContextManager[None]):
    """In the block, `F.scaled_dot_product_attention` is torch's ring over a mesh, with torch's attention for the CPU."""

    def __init__(self, mesh: Any) -> None:
        self._group = mesh.get_group()

    def __enter__(self) -> None:
        self._before = torch.nn.functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = self._attend  # type: ignore[assignment]

    def __exit__(self, *exception: object) -> None:
        torch.nn.functional.scaled_dot_product_attention = self._before

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        out: torch.Tensor = _TheirRing.apply(q, k, v, self._group, is_causal)
        return out


class _TheirRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, causal: bool) -> torch.Tensor:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse, *_ = theirs._templated_ring_attention(group, 2, op, q, k, v, is_causal=causal)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group, ctx.causal = group, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        from torch.distributed.tensor.experimental._context_parallel import _attention as theirs

        op: Any = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        q, k, v, out, lse = ctx.saved_tensors
        arguments = {"query": q, "key": k, "value": v, "out": out, "logsumexp": lse, "is_causal": ctx.causal, "dropout_p": 0.0}
        grads = theirs._templated_ring_attention_backward(
            ctx.group, 2, op, grad_out=grad, grad_out_name="grad_out", **arguments
        )
        return *grads[:3], None, None


def alone_worker(options: Options) -> tuple[int, Measured]:
    nothing = Side(lambda x: x.clone(), nullcontext, lambda: None, lambda grad: grad)
    return 0, measure(options, nothing, 1)


def work(options: Options) -> None:
    worker = options.worker or ""
    write_stacks_before_end()
    if worker in OURS:
        rank, found = shardrt_worker(options, worker)
    elif worker in PEERS:
        rank, found = torch_worker(options, "alltoall" if worker == "torch-rotate" else "allgather")
    else:
        rank, found = alone_worker(options)
    (options.results / str(rank)).write_text(json.dumps(found))


# ---------------------------------------------------------------------- the jobs


def run_worker(worker: str, ranks: int, tokens: int, options: Options) -> list[Measured]:
    launcher = torchrun(ranks) if worker in PEERS else mpirun(ranks) if worker in OURS else [sys.executable]
    count = ranks if worker in OURS + PEERS else 1
    with tempfile.TemporaryDirectory(prefix="bench-context-") as folder:
        names = ("channels", "heads", "steps")
        sizes = [text for name in names for text in (f"--{name}", str(getattr(options, name)))]
        run_job(
            [*launcher, __file__, "--worker", worker, "--tokens", str(tokens), *sizes, "--results", folder], options.timeout
        )
        return [Measured(*json.loads((Path(folder) / str(rank)).read_text())) for rank in range(count)]


def times(ranks: int, tokens: int, options: Options) -> dict[str, float]:
    """The median step of each worker in milliseconds. Exits if they disagree on the gradient."""
    workers = [*OURS, *PEERS, "alone"]
    seconds: dict[str, list[float]] = {worker: [] for worker in workers}
    gradients: dict[str, torch.Tensor] = {}
    for number in range(options.rounds):
        for worker in workers:
            print(f"{ranks} ranks, {tokens} tokens, round {number + 1}: {worker}", file=sys.stderr, flush=True)
            found = run_worker(worker, ranks, tokens, options)
            seconds[worker] += [max(step) for step in zip(*(each.seconds for each in found), strict=True)]
            gradients[worker] = torch.tensor(found[0].gradients)
    alone = gradients["alone"]
    differences = {worker: ((each - alone).norm() / alone.norm()).item() for worker, each in gradients.items()}
    if max(differences.values()) > 1e-4:
        sys.exit(f"the gradients differ from those of one process, relative to their norm by {differences}")
    medians = {worker: median(each) * 1e3 for worker, each in seconds.items()}
    return medians | {"alone": medians["alone"] / ranks}


def report_times(options: Options) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    head = "".join(f" {name:>13}" for name in (*OURS, *PEERS, "alone / ranks"))
    print(f"{'ranks':>5} {'tokens':>7}{head}  ring/torch  ring/torch-rotate   (ms)")
    for ranks in options.ranks:
        for tokens in options.tokens:
            ms = times(ranks, tokens, options)
            ratios = [ms["ring"] / ms[peer] for peer in PEERS]
            row = "".join(f" {value:13.0f}" for value in ms.values())
            print(f"{ranks:5} {tokens:7}{row}  {ratios[0]:10.2f}  {ratios[1]:17.2f}", flush=True)
            results.append({"ranks": ranks, "tokens": tokens, "ms": ms})
    return results


def report_peaks(options: Options) -> list[dict[str, object]]:
    results: list[dict[str, object]] = []
    print(f"{'tokens':>7} {'method':>10}" + "".join(f" {ranks:>5} ranks" for ranks in (1, 2, 4)) + "   (peak MiB of a rank)")
    for tokens in options.tokens:
        for method in OURS:
            found = {ranks: max(each.peak_mb for each in run_worker(method, ranks, tokens, options)) for ranks in (1, 2, 4)}
            print(f"{tokens:7} {method:>10}" + "".join(f" {mb:11.0f}" for mb in found.values()), flush=True)
            results.append({"tokens": tokens, "method": method, "peak_mb": found})
    return results


def main() -> None:
    options = parse_options()
    if options.worker is not None:
        work(options)
        return
    os.environ["OMP_NUM_THREADS"] = "1"
    results = report_peaks(options) if options.peaks else report_times(options)
    print(json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
