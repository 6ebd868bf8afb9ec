"""The variables of a job: what is refused, in which words, and that all ranks refuse it together."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from ranks import on_ranks, run_script
from shardrt.comm import World
from shardrt.comm.core.settings import EnvironmentSettings, MalformedVariable, SettingsError, agree, launched, read
from shardrt.comm.monitor.timing import Timing

SECONDS = ("SHARDRT_TIMEOUT", "SHARDRT_START_TIMEOUT")
FLAGS = ("SHARDRT_CHECK", "SHARDRT_CHECK_BATCHES", "SHARDRT_CHECK_WEIGHTS")
NUMBERS = ("SHARDRT_RECORDER", "SHARDRT_RANKS_PER_NODE")
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


def settings(environment: Mapping[str, str], device: str = "cpu") -> EnvironmentSettings:
    """Of an environment without problems."""
    made, problems = read(environment, device)
    assert problems == []
    return made


def test_defaults() -> None:
    """Of no variable, and of empty ones; they are those of docs/failures.md."""
    made = settings({})
    assert made == settings(dict.fromkeys((*SECONDS, *FLAGS, *NUMBERS, "SHARDRT_DUMP", "SHARDRT_HOST_STREAMS"), ""))
    assert (made.start_timeout_s, made.straggler) == (120.0, 0.25)
    assert (made.timeout_s, made.check, made.check_batches, made.check_weights) == (600.0, True, True, True)
    assert made.recorded_calls == 2000
    assert (made.dumps, made.host_streams, made.ranks_per_node, made.monitor_timing) == (None, None, None, "")
    assert settings({"SHARDRT_TIMEOUT": "0"}).timeout_s == math.inf
    assert settings({"SHARDRT_TIMEOUT": " 2.5e1 "}).timeout_s == 25.0
    assert settings({"SHARDRT_RECORDER": "0", "SHARDRT_DUMP": "/a b"}).dumps == Path("/a b")


def test_every_variable_is_in_the_documents() -> None:
    page = (Path(__file__).parents[2] / "docs" / "failures.md").read_text()
    listed = re.findall(r"^\| `(SHARDRT_\w+)` \|", page, re.MULTILINE)
    compared = {name for name in settings({}).compared() if name.startswith("SHARDRT_")} - {"SHARDRT_MONITOR_TIMING"}
    assert sorted(listed) == sorted(compared | {"SHARDRT_RECORDER", "SHARDRT_DUMP"})


@pytest.mark.parametrize("variable", SECONDS)
@pytest.mark.parametrize("text", ["nan", "inf", "-1", "1e9", "1e999", "1_0", "soon", "١", "0x10", "1 2", "9" * 5000])
def test_seconds_that_are_refused(variable: str, text: str) -> None:
    _, problems = read({variable: text})
    assert problems == [MalformedVariable(f"{variable}={text!r}", "seconds, at most 1e+08, or 0 for no limit")]


@pytest.mark.parametrize("variable", [*FLAGS, *NUMBERS, "SHARDRT_HOST_STREAMS", "SHARDRT_STRAGGLER"])
@pytest.mark.parametrize("text", ["nan", "inf", "-1", "2.5", "1e3", "1_0", "yes", "١", "9" * 30, "9" * 5000, "\udcff"])
def test_other_values_that_are_refused(variable: str, text: str) -> None:
    made, ((found, expected),) = read({variable: text})
    assert found == f"{variable}={text!r}"
    assert found.encode(), "it can be printed"
    assert expected.startswith(("a whole number from ", "a share of ", "'0' or '1'", "'inline' or 'threaded'"))
    assert made == settings({}), "its default stands in"


def test_every_problem_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    environment = {"SHARDRT_TIMEOUT": "nan", "SHARDRT_RANKS_PER_NODE": "0", "SHARDRT_DUMP": str(tmp_path / "file")}
    _, problems = read(environment, "meta")
    assert [problem.found.split("=")[0] for problem in problems] == [
        "init(device",
        "SHARDRT_TIMEOUT",
        "SHARDRT_DUMP",
        "SHARDRT_RANKS_PER_NODE",
    ]
    assert settings({"SHARDRT_DUMP": str(tmp_path)}).dumps == tmp_path


def test_devices() -> None:
    assert settings({}, "cpu").device == torch.device("cpu")
    for wrong in ("meta", "gpu", "cpu:x"):
        assert read({}, wrong)[1] == [MalformedVariable(f"init(device={wrong!r})", "'cpu' or 'cuda'")]
    if not torch.cuda.is_available():
        (problem,) = read({}, "cuda")[1]
        assert "sees no CUDA device here" in problem.expected


@pytest.mark.parametrize("variable", SIZES)
@pytest.mark.parametrize("text", ["abc", "0", "-2", "2.0", "1e26", "9" * 26])
def test_a_launchers_count_that_is_no_number(variable: str, text: str) -> None:
    environment = {variable: text, "SLURM_STEP_ID": "0"}
    with pytest.raises(SettingsError, match=f"^{variable}={text!r}, which the launcher sets: expected a whole number"):
        launched(environment)
    assert launched({variable: "4", "SLURM_STEP_ID": "0"}) == (variable, 4)


def test_a_launchers_count_outside_of_a_step() -> None:
    assert launched({"SLURM_NTASKS": "(null)"}) is None
    assert launched({"PMI_SIZE": "2", "SLURM_NTASKS": "(null)", "SLURM_STEP_ID": "0"}) == ("PMI_SIZE", 2)


def test_time_constants() -> None:
    """An override names a field, and an error names the variable."""
    assert (Timing.from_settings(settings({})).timeout_s, Timing.from_settings(settings({})).lost_s) == (600.0, 4.0)
    made = Timing.from_settings(settings({"SHARDRT_TIMEOUT": "0", "SHARDRT_MONITOR_TIMING": "poll_s=0.05,lost_s=1"}))
    assert made == Timing(timeout_s=math.inf, poll_s=0.05, lost_s=1.0)
    for wrong in ("lost=1", "lost_s", "lost_s=soon", "lost_s=-1", "lost_s=nan"):
        with pytest.raises(ValueError, match="SHARDRT_MONITOR_TIMING"):
            Timing.from_settings(settings({"SHARDRT_MONITOR_TIMING": wrong}))


@given(
    st.dictionaries(st.sampled_from([*SECONDS, *FLAGS, *NUMBERS, "SHARDRT_HOST_STREAMS", "SHARDRT_MONITOR_TIMING"]), st.text())
)
def test_any_text_gives_settings_or_a_problem(environment: dict[str, str]) -> None:
    made, problems = read(environment)
    assert made.timeout_s > 0
    assert made.recorded_calls >= 0
    assert len(problems) <= len(environment)


# ---------------------------------------------------------------------- over the ranks


def agreed(world: World, environments: list[dict[str, str]]) -> str:
    """What all ranks raise; the last environment is that of all further ranks."""
    own = read(environments[min(world.rank, len(environments) - 1)], "cpu")
    try:
        agree(MPI.COMM_WORLD, *own)
    except SettingsError as error:
        (message,) = set(world.comm.exchange(str(error)))
        return message
    assert world.comm.exchange("agreed") == ["agreed"] * world.size
    return "agreed"


@on_ranks(2, 3)
def test_all_ranks_refuse_together(world: World) -> None:
    others = "all others" if world.size > 2 else "rank 1"
    assert agreed(world, [{}]) == "agreed"
    assert agreed(world, [{"SHARDRT_CHECK": "1", "SHARDRT_RECORDER": "5", "SHARDRT_DUMP": "/a"}, {}]) == "agreed"
    assert agreed(world, [{}, {"SHARDRT_TIMEOUT": "nan", "SHARDRT_CHECK": "2"}, {}]) == (
        "SHARDRT_TIMEOUT='nan' on rank 1: expected seconds, at most 1e+08, or 0 for no limit\n"
        "SHARDRT_CHECK='2' on rank 1: expected '0' or '1'"
    )
    assert agreed(world, [{"SHARDRT_TIMEOUT": "x"}]).startswith("SHARDRT_TIMEOUT='x' on all ranks: ")
    differs = "differs between the ranks"
    expected = "expected the same on all ranks"
    for variable, one, other in (
        ("SHARDRT_CHECK", "0", "1"),
        ("SHARDRT_CHECK_BATCHES", "0", "1"),
        ("SHARDRT_CHECK_WEIGHTS", "0", "1"),
        ("SHARDRT_RANKS_PER_NODE", "1", "2"),
        ("SHARDRT_HOST_STREAMS", "threaded", "inline"),
        ("SHARDRT_TIMEOUT", "3", "600"),
        ("SHARDRT_MONITOR_TIMING", "poll_s=1", "poll_s=2"),
    ):
        message = agreed(world, [{variable: one}, {variable: other}])
        assert message == f"{variable} {differs}: {one} on rank 0, {other} on {others}; {expected}"
    with pytest.MonkeyPatch.context() as patch:
        if world.rank == 0:
            patch.setattr(torch, "__version__", "1.0")
            patch.setattr("shardrt.comm.core.settings.__version__", "0.0.1")
        lines = agreed(world, [{}]).splitlines()
    assert [line.partition(" on rank 0, ")[0] for line in lines] == [f"shardrt {differs}: 0.0.1", f"torch {differs}: 1.0"]


@pytest.mark.mpi
def test_a_job_whose_ranks_differ() -> None:
    """What one rank lacks would give wrong sums, or a hang; the job ends with one line for each variable, on every rank."""
    source = """
import os, sys
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
if rank == 1:
    os.environ |= {"SHARDRT_CHECK": "0", "SHARDRT_RANKS_PER_NODE": "1"}
import shardrt
try:
    shardrt.init("cpu")
except ValueError as error:
    os.write(1, f"rank {rank}: {error}\\n".encode())
    sys.exit(3)
"""
    done = run_script(source, 2, code=3)
    for rank in range(2):
        assert f"rank {rank}: SHARDRT_CHECK differs between the ranks: " in done.stdout
    assert done.stdout.count("SHARDRT_RANKS_PER_NODE differs between the ranks: ") == 2


def test_progress_is_told_by_ranks_of_the_launcher_alone() -> None:
    def progress(process: int | None) -> Path | None:
        launched = {} if process is None else {"SHARDRT_LAUNCHED": str(process)}
        return read({"SHARDRT_PROGRESS": "progress", **launched}, "cpu")[0].progress

    assert progress(os.getpid()) == Path("progress")
    assert progress(os.getppid()) == Path("progress")  # a shell's script, say
    assert progress(None) is None
    assert progress(2**22 + 1) is None
