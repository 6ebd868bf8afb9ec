"""A rank of a test job: runs the bodies that it receives until the connection closes. Started by `ranks.Job`.

With SHARDRT_TEST_BUCKET_BYTES=1 every group is a large one, gathered and reduced by itself, as those of real models are.
With SHARDRT_TEST_DEVICE=cuda each rank uses a GPU; under fake_cuda/run.py, a race between streams fails the test.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Client
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import shardrt
from shardrt.fsdp.memory import context

FACTORIES = (torch.rand, torch.randint, torch.randn, torch.randperm)


def main() -> None:
    """Connect, then run bodies and answer None or a traceback for each."""
    address, folder = sys.argv[1:]
    device = os.environ.get("SHARDRT_TEST_DEVICE", "cpu")
    world = shardrt.init(device)
    torch.set_num_threads(1)
    context.BUCKET_BYTES = int(os.environ.get("SHARDRT_TEST_BUCKET_BYTES", context.BUCKET_BYTES))
    with open(os.path.join(folder, f"stacks-{world.rank}"), "w") as stacks, Client(address) as connection:
        faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)
        connection.send((world.rank, os.getpid()))
        while True:
            try:
                module, body, parameters = connection.recv()
            except EOFError:
                return
            torch.manual_seed(0)
            try:
                with patches_undone(parameters), tensors_on(world.device):
                    getattr(importlib.import_module(module), body).__wrapped__(world, **parameters)
                if races := take_races():
                    raise AssertionError(f"streams have raced:\n{races}")
                connection.send(None)
            except BaseException:
                connection.send(traceback.format_exc() + take_races())


@contextmanager
def patches_undone(parameters: dict[str, Any]) -> Iterator[None]:
    """Undo at the end of a body what it patches with its copy of the `monkeypatch` fixture: other bodies follow."""
    try:
        yield
    finally:
        for value in parameters.values():
            if isinstance(value, pytest.MonkeyPatch):
                value.undo()


@contextmanager
def tensors_on(device: torch.device) -> Iterator[None]:
    """Let a body that names no device make its tensors there."""
    if device.type == "cpu":
        yield
    else:
        with device, HostsNumbers(device):
            yield


class HostsNumbers(TorchFunctionMode):
    """Tensors of a generator of the host are drawn there, then moved: a GPU's kernels refuse such a generator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        generator = given.get("generator")
        if generator is None or generator.device.type != "cpu" or given.get("device") is not None or func not in FACTORIES:
            return func(*args, **given)
        return func(*args, **given, device="cpu").to(self._device)


def take_races() -> str:
    """The races between streams since the last call, one per line; empty unless fake_cuda/run.py watches."""
    return str(importlib.import_module("sitecustomize").races()) if "FAKE_GPUS" in os.environ else ""


if __name__ == "__main__":
    main()
