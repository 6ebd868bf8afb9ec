"""Checks of the arguments of a collective. Messages name the communicator, what was expected, what was found, and the fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch

from ..core.calls import FLOATS, REDUCIBLE, Op, PreMulSum, ReduceOp
from .control import ControlPlane


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or an alias that no autograd knows, and that a thread outside `torch.inference_mode` may write to."""
    if tensor.is_inference():
        with torch.inference_mode(False):
            made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return made.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor.detach() if tensor.requires_grad else tensor


def raise_bad_tensors(comm: ControlPlane, name: str, out: torch.Tensor, inp: torch.Tensor) -> NoReturn:
    """Raise RuntimeError if `comm` is closed, else ValueError for the device, layout or dtype that is wrong."""
    comm.check_open(name)
    for role, tensor in (("out", out), ("inp", inp)):
        if tensor.device != comm.device:
            raise ValueError(f"{name} on {comm}: {role} is on {tensor.device}; move it to {comm.device}")
        if not tensor.is_contiguous():
            layout = f"shape {tuple(tensor.shape)}, strides {tensor.stride()}"
            raise ValueError(f"{name} on {comm}: {role} is not contiguous ({layout}); call .contiguous()")
    raise ValueError(f"{name} on {comm}: out is {out.dtype}, inp is {inp.dtype}; expected one dtype")


def check_reducible(comm: ControlPlane, name: str, dtype: torch.dtype, op: Op) -> None:
    """Raise ValueError for an `op` that is not defined for the dtype, and a dtype that the backend cannot reduce."""
    if dtype not in REDUCIBLE:
        raise ValueError(f"{name} on {comm}: {dtype} cannot be reduced; expected one of {_names(REDUCIBLE)}")
    if dtype not in FLOATS and (op is ReduceOp.AVG or isinstance(op, PreMulSum)):
        raise ValueError(f"{name} on {comm}: {op} of {dtype} is not defined; use SUM, or one of {_names(FLOATS)}")
    if dtype not in comm.backend.reducible:
        raise ValueError(f"{name} on {comm}: {comm.backend.library} cannot reduce {dtype}; widen it first")


def check_linear(comm: ControlPlane, name: str, dtype: torch.dtype, op: Op) -> None:
    """Raise ValueError for an `op` that complex numbers do not have, or that does not treat their two parts apart."""
    if op not in (ReduceOp.SUM, ReduceOp.AVG) and not isinstance(op, PreMulSum):
        raise ValueError(f"{name} on {comm}: {op} of {dtype} is not defined; use SUM or AVG")


def raise_bad_size(comm: ControlPlane, name: str, tensor: torch.Tensor, other: torch.Tensor, formula: str) -> NoReturn:
    """Raise ValueError for two tensors whose sizes do not match the formula."""
    sizes = f"{tensor.numel()} against {other.numel()} elements with N = {comm.size}"
    raise ValueError(f"{name} on {comm}: expected {formula}, found {sizes}")


def check_rank(comm: ControlPlane, name: str, role: str, rank: int) -> None:
    """Raise ValueError unless `rank` is one of the communicator."""
    if not 0 <= rank < comm.size:
        raise ValueError(f"{name} on {comm}: {role} {rank} is not a rank; expected 0 <= {role} < {comm.size}")


def check_peer(comm: ControlPlane, name: str, role: str, rank: int, in_group: bool) -> None:
    """Raise ValueError unless `rank` is one of the communicator, and another one outside of a group."""
    check_rank(comm, name, role, rank)
    if rank == comm.rank and not in_group:
        raise ValueError(f"{name} on {comm}: {role} is this rank itself; outside a group() the call would wait for ever")


def tensor_of_root(comm: ControlPlane, root: int, name: str, role: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    """`tensor` on the root, None elsewhere. Raises ValueError for a root that is not a rank, or has no tensor."""
    check_rank(comm, name, "root", root)
    if comm.rank == root and tensor is None:
        raise ValueError(f"{name} on {comm}: this rank is the root, but {role} is None; give it a tensor")
    return tensor if comm.rank == root else None


def checked_counts(comm: ControlPlane, role: str, tensor: torch.Tensor, counts: Sequence[int] | None) -> tuple[int, ...]:
    """The counts of an all-to-all as a tuple. Raises ValueError unless they add up to the tensor's elements."""
    counts = () if counts is None else counts
    if len(counts) != comm.size or min(counts) < 0 or sum(counts) != tensor.numel():
        raise ValueError(
            f"all_to_all on {comm}: expected {comm.size} {role}_counts, none below 0, that add up to the "
            f"{tensor.numel()} elements there; found {list(counts)}, which add up to {sum(counts)}"
        )
    return tuple(counts)


def _names(dtypes: frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
