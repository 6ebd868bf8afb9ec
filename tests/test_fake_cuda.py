"""The stand-in for CUDA reports a race unless an event orders the two accesses. Runs only under fake_cuda/run.py."""

import importlib
import os

import pytest
import torch


@pytest.mark.skipif("FAKE_GPUS" not in os.environ, reason="runs under tests/fake_cuda/run.py")
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
