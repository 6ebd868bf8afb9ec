"""Which parameters a group's modules see: the shards, or the gathered parameters; and whether the user can reach the latter."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ...torch_internals import outside_transforms
from .by_hand import HandUse
from .in_place import LinearWeight, Place, computes_in_place
from .param import Attributes, GatheredParameter, ShardedParam


class VisibleParams:
    """The parameters that are registered on a group's modules. They are exchanged around forward and backward.

    The gathered parameters are exposed while the user's code can reach them. `conceal` copies to the shards what that code has
    written to the gathered parameters.
    """

    unsharded: bool  # the modules see the unsharded parameters
    exposed: bool  # the user can reach the unsharded parameters
    known: bool  # the user could once, and may have kept them; written by expose()
    was_exposed: bool  # or could since the last ParamGroup.follow_requires_grad(), which clears it; written by expose() as well
    _owners: list[tuple[dict[str, nn.Parameter | None] | Attributes, str, ShardedParam]]  # registry, attribute, parameter
    linear: Sequence[tuple[nn.Parameter, Place]]  # unsharded weights whose gradients have places; written by set_linear()
    _watched: list[ShardedParam]  # those whose unsharded parameter is of no subclass; written by attach()
    _plain: list[nn.Parameter]  # these unsharded parameters; written by attach()
    _versions: list[int]  # of `_plain`; written by attach() and expose()
    _hand_use: HandUse | None  # written by attach()

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self.unsharded = False
        self.exposed = self.was_exposed = self.known = False
        self.linear = ()
        self._owners = [(owner.registry, owner.attribute, param) for param in params for owner in param.owners]
        self._watched, self._plain, self._versions, self._hand_use = [], [], [], None

    def attach(self, params: Sequence[ShardedParam], hand_use: HandUse) -> None:
        """Take the unsharded parameters, which have just been made: the user has not seen them yet."""
        self.exposed, self._versions, self._hand_use = False, [], hand_use
        self._watched = [param for param in params if type(param.unsharded) is nn.Parameter]
        self._plain = [param.unsharded for param in self._watched]

    def set_linear(self, linear: Sequence[tuple[nn.Parameter, Place]]) -> None:
        """From the next forward on, gradients of these unsharded weights have places, and others have none."""
        self._hide_places()
        self.linear = linear

    def _hide_places(self) -> None:
        for weight, _ in self.linear:
            weight.__dict__.pop("place", None)
            if type(weight) is LinearWeight:
                weight.__class__ = nn.Parameter  # type: ignore[assignment]

    def as_expected(self) -> bool:
        """Whether the modules register exactly those of the group's parameters that they should see now."""
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

    def follow_grad_mode(self) -> None:
        """Let linear layers that run now compute gradients in place, or not. No-op while the user can reach the weights."""
        if self.exposed:
            return
        if not computes_in_place():
            self._hide_places()
            return
        for weight, place in self.linear:
            weight.__class__, weight.place = LinearWeight, place  # type: ignore[attr-defined]

    def differ(self) -> bool:
        """Whether this rank's shards are not what was gathered of them. Only those are looked at that somebody has had as local
        tensors: the versions of others show all writes.
        """
        return any(watched.differs() for watched in self._watched if watched.sharded.handed_out)  # type: ignore[attr-defined]

    def expose(self) -> None:
        """From now on the user's code can reach the unsharded parameters: notice what it writes to them. No-op if exposed."""
        if self.exposed:
            return
        self._versions = [param._version for param in self._plain]
        self.exposed = self.was_exposed = self.known = True  # first: a signal handler's exception may end this anywhere
        for param, watched in zip(self._plain, self._watched, strict=True):
            param.sharded, param.hand_use = watched.sharded, self._hand_use  # type: ignore[attr-defined]
            param.__class__ = GatheredParameter

    def conceal(self) -> None:
        """Note that the user cannot reach the unsharded parameters any more, and copy to the shards what was written to them.

        Only while they are exposed.
        """
        # Cost: operations on a subclass take longer, so inside forward and backward the parameters are plain.
        # Hazard: a weight whose forward had a place keeps it in a recomputation: selective checkpoints compare operations.
        for param in self._plain:
            param.__class__ = LinearWeight if "place" in param.__dict__ else nn.Parameter
            param.__dict__.pop("sharded", None)  # which cannot be pickled
            param.__dict__.pop("hand_use", None)
            param.__dict__.pop("aliases", None)
        versions = [param._version for param in self._plain]
        if versions != self._versions:
            with outside_transforms():
                for watched, version, known in zip(self._watched, versions, self._versions, strict=True):
                    if version != known:
                        watched.keep_writes()
        self.exposed = False
