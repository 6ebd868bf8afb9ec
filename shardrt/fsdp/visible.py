"""Which parameters a group's modules see: the shards, or the gathered parameters; and whether the user can reach the latter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from .param import Attributes, GatheredParameter, ShardedParam


class VisibleParams:
    """What is registered on a group's modules: exchanged around forward and backward.

    The gathered parameters are exposed while the user's code can reach them. What it writes to them then, `conceal` copies to
    the shards.
    """

    unsharded: bool  # the modules see the unsharded parameters
    exposed: bool  # the user can reach the unsharded parameters
    _owners: list[tuple[dict[str, nn.Parameter | None] | Attributes, str, ShardedParam]]  # registry, attribute, parameter
    _plain: list[ShardedParam]  # whose unsharded parameter is of no subclass; written by attach()
    _versions: list[int]  # of the unsharded parameters of `_plain`; written by attach() and expose()

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self.unsharded = False
        self.exposed = False
        self._owners = [(owner.registry, owner.attribute, param) for param in params for owner in param.owners]
        self._plain = []
        self._versions = []

    def attach(self, params: Sequence[ShardedParam]) -> None:
        """The unsharded parameters are made; the user has not seen them yet."""
        self.exposed, self._versions = False, []
        self._plain = [param for param in params if type(param.unsharded) is nn.Parameter]

    def as_expected(self) -> bool:
        """The modules have the group's own parameters, those that they should see now."""
        unsharded = self.unsharded
        for registry, attribute, param in self._owners:
            if registry.get(attribute) is not (param.unsharded if unsharded else param.sharded):
                return False
        return True

    def show_unsharded(self) -> None:
        """Let the modules see the unsharded parameters."""
        for registry, attribute, param in self._owners:
            if registry.get(attribute) is param.sharded:
                registry[attribute] = param.unsharded
        self.unsharded = True

    def show_sharded(self) -> None:
        """Let the modules see the shards. No-op if they do."""
        if self.unsharded:
            self.replace_unsharded()
            self.unsharded = False

    def replace_unsharded(self) -> None:
        """Register the shards wherever the unsharded parameters are. Anything else stays, for the next forward to reject."""
        for registry, attribute, param in self._owners:
            if registry.get(attribute) is param.unsharded:
                registry[attribute] = param.sharded

    def repair(self) -> None:
        """Register what the modules should see now, whatever is there."""
        for registry, attribute, param in self._owners:
            registry[attribute] = param.unsharded if self.unsharded else param.sharded

    def expose(self) -> None:
        """From now on the user's code can reach the unsharded parameters: notice what it writes to them. No-op if exposed."""
        if self.exposed:
            return
        self.exposed = True
        for param in self._plain:
            param.unsharded.__class__ = GatheredParameter
            param.unsharded.sharded = param.sharded  # type: ignore[attr-defined]
        self._versions = [param.unsharded._version for param in self._plain]

    def conceal(self) -> None:
        """The user cannot reach the unsharded parameters any more: write to the shards what was written to them.

        Only while they are exposed.
        """
        for param, version in zip(self._plain, self._versions, strict=True):
            if param.unsharded._version != version:
                param.keep_writes()
        self.exposed = False
        # Cost: operations on a subclass take 0.2 us longer, so inside forward and backward the parameters are plain.
        for param in self._plain:
            param.unsharded.__class__ = nn.Parameter
            param.unsharded.__dict__.pop("sharded", None)
