"""The stress tester finds what is wrong, and finds nothing wrong with what is right."""

import configparser
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import on_ranks, rank_environment, refused, run_job, run_script
from shardrt.comm import Communicator, PreMulSum, ReduceOp, Work, World
from shardrt.comm.core.calls import REDUCIBLE, Op
from shardrt.comm.stress import soak
from shardrt.comm.stress.fault import judge
from shardrt.comm.stress.faults import report
from shardrt.comm.stress.faults.jobs import Ending, Way
from shardrt.comm.stress.faults.report import FaultTable
from shardrt.comm.stress.names import COLLECTIVES
from shardrt.comm.stress.options import parse
from shardrt.comm.stress.problem import DTYPES, OPS, Problem, bus_factor
from shardrt.comm.stress.sweeps import sweep
from shardrt.comm.stress.sweeps.sweep import Row, SweepResult, draw
from shardrt.stress import FAULTS

ROOT = Path(__file__).resolve().parents[2]
COUNTS = ((2, 0, 5), (1, 3, 0), (0, 0, 7))


def run_sweep(world: World, *arguments: str) -> tuple[int, list[str], dict[str, Any]]:
    """Exit code, lines, and what the JSON file has (on rank 0)."""
    output: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sweep.json"
        code = sweep.run(world, parse([*arguments, "--json", str(path)]), output.append)
        return code, output, json.loads(path.read_text()) if world.rank == 0 else {}


def run_soak(world: World, *arguments: str) -> tuple[int, str]:
    """Exit code, and the last line. This process was started without `soak.prepare`: its memory tells little."""
    output: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "TOLERATED_MIB", 100)
        return soak.run(world, parse(list(arguments)), output.append), output[-1]


# ---------------------------------------------------------------------- problems


def test_bus_factors_of_four_ranks() -> None:
    by_hand = {"all_reduce": 1.5, "broadcast": 1.0, "reduce": 1.0, "sendrecv": 1.0}
    for name in COLLECTIVES:
        assert bus_factor(name, 4) == by_hand.get(name, 0.75)


def results(problem: Problem, inps: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """What each rank must get, the plain way."""
    n, ranks, root = problem.n, range(problem.size), problem.root
    combine: dict[Op | None, Callable[[torch.Tensor], torch.Tensor]] = {
        ReduceOp.SUM: lambda rows: rows.sum(0),
        ReduceOp.AVG: lambda rows: rows.mean(0),
        ReduceOp.MIN: lambda rows: rows.amin(0),
        ReduceOp.MAX: lambda rows: rows.amax(0),
        ReduceOp.PRODUCT: lambda rows: rows.prod(0),
        PreMulSum(2.0): lambda rows: 2 * rows.sum(0),
    }
    match problem.name:
        case "all_gather":
            return [torch.cat(inps)] * problem.size
        case "gather":
            return [torch.cat(inps) if rank == root else None for rank in ranks]
        case "broadcast":
            return [inps[root]] * problem.size
        case "scatter":
            return list(inps[root].chunk(problem.size))
        case "sendrecv":
            return [inps[rank - 1] for rank in ranks]
        case "all_to_all":
            counts = problem.counts or [[n] * problem.size] * problem.size
            blocks = [inp.split(list(row)) for inp, row in zip(inps, counts, strict=True)]
            return [torch.cat([blocks[peer][rank] for peer in ranks]) for rank in ranks]
    reduced = combine[problem.op](torch.stack(inps).double()).to(problem.dtype)
    if problem.name == "reduce_scatter":
        return list(reduced.chunk(problem.size))
    return [reduced if problem.name == "all_reduce" or rank == root else None for rank in ranks]


@pytest.mark.parametrize("in_place", [False, True], ids=["out_of_place", "in_place"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_result_made_the_plain_way_is_right_and_any_other_wrong(name: str, dtype: torch.dtype, in_place: bool) -> None:
    ops: list[Op | None] = [None]
    if "reduce" in name:
        ops = [op for op in (*ReduceOp, PreMulSum(2.0)) if dtype.is_floating_point or op not in (ReduceOp.AVG, PreMulSum(2.0))]
    problems = [Problem(name, 3, n, dtype, op, root=1) for op in ops for n in (1, 5000)]
    if name == "all_to_all":
        problems.append(Problem(name, 3, 0, dtype, counts=COUNTS))
    for problem in problems:
        if in_place and not problem.can_be_in_place:
            continue
        tensors = [problem.place(rank, in_place, lambda n, dtype: torch.empty(n, dtype=dtype)) for rank in range(3)]
        wanted = results(problem, [inp.clone() for _, inp in tensors])
        for rank, ((out, inp), result) in enumerate(zip(tensors, wanted, strict=True)):
            if result is not None:
                poisoned = out.clone()
                out.copy_(result)
                if not in_place:
                    assert problem.count_wrong(rank, in_place, poisoned, inp) == out.numel(), "poison"
            assert problem.count_wrong(rank, in_place, out, inp) == 0, (problem, rank)
            out[-1] = 99
            assert problem.count_wrong(rank, in_place, out, inp) == 1, (problem, rank)


# ---------------------------------------------------------------------- sweeps


@on_ranks(1, 2, 3)
def test_sweep(world: World) -> None:
    sizes = ["-b", "0", "-e", "80K", "-i", "40K", "-n", "3", "-w", "1"]
    code, output, summary = run_sweep(world, *sizes, "--dtypes", "float32,int8", "--ops", "sum,avg")
    lines = [line.split() for line in output if not line.startswith("#")]
    assert code == 0
    assert [line.split()[1] for line in "\n".join(output).splitlines() if line[2:] in COLLECTIVES] == list(COLLECTIVES)
    assert len(lines) == 3 * (3 * 3 + 6 * 2)  # sizes; float32 sum and avg, int8 sum; float32 and int8
    if world.rank:
        return
    assert (summary["wrong"], summary["ranks"], len(summary["rows"])) == (0, world.size, len(lines))
    for row, line in zip(summary["rows"], lines, strict=True):
        assert line[:5] == [str(row[key]) for key in ("size", "count", "type", "redop", "root")]
        blocks = 1 if row["collective"] in ("all_reduce", "reduce", "broadcast", "sendrecv") else world.size
        assert row["size"] == row["count"] * {"float32": 4, "int8": 1}[row["type"]] * blocks
        assert line[8] == str(row["out_of_place"]["wrong"]) == "0"
        assert (row["in_place"] is None) == (row["collective"] == "sendrecv") == (line[9] == "N/A")
        side = row["out_of_place"]
        assert side["algbw"] == pytest.approx(row["size"] / side["time_us"] / 1e3)
        assert side["busbw"] == pytest.approx(side["algbw"] * bus_factor(row["collective"], world.size))
        assert 0 < side["p50_us"] <= side["p99_us"]
    assert re.fullmatch(r"# Avg bus bandwidth: [\d.]+ GB/s   #wrong: 0", output[-1])


@on_ranks(1, 2)
def test_compute(world: World) -> None:
    """Rates of the order that any machine has, in the file and in the output."""
    sweep = ("-b", "1K", "-e", "1K", "-n", "2", "-w", "0", "--collectives", "sendrecv")
    code, output, summary = run_sweep(world, *sweep, "--compute", "--dtypes", "int8,bfloat16")
    assert code == 0
    assert [line for line in output if line.startswith("# bfloat16 matrices: ")]
    if world.rank:
        return
    found = summary["compute"]
    assert found["device"] == "cpu"
    assert 1e8 < found["nbytes"] <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / world.size
    assert set(found["matmul"]) == {"float32", "bfloat16"}, "integers have no products of matrices; float32 is always there"
    rows, side = 4, 1024
    assert found["matmul"]["float32"][2][0] == 2 * rows * side * side / (4 * side * (2 * rows + side))
    rates = [rate for pairs in (found["memory"], *found["matmul"].values()) for _, rate in pairs]
    assert all(1e7 < rate < 1e14 for rate in rates)
    assert set(found["collectives"]) == {"all_gather", "reduce_scatter", "all_reduce"}
    assert all(1e6 < rate < 1e13 for rate in found["collectives"].values())
    assert 1e7 < found["functions"] < 1e13
    assert 10 < found["small_step_us"] < 1e6


@pytest.mark.parametrize("broken", ["first", "later"])
@on_ranks(2)
def test_sweep_finds_what_is_wrong(world: World, broken: str) -> None:
    """The first call writes nothing, or later ones, on one rank, one element that is not right."""
    right, made = Communicator.all_gather, []

    def wrong(comm: Communicator, out: torch.Tensor, inp: torch.Tensor, **args: object) -> Work:
        made.append(inp)
        if broken == "first" and len(made) == 1:
            return comm.barrier(**args)  # type: ignore[arg-type]
        work = right(comm, out, inp, **args)  # type: ignore[arg-type]
        if broken == "later" and len(made) > 1 and comm.rank == 1:
            out[3] += 1
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "all_gather", wrong)
        code, output, summary = run_sweep(world, "-b", "80", "-e", "80", "-n", "2", "--collectives", "all_gather")
    assert code == 1
    counts = {"first": (2 * 20, 0), "later": (1, 1)}[broken]
    if world.rank == 0:
        (row,) = summary["rows"]
        assert (row["out_of_place"]["wrong"], row["in_place"]["wrong"]) == counts
    assert output[-1].endswith(f"#wrong: {sum(counts)}")


@pytest.mark.parametrize("buffers", ["window", "symmetric", "ordinary"])
@pytest.mark.parametrize("peer", ["mpi4py", "gloo"])
@on_ranks(2)
def test_peers(world: World, peer: str, buffers: str) -> None:
    sizes = ["-b", "4K", "-e", "4K", "-n", "3", "-w", "1", "--dtypes", "float32,int16", "--ops", "sum,avg"]
    _, output, summary = run_sweep(world, *sizes, "--peer", peer, "--buffers", buffers, "--streams", "threaded")
    if world.rank:
        return
    compared = [row for row in summary["rows"] if row["ratio"]]
    assert {row["collective"] for row in compared} == set(COLLECTIVES)
    assert {row["redop"] for row in compared} == {"sum", "none"}  # neither has an average
    for row in compared:
        assert row["ratio"] == pytest.approx(row["out_of_place"]["p50_us"] / row["peer_us"])
    product = torch.tensor([row["ratio"] for row in compared], dtype=torch.float64).prod().item()
    assert summary["ratio"] == pytest.approx(product ** (1 / len(compared)))
    assert f"ours / {peer}" in "\n".join(output)


@on_ranks(1, 2, 3)
def test_nccl_itself(world: World) -> None:
    """On the host there is none; with GPUs its calls give right results, which a peer's are checked for, and averages too."""
    sizes = ["-b", "4K", "-e", "4K", "-n", "2", "-w", "1", "--dtypes", "float32,bfloat16", "--ops", "sum,avg"]
    if world.device.type == "cpu":
        refused("--peer nccl does not support tensors on cpu", lambda: run_sweep(world, *sizes, "--peer", "nccl"))
        return
    code, _, summary = run_sweep(world, *sizes, "--peer", "nccl", "--buffers", "ordinary")
    assert code == 0
    if world.rank == 0:
        compared = {(row["collective"], row["redop"]) for row in summary["rows"] if row["ratio"]}
        ops = ("sum", "avg") if world.size > 1 else ("sum",)
        reductions = {(name, op) for name in ("all_reduce", "reduce_scatter", "reduce") for op in ops}
        assert compared == reductions | {(name, "none") for name in COLLECTIVES if (name, "sum") not in reductions}


@on_ranks(2)
def test_peer_without_the_op_has_no_ratio(world: World) -> None:
    few = ["-b", "4K", "-e", "4K", "-n", "1", "--collectives", "all_reduce", "--ops", "avg", "--peer", "mpi4py"]
    code, output, _ = run_sweep(world, *few)
    assert (code, output[-2]) == (0, "# Ours / mpi4py: none of 0 ratios of medians")


def test_command_line() -> None:
    """As mpirun starts it: the header, a line per problem, a picture; bad arguments cost one line per rank."""
    with tempfile.TemporaryDirectory() as folder:
        plot = f"{folder}/plot.png"
        script = "import sys; from shardrt.comm.stress.__main__ import main; sys.exit(main({}))"
        few = ["-b", "1K", "-e", "2K", "-n", "1", "--collectives", "broadcast", "--root", "1", "--plot", plot]
        done = run_script(script.format(few), 2, code=0)
        assert Path(plot).read_bytes().startswith(b"\x89PNG")
    lines = done.stdout.splitlines()
    assert re.match(r"# shardrt [\d.]+, torch .*, Python .*(MPICH|Open MPI)", lines[0])
    assert [line for line in lines if "rank 1: " in line]
    assert [line.split()[:5] for line in lines if not line.startswith("#")] == [
        ["1024", "256", "float32", "none", "1"],
        ["2048", "512", "float32", "none", "1"],
    ]
    refused("2", lambda: parse(["-b", "2K", "-e", "1K"]), SystemExit)


def test_options_of_nccl_tests(capsys: pytest.CaptureFixture[str]) -> None:
    found = parse(
        ["-b", "8", "-e", "128K", "-f", "4", "-n", "3", "-w", "2", "-d", "half,double,int8", "-o", "max", "-g", "1", "-c", "1"]
    )
    assert (found.sizes[0], found.sizes[-1], found.number, found.warmup) == (8, 128 << 10, 3, 2)
    assert (found.dtypes, found.ops) == (["float16", "float64", "int8"], ["max"])
    long = "--minbytes 4M --maxbytes 1G --stepfactor 256 --iters 3 --warmup_iters 2 --ngpus 1 --check 2"
    assert parse(long.split()).sizes == [4 << 20, 1 << 30]
    every = parse(["-d", "all", "-o", "all"])
    assert {*ReduceOp} < {OPS[name] for name in every.ops}
    assert {DTYPES[name] for name in every.dtypes} > REDUCIBLE
    assert (len(every.dtypes), len(every.ops)) == (len(set(every.dtypes)), len(set(every.ops)))
    for arguments, message in (("-g 8", "-g: expected 1, as each rank has one GPU"), ("-c 0", "-c 0: expected 1 or more")):
        with pytest.raises(SystemExit, match="2"):
            parse(arguments.split())
        assert message in capsys.readouterr().err


def test_the_plot_is_logarithmic_and_keeps_room_for_its_curves() -> None:
    """Bandwidths differ by orders of magnitude. Of one rank all are 0, which no logarithmic axis has."""
    timed = SweepResult(1.0, 1.0, 0.5, 0, 1.0, 1.0, 1.0)
    kinds = [(collective, dtype) for collective in COLLECTIVES for dtype in ("float32", "bfloat16", "int64", "uint8")]
    for busbw, scale in ((0.5, "log"), (0.0, "linear")):
        result = replace(timed, busbw=busbw)
        rows = [
            Row(name, size, size, dtype, "sum", -1, result, None, None, None) for name, dtype in kinds for size in (64, 4096)
        ]
        figure = draw(rows)
        figure.draw_without_rendering()
        (axes,), (legend,) = figure.axes, figure.legends
        assert (axes.get_xscale(), axes.get_yscale()) == ("log", scale)
        assert len(legend.get_texts()) == len(kinds)
        assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == min(len(kinds), 40)
        assert legend.get_window_extent().height < figure.bbox.height
        assert axes.get_window_extent().width > 0.5 * figure.bbox.width


@pytest.mark.parametrize("script", ["shardrt-stress", "shardrt-timeline"])
def test_entry_point(script: str) -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    scripts = dict(line.strip().split(" = ") for line in config["options.entry_points"]["console_scripts"].split("\n") if line)
    module, function = scripts[script].split(":")
    code = f"import sys; from {module} import {function}; print('mpi4py.MPI' in sys.modules)"
    done = run_job(["-c", code], 0)
    assert done.stdout == "False\n", done.stderr  # shardrt.init() must be what starts MPI


# ---------------------------------------------------------------------- soaks


@pytest.mark.rest
@on_ranks(3, more=(1,))
def test_soak_has_one_digest_for_one_seed(world: World) -> None:
    digests = []
    for arguments in (["--seed", "5"], ["--seed", "5", "--streams", "inline"], ["--seed", "6"]):
        code, last = run_soak(world, "--steps", "20", *arguments)
        assert code == 0
        assert "#wrong: 0   leaks: none" in last or world.rank
        digests.append(last.split()[2])
    assert digests[0] == digests[1] != digests[2]


@on_ranks(2)
def test_soak_finds_leaks(world: World) -> None:
    right, leaked = Communicator.close, []
    over = threading.Event()

    def close(comm: Communicator) -> None:
        right(comm)
        leaked.append(os.open("/dev/null", os.O_RDONLY))
        threading.Thread(target=over.wait, name="leaked").start()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "close", close)
        code, last = run_soak(world, "--steps", "20")
    over.set()
    for descriptor in leaked:
        os.close(descriptor)
    assert code == 1
    assert last.endswith("leaks: descriptors, threads")


@pytest.mark.mpi
@on_ranks(2)
def test_soak_finds_what_is_wrong(world: World) -> None:
    """One rank's large all-gathers have their last block from itself."""
    right = Communicator.all_gather

    def wrong(comm: Communicator, out: torch.Tensor, inp: torch.Tensor, **args: object) -> Work:
        work = right(comm, out, inp, **args)  # type: ignore[arg-type]
        if comm.rank == 0 and comm.size == 2:
            args["stream"].submit(lambda: out[inp.numel() :].copy_(inp))  # type: ignore[attr-defined]
            return Work(args["stream"].record())  # type: ignore[attr-defined]
        return work

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "all_gather", wrong)
        code, last = run_soak(world, "--soak", "1s")
    assert code == 1
    assert "#wrong: 0" not in last


# ---------------------------------------------------------------------- faults


def run_faults(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shardrt.stress", "--fault", *arguments, "--fault-after", "5"]
    return subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=550, check=False)


@pytest.mark.rest
def test_a_job_with_a_fault() -> None:
    """Calls of one program that raise share a job; another job is killed."""
    done = run_faults("kill,mismatch,skip,diverged")
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^(\S+) on rank 1 of 2, shardrt.launch: exit code (\d+), [\d.]+ s after the fault$", done.stdout, re.M)
    assert [name for name, _ in found] == ["kill", "mismatch", "skip", "diverged"]
    assert found[0][1] != "0" == found[1][1] == found[2][1] == found[3][1]


@pytest.mark.all
def test_every_fault() -> None:
    """By shardrt.launch and by mpirun alone; the printed table has what happened in each cell of its MPI."""
    done = run_faults("all", "--report")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "not so" not in done.stdout


NOT_SO = {("unread", "srun"), ("ctrl-c", "srun")}  # the page tells why


def test_the_page_has_every_fault() -> None:
    """The rows of the documentation are those that the tool runs, in its order, and nearly all of them hold."""
    page = ROOT / "docs" / "failures.md"
    table = FaultTable.read(page)
    assert "\n".join(table.lines()) in page.read_text(), "run shardrt-stress --fault all --report docs/failures.md"
    assert {place for place, cell in table.cells.items() if "not so" in cell} == NOT_SO
    assert all((name, column) in table.cells for name in FAULTS for column in report.COLUMNS)


def test_table_keeps_what_was_not_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    unknown = "| does what only another program knows | the job ends | 3, 1 s | - | - |"
    page.write_text(f"before\n\n{report.BEGIN}\n| head |\n|---|\n{unknown}\n{report.END}\n\nafter\n")
    first = FaultTable.read(page)
    first.add(FAULTS["c-exit"], "MPICH", Way.LAUNCH, Ending(17, "", 0.6, []), holds=True)
    first.add(FAULTS["c-exit"], "MPICH", Way.BARE, Ending(137, "", 1.6, []), holds=True)
    first.add(FAULTS["skip"], "MPICH", Way.LAUNCH, Ending(0, "", 0.1, []), holds=True)
    first.add(FAULTS["skip"], "MPICH", Way.BARE, Ending(0, "", 1.1, []), holds=True)
    first.write(page)
    second = FaultTable.read(page)
    second.add(FAULTS["c-exit"], "Open MPI", Way.LAUNCH, Ending(None, "", 14.0, []), holds=False)
    second.write(page)
    text = page.read_text()
    rows = {what: cells for what, _, cells in (line.split(" | ", 2) for line in text.splitlines() if " | " in line)}
    assert rows["| calls C's `exit(0)`"] == "17, 1 s; bare: 137, 2 s | **not so**: no end, 14 s | - |"
    assert rows["| leaves a call out"] == "raises, 0 s | - | - |"
    assert text.count(unknown) == 1
    assert (text.startswith("before"), text.endswith("after\n")) == (True, True)


NAMED = "rank 1 pid 7\nrank 1 injects it at 1.0\nall_reduce #50: rank 1 (pid 7, stopped) is missing\n"
DIED = "rank 1 pid 7\nrank 1 injects it at 1.0\n[1] rank 1: pid 7 ended before shardrt.finalize(); last #49 all_reduce\n"
ENDED = "rank 1 pid 7\n[1] rank 1: terminated (SIGTERM), no communication under way; ending the job\n"
RAISED = "rank 0 raised in {0} at 1.0 MismatchError: x\nrank 1 raised in {0} at 2.0 MismatchError: x\n"
SLOW = "call 50 took longest: 1.001 s, waiting for rank 1, which took 0.000 s itself"


@pytest.mark.parametrize(
    ("name", "way", "code", "output", "needed"),
    [
        ("kill", Way.LAUNCH, 9, DIED, "all_reduce"),
        ("usr1", Way.LAUNCH, 138, DIED, "all_reduce"),
        ("stop", Way.LAUNCH, 17, NAMED, "rank 1"),
        ("c-exit", Way.LAUNCH, 17, DIED, "all_reduce"),
        ("c-exit", Way.BARE, 137, DIED, "all_reduce"),
        ("term", Way.LAUNCH, 143, ENDED, "no communication under way"),
        ("unread", Way.LAUNCH, 1, "ValueError: injected", "Value"),
        ("mismatch", Way.LAUNCH, 0, RAISED.format("mismatch"), "rank 1"),
        ("skip", Way.BARE, 0, RAISED.format("skip"), "rank 1"),
        ("slow", Way.LAUNCH, 0, SLOW, "rank 1"),
    ],
)
def test_judgement(name: str, way: Way, code: int, output: str, needed: str) -> None:
    fault = FAULTS[name]
    assert judge(fault, "MPICH", way, 1, 2, Ending(code, output, 2.0, [])) == []
    bad = [
        Ending(0 if code else 9, output, 2.0, []),  # another exit code
        Ending(None, output, 2.0, []),  # no end
        Ending(code, output, 60.0, []),  # late
        Ending(code, output, None, []),  # no fault
        Ending(code, output, 2.0, ["0"]),  # left a process behind
        Ending(code, output.replace(needed, "rank 0"), 2.0, []),  # not named
    ]
    for ending in bad:
        assert judge(fault, "MPICH", way, 1, 2, ending), ending
