"""The public API: `fully_shard` and what it makes of a module."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from . import comm, hooks
from .comm import DeviceMesh
from .group import ParamGroup
from .layout import ParamSpec, plan
from .param import ShardedParam
from .placement import Shard
from .policy import MixedPrecisionPolicy

# Which group has a parameter, by the original and by the sharded one: finds those that a module outside still holds.
_taken: WeakIdKeyDictionary = WeakIdKeyDictionary()


class FSDPModule:
    """What `fully_shard` adds to a module's class. The module's parameters are `DTensor`s outside its forward and backward."""

    param_group: ParamGroup

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Around, not among, the module's own hooks: all of them see full parameters.
        args, kwargs = hooks.pre_forward(self.param_group, args, kwargs)
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        return hooks.post_forward(self.param_group, output)

    def unshard(self) -> None:
        """Gather this module's own parameters now and let it see them. Collective."""
        group = self.param_group
        runtime = group.runtime or hooks.start(group.root)
        runtime.streams.begin()
        group.unshard()
        group.wait_unsharded()
        group.keep()

    def reshard(self) -> None:
        """Free this module's gathered parameters; no-op while sharded."""
        self.param_group.reshard()

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Without sync, backwards accumulate unsharded gradients, in the reduce dtype; the next one with sync reduces all.

        Cost: the gradients of every group stay unsharded in between. recurse: also for sharded modules inside.
        """
        for group in self._groups(recurse):
            group.sync_gradients = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, *, recurse: bool = True) -> None:
        """Keep parameters gathered between forward and backward (False), or free and gather them again (True)."""
        for group in self._groups(recurse):
            group.reshard_after_forward = reshard_after_forward

    def reset_iter_state(self) -> None:
        """After an exception in forward or backward: drop that iteration and its gradients. On the root; on every rank."""
        group = self.param_group
        if group.parent is not None:
            raise RuntimeError(f"reset_iter_state on '{group.name}': call it on the root, '{group.root.name}'")
        if group.runtime is not None:
            group.runtime.reset()

    def _groups(self, recurse: bool) -> Iterator[ParamGroup]:
        if not recurse:
            yield self.param_group
            return
        for module in cast(nn.Module, self).modules():
            if isinstance(module, FSDPModule):
                yield module.param_group

    def _apply(self, fn: Callable[..., torch.Tensor], recurse: bool = True) -> NoReturn:
        raise RuntimeError(
            f"to(), half(), cuda() and the like on the sharded module '{self.param_group.name}': move and cast the module "
            "before fully_shard, or compute in another dtype with a MixedPrecisionPolicy"
        )

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise RuntimeError(
            f"deepcopy of the sharded module '{self.param_group.name}': its parameters are parts, tied to buffers and "
            "communicators; copy the module before fully_shard, or build another and load this one's state_dict()"
        )


def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
) -> nn.Module:
    """Shard the parameters of `module` that no earlier `fully_shard` inside it has taken, as one group. In place.

    Call it bottom-up: on the blocks, then on the whole. Every rank keeps its segment of the planned layout; the rest is
    gathered for the module's forward and backward and freed after. Gradients are averaged over the mesh.

    mesh: over which ranks (default: all of them).
    reshard_after_forward: free the gathered parameters after forward and gather them again for backward; None: True, but
        for the root, whose backward comes at once.
    shard_placement_fn: names the dim along which a parameter is cut, between rows only, whatever that pads. None, and the
        default: along dim 0, between elements where rows would pad too much.
    mp_policy: dtypes of compute, reduction and outputs.
    Returns: the module, its class now `FSDP<class>`, an `FSDPModule`.
    Raises, on every rank alike: TypeError or ValueError for a module that cannot be sharded, or that is not the same on
    all ranks; both name the ranks that see it.
    """
    mesh = comm.world().mesh if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"fully_shard(mesh={mesh!r}): expected a DeviceMesh, such as shardrt.world().mesh")
    if len(mesh.shape) != 1:
        raise ValueError(f"fully_shard(mesh={mesh}): expected one axis; name it, as in mesh['{mesh.axis_names[-1]}']")
    owners: _Owners = {}
    buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
    asked: dict[nn.Parameter, Shard | None] = {}
    error: Exception | None = None
    policy = mp_policy or MixedPrecisionPolicy()
    try:
        owners, buffers = _collect(module, mesh)
        asked = {param: _asked(owned[0][2], param, shard_placement_fn) for param, owned in owners.items()}
    except Exception as caught:  # the user's function may raise anything, on one rank alone
        owners, error = {}, caught
    _agree(mesh, type(module).__name__, [repr(policy), *_describe(owners, asked)], error)
    params = [
        ShardedParam(owned[0][2], param, [(holder, attribute) for holder, attribute, _ in owned], _dim(asked[param], param))
        for param, owned in owners.items()
    ]
    specs = [
        ParamSpec(p.name, tuple(p.shape), policy.compute_dtype(p.dtype).itemsize, p.dim, rows_only=placement is not None)
        for p, placement in zip(params, asked.values(), strict=True)
    ]
    layout = plan(specs, mesh.size)
    group = ParamGroup(module, params, layout, mesh, policy, reshard_after_forward)
    for taken in (*owners, *(param.sharded for param in params)):
        _taken[taken] = group.name
    for holder, attribute, buffer in buffers:
        holder._buffers[attribute] = buffer.to(mesh.device)
    for child in module.modules():
        if isinstance(child, FSDPModule) and child.param_group.parent is None:
            child.param_group.parent = group
            group.children.append(child.param_group)
    module.__class__ = _sharded_class(cast(type, type(module)))
    cast(FSDPModule, module).param_group = group
    for holder in {holder for owned in owners.values() for holder, *_ in owned}:
        holder.register_state_dict_pre_hook(lambda *_: group.reshard())
        holder.register_load_state_dict_pre_hook(partial(_before_load, group))
    return module


@cache
def _sharded_class(kind: type) -> type:
    """One for all modules of a class: torch.compile makes its code anew for each class, and eight times at most."""
    _hide_from_compiler()
    return type(f"FSDP{kind.__name__}", (FSDPModule, kind), {})


@cache
def _hide_from_compiler() -> None:
    """Have torch.compile look into none of our files: a graph ends before a sharded module, and another begins in it.

    Cost: seconds and 70 MB of importing the compiler, once; torch's optimizers import it as well. The public way,
    `torch.compiler.disable`, costs some microseconds per hook and does without the hooks in a backward.
    """
    from torch._dynamo import trace_rules

    for package in ("shardrt", "shardrt.comm", "shardrt.kernels"):
        trace_rules.add(package)


def _before_load(
    group: ParamGroup, module: nn.Module, state_dict: object, prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    if metadata.get("assign_to_params_buffers", False):
        raise RuntimeError(f"load_state_dict(assign=True) on the sharded module '{group.name}': load with assign=False")
    group.reshard()


# ---------------------------------------------------------------------- set-up, and what is refused there

_Owners = dict[nn.Parameter, list[tuple[nn.Module, str, str]]]  # holder, attribute, full name; several if tied


def _collect(module: nn.Module, mesh: DeviceMesh) -> tuple[_Owners, list[tuple[nn.Module, str, torch.Tensor]]]:
    """The parameters and buffers that this call takes: those of `module` outside of sharded modules in it."""
    kind = type(module).__name__
    if not isinstance(module, nn.Module):
        raise TypeError(f"fully_shard takes one nn.Module, found {kind}")
    if isinstance(module, FSDPModule):
        raise ValueError(f"'{kind}' is sharded already: call fully_shard once for each module")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ValueError(f"'{kind}' has no forward to gather parameters for: call fully_shard on the modules in it")
    if next(module.parameters(), None) is None:
        raise ValueError(f"'{kind}' has no parameters to shard")
    owners: _Owners = {}
    buffers: list[tuple[nn.Module, str, torch.Tensor]] = []
    for name, holder in _outside_sharded(module, ""):
        for attribute, param in holder._parameters.items():
            if param is not None:
                full_name = f"{name}.{attribute}" if name else attribute
                _check_param(full_name, param, mesh)
                owners.setdefault(param, []).append((holder, attribute, full_name))
        buffers += [(holder, key, buffer) for key, buffer in holder._buffers.items() if buffer is not None]
    devices = {param.device.type: owned[0][2] for param, owned in owners.items()}
    if len(devices) > 1:
        found = ", ".join(f"'{name}' on {device}" for device, name in sorted(devices.items()))
        raise ValueError(f"'{kind}' has parameters on several devices ({found}); move the module to one of them")
    return owners, buffers


def _outside_sharded(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """`module` and what is in it, with names, sharded modules inside left out. A module met twice comes twice (ties)."""
    yield name, module
    for child_name, child in module.named_children():
        if not isinstance(child, FSDPModule):
            yield from _outside_sharded(child, f"{name}.{child_name}" if name else child_name)


def _check_param(name: str, param: nn.Parameter, mesh: DeviceMesh) -> None:
    if param in _taken:
        raise ValueError(
            f"parameter '{name}' is shared with '{_taken[param]}', which is sharded already: tied parameters belong in one "
            "group; shard neither module on its own, so that the module around both takes the parameter"
        )
    if param.device.type == "meta":
        raise ValueError(f"parameter '{name}' is on the meta device and has no values: call to_empty() and initialise it")
    if param.device not in (torch.device("cpu"), mesh.device):
        raise ValueError(f"parameter '{name}' is on {param.device}; expected the CPU or the mesh's device, {mesh.device}")


def _asked(name: str, param: nn.Parameter, placement_fn: Callable[[nn.Parameter], Shard | None] | None) -> Shard | None:
    placement = placement_fn(param) if placement_fn is not None else None
    if placement is None:
        return None
    if not isinstance(placement, Shard):
        raise TypeError(f"shard_placement_fn of '{name}': expected a Shard or None, found {placement!r}")
    if not -max(1, param.dim()) <= placement.dim < max(1, param.dim()):
        raise ValueError(f"shard_placement_fn of '{name}': {placement} of a parameter of shape {tuple(param.shape)}")
    return placement


def _dim(asked: Shard | None, param: nn.Parameter) -> int:
    return 0 if asked is None else asked.dim % max(1, param.dim())


def _describe(owners: _Owners, asked: dict[nn.Parameter, Shard | None]) -> list[str]:
    """What must be the same on every rank, a line for each parameter."""
    return [
        f"{', '.join(name for *_, name in owned)}: {tuple(param.shape)} {param.dtype}, {asked[param]}, "
        f"requires_grad {param.requires_grad}"
        for param, owned in owners.items()
    ]


def _agree(mesh: DeviceMesh, kind: str, description: list[str], error: Exception | None) -> None:
    """Raise on every rank if any rank has an error, or if the ranks describe different modules. Collective."""
    digest = hashlib.sha256("\n".join([kind, *description]).encode()).hexdigest()
    kept = type(error) if isinstance(error, (TypeError, ValueError)) else RuntimeError
    answers = mesh.exchange((digest, None if error is None else (kept, str(error) or repr(error))))
    failed = {rank: answer[1] for rank, answer in enumerate(answers) if answer[1] is not None}
    if failed:
        (raised, message), ranks = next(iter(failed.values())), sorted(failed)
        raise raised(f"{message} (on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})") from error
    if len({answer[0] for answer in answers}) == 1:
        return
    everyone = mesh.exchange([kind, *description])
    lines = max(len(lines) for lines in everyone)
    padded = [lines_of + ["nothing"] * (lines - len(lines_of)) for lines_of in everyone]
    differing = next(line for line in zip(*padded, strict=True) if len(set(line)) > 1)
    found = "; ".join(f"rank {rank}: {line}" for rank, line in enumerate(differing))
    raise ValueError(f"fully_shard of '{kind}': the ranks have different modules; the first difference is {found}")
