"""scripts/gpu_check.py without a GPU: its checks on real ranks of the host, its results, its table."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import gpu_check
from bench import step
from common import checkout
from common.jobs import GRACE_S, STACKS_S, follow_job, run_job
from gpu import checker as gpu_checker
from gpu import exchange, steady
from gpu import table as gpu_table
from gpu.checker import Checker, Part
from gpu.checks import Check, Found, Outcome, Result, run_checks
from ranks import on_ranks, rank_environment, refused
from shardrt.comm import World
from shardrt.comm.startup import bootstrap
from shardrt.launch import LaunchError

CHECK = Path(gpu_check.__file__)


@pytest.mark.rest
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_an_error() -> None:
    done = subprocess.run([sys.executable, str(CHECK)], env=rank_environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"gpu_check.py: error: no GPU to check: .*\n", done.stderr)


@pytest.fixture
def checker(tmp_path: Path) -> Checker:
    return Checker("cpu", 2, tmp_path)


@pytest.mark.all
@pytest.mark.parametrize("suite", ["together", "exchange", "steady", "compiled"])
def test_two_ranks_of_the_host_pass(suite: str, checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the checks on several ranks run, each with one result."""
    monkeypatch.setenv("PYTHONPATH", rank_environment()["PYTHONPATH"])
    monkeypatch.setattr(gpu_checker, "OPERATION_S", 400.0)
    checker.total_s = 1500.0  # where a machine is slow to compile the first time
    checker.run(Part(suite, 2, 1500.0, lambda limit: checker.together(suite, 2, limit)))
    assert [result.check for result in checker.results] == [check.__name__ for check in gpu_check.SUITES[suite]]
    assert {(result.ranks, result.outcome) for result in checker.results} <= {(2, Outcome.OK), (2, Outcome.SKIPPED)}
    summary = checker.summary()
    assert (summary["gpu"], summary["gpus"], summary["FAILED"]) == ("host", 2, 0)


# ---------------------------------------------------------------------- parts


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("gpus", "several"), [(1, []), (2, [2]), (3, [2]), (4, [2, 4]), (8, [2, 4, 8])])
def test_benchmarks_come_first_and_tests_last(
    device: str, gpus: int, several: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A GPU")
    monkeypatch.setattr(gpu_checker, "_versions", lambda device: {})
    parts = list(gpu_check.parts(Checker(device, gpus, tmp_path)))
    kinds = ["benchmarks" if part.name.startswith(("bench", "kernels", "exchange")) else part.name for part in parts]
    order = {"benchmarks": 0, "alone": 1, "stuck": 1, "together": 1, "steady": 1, "compiled": 2, "pytest -m gpu": 3}
    assert [order[kind] for kind in kinds] == sorted(order[kind] for kind in kinds)
    large = "bench gpt-1b" if device == "cuda" else "bench gpt"
    assert [part.ranks for part in parts if part.name == large] == [1, *several]
    assert [part.ranks for part in parts if part.name == "exchange"] == several[-1:]
    if (device, gpus) == ("cuda", 1):
        assert sum(part.limit_s for part in parts) <= gpu_checker.TOTAL_S < 600 - GRACE_S


@pytest.mark.rest
def test_a_part_that_hangs_shows_its_stacks_and_the_next_one_runs(checker: Checker, tmp_path: Path) -> None:
    """Also if it hangs in a job that its own process has started."""
    scripts, hangs, starts = CHECK.parent, tmp_path / "hangs.py", tmp_path / "starts.py"
    begin = f"import sys; sys.path.insert(0, {str(scripts)!r})\nfrom common.jobs import run_job, write_stacks_before_end\n"
    hangs.write_text(f"{begin}import time\ndef in_the_deep():\n    time.sleep(60)\nwrite_stacks_before_end()\nin_the_deep()\n")
    starts.write_text(f"{begin}run_job([sys.executable, {str(hangs)!r}], 60.0)\n")
    start = time.monotonic()
    for script, limit in ((hangs, 4.0), (starts, 4.0 + STACKS_S + GRACE_S)):
        checker.run(Part(script.stem, 1, limit, partial(_without_results, [sys.executable, str(script)])))
        assert "in in_the_deep" in checker.results[-1].note
    checker.run(Part("next", 1, 4.0, lambda limit: iter([Result("next", 1, Outcome.OK, 0.0)])))
    assert [(result.check, result.outcome) for result in checker.results] == [
        ("hangs", Outcome.FAILED),
        ("starts", Outcome.FAILED),
        ("next", Outcome.OK),
    ]
    assert time.monotonic() - start < 40


def _without_results(command: list[str], limit: float) -> Iterator[Result]:
    run_job(command, limit)
    yield from ()


@pytest.mark.parametrize(
    ("code", "line", "outcome"),
    [(17, "waited 4.0 s in #3 all_gather", Outcome.OK), (17, "waited", Outcome.FAILED), (0, "", Outcome.FAILED)],
)
def test_the_stuck_job_must_end_with_a_report(
    code: int, line: str, outcome: Outcome, checker: Checker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "job.py"
    script.write_text(f"import sys\nprint({line!r}, file=sys.stderr)\nsys.exit({code})\n")
    monkeypatch.setattr(gpu_checker, "SCRIPT", script)
    checker.device = "cuda"
    (result,) = checker.stuck(60.0)
    assert result.outcome is outcome
    assert outcome is Outcome.OK or f"exit code {code}" in result.note


def test_results_are_on_the_disk_when_the_script_dies(tmp_path: Path) -> None:
    script = f"""
import os, signal, sys
sys.path.insert(0, {str(CHECK.parent)!r})
import common.checkout
from pathlib import Path
from gpu.checker import Checker, Part
from gpu.checks import Outcome, Result
def first(limit):
    yield Result("first", 1, Outcome.OK, 0.5, "", {{"GB/s": 2.0}})
    os.kill(os.getpid(), signal.SIGKILL)
Checker("cpu", 4, Path({str(tmp_path)!r})).run(Part("dies", 1, 60.0, first))
"""
    done = subprocess.run([sys.executable, "-c", script], env=rank_environment(), capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    kept = json.loads((tmp_path / "4-host.json").read_text())
    assert (kept["gpus"], kept["ok"]) == (4, 1)
    assert [result["figures"] for result in kept["results"]] == [{"GB/s": 2.0}]


@on_ranks(2)
def test_a_failure_on_one_rank_is_one_result(world: World) -> None:
    """The other rank does not hang, and the next check runs."""
    written: list[str] = []

    def fails(world: World) -> None:
        assert world.rank == 0, f"wrong on rank {world.rank}"

    def reports(world: World) -> Found:
        found = Found("a note")
        found.figure("share", 0.51234, least=0.9)
        found.figure("host us", 3.0, most=15.0)
        return found

    checks: tuple[Check, ...] = (fails, reports)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", lambda line, flush: written.append(line))
        run_checks(world, checks)
    if world.rank == 1:
        assert not written
        return
    failed, reported = map(Result.parse, written)
    assert (failed.check, failed.outcome) == ("fails", Outcome.FAILED)
    assert "wrong on rank 1" in failed.note
    assert (reported.outcome, reported.figures) == (Outcome.MISSED, {"share": 0.512, "host us": 3.0})
    assert reported.note == "a note; share 0.512, goal >= 0.9"
    assert Result.parse(reported.write()) == reported


def test_a_part_that_exits_is_a_failure(checker: Checker, capsys: pytest.CaptureFixture[str]) -> None:
    def breaks(limit: float) -> Iterator[Result]:
        yield Result("first", 1, Outcome.OK, 0.0)
        raise SystemExit("exit code 3: a job\nits last words")

    checker.run(Part("breaks", 1, 60.0, breaks))
    assert [(result.check, result.outcome) for result in checker.results] == [
        ("first", Outcome.OK),
        ("breaks", Outcome.FAILED),
    ]
    assert "its last words" in capsys.readouterr().out  # a failure is printed in full


def test_a_signal_ends_the_script(checker: Checker) -> None:
    """A failed job exits with a text, a signal with a number."""

    def terminated(limit: float) -> Iterator[Result]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield from ()

    before = signal.getsignal(signal.SIGTERM)
    job = follow_job(["sh", "-c", "echo line; sleep 60"], 30.0)
    assert next(iter(job)) == "line\n"
    refused("143", lambda: checker.run(Part("ended", 1, 60.0, terminated)), SystemExit)
    job.close()
    assert not checker.results
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.rest
def test_a_job_ends_in_time_though_another_process_holds_its_output() -> None:
    start = time.monotonic()
    refused("not done in 1 s", lambda: run_job(["sh", "-c", "echo line; setsid sleep 60"], 1.0), SystemExit)
    assert time.monotonic() - start < 50


def test_nothing_starts_without_time(checker: Checker) -> None:
    checker.total_s = 9.0
    checker.run(Part("late", 1, 60.0, lambda limit: pytest.fail("it was started")))
    assert [(result.check, result.outcome, result.note) for result in checker.results] == [
        ("late", Outcome.FAILED, "no time was left")
    ]


def test_scripts_of_a_bare_checkout_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "before")
    monkeypatch.setattr(sys, "path", ["scripts"])
    runpy.run_path(checkout.__file__)
    assert sys.path == ["scripts"]  # shardrt is found already
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    runpy.run_path(checkout.__file__)
    root = str(CHECK.parent.parent)
    assert (sys.path, os.environ["PYTHONPATH"]) == (["scripts", root], f"before{os.pathsep}{root}")


def test_the_benchmark_runs_without_tqdm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with step.make_bar(3) as bar:
        bar.set_description("first")
        bar.update()
        bar.write("a row")
    assert capsys.readouterr().out == "a row\n"


def test_two_ranks_are_skipped_without_mpirun(checker: Checker, monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(*_: object) -> None:
        raise LaunchError("no mpirun of MPICH")

    monkeypatch.setattr(gpu_checker, "find_site", find_none)
    (result,) = checker.together("together", 2, 60.0)
    assert (result.outcome, result.note) == (Outcome.SKIPPED, "no mpirun of MPICH")


def test_goals_compared_with_fsdp2(checker: Checker) -> None:
    """Goals apply on a GPU only, each to one model."""
    measured: dict[str, Any] = {
        "model": "gpt-1b",
        "ranks": 1,
        "agreement": {"fsdp2": "bitwise"},
        "ms": {"shardrt": 95.0, "fsdp2": 100.0, "lone": 80.0},
        "host_ms": {"shardrt": 12.0, "fsdp2": 15.0, "lone": 10.0},
        "peak_mb": {"shardrt": 900.0, "fsdp2": 1000.0, "lone": 800.0},
        "reserved_mb": {"shardrt": 990.0, "fsdp2": 1040.0, "lone": 850.0},
    }
    assert not checker.compare_with_fsdp2(measured).missed
    checker.device = "cuda"
    large, small = (checker.compare_with_fsdp2(measured | {"model": model}) for model in ("gpt-1b", "tiny"))
    ratios, peaks = {"ms by FSDP2": 0.95, "host by FSDP2": 0.4}, {"peak MiB": 900, "MiB below FSDP2": 100}
    assert large.figures == {"ms": 95, **ratios, **peaks, "reserved MiB below FSDP2": 50}
    assert large.missed == ["ms by FSDP2 0.95, goal <= 0.9"]
    measured["host_ms"]["shardrt"] = 14.0
    assert small.missed == large.missed
    assert checker.compare_with_fsdp2(measured | {"model": "tiny"}).missed[1:] == ["host by FSDP2 0.8, goal <= 0.5"]
    assert "host by FSDP2" not in checker.compare_with_fsdp2(measured | {"ranks": 2}).figures
    with pytest.raises(AssertionError, match="losses DIFFER by 1e-01 from FSDP2's"):
        checker.compare_with_fsdp2(measured | {"agreement": {"fsdp2": "DIFFER by 1e-01"}})


def test_the_table_of_the_page_is_made_of_the_results() -> None:
    text = (gpu_table.ROOT / "docs" / "performance.md").read_text()
    assert gpu_table.BEGIN in text
    assert gpu_table.with_table(text, gpu_table.load_summaries()) == text, "run scripts/gpu/table.py"


def test_a_row_of_the_table(checker: Checker) -> None:
    """Figures of one rank and of several ranks are in a table each; of several numbers of ranks, the last is shown."""
    figures = {"copy TB/s": 4.31, "pack f32 to bf16": 0.93, "unpack bf16 to f32": 0.95, "norm f32": 0.97}
    results = [
        Result("bandwidths", 1, Outcome.OK, 1.0, "", figures),
        Result("bench tiny", 1, Outcome.MISSED, 1.0, "", {"host by FSDP2": 0.6}),
        Result("all_gather", 4, Outcome.OK, 1.0, "", {"256M GB/s": 355.0, "256M by library": 1.01}),
        Result("bench gpt-1b", 1, Outcome.OK, 1.0, "", {"ms by FSDP2": 0.9}),
        Result("bench gpt-1b", 2, Outcome.OK, 1.0, "", {"ms by FSDP2": 0.8}),
        Result("bench gpt-1b", 4, Outcome.OK, 1.0, "", {"ms by FSDP2": 0.7}),
    ]
    checker.results += results
    summary = json.loads(json.dumps(checker.summary())) | {"gpu": "A GPU", "date": "2026-01-02"}
    alone, together = gpu_table.table([summary | {"gpus": 4}]).split("\n\n")
    cells = _cells(alone)
    assert cells["GPU"] == "4 x A GPU"
    assert (cells["seen"], cells["checks"]) == ("2026-01-02", "5 ok, 1 missed")
    assert (cells["norm, by copy"], cells["launch of 100, µs"], cells["host, by FSDP2's"]) == ("0.97", "", "0.6")
    assert cells["GPT step, by FSDP2's"] == "0.9"
    cells = _cells(together)
    assert (cells["all-gather of 256 MiB, GB/s"], cells["time by NCCL's own"]) == ("355", "1.01")
    assert cells["GPT step, by FSDP2's"] == "0.7"
    assert gpu_table.table([summary | {"gpus": 1}]).count("| A GPU |") == 1


def _cells(table: str) -> dict[str, str]:
    head, _, row = table.strip().splitlines()
    return dict(zip(*([cell.strip() for cell in line.strip("|").split("|")] for line in (head, row)), strict=True))


# ---------------------------------------------------------------------- checks on several ranks


@contextmanager
def small_sizes() -> Iterator[None]:
    """Those of the host, where something else takes a GPU's place."""
    with ExitStack() as stack:
        for sizes in (exchange.SIZES, exchange.BESIDE, steady.CONFIGS):
            stack.enter_context(mock.patch.dict(sizes, cuda=sizes["cpu"]))
        yield


@on_ranks(1, 2, 4)
def test_bandwidth_beside_the_library(world: World) -> None:
    """Both operators of a reduction, each size, with the library's own call; the sizes cross that of a bucket."""
    library = "nccl" if world.device.type == "cuda" else "mpi4py"
    with small_sizes(), pytest.MonkeyPatch.context() as patch:
        rows = list(exchange.sweep(world, ["all_gather", "reduce_scatter"], "ordinary", library))
        patch.setattr(exchange, "sweep", lambda *_: rows)
        found = exchange.beside_library("reduce_scatter")(world)
    labels = [f"{op}{size}" for op in ("", "sum ", "avg ") for size in ("4K", "32K", "256K", "2M")]
    assert [exchange.label(row) for row in rows] == labels
    assert found is not None
    for row in rows:
        share = (world.size - 1) / world.size
        assert row.out_of_place.busbw == pytest.approx(share * row.size / row.out_of_place.time_us / 1e3)
        assert found.figures[f"{exchange.label(row)} GB/s"] == pytest.approx(row.out_of_place.busbw, rel=6e-3, abs=1e-9)
        lacks = row.redop == "avg" and (library == "mpi4py" or world.size == 1)
        assert (f"{exchange.label(row)} by library" in found.figures) != lacks


@on_ranks(1, more=(2,))
def test_steps_with_and_without(world: World) -> None:
    with small_sizes():
        found = exchange.variants(world)
    if world.size == 1:
        assert found.skipped
        return
    assert {name.partition(",")[0] for name in found.figures} == {"as is", "priority 0", "windows"}
    assert all(value > 0 for name, value in found.figures.items() if not name.endswith("outside torch"))


@on_ranks(2)
def test_other_checks_of_several_ranks(world: World) -> None:
    """They find no wrong element; a gather takes some time, alone or not."""
    with small_sizes():
        for check in (exchange.connecting, exchange.windows, exchange.registered):
            assert all(value > 0 for value in check(world).figures.values()), check.__name__
        found = exchange.hiding(world).figures
    assert {name.rpartition(" ")[2] for name in found} == {"-1", "0"}
    assert min(found["gather ms at -1"], found["gather ms at 0"], found["gather last at -1"]) > 0


@on_ranks(2)
def test_streams_without_priority_end_with_their_block(world: World) -> None:
    before = world.stream_for("gather")
    with exchange.without_priority():
        assert world.stream_for("gather") is not before
        assert not bootstrap._PRIORITIES
    assert world.stream_for("gather") is before
    assert bootstrap._PRIORITIES["gather"] == -1


def test_exposed_time() -> None:
    """By hand: stream 7 computes in 0 to 10 and 20 to 30; the others run alone in 12 to 18 and 30 to 34, in microseconds."""
    spans = [(7, 0.0, 10.0), (1, 5.0, 8.0), (1, 12.0, 16.0), (2, 14.0, 18.0), (7, 20.0, 30.0), (2, 29.0, 34.0)]
    assert steady.exposed_ms(spans, {7}) == pytest.approx(0.010)
    assert steady.exposed_ms(spans, {1, 2, 7}) == 0.0
    assert steady.exposed_ms([], {7}) == 0.0
