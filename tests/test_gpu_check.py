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
from pathlib import Path
from typing import Any

import pytest
import torch

import gpu_check
from bench import step
from common import checkout
from common.jobs import follow_job, run_job
from gpu import table as gpu_table
from gpu.checks import Check, Found, Outcome, Result, run_checks
from gpu_check import Checker
from ranks import on_ranks, rank_environment
from shardrt.comm import World
from shardrt.launch import LaunchError

CHECK = Path(gpu_check.__file__)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_is_an_error() -> None:
    done = subprocess.run([sys.executable, str(CHECK)], env=rank_environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"gpu_check.py: error: no GPU to check: .*\n", done.stderr)


@pytest.mark.all
def test_two_ranks_of_the_host_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly the checks on several ranks run, each with one result."""
    monkeypatch.setenv("PYTHONPATH", rank_environment()["PYTHONPATH"])
    monkeypatch.setattr(gpu_check, "LIMIT_S", 1500.0)  # where a machine is slow to compile the first time
    monkeypatch.setattr(gpu_check, "OPERATION_S", 400.0)
    checker = Checker("cpu")
    checker.part("together", 2, checker.together)
    assert [result.check for result in checker.results] == [check.__name__ for check in gpu_check.SUITES["together"]]
    assert {(result.ranks, result.outcome) for result in checker.results} == {(2, Outcome.OK)}, checker.results
    summary = checker.summary()
    assert (summary["gpu"], summary["ok"], summary["FAILED"]) == ("host", len(checker.results), 0)


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


def test_a_part_that_exits_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    checker = Checker("cpu")

    def breaks(left: float) -> Iterator[Result]:
        yield Result("first", 1, Outcome.OK, 0.0)
        raise SystemExit("exit code 3: a job\nits last words")

    checker.part("breaks", 1, breaks)
    assert [(result.check, result.outcome) for result in checker.results] == [
        ("first", Outcome.OK),
        ("breaks", Outcome.FAILED),
    ]
    assert "its last words" in capsys.readouterr().out  # a failure is printed in full


def test_a_signal_ends_the_script() -> None:
    """A failed job exits with a text, a signal with a number."""

    def terminated(left: float) -> Iterator[Result]:
        os.kill(os.getpid(), signal.SIGTERM)
        yield from ()

    checker, before = Checker("cpu"), signal.getsignal(signal.SIGTERM)
    job = follow_job(["sh", "-c", "echo line; sleep 60"], 30.0)
    assert next(iter(job)) == "line\n"
    with pytest.raises(SystemExit, match="143"):
        checker.part("ended", 1, terminated)
    job.close()
    assert not checker.results
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_job_ends_in_time_though_another_process_holds_its_output() -> None:
    start = time.monotonic()
    with pytest.raises(SystemExit, match="not done in 1 s"):
        run_job(["sh", "-c", "echo line; setsid sleep 60"], 1.0)
    assert time.monotonic() - start < 50


def test_nothing_starts_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "LIMIT_S", 10.0)
    checker = Checker("cpu")
    checker.part("late", 1, lambda left: pytest.fail("it was started"))
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


def test_two_ranks_are_skipped_without_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_none(*_: object) -> None:
        raise LaunchError("no mpirun of MPICH")

    monkeypatch.setattr(gpu_check, "find_site", find_none)
    (result,) = Checker("cpu").together(60.0)
    assert (result.outcome, result.note) == (Outcome.SKIPPED, "no mpirun of MPICH")


def test_goals_compared_with_fsdp2() -> None:
    """Goals apply on a GPU only, each to one model."""
    measured: dict[str, Any] = {
        "model": "gpt-1b",
        "agreement": "bitwise",
        "ms": {"shardrt": 95.0, "fsdp2": 100.0, "lone": 80.0},
        "host_ms": {"shardrt": 12.0, "fsdp2": 15.0, "lone": 10.0},
        "peak_mb": {"shardrt": 900.0, "fsdp2": 1000.0, "lone": 800.0},
        "reserved_mb": {"shardrt": 990.0, "fsdp2": 1040.0, "lone": 850.0},
    }
    large, small = (Checker("cuda").compare_with_fsdp2(measured | {"model": model}) for model in ("gpt-1b", "tiny"))
    ratios, peaks = {"ms by FSDP2": 0.95, "host by FSDP2": 0.4}, {"peak MiB": 900, "MiB below FSDP2": 100}
    assert large.figures == {"ms": 95, **ratios, **peaks, "reserved MiB below FSDP2": 50}
    assert large.missed == ["ms by FSDP2 0.95, goal <= 0.9"]
    measured["host_ms"]["shardrt"] = 14.0
    assert small.missed == large.missed
    assert Checker("cuda").compare_with_fsdp2(measured | {"model": "tiny"}).missed[1:] == ["host by FSDP2 0.8, goal <= 0.5"]
    with pytest.raises(AssertionError, match="losses DIFFER by 1e-01 from FSDP2's"):
        Checker("cuda").compare_with_fsdp2(measured | {"agreement": "DIFFER by 1e-01"})


def test_the_table_of_the_page_is_made_of_the_results() -> None:
    text = (gpu_table.ROOT / "docs" / "performance.md").read_text()
    assert gpu_table.BEGIN in text
    assert gpu_table.with_table(text, gpu_table.load_summaries()) == text, "run scripts/gpu/table.py"


def test_a_row_of_the_table() -> None:
    figures = {"copy TB/s": 4.31, "pack f32 to bf16": 0.93, "unpack bf16 to f32": 0.95, "norm f32": 0.97}
    results = [
        Result("bandwidths", 1, Outcome.OK, 1.0, "", figures),
        Result("bench tiny", 1, Outcome.MISSED, 1.0, "", {"host by FSDP2": 0.6}),
    ]
    checker = Checker("cpu")
    checker.results += results
    summary = json.loads(json.dumps(checker.summary())) | {"gpu": "A GPU", "date": "2026-01-02"}
    head, _, row = gpu_table.table([summary]).splitlines()
    cells = dict(zip(head.split(" | "), row.split(" | "), strict=True))
    assert cells["| GPU"] == "| A GPU"
    assert (cells["seen"], cells["checks"]) == ("2026-01-02", "1 ok, 1 missed")
    assert (cells["norm, by copy"], cells["launch of 100, µs"], cells["host, by FSDP2's |"]) == ("0.97", "", "0.6 |")
