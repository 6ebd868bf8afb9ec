"""Check all that runs on a GPU, on this machine's, and say how each check went. shardrt has to be importable.

    python scripts/gpu_check.py

On a world of 1 rank, and of 2 (on one GPU if there is but one and its NCCL can); then the tests marked `gpu`.
Exit code: 0 if nothing failed, 1 if something did, 2 without a GPU.
"""

from __future__ import annotations

import copy
import os
import sys
import tempfile
from argparse import SUPPRESS
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import shardrt
from jobs import mpirun, run_job
from options import Parser, refuse
from shardrt.comm import PreMulSum, ReduceOp, World

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
REDUCED = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
MOVED = (*REDUCED, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2)
SIZES = (0, 1, 1009, 1_000_003)
JOB_S = 300.0
ROOT = Path(__file__).resolve().parent.parent
wrong: list[str] = []  # what a check has found so far


def report(check: str, ranks: int, outcome: str, note: str) -> str:
    """A line of the table; what failed has its whole note."""
    note = note if outcome == "FAILED" else note.partition("\n")[0]
    return f"{ranks} rank{'s' if ranks > 1 else ' '}  {check:<22} {outcome:<8} {note}"


# ---------------------------------------------------------------------- on every rank


def values(world: World, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's (numel,) small integers; over 2 ranks, each reduction of them is exact."""
    steps = torch.arange(numel, device=world.device) * 7
    return [((steps + rank * 3) % 11).float().to(dtype) for rank in range(world.size)]


def join(blocks: list[torch.Tensor]) -> torch.Tensor:
    """One after the other, as bytes: torch joins not every dtype on a GPU."""
    return torch.cat([block.view(torch.uint8) for block in blocks]).view(blocks[0].dtype)


def compare(world: World, name: str, expected: torch.Tensor | None, inp: torch.Tensor | None, *how: object) -> None:
    """Make the call, where sizes permit also in place. expected: this rank's result, None where it has none."""
    trials = [(None if expected is None else torch.zeros_like(expected), inp)]
    if name in ("all_reduce", "reduce", "broadcast", "all_to_all") and inp is not None:
        memory = inp.clone()
        trials.append((None if expected is None else memory, memory))
    stream = world.stream_for("check")
    for out, source in trials:
        stream.wait(world.stream.record())
        getattr(world.comm, name)(out, source, *how, stream=stream).synchronize()
        if out is not None and expected is not None and not torch.equal(out.view(torch.uint8), expected.view(torch.uint8)):
            # Hazard: raised at once, it would leave the other ranks in the next call.
            wrong.append(f"{name} of {expected.numel()} elements, {expected.dtype}, {how}")


def moves(world: World) -> None:
    r, size, root = world.rank, world.size, world.size - 1
    for dtype in MOVED:
        for n in SIZES:
            rows = values(world, size * n, dtype)
            own, firsts, on_root = slice(r * n, (r + 1) * n), join([row[:n] for row in rows]), r == root
            compare(world, "all_gather", firsts, rows[r][:n])
            compare(world, "broadcast", rows[root], rows[r], root)
            compare(world, "gather", firsts if on_root else None, rows[r][:n], root)
            compare(world, "scatter", rows[root][own].clone(), rows[r] if on_root else None, root)
            compare(world, "all_to_all", join([row[own] for row in rows]), rows[r])


def reductions(world: World) -> None:
    for dtype in REDUCED:
        for n in SIZES:
            rows = torch.stack(values(world, world.size * n, dtype))
            wide = rows.double() if dtype.is_floating_point else rows.long()
            totals: dict[ReduceOp | PreMulSum, torch.Tensor] = {ReduceOp.SUM: wide.sum(0), ReduceOp.PRODUCT: wide.prod(0)}
            totals |= {ReduceOp.MIN: wide.amin(0), ReduceOp.MAX: wide.amax(0)}
            if dtype.is_floating_point:
                totals |= {ReduceOp.AVG: wide.mean(0), PreMulSum(0.5): wide.sum(0) * 0.5}
            for op, total in totals.items():
                expected, root = total.to(dtype), world.size - 1
                compare(world, "all_reduce", expected, rows[world.rank], op)
                compare(world, "reduce_scatter", expected[world.rank * n :][:n].clone(), rows[world.rank], op)
                compare(world, "reduce", expected if world.rank == root else None, rows[world.rank], op, root)


def groups(world: World) -> None:
    """Around a ring, with an all-to-all of uneven blocks, and an all-reduce between buffers of `empty`."""
    size, r, stream, n = world.size, world.rank, world.stream, 1009
    rows, counts = values(world, 9 * size * size, torch.float32), [[s + 3 * p for p in range(size)] for s in range(size)]
    blocks = [row[: sum(count)].split(count) for row, count in zip(rows, counts, strict=True)]
    expected = torch.cat([sent[r] for sent in blocks])
    got, swapped = torch.zeros_like(rows[0]), torch.zeros_like(expected)
    inp, out = world.comm.empty(n, torch.float32), world.comm.empty(n, torch.float32)
    inp.fill_(r + 1)
    with world.comm.group() as work:
        world.comm.send(rows[r], (r + 1) % size, stream=stream)
        world.comm.recv(got, (r - 1) % size, stream=stream)
        world.comm.all_to_all(swapped, torch.cat(blocks[r]), [count[r] for count in counts], counts[r], stream=stream)
        world.comm.all_reduce(out, inp, ReduceOp.SUM, stream=stream)
    work.synchronize()
    assert torch.equal(got, rows[(r - 1) % size]), "send and recv"
    assert torch.equal(swapped, expected), "all_to_all"
    assert torch.equal(out, torch.full_like(out, size * (size + 1) / 2)), "all_reduce between buffers of empty()"


def training(world: World) -> None:
    train(world)


def training_replicas(world: World) -> None:
    train(world, mesh=shardrt.DeviceMesh(world.comm, (world.size, 1), ("replicate", "shard")))


def training_offloaded(world: World) -> None:
    train(world, offload_policy=shardrt.CPUOffloadPolicy())


def training_keeping_parts(world: World) -> None:
    train(world, reshard_after_forward=1)


def train(world: World, **options: Any) -> None:
    """Three steps, sharded, against torch alone on the batches of all ranks."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(33, 129), nn.GELU(), nn.Linear(129, 33)) for _ in range(3))
    plain = nn.Sequential(nn.Linear(5, 33), *blocks, nn.Linear(33, 3)).to(world.device)
    sharded = copy.deepcopy(plain)
    for block in (*list(sharded)[1:-1], sharded):
        shardrt.fully_shard(block, **options)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, sharded)]
    norms = []
    for batch in torch.randn(3, world.size, 8, 5).to(world.device):
        plain(batch).square().mean().backward()
        sharded(batch[world.rank]).square().mean().backward()
        norms.append(nn.utils.clip_grad_norm_(plain.parameters(), 0.5))
        norms.append(shardrt.clip_grad_norm_(sharded.parameters(), 0.5))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = [cast(shardrt.DTensor, param).full_tensor() for param in sharded.parameters()]
    torch.testing.assert_close(norms[1::2], norms[::2])
    torch.testing.assert_close(found, [param.detach() for param in plain.parameters()])


def versions(world: World) -> str:
    import cupy
    from cupy.cuda import nccl

    with open("/proc/self/maps") as maps:
        paths = sorted({line.split()[-1] for line in maps if "libnccl.so" in line})
    gpu = torch.cuda.get_device_name(world.device)
    return f"{gpu}, torch {torch.__version__}, CuPy {cupy.__version__}, NCCL {nccl.get_version()} from {' and '.join(paths)}"


def random_numbers(world: World) -> None:
    """A model built on the meta device, filled shard by shard, is the same on all ranks together as on each alone."""
    alone = world.comm.split(world.rank, 0, "alone")
    assert alone is not None, "every rank gave a colour"
    made = []
    for mesh in (world.mesh, shardrt.DeviceMesh(alone)):
        torch.manual_seed(0)
        with torch.device("meta"):
            model = nn.Linear(33, 129)
        shardrt.fully_shard(model, mesh=mesh).to_empty(device=world.device)
        model.reset_parameters()
        made.append([cast(shardrt.DTensor, param).full_tensor() for param in model.parameters()])
        model(torch.ones(2, 33, device=world.device)).sum().backward()
    assert all(torch.equal(one, other) for one, other in zip(*made, strict=True)), "they differ"


CHECKS: tuple[Callable[[World], str | None], ...] = (
    versions,
    moves,
    reductions,
    groups,
    training,
    training_replicas,
    training_offloaded,
    training_keeping_parts,
    random_numbers,
)


def check_rank(table: Path) -> None:
    """Make every check; rank 0, which hears of every rank's failure, adds to the table."""
    world = shardrt.init("cuda")
    for check in CHECKS:
        wrong.clear()
        outcome, note = "ok", ""
        try:
            with world.comm.agree():
                note = check(world) or ""
                assert not wrong, f"{len(wrong)} wrong results, first {wrong[0]}"
        except Exception as error:
            outcome, note = "FAILED", str(error)
        if world.rank == 0:
            with open(table, "a") as lines:
                print(report(check.__name__, world.size, outcome, note), file=lines)


# ---------------------------------------------------------------------- around them


def attempt(check: str, ranks: int, command: list[str]) -> str:
    try:
        run_job(command, JOB_S)
    except SystemExit as error:
        return report(check, ranks, "FAILED", str(error))
    return report(check, ranks, "ok", "")


def check_world(ranks: int) -> str:
    with tempfile.NamedTemporaryFile("r") as table:
        ended = attempt("start to end", ranks, [*mpirun(ranks), __file__, "--table", table.name])
        return table.read() + ended


def check_two_ranks() -> str:
    """With one GPU, they have to share it."""
    if torch.cuda.device_count() == 1:
        try:
            from cupy.cuda.nccl import get_version
        except ImportError as error:
            return report("all of it", 2, "skipped", str(error))
        if get_version() < 23000:
            return report("all of it", 2, "skipped", f"two ranks on one GPU take NCCL 2.30, found {get_version()}")
        os.environ |= {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4"}
    return check_world(2)


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--table", type=Path, help=SUPPRESS)
    table = parser.parse_args().table
    if not torch.cuda.is_available():
        refuse(f"no GPU to check: torch {torch.__version__} sees no CUDA device on this machine")
    if table is not None:
        check_rank(table)
        return 0
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-c", str(ROOT / "setup.cfg"), str(ROOT / "tests")]
    failed = False
    for part in (lambda: check_world(1), lambda: attempt("pytest -m gpu", 1, tests), check_two_ranks):
        said = part()
        print(said, flush=True)
        failed = failed or " FAILED " in said
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
