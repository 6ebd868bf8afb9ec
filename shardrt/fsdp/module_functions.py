"""Functions on sharded modules that FSDP2 has beside its class, and `unsharded`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import nn

from .module import FSDPModule, UnshardHandle, groups_of, run_forward


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let `module.<method_name>` see full parameters as its forward does. No-op unless `module` is sharded.

    Raises ValueError if there is no such method.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"register_fsdp_forward_method: '{type(module).__name__}' has no method '{method_name}'")

    setattr(module, method_name, _ForwardMethod(module, method))


class _ForwardMethod:
    """A method that sees full parameters. (Not a closure: in a deepcopy of the module it is that copy's.)"""

    def __init__(self, module: FSDPModule, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._module, self._method = module, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_forward(self._module, self._method, args, kwargs)


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Inside, all sharded modules in `module`, itself included, stay gathered, so that forwards communicate nothing.

    Ranks may then run different numbers of forwards without gradients, or different parts of the model: texts that end at
    different lengths can be generated. Entering is collective, leaving is not.
    Cost: the memory of all parameters in their compute dtypes. If parameters are written to inside, the next forward gathers
    them again, which is collective.   Raises ValueError if no module is sharded.
    """
    sharded = [child for child in module.modules() if isinstance(child, FSDPModule)]
    if not sharded:
        raise ValueError(f"unsharded('{type(module).__name__}'): no module in it is sharded; call fully_shard first")
    kept = {group: replace(group.settings) for group in groups_of(sharded)}
    for group in kept:
        group.settings.reshard_after_forward, group.settings.user_has_unsharded = False, True
    try:
        for handle in [child.unshard(async_op=True) for child in sharded]:
            cast(UnshardHandle, handle).wait()
        yield
    finally:
        for group, before in kept.items():
            group.settings.reshard_after_forward = before.reshard_after_forward
            group.settings.user_has_unsharded = before.user_has_unsharded
        for group in groups_of(sharded):  # the first gather may have made some
            group.reshard()


def share_comm_ctx(modules: Sequence[FSDPModule]) -> None:
    """For several roots, such as the stages of a pipeline, to share streams and communicators: here they always do.

    Raises ValueError for a module that is not sharded.
    """
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(f"share_comm_ctx: '{type(module).__name__}' is not sharded")
