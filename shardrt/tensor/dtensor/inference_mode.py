"""Inside of `torch.inference_mode()`, sharded tensors are made and read as under `torch.no_grad()`.

torch lets nobody write to an inference tensor outside of the mode, nor train with it, and a view of an ordinary tensor has to
be an ordinary one. So a `DTensor` and its local shard are never inference tensors, unless the user gives such a local tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ...torch_internals import tree_leaves


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave inference mode for the block, or for the calls of a decorated function. Gradients stay off. Cost: 2 us."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False), torch.no_grad():
            yield
    else:
        yield


def overwrite(tensor: torch.Tensor, values: torch.Tensor) -> None:
    """`tensor.copy_(values)`, also of one that was made in inference mode, which only the mode allows."""
    with torch.inference_mode() if tensor.is_inference() else nullcontext():
        tensor.copy_(values)


def run_in_inference_mode(rule: Callable[..., Any], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation outside of the mode; in it, by the rule, if it may write to an inference tensor.

    Outside, it is called anew: in the mode, operations that consist of others, such as `matmul`, are not taken apart.
    """
    tensors = (getattr(value, "_local_tensor", value) for value in tree_leaves((args, kwargs)))
    if func._schema.is_mutable and any(isinstance(tensor, torch.Tensor) and tensor.is_inference() for tensor in tensors):
        return rule(func, args, kwargs)
    with outside_inference_mode():
        return func(*args, **kwargs)
