"""What the ranks of a job do for each fault; `faults.py` says what the job must do then."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # --help lists the faults without torch: what follows imports it when it acts
    import torch

    from ... import Communicator, Stream, World

SLEEP_S = 1.0  # that a slow rank sleeps
FAR_S = 40.0  # that a rank sleeps which does not come in time
NOBODY_READS_S = 0.5  # after which a full pipe counts as unread
MOST_NBYTES = 16 << 20  # to write until it is full; Open MPI's mpirun keeps in memory what nobody reads


def fail(message: str = "injected") -> None:
    raise ValueError(message)


def kill(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def libc(name: str, *arguments: int) -> Callable[[], object]:
    return lambda: getattr(ctypes.CDLL(None), name)(*arguments)


def hold_gil() -> None:
    mutex = ctypes.create_string_buffer(64)
    for _ in range(2):  # the second lock waits for ever; sleep() would end on a signal
        ctypes.PyDLL(None).pthread_mutex_lock(mutex)


def raise_in_thread() -> None:
    threading.Thread(target=fail, args=("injected caf\udce9",), name="fault").start()
    time.sleep(FAR_S)


def raise_unread() -> None:
    os.set_blocking(2, False)
    full = time.monotonic() + NOBODY_READS_S
    left = MOST_NBYTES
    while time.monotonic() < full and left > 0:
        with suppress(BlockingIOError):
            left -= os.write(2, b"x" * 4096)
            full = time.monotonic() + NOBODY_READS_S
    os.set_blocking(2, True)
    fail()


def set_variable(name: str, value: str) -> Callable[[], None]:
    return lambda: os.environ.update({name: value})


def set_torch_version() -> None:
    import torch

    torch.__version__ = torch.torch_version.TorchVersion("0.0.1")


# ---------------------------------------------------------------------- acts of When.CALL


@dataclass(frozen=True, slots=True)
class Scene:
    """What an act of `When.CALL` gets, on every rank alike."""

    world: World
    comm: Communicator  # of all ranks, for this act
    stream: Stream
    is_victim: bool

    def zeros(self, n: int) -> torch.Tensor:
        import torch

        return torch.zeros(n, device=self.comm.device)

    def all_reduce(self, n: int) -> None:
        from ... import ReduceOp

        ones = self.zeros(n) + 1.0
        self.comm.all_reduce(ones, ones, ReduceOp.SUM, stream=self.stream).synchronize()


def mismatch(scene: Scene) -> None:
    scene.all_reduce(8 + scene.is_victim)


def skip(scene: Scene) -> None:
    if not scene.is_victim:
        scene.all_reduce(4)
    scene.all_reduce(8)


def send_other_size(scene: Scene) -> None:
    """Every two ranks send to each other; the victim sends and expects more. Only a rank that receives is sure to raise."""
    comm, n = scene.comm, 8 + scene.is_victim
    with comm.group() as work:
        for peer in range(comm.size):
            if peer != comm.rank:
                comm.send(scene.zeros(n), peer, stream=scene.stream)
                comm.recv(scene.zeros(n), peer, stream=scene.stream)
    work.synchronize()


def send_other_counts(scene: Scene) -> None:
    comm = scene.comm
    sent, received = [2 + scene.is_victim] * comm.size, [2] * comm.size
    out, inp = (scene.zeros(sum(counts)) for counts in (received, sent))
    comm.all_to_all(out, inp, received, sent, stream=scene.stream).synchronize()


def fail_in_agree(scene: Scene) -> None:
    with scene.world.comm.agree():
        if scene.is_victim:
            fail()
        scene.all_reduce(8)
