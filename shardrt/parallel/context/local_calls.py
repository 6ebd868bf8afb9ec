"""What else than attention mixes tokens, or counts them: found among the calls of torch in a context, told at its end.

Convolutions and recurrences along the sequence, and positions that a model makes by itself, see this rank's tokens alone, and
so does attention that is none of the functions that reach other ranks. Nothing can be said of it from one call: what is told is
a call along a dim of as many elements as this rank has tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

_PRODUCTS = {F.linear, torch.matmul, torch.Tensor.matmul, torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm, torch.einsum}
_ADVICE = (
    "Give the model position ids, cut as the tokens are (position_ids=, for a model of transformers), and indices into whole "
    "tables; a model whose convolutions or recurrences run over tokens cannot have its sequence cut"
)


class LocalCalls:
    """The calls of one context. tokens: how many this rank has."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.attended = False  # by a function that reaches the tokens of all ranks
        self._computed = False
        self._found: dict[str, None] = {}  # in the order of the calls

    def see(self, func: Any, made: Any, args: Any, kwargs: Any) -> None:
        """A call that has returned `made`."""
        if func in _PRODUCTS:
            self._computed = True
        elif (look := _LOOKS.get(func)) is not None and look(self.tokens, made, *args, **kwargs):
            self._found[f"{func.__name__} in {_caller()}"] = None

    def told(self) -> str | None:
        """What the user should know of it, if anything."""
        texts = []
        if self._found:
            texts.append(
                f"{', '.join(self._found)}: over {self.tokens} elements, the number of this rank's tokens, so that it sees or "
                f"counts those alone. {_ADVICE}"
            )
        if self._computed and not self.attended:
            texts.append(
                "matrix products, and no attention that reaches other ranks' tokens: expected F.scaled_dot_product_attention "
                "(attn_implementation='sdpa', for a model of transformers) or shardrt.parallel.flex_attention"
            )
        return "; ".join(texts) or None


def _convolution(tokens: int, made: Any, input: Any, weight: Any, *options: Any, dilation: Any = 1, **others: Any) -> bool:
    """Over the tokens, which may have been padded before."""
    dilation = options[3] if len(options) > 3 else dilation
    reach = (weight.shape[-1] - 1) * (dilation if isinstance(dilation, int) else dilation[0])
    return reach > 0 and tokens <= input.shape[-1] <= tokens + reach


def _recurrence(tokens: int, made: Any, input: Any, *others: Any) -> bool:
    return tokens in input.shape[:2]


def _scan(tokens: int, made: Any, input: Any, dim: Any = None, **others: Any) -> bool:
    """Not of bools, which transformers adds up to find packed sequences in position ids."""
    dim = others.get("axis", dim)
    return input.dim() > 0 and input.dtype is not torch.bool and input.shape[dim] == tokens


def _range(tokens: int, made: Any, *bounds: Any, step: Any = 1, **others: Any) -> bool:
    return made.numel() == tokens and (bounds[2] if len(bounds) > 2 else step) == 1


def _first_rows(tokens: int, made: Any, table: Any, index: Any) -> bool:
    """The first ones of a table that no operation with a gradient made, as `weight[:T]` or `position_ids[:, :T]`."""
    if table.dim() < 2 or not table.is_leaf:
        return False
    for size, part in zip(table.shape, index if isinstance(index, tuple) else (index,), strict=False):
        if not isinstance(part, slice):
            return False
        if size > tokens and part in (slice(tokens), slice(0, tokens)):
            return True
        if size != 1:
            return False
    return False


def _caller() -> str:
    """The innermost function that is neither of torch nor of this package, with its line."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "shardrt"):
        frame = frame.f_back
    return f"{frame.f_code.co_qualname} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


_LOOKS: dict[Any, Callable[..., bool]] = {
    torch.conv1d: _convolution,
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recurrence),
    **{getattr(of, name): _scan for of in (torch, torch.Tensor) for name in ("cumsum", "cumprod", "logcumsumexp")},
    torch.arange: _range,
    torch.Tensor.__getitem__: _first_rows,
}
