"""NCCL's symmetric windows for collectives (`FSDPModule.set_symm_mem_for_comm`).

All ranks together make a window once, and it stays. Full parameters are allocated and freed in every step, so they cannot be
in a window. Their gathers go through one instead, as FSDP2's do: shard -> window, all-gather in place, window -> full
parameters. Packed gradients of large groups use memory that stays, a `CommBuffer`, which is made a window itself.

Invariant: all ranks give a call the same part of a window (`Communicator.empty`). It holds because the ranks agree on which
groups use windows; a layout is the same on all ranks, and begins where the window does; and the order of calls alone decides
which gradients are in the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...comm import Communicator, Stream, Work
from ..memory.buffers import CommBuffer
from .param_group import ParamGroup


class SymmetricGather:
    """An all-gather through a window. Gathers of one communicator run in order on one stream, so they share the window.

    Cost: the window, as large as the largest group that uses it; a group's bytes copied twice on the gather stream.
    """

    _window: torch.Tensor

    def __init__(self, window: torch.Tensor) -> None:
        self._window = window

    def __call__(self, out: torch.Tensor, inp: torch.Tensor, comm: Communicator, stream: Stream) -> Work:
        """Gather bytes as `comm.all_gather(out, inp, stream=stream)` does."""
        part, first = self._window[: out.numel()], comm.rank * inp.numel()
        own = part[first : first + inp.numel()]
        stream.submit(lambda: own.copy_(inp))
        comm.all_gather(part, own, stream=stream)
        stream.submit(lambda: out.copy_(part))
        return Work(stream.record())


def useful(comm: Communicator) -> bool:
    """Whether a window has any use on this communicator: it has one among several GPUs only."""
    return comm.device.type == "cuda" and comm.size > 1


def gathers(groups: Sequence[ParamGroup]) -> dict[ParamGroup, SymmetricGather]:
    """The all-gathers through windows, for the groups whose settings ask for one and that can use it. Collective."""
    chosen = [group for group in groups if group.settings.symmetric and group.gather.windowed and useful(group.gather_comm)]
    found = {}
    for comm in dict.fromkeys(group.gather_comm for group in chosen):
        mine = [group for group in chosen if group.gather_comm is comm]
        window = CommBuffer.of(comm, max(group.nbytes for group in mine), symmetric=True)
        gather = SymmetricGather(window.memory)
        found.update(dict.fromkeys(mine, gather))
    return found


def check_same_windows(root: ParamGroup, groups: Sequence[ParamGroup]) -> None:
    """Raise RuntimeError, on every rank alike, if ranks chose windows for different groups, or for one that cannot have them.

    That is a group with custom collectives, or with quantised ones.
    """
    chosen = [group.name for group in groups if group.settings.symmetric]
    answers = root.device_mesh.differing(chosen)
    if answers is not None:
        found = "; ".join(f"rank {rank}: {names or 'none'}" for rank, names in enumerate(answers))
        raise RuntimeError(
            f"set_symm_mem_for_comm under '{root.name}': expected the same groups on all ranks, found {found}; a window is "
            "made by all ranks together: call it alike on all"
        )
    for group in groups:
        if group.settings.symmetric and group.quantization:
            raise RuntimeError(f"'{group.name}' has both set_symm_mem_for_comm and a quantization_policy: choose one")
        if group.settings.symmetric and (group.settings.all_gather or group.settings.reduce_scatter):
            raise RuntimeError(
                f"'{group.name}' has both set_symm_mem_for_comm and a custom collective, which allocates for itself: choose one"
            )
