"""What an operation does with `DTensor`s: one table.

| operations                                            | done                                        | communication        |
|-------------------------------------------------------|---------------------------------------------|----------------------|
| elementwise (torch's `pointwise` tag; of lists: `_LISTS`), copies, `zeros_like` and the like | on the local parts | none   |
| sum, mean, norm, max, min, any, all of everything     | on the local parts, then over the ranks     | all-reduce, a scalar |
| `GradScaler`'s scaling of gradients                   | the same                                    | the same, each mesh  |
| `normal_`, `uniform_`, `rand_like` and the like       | the same whole tensor on any number of ranks (`rng.py`) | a seed   |
| indexing, slices, shapes: `w[0]`, `split`, `view`, `t`, ... | a view of the gathered tensor (`views.py`) | all-gather      |
| what optimizers do with matrices, and people who look at a tensor: `_GATHERED` | on the gathered tensors | all-gather, each |
| other indices, `eye`, `cumsum_`, ...: `_GATHERED_IN_PLACE` | on the gathered tensor; each rank keeps its part | all-gather |
| anything else                                         | refused, by name                            |                      |

All of it counts replicas once. With a `Partial` placement only copies, and of sums and averages what is linear, are done on
the local parts; the gathered operations reduce first, and everything else is refused.
Plain tensors may take part, the same on every rank: of one that can be expanded to the global shape, this rank's part of that.
In lists of sharded and plain tensors, the plain ones are dealt with as always.
Results of reductions and gathered operations are plain tensors, the same on every rank. What is written to a gathered tensor or
a view of one is written to the sharded tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version

from .dtensor import RULES, DTensor, Rule
from .operands import first_of, gathered, localized, refuse, specs_of
from .placement import Partial, Spec
from .random import RANDOM, agree_on_seed, agreed, fill
from .reductions import TO_SCALAR, foreach_norm, to_scalar, unscale, vector_norm
from .views import gathered_view, new_empty, random_like

aten = torch.ops.aten

_COPIES = {
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.copy_.default,
    aten._to_copy.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.masked_fill.Scalar,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Scalar,
    aten.masked_fill_.Tensor,
    aten.zero_.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
}
# What optimizers do with whole matrices, and people who look at a tensor.
_GATHERED = (
    "_cdist_forward _linalg_det _linalg_eigh _linalg_slogdet _linalg_solve_ex _linalg_svd _local_scalar_dense _log_softmax "
    "_pdist_forward _softmax _unique2 _unsafe_view addmm addmv all allclose amax amin aminmax any argmax argmin argsort "
    "baddbmm bincount bmm bucketize cat constant_pad_nd count_nonzero cummax cummin cumprod cumsum diag_embed diagonal_copy "
    "dist dot flip gather histc histogram index index_select isin kthvalue linalg_cholesky_ex linalg_eig linalg_inv_ex "
    "linalg_lu_factor_ex linalg_pinv linalg_qr logcumsumexp logsumexp masked_select max mean median min mm mode mv nanmedian "
    "nansum new_full new_ones new_zeros nonzero prod renorm repeat repeat_interleave roll rot90 searchsorted sort stack std "
    "std_mean sum take topk trace tril triu unique_consecutive unique_dim var var_mean vdot"
)
# What writes a whole tensor of which elements depend on others, or on where they are.
_GATHERED_IN_PLACE = (
    "addmm_ cumprod_ cumsum_ eye fill_diagonal_ index_add_ index_copy_ index_fill_ masked_scatter_ put_ renorm_ scatter_ "
    "scatter_add_ tril_ triu_"
)
# The `_foreach_*` and `_fused_*` operations that treat each element alone. All others of these names are refused, and of the
# `_fused_*` steps all overloads but those in place.
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
# What may be done to each part of what a reduction will make one tensor of.
_PARTIAL_COPIES = {
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
    aten.copy_.default,
    aten.empty_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
}
_PARTIAL_SUMS = {aten.add.Tensor, aten.add_.Tensor, aten.neg.default, aten.neg_.default, aten.sub.Tensor, aten.sub_.Tensor}


def _find_rule(func: Any) -> Rule:
    name = func._schema.name.removeprefix("aten::")
    if func in TO_SCALAR:
        return to_scalar
    outputs = [argument.name for argument in func._schema.arguments if argument.is_out]
    if outputs and (outputs != ["out"] or name in _BY_NAME):
        return refuse  # these rules return their results, and would leave the outputs as they are
    if name in _BY_NAME:
        return _BY_NAME[name]
    if func in RANDOM:
        return _random
    if name.startswith(("_foreach_", "_fused_")):
        return _on_lists if name in FOREACH_AND_FUSED else refuse
    if func in _COPIES or (torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags):
        return _elementwise
    if func.is_view:
        return gathered_view
    if name in (_GATHERED_IN_PLACE if func._schema.is_mutable else _GATHERED).split():
        return gathered
    return refuse


def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`_local` for what optimizers call most: sharded tensors of one spec, numbers and 0-dim tensors."""
    spec: Spec | None = None
    local_args = []
    for arg in args:
        if type(arg) is DTensor:
            spec = arg.spec if spec is None else spec
            if arg.spec is not spec:
                return _local(func, args, kwargs)
            local_args.append(arg._local_tensor)
        elif isinstance(arg, torch.Tensor) and arg.dim() != 0:
            return _local(func, args, kwargs)
        else:
            local_args.append(arg)
    if spec is None or spec.partial or type(args[0]) is not DTensor or "out" in kwargs:
        return _local(func, args, kwargs)
    out = func(*local_args, **kwargs)
    if isinstance(out, torch.Tensor):
        return args[0] if out is local_args[0] else DTensor(out, spec)
    return [DTensor(part, spec) for part in out]  # mantissas and exponents


def _copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A copy of the parts, in the memory format that they have: channels_last is a format of whole tensors."""
    if kwargs.get("memory_format") in (torch.channels_last, torch.channels_last_3d):
        kwargs = {key: value for key, value in kwargs.items() if key != "memory_format"}
    return _elementwise(func, args, kwargs)


def _local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on the local shards; what comes out has the placement of the first sharded argument."""
    (spec,) = specs = specs_of((*args, *kwargs.values()) if kwargs else args)
    destination = kwargs.get("out", args[0])
    if func._schema.is_mutable and not isinstance(destination, DTensor):
        return gathered(func, args, kwargs)  # a plain tensor is written: it needs all of the values
    if spec.partial:
        _check_partial(func, args, kwargs)
    local_args = [localized(arg, specs, func) for arg in args]
    local_kwargs = {key: localized(value, specs, func) for key, value in kwargs.items()}
    out = func(*local_args, **local_kwargs)
    if isinstance(out, torch.Tensor):
        written = local_kwargs.get("out", local_args[0])
        return destination if out is written else DTensor(out, spec)
    return [DTensor(part, spec) for part in out]  # mantissas and exponents


def _on_lists(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run on the local shards of the lists; results lie as the tensors of the first list with sharded tensors.

    Plain tensors that are in no list go in as they are: scalars, or one scalar for each tensor.
    """
    specs = specs_of((*args, *kwargs.values()) if kwargs else args)
    if not all(specs):
        return _apart(func, args, kwargs)
    destination = kwargs.get("out", args[0])
    if func._schema.is_mutable and not isinstance(first_of(destination), DTensor):
        return gathered(func, args, kwargs)  # a plain tensor is written: it needs all of the values
    if any(spec.partial for spec in specs):
        _check_partial(func, args, kwargs)
    local_args = [arg if type(arg) is torch.Tensor else localized(arg, specs, func) for arg in args]
    local_kwargs = {
        key: value if type(value) is torch.Tensor else localized(value, specs, func) for key, value in kwargs.items()
    }
    out = func(*local_args, **local_kwargs)
    if func._schema.is_mutable:
        increment_version(destination)  # the dispatcher increments it for tensors, not for lists
        return out
    return [DTensor(shard, spec) for shard, spec in zip(out, specs, strict=True)]


def _apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor] | None:
    """Lists of sharded and of plain tensors: one call for those places of the lists that are sharded in the same lists."""
    if "out" in kwargs:
        refuse(func, args, kwargs)
    numbers = range(len(specs_of(args)))
    lists = [arg for arg in args if isinstance(arg, (list, tuple)) and len(arg) == len(numbers)]
    alike: dict[tuple[bool, ...], list[int]] = {}
    for number in numbers:
        alike.setdefault(tuple(isinstance(values[number], DTensor) for values in lists), []).append(number)
    made: dict[int, torch.Tensor] = {}
    for chosen in alike.values():
        some = (
            [arg[number] for number in chosen] if isinstance(arg, (list, tuple)) and len(arg) == len(numbers) else arg
            for arg in args
        )
        made.update(zip(chosen, func(*some, **kwargs) or (), strict=False))
    return [made[number] for number in numbers] if made else None


def _check_partial(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse what does not commute with the reductions that are still to be made."""
    if func in _PARTIAL_COPIES:
        return
    summed = func in _PARTIAL_SUMS and all(isinstance(arg, DTensor) for arg in args)
    if not summed or not all(p.linear for arg in args for p in arg.placements if isinstance(p, Partial)):
        refuse(func, args, kwargs)


def _index_put(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x[mask] = scalar` is elementwise; other indices, of which rank 0's count, are those of the whole."""
    whole, indices, values = args[:3]
    mask = indices[0]
    masked = len(indices) == 1 and isinstance(mask, DTensor) and mask.dtype == torch.bool
    if masked and isinstance(whole, DTensor) and mask.spec == whole.spec and values.dim() == 0:
        return _local(func, args, kwargs)
    mesh = next(value.spec.mesh for value in (whole, *indices, values) if isinstance(value, DTensor))
    return gathered(func, (whole, agreed(mesh, indices), *args[2:]), kwargs)


def _random(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, given = args[0], kwargs.get("generator")
    if tensor.spec.partial or tensor.device.type == "meta":
        raise NotImplementedError(
            f"{func} on a tensor of {tensor.spec} on {tensor.device}: it has no values of its own to draw"
        )
    func(
        torch.empty(0, dtype=tensor.dtype, device=tensor.device), *args[1:], generator=given
    )  # bad arguments raise here, on every rank alike
    seed = agree_on_seed(tensor.spec.mesh, given)
    fill(tensor._local_tensor, tensor.spec, seed, lambda block, generator: func(block, *args[1:], generator=generator))
    return tensor


_BY_NAME: dict[str, Rule] = {
    "_amp_foreach_non_finite_check_and_unscale_": unscale,
    "_foreach_norm": foreach_norm,
    "_to_copy": _copy,
    "clone": _copy,
    "index_put_": _index_put,
    "linalg_vector_norm": vector_norm,
    "new_empty": new_empty,
    "rand_like": random_like,
    "randint_like": random_like,
    "randn_like": random_like,
}
RULES.find = _find_rule
