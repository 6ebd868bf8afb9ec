"""The operations that are defined on `DTensor`s, and how each is run. Importing this module installs the table.

| operations                                           | run on                                         | communication        |
|------------------------------------------------------|------------------------------------------------|----------------------|
| elementwise (torch's `pointwise` tag, `UNTAGGED`), copies, `zeros_like` and the like | the local shards | none |
| `_foreach_*`, `_fused_*` in `FOREACH_AND_FUSED`      | the local shards                               | none (norm: a sum's) |
| sum, mean, norm, max, min, any, all over all elements | the local shards, then over the ranks         | all-reduce, a scalar |
| `mse_loss` and other `LOSSES` of two tensors         | the same, element by element before that       | the same             |
| `GradScaler`'s unscaling of gradients                | the local shards, then over the ranks          | the same, each mesh  |
| `normal_`, `uniform_`, `rand_like` and the like      | blocks, for any number of ranks (`random.py`)  | broadcast of a seed  |
| indexing, slices, shapes: `w[0]`, `split`, `view`, `t` | the full tensor; the result is a view (`views.py`) | all-gather |
| matrices, statistics, sorting: `_ON_FULL_TENSORS`    | the full tensors                               | all-gather of each   |
| the same in place: `_IN_PLACE_ON_FULL_TENSORS` | the full tensors; each rank writes its shard back | all-gather of each |
| any other                                            | raises NotImplementedError with its name       |                      |

- Replicas count once.
- Operands of one elementwise operation may lie differently where that needs no communication: see `elementwise.py`. `copy_`
  redistributes.
- On a `Partial` tensor, only copies, and sums if its reduction is linear, run on the local shards. Operations on full tensors
  reduce it first. All others raise.
- Plain tensors may take part if all ranks pass the same values and they expand to the global shape: each rank uses its shard.
  Where a tensor is written by indices or a mask, plain ones are broadcast: they are rank 0's on every rank.
  In lists of sharded and plain tensors, plain ones are processed as usual.
- Activations (`Spec.gathers` is False) are never gathered: operations that would raise NotImplementedError. `activations.py`
  has those that run on them besides.
- Results of reductions and of operations on full tensors are plain tensors, the same on every rank.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from ..dtensor.dtensor import RULES, DTensor, Rule
from ..dtensor.operands import first_element, local_shards, mutated_tensors, raise_undefined, specs_of, wait_to_write
from ..placement import snapshots
from ..placement.random import RANDOM, broadcast_seed, fill, with_indices_of_rank_0
from .activations import activations_in, run_gathered, run_on_activations
from .elementwise import (
    UNTAGGED,
    check_partial,
    copy,
    copy_into,
    copy_lists_into,
    elementwise,
    new_empty_strided,
    on_local_shards,
)
from .losses import LOSSES, loss, loss_backward
from .reductions import TO_SCALAR, foreach_norm, to_scalar, unscale, vector_norm
from .views import gathered_view, new_empty, random_like

aten = torch.ops.aten

_COPIES = {
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten._to_copy.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.zero_.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
}
# Elements of the result depend on several elements of the arguments.
_ON_FULL_TENSORS = (
    "_cdist_forward _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _local_scalar_dense _log_softmax "
    "_log_softmax_backward_data _pdist_forward _softmax _softmax_backward_data _unique2 _unsafe_view addmm addmv all "
    "allclose amax amin aminmax any argmax argmin argsort baddbmm bincount bmm bucketize cat constant_pad_nd count_nonzero "
    "cummax cummin cumprod cumsum diag_embed diagonal_copy dist dot embedding flip gather glu glu_backward histc histogram "
    "index index_put index_select isin kthvalue linalg_cholesky_ex linalg_eig linalg_inv_ex linalg_lu_factor_ex linalg_pinv "
    "linalg_qr logcumsumexp logsumexp masked_scatter masked_select masked_select_backward max mean median min mm mode mv "
    "nanmedian nansum native_layer_norm native_layer_norm_backward new_full new_ones new_zeros nonzero prod renorm repeat "
    "repeat_interleave roll rot90 searchsorted sort stack std std_mean sum take topk trace tril triu unique_consecutive "
    "unique_dim var var_mean vdot"
)
# Elements of the mutated tensor depend on others, or on their own indices.
_IN_PLACE_ON_FULL_TENSORS = (
    "addmm_ cumprod_ cumsum_ eye fill_diagonal_ index_add_ index_copy_ masked_scatter_ put_ renorm_ scatter_ "
    "scatter_add_ tril_ triu_"
)
_LAZY = ("_conj", "_neg_view")  # a bit of the tensor says so, which no wrapper can have
# The `_foreach_*` and `_fused_*` operations that are defined: elementwise ones, and the norm. All others of these names raise,
# among them the `_fused_*` optimizer steps that are not in place.
_FOREACH = (
    "abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor frac "
    "lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub "
    "tan tanh trunc zero"
)
FOREACH_AND_FUSED = (
    {f"_foreach_{name}{suffix}" for name in _FOREACH.split() for suffix in ("", "_")}
    | {f"_fused_{name}_" for name in ("adagrad", "adam", "adamw", "sgd")}
    | {"_foreach_norm"}
)  # fmt: skip


def _find_rule(func: Any) -> Rule:
    """The rule for one overload. Called once per overload."""
    rule = _rule_of(func)
    if not func._schema.is_mutable:
        return rule

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if snapshots.current is not None or snapshots.read_elsewhere:
            wait_to_write(mutated_tensors(func, args, kwargs))
        return rule(func, args, kwargs)

    return run


def _rule_of(func: Any) -> Rule:
    """The row of the table for one overload, or what runs on activations."""
    rule = _row_of(func)
    if rule not in (gathered_view, raise_undefined, random_like, _index_put):
        return rule

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = activations_in(args, kwargs)
        return run_on_activations(func, args, kwargs, found) if found else rule(func, args, kwargs)

    return run


def _row_of(func: Any) -> Rule:
    """The row of the table for one overload."""
    name = func._schema.name.removeprefix("aten::")
    if func in TO_SCALAR:
        return to_scalar
    outputs = [argument.name for argument in func._schema.arguments if argument.is_out]
    if outputs and (outputs != ["out"] or name in _BY_NAME):
        return raise_undefined  # the rules return new tensors, and would not write the outputs
    if name in _BY_NAME:
        return _BY_NAME[name]
    if name in _LAZY:
        return _resolved
    if func in RANDOM:
        return _random
    if name.startswith(("_foreach_", "_fused_")):
        return _on_lists if name in FOREACH_AND_FUSED else raise_undefined
    tagged = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
    if func in _COPIES or tagged or name in UNTAGGED.split():
        return elementwise
    if func.is_view:
        return gathered_view
    if name in (_IN_PLACE_ON_FULL_TENSORS if func._schema.is_mutable else _ON_FULL_TENSORS).split():
        return run_gathered
    return raise_undefined


def _resolved(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """`conj`, and the imaginary part of one: on the shards, with its values, which torch would make at the next operation."""
    (tensor,) = args
    return DTensor(func(tensor._local_tensor).resolve_conj().resolve_neg(), tensor.spec)


def _on_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on the local shards of each list; results have the specs of the first list with sharded tensors.

    Plain tensors outside of lists are passed unchanged: they hold a scalar, or one scalar for each tensor.
    """
    specs = specs_of((*args, *kwargs.values()) if kwargs else args)
    if not all(specs):
        return _split_mixed_lists(func, args, kwargs)
    destination = kwargs.get("out", args[0])
    if func._schema.is_mutable and not isinstance(first_element(destination), DTensor):
        return run_gathered(func, args, kwargs)  # the mutated tensors are plain and need all values
    if any(spec.partial for spec in specs):
        check_partial(func, args, kwargs)
    try:
        local_args = [arg if type(arg) is torch.Tensor else local_shards(arg, specs, func) for arg in args]
    except ValueError:
        if func is not aten._foreach_copy_.default:
            raise
        return copy_lists_into(func, args, kwargs)
    local_kwargs = {
        key: value if type(value) is torch.Tensor else local_shards(value, specs, func) for key, value in kwargs.items()
    }
    out = func(*local_args, **local_kwargs)
    if func._schema.is_mutable:
        increment_version(destination)  # the dispatcher does not increment it for tensors in lists
        return out
    return [DTensor(shard, spec) for shard, spec in zip(out, specs, strict=True)]


def _split_mixed_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """Lists that mix sharded and plain tensors: one call for all positions at which the same lists hold sharded tensors."""
    if "out" in kwargs:
        raise_undefined(func, args, kwargs)
    count = len(specs_of(args))
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and len(arg) == count]
    positions_by_kind: dict[tuple[bool, ...], list[int]] = {}
    for position in range(count):
        kind = tuple(isinstance(values[position], DTensor) for values in lists)
        positions_by_kind.setdefault(kind, []).append(position)
    results: dict[int, torch.Tensor] = {}
    for positions in positions_by_kind.values():
        selected = (
            [arg[position] for position in positions] if isinstance(arg, (list, tuple)) and len(arg) == count else arg
            for arg in args
        )
        results.update(zip(positions, func(*selected, **kwargs) or (), strict=False))
    return [results[position] for position in range(count)] if results else None


def _index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x[mask] = scalar` is elementwise. Other indices refer to the full tensor; those of rank 0 are used on every rank."""
    target, indices, values = args[:3]
    mask = indices[0]
    masked = len(indices) == 1 and isinstance(mask, DTensor) and mask.dtype == torch.bool
    if masked and isinstance(target, DTensor) and mask.spec == target.spec and values.dim() == 0:
        return on_local_shards(func, args, kwargs)
    mesh = next(value.spec.mesh for value in (target, *indices, values) if isinstance(value, DTensor))
    return run_gathered(func, with_indices_of_rank_0(func, args, mesh), kwargs)


def _filled(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`index_fill_` and `masked_fill_`, which torch 2.15 makes of `x[indices] = number`: with rank 0's indices, as there."""
    target = args[0]
    if isinstance(target, DTensor) and target.spec.gathers:
        args = with_indices_of_rank_0(func, args, target.spec.mesh)
    return (run_gathered if func.overloadpacket is aten.index_fill_ else elementwise)(func, args, kwargs)


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fill a tensor with random numbers that do not depend on the number of ranks."""
    tensor, generator = args[0], kwargs.get("generator")
    if tensor.spec.partial or tensor.device.type == "meta":
        raise NotImplementedError(
            f"{func} on a tensor of {tensor.spec} on {tensor.device}: expected a sharded or replicated tensor with memory"
        )
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    func(empty, *args[1:], generator=generator)  # invalid arguments raise here, on every rank
    seed = broadcast_seed(tensor.spec.mesh, generator)
    fill(tensor._local_tensor, tensor.spec, seed, lambda block, generator: func(block, *args[1:], generator=generator))
    return tensor


_BY_NAME: dict[str, Rule] = {
    "_amp_foreach_non_finite_check_and_unscale_": unscale,
    "_foreach_norm": foreach_norm,
    "_to_copy": copy,
    "clone": copy,
    "copy_": copy_into,
    "index_fill_": _filled,
    "index_put_": _index_put,
    "linalg_vector_norm": vector_norm,
    "masked_fill_": _filled,
    "new_empty": new_empty,
    "new_empty_strided": new_empty_strided,
    "rand_like": random_like,
    "randint_like": random_like,
    "randn_like": random_like,
}
_BY_NAME |= dict.fromkeys(LOSSES, loss) | {f"{name}_backward": loss_backward for name in LOSSES}
RULES.find = _find_rule
