"""A table of the memory that each group of a sharded model uses on this rank."""

from __future__ import annotations

from contextlib import closing

import torch
from torch import nn

from ..fsdp.api.module import FSDPModule
from ..fsdp.memory.buffers import allocated_buffers
from ..fsdp.schedule.param_group import ParamGroup
from ..fsdp.schedule.runtime import packed_nbytes
from .account import MemoryAccount
from .devices import measuring
from .parts import Claim, Use

_HEAD = ("group", "ranks", "parameters", "shard", "gathered", "gradients", "padding", "now")


def memory_summary(model: nn.Module, account: MemoryAccount | None = None) -> str:
    """A table of `model`'s groups: the memory of each on this rank. Below, the buffers in use now and their peak, and all
    memory of the process, or of the GPU.

    account: one that has ended. Then the last lines are its table: what the peak of the process consisted of.

    shard: bytes that stay.   gathered: bytes of full parameters while gathered, and the codes that they are gathered as; none
    where a single rank computes with its shards.
    gradients: bytes packed for one reduction if all parameters are trainable (a single shard rank packs into the sharded
    gradients, or nothing).   padding: share of the gathered bytes.   now: sharded, or gathered.
    Raises ValueError for a model that is not sharded.
    """
    if not isinstance(model, FSDPModule):
        raise ValueError(f"memory_summary: '{type(model).__name__}' is not sharded; pass what fully_shard returned")
    root = model.param_group
    groups = list(root.with_descendants())
    rows = [_HEAD, *(_row(group) for group in groups)]
    total = sum(param.shape.numel() for group in groups for param in group.params)
    rows.append(("all", "", f"{total:,}", _size(sum(group.gather.shard_nbytes for group in groups)), "", "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    memory = None if root.runtime is None else root.runtime.memory
    used = "none yet" if memory is None else f"{_size(memory.in_use)} in use, {_size(memory.peak)} at most so far"
    lines.append(f"buffers for gathered parameters and gradients: {used}")
    return "\n".join([*lines, *(_process(root.mesh.device) if account is None else ["", account.table()])])


def _process(device: torch.device) -> list[str]:
    """The memory now, as far as it can be told without an account."""
    try:
        memory = measuring(device)
    except RuntimeError:  # a dry world
        return []
    with closing(memory):
        used = allocated_buffers(device)
        total, parts = memory.measure(Claim(Use(each.kind.value), each.storage.data_ptr(), each.nbytes) for each in used)
    of_which = f"{_size(parts[Use.HELD])} held by the allocator, {_size(parts[Use.WINDOWS])} of windows"
    return [f"{'GPU' if device.type == 'cuda' else 'process'}: {_size(total)}, of it {of_which}"]


def _row(group: ParamGroup) -> tuple[str, ...]:
    ranks = f"{group.mesh.size}" if group.replicas is None else f"{group.replicas.size} x {group.mesh.size}"
    numel = sum(param.shape.numel() for param in group.params)
    payload = sum(param.spec.nbytes for param in group.layout.placed)
    padding = f"{1 - payload / group.nbytes:.1%}" if group.params else ""
    state = "gathered" if group.state.gathered else "sharded"
    codes = "" if group.quantization.gather is None else f" of {str(group.quantization.gather).removeprefix('torch.')}"
    resident = group.gather.may_be_resident and group.settings.all_gather is None
    sizes = (_size(group.gather.shard_nbytes), _size(0 if resident else group.nbytes) + codes, _size(packed_nbytes(group)))
    return (group.name, ranks, f"{numel:,}", *sizes, padding, state)


def _size(nbytes: int) -> str:
    size, unit = float(nbytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{nbytes} B" if unit == "B" else f"{size:.2f} {unit}"
