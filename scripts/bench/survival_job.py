"""The job of survival.py: an MLP that trains in a `Run`, and whose ranks lose themselves at given moments.

Each rank appends to FOLDER/events-RANK, as JSON lines: when it comes to its fault, and each step it has done, with the time and
the number of ranks; at the end the hash of the parameters.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import torch

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from shardrt.comm import Communicator
from shardrt.parallel import ColwiseParallel, parallelize_module

WAYS: dict[str, Callable[[], object]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "exit": lambda: os._exit(3),
    "raise": lambda: raise_(ValueError("injected")),
    "segfault": lambda: ctypes.string_at(0),
}


def raise_(error: Exception) -> None:
    raise error


class Fault:
    """One rank, by its number at the start, and what becomes of it some milliseconds after the begin of a step.

    "raise" takes effect where the rank makes its next call; what else there is, in the middle of anything.
    """

    def __init__(self, text: str) -> None:
        rank, way, step, ms = text.split(":")
        self.rank, self.way, self.step, self.ms = int(rank), way, int(step), float(ms)
        self.is_due = False
        self._thread: threading.Thread | None = None

    def begin(self, step: int, note: Callable[..., None]) -> None:
        """This step begins on the rank."""
        if step != self.step or self._thread is not None:
            return

        def act() -> None:
            time.sleep(self.ms / 1000)
            note(fault=self.way)
            if self.way == "raise":
                self.is_due = True
            else:
                WAYS[self.way]()

        self._thread = threading.Thread(target=act, name="fault", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until it has happened, if it has begun."""
        if self._thread is not None:
            self._thread.join()


def take_own_memory() -> None:
    """Let this process see a /dev/shm of its own, empty, and be a node of its own, for shardrt and for Open MPI."""
    libc, (new_namespace, private) = ctypes.CDLL(None, use_errno=True), (0x20000, 0x44000)
    memory = (b"none", b"/dev/shm", b"tmpfs", 0, None)
    if libc.unshare(new_namespace) or libc.mount(b"none", b"/", None, private, None) or libc.mount(*memory):
        raise OSError(ctypes.get_errno(), "cannot make a mount namespace, which needs root")
    os.environ |= {"SHARDRT_RANKS_PER_NODE": "1", "OMPI_MCA_btl": "self,tcp"}


class Events:
    """What this rank does, and when."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", buffering=1)

    def note(self, **what: object) -> None:
        self._file.write(json.dumps({"time": time.time(), **what}) + "\n")


def build(options: argparse.Namespace, world: shardrt.World) -> dict[str, Any]:
    """The model, without values, and its optimizer, on the world that there is."""
    with torch.device("meta"):
        layers = [torch.nn.Linear(options.width, options.width) for _ in range(options.layers)]
        model = torch.nn.Sequential(*(torch.nn.Sequential(layer, torch.nn.GELU()) for layer in layers))
    mesh = world.mesh
    if options.mesh == "hsdp" and world.size % 2 == 0:
        mesh = mesh.unflatten((2, world.size // 2), ("replicate", "shard"))
    elif options.mesh == "tp":
        both = mesh.unflatten((world.size // 2, 2), ("dp", "tp"))
        mesh = both["dp"]
        plan = {"*.0": ColwiseParallel(output_layouts=shardrt.Replicate())}
        parallelize_module(model, both["tp"], plan)
    for block in model:
        shardrt.fully_shard(block, mesh=mesh)
    shardrt.fully_shard(model, mesh=mesh)
    model.to_empty(device=world.device)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)}


def initialize(model: torch.nn.Module, width: int) -> None:
    """The same values on any number of ranks. Where they are loaded, nothing needs them."""
    for number, parameter in enumerate(model.parameters()):
        assert isinstance(parameter, shardrt.DTensor)
        generator = torch.Generator().manual_seed(number)
        whole = torch.empty(parameter.shape).uniform_(-1, 1, generator=generator) / width**0.5
        parameter.data.copy_(shardrt.distribute_tensor(whole, parameter.device_mesh, parameter.placements))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--copies", type=int, default=0)
    parser.add_argument("--survive", action="store_true")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a step takes longer")
    parser.add_argument("--mesh", choices=("flat", "hsdp", "tp"), default="flat")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--fault", type=Fault, action="append", default=[])
    parser.add_argument("--apart", action="store_true", help="a /dev/shm for each rank, as on nodes of their own; needs root")
    options = parser.parse_args()
    if options.apart:
        take_own_memory()
    group = 2 if options.mesh == "tp" else 1  # ranks with the same batch
    world = shardrt.init(options.device)
    own = world.rank
    path = options.folder / f"events-{own}"
    has_failed = path.exists() and '"fault"' in path.read_text()  # in a start before this one
    events = Events(path)
    faults = [fault for fault in options.fault if fault.rank == own and not has_failed]
    if any(fault.way == "raise" for fault in faults):
        raise_in_calls(tuple(faults))

    def step(index: int) -> None:
        here = shardrt.comm.world()
        time.sleep(options.pause)
        for fault in faults:
            fault.begin(index, events.note)
            if index == options.steps - 1:  # what comes after the last step is no part of the run
                fault.wait()
        generator = torch.Generator().manual_seed(index)
        parts = here.size // group
        rows = torch.randn(options.rows, options.width, generator=generator).chunk(parts)[here.rank // group]
        rows = rows.to(here.device)
        loss = (run.state["model"](rows) - rows.sin()).square().mean()
        loss.backward()
        run.state["optimizer"].step()
        run.state["optimizer"].zero_grad()
        events.note(step=index, ranks=here.size, loss=here.mean(loss.detach()).item())

    survive = shardrt.Survival(copies_every=options.copies or None, group=group) if options.survive else None
    with shardrt.Run(options.folder / "run", lambda world: build(options, world), options.every, survive=survive) as run:
        if run.done == 0:
            initialize(run.state["model"], options.width)
        events.note(begun=run.done, pid=os.getpid())
        with shardrt.Timeline(options.folder / "traces") if options.timeline else nullcontext():
            run.train(options.steps, step)
        digest = hashlib.sha256()
        for value in shardrt.checkpoint.get_model_state_dict(
            run.state["model"], options=shardrt.checkpoint.StateDictOptions(full_state_dict=True)
        ).values():
            digest.update(value.cpu().numpy().tobytes())
        events.note(digest=digest.hexdigest(), ranks=shardrt.comm.world().size)


def raise_in_calls(faults: tuple[Fault, ...]) -> None:
    """Let the next call of a communicator raise when a fault is due."""
    run = Communicator._run

    def raising(comm: Communicator, *arguments: Any) -> None:
        for fault in faults:
            if fault.is_due:
                WAYS["raise"]()
        run(comm, *arguments)

    Communicator._run = raising  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main()
