"""`context_parallel`: a context in which `F.scaled_dot_product_attention` is attention to the tokens of all ranks.

Models of other projects run as they are. In the context, `torch.nn.functional` has another function of this name, as under
torch's context parallelism, and a `TorchFunctionMode` sees the calls of those who imported torch's before. The mode alone would
not do: torch runs a backward outside of it, and checkpointed modules are computed again there. For the same reason what calls
a name imported before cannot be computed again: torch's check of checkpoints says so.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention as torch_flex_attention
from torch.overrides import TorchFunctionMode

from ...comm import DeviceMesh
from ...torch_internals import hide_package_from_compiler, torch_attention, without_torch_functions
from .agreement import agreed, ring_for
from .call import AttentionCall
from .cut import Documents, SequenceCut
from .local_calls import LocalCalls
from .methods.attention import Attention
from .methods.ulysses import HeadwiseAttention
from .sequences import check_list, length_of, taken
from .transport import Gathering, Ring, Rotation, Transport

Method = Literal["ring", "all_gather", "ulysses"]
_TRANSPORTS: dict[str, type[Transport]] = {"ring": Rotation, "all_gather": Gathering}
_FLEX: Any = torch_flex_attention.__code__
_current: _Mode | None = None  # that of the context; its writer holds the lock
_running = threading.Lock()  # held by the context of this process: what it replaces is replaced for all threads


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[torch.Tensor] | None = None,
    seq_len: int | None = None,
    document_ids: torch.Tensor | None = None,
    method: Method = "ring",
    balanced: bool = True,
) -> Iterator[None]:
    """In the block, ranks have parts of one sequence, and attention reaches all of it. Forward and backward go inside.

    mesh: 1-D, such as `mesh["cp"]`. Its ranks are given the same batch, and the same model.
    buffers: what has the sequence in a dim: tokens, labels, position ids, tables of RoPE of its length. In the block each
    holds this rank's tokens, in place; at the end it is as before. They are the tensor objects that the model reads. None:
    `seq_len` tells the number of tokens of all ranks, and the caller has cut them with `context_parallel_shard`.
    buffer_seq_dims: for each buffer, the dim with the sequence.
    no_restore_buffers: those of `buffers` that need not be restored.
    document_ids: integers (S,), or (B, S), whole on every rank: tokens attend only to those with the same. The tokens of a
    document are in a row.
    method: "ring" passes keys and values from rank to rank while it computes; "all_gather" gathers them first, with N times
    their memory; "ulysses" exchanges tokens for heads, whose numbers N must divide.
    balanced: as of `context_parallel_shard`. Without causal attention, or with "ulysses", ranks compute as much in any case.

    In the block, `F.scaled_dot_product_attention` takes queries, keys and values (B, H, T, C) of this rank's T tokens, in any
    floating dtype, with `is_causal`, `scale` and `enable_gqa`; sums are in float32 at least. "ring" and "all_gather" make
    nothing of size S x S; "ulysses" calls torch's own attention, which does for dropout on the CPU. Attention is to all tokens,
    or all earlier ones: a sliding window, of which the function is not told, would be ignored without an error.
    Collective, as is each such call; the first call for a mesh is collective over all ranks of the mesh that it is a part of.
    The function is replaced for all threads, and there is one context at a time in a process. Recomputation of checkpointed
    modules is for `use_reentrant=False` with torch's default `determinism_check`. Raises on every rank, before anything is
    sent: ValueError for a mesh with several axes, buffers that do not fit or need a gradient, a second context in the process,
    queries, keys or values of other sizes, heads that "ulysses" cannot divide, and whatever differs between ranks;
    NotImplementedError for attn_mask, dropout with another method than "ulysses", `F.multi_head_attention_forward` and torch's
    flex_attention, in whose place is `shardrt.parallel.flex_attention`; RuntimeError where another rank failed otherwise.
    TypeError where `mesh` is none. With several ranks, each warns at the end of writes into buffers that are restored,
    and of what saw the local tokens alone: matrix products without attention that is replaced, convolutions, recurrences and
    running sums along the tokens, and positions that a model makes by itself (docs/context_parallel.md).
    """
    hide_package_from_compiler()
    ring = ring_for(mesh, "context_parallel")
    given = _CutBuffers(_listed(buffers), _listed(buffer_seq_dims), _listed(no_restore_buffers), seq_len)
    alone = _running.acquire(blocking=False)
    try:
        find = lambda: _settings(ring, given, document_ids, method, balanced, alone)  # noqa: E731
        settings = agreed(ring, "context_parallel", find)
        mode = _Mode(ring, settings)
        with _cut_in_place(ring, given, settings.cut) as written, _replaced_attention(mode):
            yield
        if ring.size > 1 and mesh.device.type != "meta":  # not in a forecast
            for text in filter(None, (mode.local_calls.told(), written())):
                warnings.warn(f"context_parallel on {mesh}: {text}", stacklevel=3)
    finally:
        if alone:
            _running.release()


def _listed(values: Any) -> Any:
    """What is no collection is as it is, for `total` to refuse on every rank."""
    if values is None:
        return ()
    return tuple(values) if isinstance(values, Collection) and not isinstance(values, torch.Tensor) else values


@dataclass(frozen=True, slots=True)
class _CutBuffers:
    buffers: tuple[torch.Tensor, ...]
    dims: tuple[int, ...]
    dropped: tuple[torch.Tensor, ...]
    seq_len: int | None

    def total(self) -> int:
        """The number of tokens. Raises ValueError for what does not fit."""
        self._check_kinds()
        for buffer in self.dropped:
            if not any(buffer is one for one in self.buffers):
                raise ValueError(
                    f"no_restore_buffers has a tensor of shape {tuple(buffer.shape)} that is not among the buffers"
                )
        for number, buffer in enumerate(self.buffers):
            if any(buffer is earlier for earlier in self.buffers[:number]):
                raise ValueError(f"buffer {number} is given twice: it would be cut twice")
            if buffer.requires_grad:
                raise ValueError(f"buffer {number} needs a gradient and cannot be cut in place: use context_parallel_shard")
            if buffer.is_inference() and not torch.is_inference_mode_enabled():
                raise ValueError(
                    f"buffer {number} was made in inference mode and cannot be cut in place outside of it: use "
                    "context_parallel_shard, or enter the context in inference mode"
                )
        if not self.buffers and not self.dims:
            if self.seq_len is None or self.seq_len < 0:
                raise ValueError(
                    f"no buffers, and seq_len={self.seq_len}: expected buffers, or the number of tokens of all ranks"
                )
            return self.seq_len
        total = length_of(self.buffers, self.dims)
        if self.seq_len not in (None, total):
            raise ValueError(f"buffers of {total} tokens, and seq_len={self.seq_len}: expected one number")
        return total

    def _check_kinds(self) -> None:
        check_list("buffers", self.buffers, torch.Tensor)
        check_list("buffer_seq_dims", self.dims, int)
        check_list("no_restore_buffers", self.dropped, torch.Tensor)


class _Settings(NamedTuple):
    cut: SequenceCut
    documents: Documents | None
    method: str


def _settings(ring: Ring, given: _CutBuffers, ids: torch.Tensor | None, method: str, balanced: bool, alone: bool) -> _Settings:
    if not alone:
        raise ValueError("nested in another context_parallel, or beside one of another thread: leave that one first")
    if method not in get_args(Method):
        raise ValueError(f"method={method!r}: expected one of {get_args(Method)}")
    total = given.total()
    documents = None if ids is None else _documents(ids, total)
    return _Settings(SequenceCut(total, ring.size, balanced), documents, method)


def _documents(ids: torch.Tensor, total: int) -> Documents:
    if not isinstance(ids, torch.Tensor):
        raise ValueError(f"document_ids: expected a tensor of integers, found a {type(ids).__name__}")
    if ids.dim() not in (1, 2) or ids.shape[-1] != total or ids.is_floating_point():
        raise ValueError(
            f"document_ids of shape {tuple(ids.shape)} and {ids.dtype}: expected integers ({total},) or (rows, {total}), whole "
            "on every rank"
        )
    return Documents(tuple(_bounds_of(row) for row in ids.reshape(-1, total).tolist()))


def _bounds_of(ids: list[int]) -> tuple[int, ...]:
    starts = [place for place, found in enumerate(ids) if place == 0 or found != ids[place - 1]]
    if len(starts) > len(set(ids)):
        raise ValueError("document_ids: a document has tokens in two places of a row: expected all of them in a row")
    return (*starts, len(ids))


@contextmanager
def _cut_in_place(ring: Ring, given: _CutBuffers, cut: SequenceCut) -> Iterator[Callable[[], str | None]]:
    """In the block, the buffers hold this rank's tokens. Yields what tells, at its end, of values that were lost."""
    parts = [taken(buffer, dim, cut, ring.rank) for buffer, dim in zip(given.buffers, given.dims, strict=True)]
    restored: list[tuple[torch.Tensor, torch.Tensor]] = []  # with aliases of their memory
    try:
        for buffer, part in zip(given.buffers, parts, strict=True):
            whole = buffer.detach()
            buffer.set_(part)  # type: ignore[call-overload]
            restored.append((buffer, whole))
        restored = [(buffer, whole) for buffer, whole in restored if not any(buffer is one for one in given.dropped)]
        versions = [_version(buffer) for buffer, _ in restored]
        lost: list[int] = []
        yield lambda: _told_of(lost)
        lost += [
            next(number for number, each in enumerate(given.buffers) if each is buffer)
            for (buffer, _), version in zip(restored, versions, strict=True)
            if _version(buffer) != version
        ]
    finally:
        for buffer, whole in restored:
            buffer.set_(whole)  # type: ignore[call-overload]


def _version(tensor: torch.Tensor) -> int:
    """How often it was written to. Tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _told_of(lost: list[int]) -> str | None:
    if not lost:
        return None
    return (
        f"buffers {lost} were written to in the block, and hold what they did before: what was written is lost. Name them in "
        "no_restore_buffers, which keeps this rank's tokens, and gather these with context_parallel_unshard; or write to copies"
    )


@contextmanager
def _replaced_attention(mode: _Mode) -> Iterator[None]:
    """In the block, `F.scaled_dot_product_attention` is the mode's; after it, what it was, which may be the user's own."""
    global _current
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention, _current = mode.attend, mode
    try:
        with mode:
            yield
    finally:
        F.scaled_dot_product_attention, _current = before, None


def current_context() -> _Mode | None:
    """The context that this process is in, on any thread: backwards compute checkpointed modules again on others."""
    return _current


class _Mode(TorchFunctionMode):
    def __init__(self, ring: Ring, settings: _Settings) -> None:
        super().__init__()
        self.ring, self.settings = ring, settings
        self.masks: dict[int, tuple[Any, Any]] = {}  # of whole sequences, by their id, and this rank's part of each
        self.local_calls = LocalCalls(settings.cut.length(ring.rank))
        self._places: dict[torch.device, torch.Tensor] = {}

    def places(self, device: torch.device) -> torch.Tensor:
        """Where in the sequence this rank's tokens are: (T,) int64."""
        if device not in self._places:
            chunks = self.settings.cut.chunks(self.ring.rank)
            self._places[device] = torch.cat([torch.arange(*chunk, device=device) for chunk in chunks])
        return self._places[device]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch_attention:
            return self.attend(*args, **(kwargs or {}))
        _refuse(func)
        made = func(*args, **(kwargs or {}))
        self.local_calls.see(func, made, args, kwargs or {})
        return made

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """In the place of `F.scaled_dot_product_attention`."""
        ring, (cut, documents, method) = self.ring, self.settings
        with without_torch_functions():
            query, key, value = tensors = _autocast(query, key, value)
            call = AttentionCall(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
            what = "scaled_dot_product_attention in context_parallel"
            agreed(ring, what, lambda: call.described(ring, cut, documents, method))
            self.local_calls.attended = True
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            if scale <= 0:  # torch's fused attention multiplies by it after the causal mask, and makes nan
                query, scale = query * (-1 if scale else 0), -scale or 1.0
                tensors = query, key, value
            if method == "ulysses":
                return HeadwiseAttention(ring, cut, documents, is_causal, scale, dropout_p)(*tensors)
            return Attention(ring, _TRANSPORTS[method], cut, documents, is_causal, scale)(*tensors)


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As torch's own attention casts under autocast."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(tensor if tensor.dtype is torch.float64 else tensor.to(dtype) for tensor in tensors)


def _refuse(func: Any) -> None:
    """Attention to this rank's tokens alone, for the mode that is called with it."""
    caller = sys._getframe(2).f_code
    if func is F.multi_head_attention_forward:
        name = func.__name__
    # torch's flex_attention asks for dims before it gives itself to the compiler, which would wrap an error in its own. Its
    # frame has another name where the compiler has cut it.
    elif func is torch.Tensor.dim and caller.co_filename == _FLEX.co_filename and _FLEX.co_name in caller.co_name:
        name = _FLEX.co_name
    else:
        return
    raise NotImplementedError(
        f"{name} in context_parallel would attend to this rank's tokens alone: call F.scaled_dot_product_attention, without a "
        "mask, or shardrt.parallel.flex_attention"
    )
