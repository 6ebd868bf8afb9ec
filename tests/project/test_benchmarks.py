"""The step benchmark runs and its losses agree; the feature table names existing tests."""

import json
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import parity
from bench import forecast, published, step
from bench.checkpoint_metadata import simulate
from bench.host_time import HostTime, per_group
from bench.memory import held_mb, part_of_node_mb
from bench.step_results import Round, header, host_line, inside_and_waiting, part_rows, row, summarize
from bench.timing import Call, Run, Timing
from bench.workers import AdamWOfShare, Optimizer, adamw
from common.models import CASES
from ranks import on_ranks, refused
from shardrt import World
from shardrt.comm import ReduceOp
from shardrt.comm.groups.control import hooked
from shardrt.plan.machine.hardware import load_sheet

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "scripts" / "bench" / "step.py"
FORECAST = BENCH.with_name("forecast.py")


def run_script(script: Path, *options: str) -> dict[str, Any]:
    """The JSON of the last line."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(script), *options], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return cast("dict[str, Any]", json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.all
def test_last_line_is_json_and_the_losses_agree() -> None:
    summary = run_script(BENCH, "--models", "tiny", "--ranks", "1", "2", "--rounds", "1", "--steps", "2")
    for ranks, result in enumerate(summary["results"], start=1):
        assert (result["model"], result["ranks"], result["peer"]) == ("tiny", ranks, "fsdp2")
        assert result["agreement"] == dict.fromkeys(["fsdp2", "fsdp2-comm"][:ranks], "bitwise")
        assert set(result["ratios"]) == {*result["agreement"], "lone"}
        assert result["ratios"]["fsdp2"]["ms"] == result["ms"]["shardrt"] / result["ms"]["fsdp2"]
        assert min(*result["ms"].values(), *result["peak_mb"].values(), result["ratios"]["lone"]["peak_mb"]) > 0
    parts_ms = summary["results"][1]["parts_ms"]
    assert min(parts_ms["shardrt"]["collectives"], parts_ms["fsdp2-comm"]["collectives"]) > 0
    assert 0 < summary["host"]["shardrt"]["median_us"] < summary["host"]["fsdp2"]["median_us"]


@pytest.mark.all
def test_replicas_beside_those_of_torch() -> None:
    summary = run_script(BENCH, "--replicate", "--models", "tiny", "--no-host-time", "--rounds", "1", "--steps", "1")
    (result,) = summary["results"]
    assert (result["ranks"], result["peer"], result["agreement"]) == (2, "ddp", {"ddp": "bitwise"})
    assert set(result["ratios"]) == {"ddp", "lone"}


@pytest.mark.all
def test_tensor_parallel_losses_agree_with_those_of_torch() -> None:
    summary = run_script(BENCH, "--tp", "2", "--rounds", "1", "--steps", "1")
    (result,) = summary["results"]
    assert (result["model"], result["ranks"], result["tp"], set(result["ratios"])) == ("gpt-512", 2, 2, {"fsdp2"})
    assert not result["agreement"]["fsdp2"].startswith("DIFFER"), result["agreement"]


@pytest.mark.all
def test_divided_experts_have_the_losses_of_whole_ones() -> None:
    script, sizes = BENCH.with_name("experts.py"), ("--layers", "1", "--width", "16", "--tokens", "8", "--rounds", "1")
    summary = run_script(script, *sizes)  # it compares the losses
    assert summary["ratio"] == summary["ms"]["experts divided"] / summary["ms"]["fully_shard"] > 0


@pytest.mark.all
def test_a_pipeline_of_sharded_stages_has_the_losses_of_torchs() -> None:
    sizes = (
        "--layers",
        "2",
        "--channels",
        "32",
        "--context",
        "8",
        "--micro-batches",
        "2",
        "3",
        "--steps",
        "1",
        "--rounds",
        "1",
    )
    results = run_script(BENCH.with_name("pipeline.py"), *sizes)["results"]  # it compares the losses
    assert [result["micro_batches"] for result in results] == [2, 3]
    assert all(min(result.values()) > 0 for result in results)


def timing(seconds: list[float], peak: float, *calls: list[Call]) -> Timing:
    """Of one rank: a half of each step is the forward, a quarter the backward."""
    halves, quarters = [each / 2 for each in seconds], [each / 4 for each in seconds]
    return Timing(seconds, halves, quarters, quarters, list(calls), [1.0, 0.5], 100.0, peak, peak)


def test_figures_of_a_benchmark_are_medians_over_steps_and_means_over_ranks() -> None:
    # Two steps of 0.2 s and 0.4 s (means of 0.1 and 0.3, 0.4 and 0.4); rank 1 comes 0.04 s late to the first step's call.
    late = [[("world 7", 1.00, 1.10)], [("world 8", 2.0, 2.02)]]
    later = [[("world 7", 1.04, 1.10)], [("world 8", 2.0, 2.02)]]
    first: Round = {
        "shardrt": [timing([0.1, 0.4], 300.0, *late), timing([0.3, 0.4], 400.0, *later)],
        "fsdp2": [timing([0.4, 0.8], 500.0, [], [])] * 2,
        "fsdp2-comm": [replace(timing([0.3, 0.3], 450.0, [], []), losses=[1.0, 1.0])] * 2,
        "lone": [timing([0.2, 0.2], 320.0, [], [])] * 2,
    }
    quick = replace(first["shardrt"][0], seconds=[0.1, 0.1])
    result = summarize("tiny", 2, 1, "cpu", [first, first | {"shardrt": [quick, quick]}])
    assert result.peer == "fsdp2"
    assert result.ms == pytest.approx({"shardrt": 150, "fsdp2": 600, "fsdp2-comm": 300, "lone": 200})  # of 200, 400, 100, 100
    assert result.best_ms["shardrt"] == pytest.approx(100)
    assert result.agreement == {"fsdp2": "bitwise", "fsdp2-comm": "DIFFER by 5e-01"}
    assert result.peak_mb == {"shardrt": 350, "fsdp2": 500, "fsdp2-comm": 450, "lone": 320}, "of the first round"
    assert result.grown_mb["shardrt"] == 250
    assert summarize("tiny", 2, 1, "cuda", [first]).peak_mb["shardrt"] == 400, "each rank has a GPU"
    assert result.ratios["lone"].ms == pytest.approx(0.75)
    assert result.ratios["lone"].peak_mb == pytest.approx(350 / 320)
    assert result.ratios["fsdp2"].ms_by_round == pytest.approx([0.5, 1 / 6])
    assert result.host_ms["lone"] == pytest.approx(150)
    lone = result.parts_ms["lone"]
    assert (lone.forward, lone.backward, lone.optimizer) == pytest.approx((100, 50, 50))
    assert lone.collectives is lone.waiting is None
    first_line, *others = part_rows(result).splitlines()
    assert first_line.endswith("waiting for other ranks 0.0 of them")
    assert len(others) == 3
    columns = ["fsdp2", "fsdp2-comm", "lone"]
    cells = row(result, columns).split()
    assert cells[:9] == ["tiny", "2", "150.0", "600.0", "300.0", "200.0", "0.25", "0.50", "0.75"]
    assert cells[9:14] == ["350", "500", "320", "0.70", "1.09"], "fsdp2-comm has no column for memory"
    assert cells[14:19] == ["fsdp2", "bitwise,", "fsdp2-comm", "DIFFER", "by"]
    names = header(columns).splitlines()[1]
    assert len(names.split()) == 2 + 7 + 3 + 5 + 2 + 1, "'by' is a word of its own"
    assert names.index("by lone") + len("by lone") == row(result, columns).index("0.75") + len("0.75")
    alone = summarize("tiny", 1, 1, "cpu", [{worker: first[worker] for worker in ("shardrt", "fsdp2", "lone")}])
    assert row(alone, columns).split()[4] == "-"


def test_ranks_wait_in_a_collective_until_the_last_one_has_come() -> None:
    early, late = [("a", 1.0, 1.5), ("b", 2.0, 2.25)], [("a", 1.25, 1.5), ("b", 2.0, 2.25)]
    assert inside_and_waiting([early, late]) == (0.625, 0.125)
    other = [("c", 1.0, 1.5)]  # on a communicator of its own
    assert inside_and_waiting([early, other]) == (0.625, 0.0)
    left = [("a", 1.0, 1.125), ("b", 2.0, 2.25)]  # does not need the other rank
    assert inside_and_waiting([left, late]) == (0.4375, 0.0625)


@on_ranks(2)
def test_calls_have_the_same_names_on_all_ranks(world: World) -> None:
    from bench.calls import CallTimes

    calls, value = CallTimes(), torch.ones(4, device=world.device)
    with hooked(calls):
        world.comm.all_reduce(value, value, ReduceOp.SUM, stream=world.stream).synchronize()
        ((name, came, left),) = calls.take()
        assert calls.take() == []
    assert came < left
    assert world.comm.differing(name) is None


def test_shared_pages_count_once(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("Name:\tpython\nVmHWM:\t  10240 kB\nVmRSS:\t  9216 kB\nRssShmem:\t  6144 kB\n")
    assert part_of_node_mb("VmHWM", tmp_path) == 10, "a kernel without Pss_Shmem"
    (tmp_path / "smaps_rollup").write_text("7f0000000000-7fff00000000 ---p 00000000 00:00 0 [rollup]\nPss_Shmem:  2048 kB\n")
    assert part_of_node_mb("VmHWM", tmp_path) == 6
    assert part_of_node_mb("VmRSS", tmp_path) == 5


def test_a_page_that_is_mapped_twice_counts_once() -> None:
    megabytes, file = 16, os.memfd_create("twice")
    os.ftruncate(file, megabytes << 20)
    before = held_mb("cpu")
    with mmap.mmap(file, 0) as first, mmap.mmap(file, 0) as second:
        os.close(file)
        first.write(bytes(megabytes << 20))
        assert second.read() == bytes(megabytes << 20)
        assert held_mb("cpu") - before == pytest.approx(megabytes, abs=4)


def test_host_time_is_what_a_sharded_step_takes_longer() -> None:
    found = per_group([(5e-3, 1e-3), (9e-3, 2e-3), (6e-3, 1e-3)], groups=100)
    assert (found.median_us, found.best_us) == pytest.approx((50, 40))
    line = host_line({"shardrt": found, "fsdp2": HostTime(200.0, 100.0)})
    assert line.endswith("50 us (at best 40), FSDP2 200 (100), ratio 0.25 (0.40)")


def test_shares_of_an_optimizer_add_up_to_the_whole() -> None:
    torch.manual_seed(0)
    run = Run("cpu", 1, fused=False)
    start, grads = [torch.randn(5, 3), torch.randn(2)], [torch.randn(5, 3), torch.randn(2)]

    def stepped(make: Callable[[list[nn.Parameter]], Optimizer]) -> list[torch.Tensor]:
        parameters = [nn.Parameter(each.clone()) for each in start]
        optimizer = make(parameters)
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = grad
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in parameters)
        return [parameter.detach() for parameter in parameters]

    whole = stepped(lambda parameters: adamw(parameters, run))
    changes = [torch.zeros_like(each) for each in start]
    for rank in range(4):
        shares = stepped(lambda parameters, rank=rank: AdamWOfShare(parameters, rank, 4, run))  # type: ignore[misc]
        for change, share, before in zip(changes, shares, start, strict=True):
            moved = share != before
            assert moved.sum() <= -(-before.numel() // 4)
            assert not change[moved].any(), "no element has two owners"
            change[moved] = share[moved]
    for change, expected in zip(changes, whole, strict=True):
        assert torch.equal(change, expected)


@pytest.mark.all
def test_forecasts_are_compared_with_steps() -> None:
    (result,) = run_script(FORECAST, "--models", "tiny", "--ranks", "2", "--rounds", "1", "--steps", "5")["results"]
    assert (result["model"], result["ranks"]) == ("tiny", 2)
    assert result["ratio"] == result["forecast_ms"] / result["measured_ms"]
    assert 0.1 < result["ratio"] < 10, "other load may be heavy, but not the wrong unit"


QUICK = next(run for run in published.RUNS if (run.model, run.machine) == ("mpt-1b", "H100"))


@pytest.mark.parametrize("run", [QUICK, *(pytest.param(run, marks=pytest.mark.all) for run in published.RUNS if run != QUICK)])
def test_published_runs_are_forecast(run: published.Run) -> None:
    assert published.forecast_rate(run) == pytest.approx(run.rate, rel=0.1)


def test_the_model_of_a_forecast_is_the_one_that_is_measured() -> None:
    case = CASES["mlp"]
    found = forecast.forecast_step(case, 2, load_sheet("h100"))
    numels = [parameter.numel() for parameter in case.build().parameters()]
    assert sum(group.numel for group in found.groups) == sum(numels)
    assert len(found.groups) == 13
    matrices = sum(numel for numel in numels if numel > 1024)
    first = 1024 * 1024  # its input needs no gradient
    assert found.flops == 8 * (6 * matrices - 2 * first) + 8 * 6 * 1024, "and the head"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", "2", "--ranks", "3"), "--ranks 3 does not divide by --tp 2"),
        (("--tp", "2", "--replicate"), "--replicate and --tp: give one of them"),
        (
            ("--replicate", "--models", "gpt-1b"),
            "--replicate: model gpt-1b computes in torch.bfloat16, which DDP does not: choose others",
        ),
        (("--tp", "2", "--models", "mlp"), "--tp 2: model mlp has no plan, use a GPT"),
    ],
)
def test_bad_options_of_the_step_benchmark(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["step.py", *options])
    refused("2", step.main, SystemExit)
    assert capfd.readouterr().err == f"step.py: error: {message}\n"


def test_help_of_the_step_benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["step.py", "--help"])
    refused("0", step.main, SystemExit)
    text = capsys.readouterr().out
    assert {"--replicate", "--parts", "lone", *step.MODELS} <= set(text.replace(",", " ").split())


@pytest.mark.all
def test_host_time_of_a_block() -> None:
    us = run_script(BENCH.with_name("parallel.py"), "--rounds", "2")["host_us"]
    assert {name.split(",")[0] for name in us} == {"plain", "shardrt", "torch"}
    assert min(us.values()) > 0


@pytest.mark.all
def test_checkpoints_beside_those_of_torch(tmp_path: Path) -> None:
    options = ("--megabytes", "30", "--rounds", "1", "--repeats", "1", "--metadata-ranks", "1000", "--metadata-blocks", "2")
    summary = run_script(BENCH.with_name("checkpoint.py"), *options, "--folder", str(tmp_path))
    (result,) = summary["results"]
    assert result["ratio_load"] == result["load_s"]["shardrt"] / result["load_s"]["stock"]
    assert min(*result["save_s"].values(), *result["stall_s"].values(), *result["save_peak"].values(), result["read_s"]) > 0
    assert summary["metadata"]["tensors"] == 20
    assert not list(tmp_path.iterdir())


def test_the_metadata_of_many_ranks(tmp_path: Path) -> None:
    made = simulate(ranks=300, blocks=2, folder=tmp_path)
    assert made.chunks >= 2 * 300
    assert made.nbytes == (tmp_path / ".metadata").stat().st_size


def test_scripts_look_for_the_checkout_before_they_import_shardrt() -> None:
    """In a bare checkout, shardrt cannot be imported before `common.checkout`; sorted imports may change their order."""
    found = []
    for path in (ROOT / "scripts").rglob("*.py"):
        lines = path.read_text().splitlines()
        first = next(
            (n for n, line in enumerate(lines) if line.startswith(("import common.checkout", "from common import checkout"))),
            None,
        )
        if first is not None:
            found.append(path.name)
            assert not [line for line in lines[:first] if line.startswith(("import shardrt", "from shardrt"))], path
    benches = {"step.py", "overlap.py", "padding.py", "parallel.py", "context.py", "experts.py", "pipeline.py", "checkpoint.py"}
    benches |= {"quantized_gather.py", "quantized_training.py", "forecast.py", "growth.py", "peak.py", "published.py"}
    benches |= {"survival.py", "survival_job.py"}
    assert benches | {"options.py", "train.py", "matrix.py", "gpu_check.py", "table.py", "gpu_forecast.py"} == set(found)


@pytest.mark.rest
def test_feature_table(capsys: pytest.CaptureFixture[str]) -> None:
    parity.main()
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["row", "feature", "FSDP2", "shardrt", "test"]
    assert {row.split()[0] for row in rows} >= {
        *(f"A{n}" for n in range(1, 14)),
        *(f"B{n}" for n in range(1, 10)),
        "C1",
        "C2",
        "C3",
    }
