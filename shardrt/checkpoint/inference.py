"""Saves and loads inside of `torch.inference_mode()`, in which a sharded parameter has no `detach()`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def outside_inference_mode(modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Leave inference mode for the `with` block; not if tensors of these modules were made in it, which change in it alone.

    What is made in the block, such as optimizer state, can be trained afterwards.
    """
    inside = torch.is_inference_mode_enabled()
    if not inside or any(t.is_inference() for module in modules for t in (*module.parameters(), *module.buffers())):
        yield
    else:
        with torch.inference_mode(False), torch.no_grad():
            yield
