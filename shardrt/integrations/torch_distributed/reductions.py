"""Reductions by torch's operations: a communicator's, and those of bits, of which the terms are sent and combined here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce

import torch

from ...comm import Communicator, Stream
from ...comm.core.calls import Op
from .contiguous import Staging

Bitwise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def all_reduced(comm: Communicator, stream: Stream, staging: Staging, buffer: torch.Tensor, op: Op | Bitwise) -> None:
    """Reduce `buffer` over the ranks, in place."""
    if not callable(op):
        comm.all_reduce(buffer, buffer, op, stream=stream)
        return
    terms = staging.new(comm.size * buffer.numel(), buffer)
    comm.all_gather(terms, buffer, stream=stream)
    stream.submit(partial(_combine, buffer, terms, op))


def reduced(comm: Communicator, stream: Stream, staging: Staging, buffer: torch.Tensor, op: Op | Bitwise, root: int) -> None:
    """Reduce `buffer` over the ranks, in place on rank `root`."""
    is_root = comm.rank == root
    if not callable(op):
        comm.reduce(buffer if is_root else None, buffer, op, root, stream=stream)
        return
    terms = staging.new(comm.size * buffer.numel(), buffer) if is_root else None
    comm.gather(terms, buffer, root, stream=stream)
    if terms is not None:
        stream.submit(partial(_combine, buffer, terms, op))


def reduce_scattered(
    comm: Communicator, stream: Stream, staging: Staging, out: torch.Tensor, inp: torch.Tensor, op: Op | Bitwise
) -> None:
    """Block r of `inp`, reduced over the ranks, in `out` on rank r."""
    if not callable(op):
        comm.reduce_scatter(out, inp, op, stream=stream)
        return
    terms = staging.new(inp.numel(), inp)
    comm.all_to_all(terms, inp, stream=stream)
    stream.submit(partial(_combine, out, terms, op))


@torch.no_grad()
def _combine(out: torch.Tensor, terms: torch.Tensor, op: Bitwise) -> None:
    """terms: the ranks', one after the other."""
    out.copy_(reduce(op, terms.view(-1, *out.shape).unbind()) if out.numel() else out)
