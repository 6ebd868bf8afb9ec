"""Metrics: every figure against one worked out by hand, lines on rank 0, and what counts as exposed communication."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional

import shardrt
from ranks import on_ranks, refused
from shardrt import Metrics, World
from shardrt.comm import ReduceOp, RemoteError
from shardrt.comm.core.streams import INLINE, ThreadedStream
from shardrt.comm.recorder.exposure import Exposure

NAP = 0.4  # seconds


def meet(world: World, *, late: int) -> None:
    """A collective that one rank comes late to."""
    if world.rank == late:
        time.sleep(NAP)
    value = torch.ones(1, device=world.device)
    world.comm.all_reduce(value, value, ReduceOp.SUM, stream=world.stream).wait(world.stream)


@on_ranks(2, more=(1, 3))
def test_figures_of_two_steps(world: World) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        with Metrics(path, every=2, flops_per_token=3e6, peak_flops=1e12) as metrics:
            for step in range(4):
                with metrics.step(tokens=600):
                    time.sleep(NAP / 4)
                time.sleep(NAP)  # between the steps of a line it counts, after the last one not
                record = metrics.log(step, loss=torch.tensor(2.0 * world.rank), lr=world.rank + 0.25, validation_loss=None)
                assert (record is None) == (step % 2 == 0)
        assert record is not None
        seconds = record["time_metrics/end_to_end(s)"]
        assert 0.75 * NAP <= seconds < 1.25 * NAP
        assert record["loss"] == world.size - 1
        assert (record["step"], record["lr"], record["validation_loss"]) == (3, world.rank + 0.25, None)
        assert record["throughput(tps)"] == pytest.approx(600 / seconds / world.size)
        assert record["tflops"] == pytest.approx(3e6 * record["throughput(tps)"] / 1e12)
        assert record["mfu(%)"] == pytest.approx(100 * record["tflops"])
        assert record["memory/max_reserved(GiB)"] >= record["memory/max_active(GiB)"] > 0
        assert record["memory/num_alloc_retries"] == record["memory/num_ooms"] == 0
        shared = ("time_metrics/exposed_communication(s)", "memory/max_active(GiB)", "loss")
        assert world.comm.differing([record[name] for name in shared]) is None
        assert path.exists() == (world.rank == 0)
        if world.rank == 0:
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            assert [line["step"] for line in lines] == [1, 3]
            assert lines[1] == record


@on_ranks(2, more=(3,))
def test_exposed_communication(world: World) -> None:
    """All ranks but the last wait for it; what comes late outside of the step does not count."""
    metrics, exposure = Metrics(), Exposure()
    with metrics.step(tokens=1), exposure.timed():
        begin = time.perf_counter()
        meet(world, late=world.size - 1)
        took = time.perf_counter() - begin
    record = metrics.log(0)
    assert record is not None
    mine = exposure.take()
    assert mine <= took
    assert world.rank == world.size - 1 or mine > 0.5 * NAP
    mean = sum(world.comm.exchange(mine)) / world.size
    assert record["time_metrics/exposed_communication(s)"] == pytest.approx(mean, abs=NAP / 4)
    share = 100 * record["time_metrics/exposed_communication(s)"] / record["time_metrics/end_to_end(s)"]
    assert record["time_metrics/exposed_communication(%)"] == pytest.approx(share)
    meet(world, late=0)
    assert exposure.take() == 0.0


@on_ranks(2)
def test_exposed_communication_of_threads(world: World) -> None:
    """What runs beside the caller counts only where the caller waits for it."""
    if world.device.type != "cpu":
        return
    stream, value = ThreadedStream("side"), torch.ones(1)
    for computes in (False, True):
        exposure = Exposure()
        with exposure.timed():
            stream.submit(lambda: time.sleep(NAP))
            work = world.comm.all_reduce(value, value, ReduceOp.SUM, stream=stream)
            while computes and not work.is_done():
                time.sleep(NAP / 10)
            work.wait(INLINE)
        assert (exposure.take() > 0.5 * NAP) == (not computes)
    stream.close()


@on_ranks(1, more=(2,))
def test_flops_are_those_of_the_first_step(world: World) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False)).to(world.device)
    shardrt.fully_shard(model)
    metrics = Metrics(count_flops=True)
    for step in range(2):
        with metrics.step(tokens=3 * world.size):
            model(torch.ones(3, 8, device=world.device)).sum().backward()
        record = metrics.log(step)
        assert record is not None
        # Per row: both matrices forward and for the weights' gradients, the second one for its input's.
        flops = 3 * 2 * (2 * 8 * 16 + 3 * 16 * 4)
        assert record["tflops"] == pytest.approx(flops / record["time_metrics/end_to_end(s)"] / 1e12)
        assert "mfu(%)" not in record
    metrics.close()


@on_ranks(2)
def test_ranks_with_other_numbers_of_operations(world: World) -> None:
    """As stages of a pipeline have. The figure is the mean."""
    metrics, rows = Metrics(count_flops=True), torch.ones(3, 8)
    with metrics.step(tokens=3):
        for _ in range(1 + 2 * world.rank):
            rows @ rows.T
    record = metrics.log(0)
    assert record is not None
    assert record["tflops"] == pytest.approx((1 + 3) / 2 * 2 * 3 * 3 * 8 / record["time_metrics/end_to_end(s)"] / 1e12)


@on_ranks(1)
def test_flops_of_attention_and_experts_on_the_host(world: World) -> None:
    if world.device.type != "cpu":
        return
    heads, rows, experts = torch.ones(2, 3, 16, 8), torch.ones(6, 16), torch.ones(2, 16, 32)
    for tensor in (heads, rows, experts):
        tensor.requires_grad_()
    metrics = Metrics(count_flops=True)
    with metrics.step(tokens=1):
        functional.scaled_dot_product_attention(heads, heads, heads).sum().backward()
        functional.grouped_mm(rows, experts, offs=torch.tensor([2, 6], dtype=torch.int32)).square().sum().backward()
    record = metrics.log(0)
    assert record is not None
    # Two products forward; backward the scores again, and a gradient for each factor of both. Each row has one expert.
    flops = (2 + 5) * 2 * 2 * 3 * 16 * 16 * 8 + 3 * 2 * 6 * 16 * 32
    assert record["tflops"] == pytest.approx(flops / record["time_metrics/end_to_end(s)"] / 1e12)


@on_ranks(2)
def test_what_one_rank_cannot_write_every_rank_refuses(world: World) -> None:
    refused("rank 0 raised FileNotFoundError", lambda: Metrics("/nowhere/metrics.jsonl"), RemoteError)
    metrics = Metrics()
    with pytest.raises(ValueError, match=r"tokens=0.*at least 1"), metrics.step(tokens=0):
        pass
    for value in ("text", torch.ones(2)):
        with pytest.raises(TypeError, match=r"loss=.*expected a number, a tensor of one element, or None"):
            metrics.log(0, loss=value)


@on_ranks(1)
def test_tensorboard_and_numbers_that_json_has_not(world: World) -> None:
    added: list[tuple[str, float, int]] = []
    writer = SimpleNamespace(add_scalar=lambda *given: added.append(given), close=lambda: added.append(("closed", 0, 0)))
    sys.modules["torch.utils.tensorboard"] = SimpleNamespace(SummaryWriter=lambda folder: writer)
    try:
        with tempfile.TemporaryDirectory() as folder:
            with Metrics(Path(folder) / "lines", tensorboard=folder) as metrics:
                with metrics.step(tokens=1):
                    pass
                metrics.log(7, loss=float("nan"), missing=None)
            line = json.loads((Path(folder) / "lines").read_text())
        sys.modules["torch.utils.tensorboard"] = None  # not installed
        Metrics(tensorboard="nowhere").close()
    finally:
        del sys.modules["torch.utils.tensorboard"]
    assert (line["loss"], line["missing"]) == (None, None)
    names = {name: (value, step) for name, value, step in added}
    assert names["throughput(tps)"][1] == 7
    assert not names.keys() & {"step", "missing"}
    assert added[-1][0] == "closed"
    refused("expected a number of steps", lambda: Metrics(every=0))
    refused("give one of them", lambda: Metrics(flops_per_token=1.0, count_flops=True))
