"""NCCL's symmetric windows for collectives (`FSDPModule.set_symm_mem_for_comm`).

A window is made once, by all ranks together, and stays; full parameters come and go, so they cannot lie in one. Their gathers
go through a window instead, as FSDP2's do: shard -> window, all-gather in place, window -> full parameters. Packed gradients of
large groups have memory that stays, the comm_buffer, which is made a window itself.

A window is a promise that all ranks give a call the same part of it (`Communicator.empty`). What keeps it: the ranks agree on
which groups asked; a layout is the same on all ranks, and begins where the window does; and which gradients lie in the buffer
follows from the order of calls alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from ..comm import Communicator, Stream, Work
from .buffers import CommBuffer

if TYPE_CHECKING:
    from .param_group import ParamGroup


class SymmetricGather:
    """An all-gather through a window. Gathers of one communicator follow each other on one stream, so they share it.

    Cost: the window, as large as the largest group that uses it; a group's bytes copied twice on the gather stream.
    """

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
    """Whether there is any use for a window: on GPUs, more than one."""
    return comm.device.type == "cuda" and comm.size > 1


def gathers(groups: Sequence[ParamGroup]) -> dict[ParamGroup, SymmetricGather]:
    """For each group that asked, and that has a use for it, how it gathers. Collective."""
    asked = [group for group in groups if group.settings.symmetric and group.stages and useful(group.gather_comm)]
    found = {}
    for comm in dict.fromkeys(group.gather_comm for group in asked):
        mine = [group for group in asked if group.gather_comm is comm]
        window = CommBuffer.of(comm, max(group.nbytes for group in mine), symmetric=True)
        gather = SymmetricGather(window.memory)
        found.update(dict.fromkeys(mine, gather))
    return found


def agree(root: ParamGroup, groups: Sequence[ParamGroup]) -> None:
    """RuntimeError, on every rank alike, unless all ranks asked for the same groups, none of which has custom collectives."""
    asked = [group.name for group in groups if group.settings.symmetric]
    answers = root.device_mesh.exchange(asked)
    if any(answer != answers[0] for answer in answers):
        found = "; ".join(f"rank {rank}: {names or 'none'}" for rank, names in enumerate(answers))
        raise RuntimeError(
            f"set_symm_mem_for_comm under '{root.name}': expected the same groups on all ranks, found {found}; a window is "
            "made by all ranks together: call it alike on all"
        )
    for group in groups:
        if group.settings.symmetric and (group.settings.all_gather or group.settings.reduce_scatter):
            raise RuntimeError(
                f"'{group.name}' has both set_symm_mem_for_comm and a custom collective, which allocates for itself: choose one"
            )
