"""A rank of a test job: runs the bodies it is told to, until the connection closes. Started by `ranks.Job`."""

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


def main() -> None:
    """Connect, then run bodies and answer None or a traceback for each."""
    address, folder = sys.argv[1:]
    world = shardrt.init("cpu")
    torch.set_num_threads(1)
    with open(os.path.join(folder, f"stacks-{world.rank}"), "w") as stacks, Client(address) as connection:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        connection.send((world.rank, os.getpid()))
        while True:
            try:
                module, body, parameters = connection.recv()
            except EOFError:
                return
            torch.manual_seed(0)
            try:
                getattr(importlib.import_module(module), body).__wrapped__(world, **parameters)
                connection.send(None)
            except BaseException:
                connection.send(traceback.format_exc())


if __name__ == "__main__":
    main()
