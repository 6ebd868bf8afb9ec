"""What only the stand-in for CUDA can show: races between streams, and what its NCCL does. Runs under fake_cuda/run.py."""

import importlib
import os
import re

import pytest
import torch

from ranks import run_script

pytestmark = pytest.mark.skipif("FAKE_GPUS" not in os.environ, reason="runs under tests/fake_cuda/run.py")


def test_streams_that_race_and_streams_that_do_not() -> None:
    describe_races = importlib.import_module("sitecustomize").races
    first, second = torch.cuda.Stream(), torch.cuda.Stream()

    def both(*, ordered: bool) -> str:
        torch.cuda.synchronize()
        describe_races()
        with torch.cuda.stream(first):
            shared = torch.zeros(100, device="cuda")
        if ordered:
            second.wait_event(first.record_event())
        with torch.cuda.stream(second):
            shared.add_(1)
        torch.cuda.synchronize()
        assert shared.cpu().tolist() == [1.0] * 100
        return str(describe_races())

    assert "write after write: aten.zero_.default on stream" in both(ordered=False)
    assert both(ordered=True) == ""


@pytest.mark.parametrize("failing", [0, 1])
def test_an_asynchronous_error_of_nccl_ends_the_job(failing: int) -> None:
    """The kernel of the second all-reduce waits on both ranks; one of them is told why."""
    source = """
import torch
import shardrt
from shardrt.comm import ReduceOp

world = shardrt.init("cuda")
ones = torch.ones(4, device=world.device)
for _ in range(3):
    world.comm.all_reduce(ones, ones, ReduceOp.SUM, stream=world.stream).synchronize()
"""
    done = run_script(source, 2, FAKE_NCCL_ERROR=f"{failing}:1", SHARDRT_TIMEOUT="200")
    assert done.returncode != 0
    failed = (
        rf"^\[{failing}\] rank {failing}: NCCL failed in #\d+ all_reduce float32 4 sum on 'world': NCCL_ERROR_REMOTE_ERROR: "
        r"remote process exited or there was a network error \(net.cc:1 NCCL WARN Connection closed\); ending the job"
    )
    assert re.search(failed, done.stderr, re.MULTILINE), done.stderr
    assert "waited" not in done.stderr


def made_by(source: str, size: int) -> list[str]:
    """What a job makes of NCCL's communicators, a line for each on each rank."""
    done = run_script(source, size, FAKE_NCCL_LOG="1")
    assert done.returncode == 0, done.stderr
    return re.findall(r"^fake NCCL: (.*)$", done.stderr, re.MULTILINE)


def test_a_model_makes_one_communicator_and_splits_the_others_from_it() -> None:
    """For gathers, reductions, and world.comm. The losses are those of a world whose ranks all have the same batch."""
    source = """
import torch
import shardrt
from shardrt.comm import NcclPolicy

world = shardrt.init("cuda", nccl=NcclPolicy(max_ctas=8))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3)).to(world.device)
shardrt.fully_shard(model)
optimizer, inp = torch.optim.SGD(model.parameters(), lr=0.1), torch.ones(2, 5, device=world.device)
for _ in range(2):
    loss = model(inp).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
assert torch.equal(world.mean(loss), loss.detach())
"""
    made = made_by(source, 2)
    assert sorted(made) == ["init 0 -2147483648 8 -2147483648"] * 2 + ["split"] * 4


def test_a_job_that_agrees_on_the_host_makes_no_communicator() -> None:
    source = """
import shardrt

world = shardrt.init("cuda")
assert world.mesh.exchange(world.rank) == [0, 1]
with world.comm.agree():
    pass
"""
    assert made_by(source, 2) == []
