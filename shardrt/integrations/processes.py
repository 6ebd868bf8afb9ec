"""What `accelerate.utils` and Accelerate's shared state do across processes, over the ranks of shardrt's world.

Accelerate's functions ask `PartialState` whether there are several processes, and then call torch.distributed. Programs import
them by name, often before the world is joined, so their code is replaced: where the state names shardrt as its backend, they
call the functions of this file; elsewhere they do what they did.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import operations, random, recursively_apply

from .. import comm
from ..comm import ReduceOp
from . import world as ranks

_BACKEND = "shardrt"
_OPERATIONS = {"sum": ReduceOp.SUM, "mean": ReduceOp.AVG, "max": ReduceOp.MAX}


def join_world(state: Any) -> None:
    """Give a state of Accelerate, or of a class derived from it, this process's rank and device."""
    _replace_all()
    world = comm.world()
    state.num_processes, state.process_index, state.local_process_index = world.size, world.rank, world.local_rank
    state.device, state.backend = world.device, _BACKEND


# ---------------------------------------------------------------------- the functions, by their names in accelerate.utils


def gather(tensor: Any) -> Any:
    """The ranks' tensors concatenated along dim 0, in which they may differ; a 0-dim tensor is one row. Collective."""
    return recursively_apply(ranks.gather_rows, tensor, error_on_other_type=True)


def gather_object(object: Any) -> list[Any]:
    """The items of all ranks' lists, in rank order. Collective."""
    return [item for part in comm.world().comm.exchange(object) for item in part]


def broadcast(tensor: Any, from_process: int = 0) -> Any:
    """The tensors of one rank, written into those of the others, of the same shapes and dtypes. Collective."""
    return recursively_apply(lambda one: ranks.broadcast(one, from_process), tensor, error_on_other_type=True)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """The objects of one rank, written into the lists of the others. Raises ValueError for no rank. Collective."""
    world = comm.world()
    if not 0 <= from_process < world.size:
        raise ValueError(
            f"broadcast_object_list on rank {world.rank}: expected from_process in 0..{world.size - 1}, found {from_process}"
        )
    sent = world.comm.exchange(object_list if world.rank == from_process else [])[from_process]
    object_list[: len(sent)] = sent
    return object_list


def gather_tensor_shape(tensor: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """The shape, as a column, and Accelerate's number of the dtype of the tensor that one rank has. Collective."""
    _, shape, dtype = _only_tensor(tensor)
    return torch.tensor(shape, dtype=torch.int, device=comm.world().device)[:, None], operations.TENSOR_TYPE_TO_INT[dtype]


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """The tensor that one rank has, and for which the others pass None. Collective."""
    owner, shape, dtype = _only_tensor(tensor)
    held = torch.empty(shape, dtype=dtype, device=comm.world().device) if tensor is None else tensor.detach().clone()
    return ranks.broadcast(held, owner)


def _only_tensor(tensor: torch.Tensor | None) -> tuple[int, torch.Size, torch.dtype]:
    """The rank that has a tensor, its shape and dtype. Raises ValueError if not exactly one rank has."""
    world = comm.world()
    given = world.comm.exchange(None if tensor is None else (world.rank, tensor.shape, tensor.dtype))
    found = [each for each in given if each is not None]
    if len(found) != 1:
        raise ValueError(
            f"copy_tensor_to_devices on rank {world.rank}: expected a tensor on one rank and None on the others, found "
            f"tensors on ranks {[each[0] for each in found]}"
        )
    return found[0]


def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
    """The sum, mean or maximum of the ranks' tensors, times `scale`; with "none", this rank's own. Collective."""
    if reduction == "none":
        return tensor
    if reduction not in _OPERATIONS:
        raise ValueError(
            f"reduce on rank {comm.world().rank}: expected one of {', '.join(_OPERATIONS)} or none, found '{reduction}'"
        )

    def reduce_one(one: torch.Tensor) -> torch.Tensor:
        reduced = ranks.reduce(one, _OPERATIONS[reduction])
        return reduced if scale == 1 else reduced * scale

    return recursively_apply(reduce_one, tensor, error_on_other_type=True)


def synchronize_rng_state(rng_type: Any = None, generator: torch.Generator | None = None) -> None:
    """Give every rank the random state of rank 0. Collective."""
    drawn = {"torch": torch, "cuda": torch.cuda}.get(str(getattr(rng_type, "value", rng_type)))
    if drawn is not None:
        drawn.set_rng_state(comm.world().comm.exchange(drawn.get_rng_state())[0])
    elif generator is not None:
        generator.set_state(comm.world().comm.exchange(generator.get_state())[0])
    else:
        raise ValueError(
            f"synchronize_rng_state on rank {comm.world().rank}: expected 'torch', 'cuda' or a generator, found {rng_type!r}"
        )


def _wait_for_everyone(state: Any) -> None:
    comm.world().barrier()


def _use_distributed(state: Any) -> bool:
    return comm.world().size > 1


# ---------------------------------------------------------------------- in the place of Accelerate's


def _call_own(*args: Any, _own: Callable[..., Any], **options: Any) -> Any:
    return _own(*args, **options)


def replace(function: Any, own: Callable[..., Any]) -> None:
    """Let `function`, under all names it was imported by, call `own` where the state has joined the world."""
    function = inspect.unwrap(function)
    plain = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)

    def choose(*args: Any, **options: Any) -> Any:
        joined = PartialState._shared_state.get("backend") == _BACKEND
        return (own if joined else plain)(*args, **options)

    function.__signature__ = inspect.signature(function)
    function.__code__, function.__defaults__, function.__kwdefaults__ = _call_own.__code__, None, {"_own": choose}


@functools.cache
def _replace_all() -> None:
    for own in gather, gather_object, broadcast, broadcast_object_list, gather_tensor_shape, copy_tensor_to_devices, reduce:
        replace(getattr(operations, own.__name__), own)
    replace(random.synchronize_rng_state, synchronize_rng_state)
    replace(PartialState.wait_for_everyone, _wait_for_everyone)
    replace(PartialState.use_distributed.fget, _use_distributed)
