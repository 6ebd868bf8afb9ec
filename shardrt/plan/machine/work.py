"""What one of torch's operations does: floating-point operations and bytes, from its arguments and results.

An operation reads every tensor that it is given, and writes every tensor that it returns or changes, once. Floating-point
operations are those of torch's flop counter, which knows matrix multiplications, convolutions and attention.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from ...instruments.flops import FORMULAS
from ...torch_internals import OpOverload, aten_operator, tree_leaves


class OperationWork(NamedTuple):
    """What an operation does.

    flops: of matrices.   functions: elements of roots, exponentials and the like.   nbytes: read and written.
    dtype: of the arithmetic.   is_launched: a kernel runs.   scored: of the flops, those that fused attention spends time on:
    half of them under a causal mask.
    """

    flops: int
    nbytes: int
    dtype: torch.dtype
    is_launched: bool = True
    functions: int = 0
    scored: int = 0


_ATEN = torch.ops.aten
# Reads of the table that it looks up in no more than it returns.
_LOOKUPS = frozenset({_ATEN.embedding, _ATEN.gather, _ATEN.index, _ATEN.index_select})
_OVERWRITES = frozenset({_ATEN.copy_, _ATEN.fill_, _ATEN.zero_})
_FUNCTIONS = frozenset(
    aten_operator(name)
    for name in (
        *("sqrt", "rsqrt", "exp", "log", "sin", "cos", "tanh", "sigmoid", "erf"),
        *("gelu", "gelu_backward", "silu", "silu_backward"),
        *("_softmax", "_safe_softmax", "_log_softmax", "native_layer_norm", "native_layer_norm_backward"),
    )
)
_ALLOCATIONS = frozenset(
    {_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided, _ATEN.resize_, _ATEN.set_}
)
ALIASES = frozenset({aten_operator("_unsafe_view"), aten_operator("_reshape_alias")})


def work_of(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> OperationWork:
    """The work of one operation, as a TorchDispatchMode sees it. out: what it has returned."""
    packet = func.overloadpacket
    formula = FORMULAS.get(packet)
    # Hazard: attention has float32 statistics beside its matrices, the first of its arguments.
    dtype = _widest(_tensors((args, kwargs, out))) if formula is None else next(_tensors(args)).dtype
    if func.is_view or packet in ALIASES or packet in _ALLOCATIONS:
        return OperationWork(0, 0, dtype, is_launched=False)
    flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
    functions = next(_tensors(args)).numel() if packet in _FUNCTIONS else 0
    nbytes = _given_nbytes(func, args, kwargs, out) + _new_nbytes(func, out)
    return OperationWork(flops, nbytes, dtype, functions=functions, scored=_scored(func, args, kwargs, flops))


def _scored(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], flops: int) -> int:
    names = [argument.name for argument in func._schema.arguments]
    if not flops or "is_causal" not in names:
        return 0
    position = names.index("is_causal")
    is_causal = args[position] if position < len(args) else kwargs.get("is_causal", False)
    return flops // 2 if is_causal else flops


def _given_nbytes(func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> int:
    """Of the arguments, read or changed; both counts twice."""
    nbytes = 0
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        one_way = sum(map(_nbytes, _tensors(value)))
        if position == 0 and func.overloadpacket in _LOOKUPS:
            one_way = sum(map(_nbytes, _tensors(out)))
        is_changed = argument.alias_info is not None and argument.alias_info.is_write
        is_read = not (argument.is_out or (position == 0 and func.overloadpacket in _OVERWRITES))
        nbytes += one_way * (is_changed + is_read)
    return nbytes


def _new_nbytes(func: OpOverload, out: object) -> int:
    """Of the results, without those that are arguments."""
    outs = out if isinstance(out, (tuple, list)) else (out,)
    returns = func._schema.returns
    aliases = [each.alias_info is not None for each in returns] if len(returns) == len(outs) else [False] * len(outs)
    return sum(sum(map(_nbytes, _tensors(each))) for each, is_alias in zip(outs, aliases, strict=True) if not is_alias)


def _tensors(tree: object) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _nbytes(tensor: torch.Tensor) -> int:
    """Those in memory: an expanded tensor has fewer than elements."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _widest(tensors: Iterable[torch.Tensor]) -> torch.dtype:
    """The dtype that decides the rate of the arithmetic."""
    floats = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    return max(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
