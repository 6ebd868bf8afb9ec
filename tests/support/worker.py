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
from multiprocessing.connection import Client

import torch

import shardrt
from shardrt.fsdp.memory import context


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
                if device != "cpu":
                    torch.set_default_device(device)
                getattr(importlib.import_module(module), body).__wrapped__(world, **parameters)
                if races := take_races():
                    raise AssertionError(f"streams have raced:\n{races}")
                connection.send(None)
            except BaseException:
                connection.send(traceback.format_exc() + take_races())


def take_races() -> str:
    """The races between streams since the last call, one per line; empty unless fake_cuda/run.py watches."""
    return str(importlib.import_module("sitecustomize").races()) if "FAKE_GPUS" in os.environ else ""


if __name__ == "__main__":
    main()
