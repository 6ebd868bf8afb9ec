"""Checks: that heads can be split, and that the ranks of a tensor parallel axis are given the same data.

Tensor parallel ranks work on one batch together. The first forward of a model compares the data that they feed to it;
SHARDRT_CHECK_BATCHES=0 turns this off.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections.abc import Sequence
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, NoReturn

import torch
from torch import nn

from ...comm import world
from ...comm.core.fingerprint import fingerprint_of
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.placement.placement import Replicate, Shard
from ...torch_internals import Node, current_backward, queue_backward_callback, tree_leaves
from ..boundaries.axis import Axis, Part, parts

_OUTPUT = "the output of"
_HEADS = ("head", "heads", "n_head", "n_heads", "num_heads", "num_attention_heads", "nhead")
_KEY_HEADS = ("n_kv_head", "n_kv_heads", "num_key_value_heads", "num_kv_heads", "kv_heads")
_PROJECTION = re.compile(r"(^|_)w?(q|k|v|query|key|value)(_|$)")


def whole_heads(parent: nn.Module, name: str, layer: nn.Linear, size: int) -> None:
    """Raise ValueError if a projection to queries, keys or values would have its heads cut by `size` ranks.

    name: the layer's; its last part, such as "q_proj", "wk" or "value", says what it is. The number of heads is looked for
    among the attributes of `parent`, which has the layer; other layers, and parents without one, are not checked.
    """
    found = _PROJECTION.search(name.rpartition(".")[2])
    if found is None:
        return
    keys = found[2] in ("k", "v", "key", "value")
    names = [*(_KEY_HEADS if keys else ()), *_HEADS]
    heads = next((value for name in names if type(value := vars(parent).get(name)) is int and value > 0), None)
    if heads is None or layer.out_features % heads:
        return
    width = layer.out_features // heads
    cut = parts(layer.out_features, size)
    if any(rows % width for rows in cut):
        raise ValueError(
            f"'{name}' has {heads} heads of {width} features, which {size} ranks would cut into parts of {cut}: expected whole "
            "heads on each rank; use a mesh whose size divides the number of heads"
        )


def same_data(axis: Axis, value: Any, name: str) -> None:
    """Raise ValueError on every rank unless data that is declared to be replicated is the same on all. Collective.

    Data are plain tensors that no operation of autograd made, and that need no gradient.
    """
    if axis.size == 1 or type(value) is DTensor or not isinstance(value, torch.Tensor) or not world().settings.check_batches:
        return
    if not (value.requires_grad or value.is_meta) and (torch.is_grad_enabled() or not value.is_floating_point()):
        found = axis.comm.compare(_digest(value), lambda: _text(value))
        if found is not None:
            _raise(axis, f"the input of '{name}'", found)


def same_tokens(axis: Axis, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise ValueError on every rank unless the outermost module gets the same on all: which tensors, and integers in them.

    The integers are not compared where an embedding takes its tokens sharded. Collective: one comparison.
    """
    if axis.size == 1 or not world().settings.check_batches:
        return
    values = not _takes_parts(module)
    named = [*((str(index), arg) for index, arg in enumerate(args)), *((repr(key), kwargs[key]) for key in sorted(kwargs))]
    mine = [(name, *_described(leaf, values)) for name, arg in named for leaf in tree_leaves(arg) if torch.is_tensor(leaf)]
    if (found := axis.comm.compare(fingerprint_of(repr(mine)), lambda: mine)) is not None:
        differing = next(tensors for tensors in zip_longest(*found) if len(set(tensors)) > 1)
        name = next(tensor[0] for tensor in differing if tensor is not None)
        texts = ["no tensor" if tensor is None or tensor[0] != name else tensor[1] for tensor in differing]
        _raise(axis, f"argument {name} of the parallelized {type(module).__name__}", texts)


class FirstGradients:
    """The first gradients of parameters that are replicated, which must be the same on all ranks; compared once.

    Cost: for each a product with a vector, which the ranks exchange when the backward ends.
    """

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._handles: dict[str, Any] = {}  # by name; None once a gradient was compared
        # Of each backward that runs, which may be inside of another one: projections of gradients, and their eps.
        self._seen: dict[int, dict[str, tuple[torch.Tensor, float]]] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> FirstGradients:
        return FirstGradients(self._axis)

    def watch(self, leaves: dict[str, torch.Tensor]) -> None:
        """Compare the first gradients of these leaves, by name, in backwards that are to come. Alike on all ranks."""
        for name, leaf in leaves.items() if world().settings.check_batches else ():
            if name not in self._handles:
                self._handles[name] = leaf.register_hook(functools.partial(self._see, name))

    def watch_outputs(self, nodes: dict[Node, str]) -> None:
        """Compare the gradients that arrive at the first outputs of nodes, by what these are of, while their graph lives."""
        for node, subject in nodes.items() if world().settings.check_batches else ():
            node.register_prehook(functools.partial(self._see_output, f"{_OUTPUT} {subject or 'a boundary'}"))

    def _see_output(self, name: str, grads: Sequence[torch.Tensor | None]) -> None:
        if grads[0] is not None:
            self._see(name, grads[0])

    def forget(self, name: str) -> None:
        """Compare no gradient of this leaf."""
        if (handle := self._handles.get(name)) is not None:
            handle.remove()
        self._handles[name] = None

    def _see(self, name: str, grad: torch.Tensor) -> None:
        if grad.layout is not torch.strided or isinstance(grad, DTensor):
            return
        running = current_backward()
        if running not in self._seen:
            self._seen[running] = {}
            queue_backward_callback(functools.partial(self._compare, running))
        with torch.no_grad():
            self._seen[running][name] = _projection(grad.detach()), torch.finfo(grad.dtype).eps

    @torch.no_grad()
    def _compare(self, running: int) -> None:
        seen = dict(sorted(self._seen.pop(running).items()))
        own = torch.cat([vector for vector, _ in seen.values()])
        shape = torch.Size((self._axis.size, *own.shape))
        gathered = self._axis.changed(Part(own[None], Shard(0), shape), Replicate())
        all_ranks = gathered.split([vector.numel() for vector, _ in seen.values()], 1)
        sizes = torch.stack([part.norm(dim=1).max() for part in all_ranks])
        differences = torch.stack([(part - part[0]).norm(dim=1).max() for part in all_ranks])
        differing = []
        scale = float(sizes.max())
        for (name, (_, eps)), size, difference in zip(seen.items(), sizes.tolist(), differences.tolist(), strict=True):
            if math.isfinite(size):  # else a later one is compared: mixed precision skips this step
                self.forget(name)
            if difference > eps**0.5 * size and difference > eps * scale:
                differing.append(name)
        if outputs := [name for name in differing if name.startswith(_OUTPUT)]:
            raise ValueError(
                f"the gradients of {', '.join(outputs)} differ between the ranks of {self._axis.mesh} (here rank "
                f"{self._axis.rank}): expected the same on each, since it is replicated. A rank has a term of the gradient "
                "where what is computed from replicated activations meets split ones, such as keys that no style splits the "
                "queries of the rank's own heads: split both, over as many ranks as there are heads of keys, or none "
                "(SHARDRT_CHECK_BATCHES=0 turns this check off)"
            )
        if differing:
            owner, _, name = differing[0].rpartition(".")
            raise ValueError(
                f"the gradients of {', '.join(map(repr, differing))} differ between the ranks of {self._axis.mesh} (here rank "
                f"{self._axis.rank}): expected the same on each, since no style names them. A rank has a term of the gradient "
                "where a parameter is used on activations that are split, such as on the rank's own heads. If all its uses are "
                f"so, name it in the plan ('{owner}': SummedGradients('{name}')); if some are not, use another parameter for "
                "those. Call the module that parallelize_module was given, not a part of it by itself "
                "(SHARDRT_CHECK_BATCHES=0 turns this check off)"
            )


def _projection(grad: torch.Tensor) -> torch.Tensor:
    """A vector (last dim,) in float64 that tells gradients apart: the rows, by weights that no structure of a model has."""
    grad = torch.view_as_real(grad) if grad.is_complex() else grad
    rows = grad.reshape(-1, grad.shape[-1]) if grad.dim() > 1 else grad.reshape(1, -1)
    weights = torch.arange(1, rows.shape[0] + 1, dtype=torch.float32, device=rows.device).cos_().to(rows.dtype)
    return (weights @ rows).double()


def _described(value: torch.Tensor, values: bool) -> tuple[str, int]:
    """What has to be the same on all ranks: a text, and a digest of the numbers. Parts of a sequence may differ in size."""
    if values and type(value) is torch.Tensor and not (value.is_floating_point() or value.is_meta):
        return _text(value), _digest(value)
    return f"a {type(value).__name__} of {value.dtype}", 0


def _takes_parts(module: nn.Module) -> bool:
    embeddings = (child for child in module.modules() if isinstance(child, nn.Embedding))
    styles = (getattr(vars(child).get("tp_state"), "style", None) for child in embeddings)
    return any(isinstance(getattr(style, "source", None), Shard) for style in styles)


def _text(value: torch.Tensor) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}"


def _digest(value: torch.Tensor) -> int:
    host = value.detach().cpu().contiguous()
    digest = blake2b(_text(value).encode(), digest_size=8)
    digest.update(ctypes.string_at(host.data_ptr(), host.nbytes))  # `numpy()` would do, but needs NumPy
    return int.from_bytes(digest.digest()) >> 1


def _raise(axis: Axis, what: str, found: list[str]) -> NoReturn:
    shapes = f"shapes and dtypes: {', '.join(found)}" if len(set(found)) > 1 else f"{found[0]}, other values"
    raise ValueError(
        f"{what} differs between the ranks of {axis.mesh} ({shapes}): tensor parallel ranks work on one batch; let the "
        "data parallel coordinate choose the rows (SHARDRT_CHECK_BATCHES=0 turns this check off)"
    )
