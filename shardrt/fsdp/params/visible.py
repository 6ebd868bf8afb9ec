"""What a group's modules register: the shards, or the gathered parameters; and what is written to the latter."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from ...comm import DeviceMesh
from ...torch_internals import compiler_in_use, outside_transforms
from .by_hand import HandUse
from .in_place import LinearWeight, Place, computes_in_place
from .param import Attributes, GatheredParameter, RunningParameter, ShardedParam, check_assigned

_log = logging.getLogger("shardrt")
LOOKS = 16  # of this many forwards, one, and the first ones


class VisibleParams:
    """The parameters that are registered on a group's modules. They are exchanged around forward and backward.

    `ParamGroup.state` says which. The gathered parameters are exposed while the user's code can reach them. `conceal` copies to
    the shards what that code has written to them. What modules write while they run, `take_writes` finds: by version counters,
    and what is written through `data`, where none shows it, in some forwards. A parameter whose `data` was asked for in one of
    these is watched in all others.
    """

    known: bool  # the user could once, and may have kept them; written by expose()
    was_exposed: bool  # or could since the last ParamGroup.follow_requires_grad(), which clears it; written by expose() as well
    _owners: list[tuple[dict[str, nn.Parameter | None] | Attributes, str, ShardedParam]]  # registry, attribute, parameter
    linear: Sequence[tuple[nn.Parameter, Place]]  # unsharded weights whose gradients have places; written by set_linear()
    _watched: list[ShardedParam]  # those whose unsharded parameter is of no subclass; written by attach()
    _plain: list[nn.Parameter]  # these unsharded parameters; written by attach()
    _memory: list[torch.Tensor]  # theirs, that gathers fill; written by attach()
    _versions: list[int]  # of `_plain`, at the last attach(), take_writes() or conceal()
    ran: bool  # modules have run since the last attach() or take_writes(); written there and by begin_forward()
    _forwards: int  # how many have begun
    _handed: list[tuple[nn.Parameter, torch.Tensor]]  # what `data` has returned in this forward; written by `RunningParameter`
    _asked: set[int]  # by id: those of `_plain` whose `data` a forward has asked for
    _hand_use: HandUse | None  # written by attach()

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self.was_exposed = self.known = False
        self.linear = ()
        self._owners = [(owner.registry, owner.attribute, param) for param in params for owner in param.owners]
        self._watched, self._plain, self._memory, self._versions, self._hand_use = [], [], [], [], None
        self.ran, self._forwards, self._handed, self._asked = False, 0, [], set()

    def attach(self, params: Sequence[ShardedParam], hand_use: HandUse) -> None:
        """Take the unsharded parameters, which have just been made: the user has not seen them yet."""
        self.ran = False
        self._hand_use = hand_use
        self._watched = [param for param in params if type(param.unsharded) is nn.Parameter]
        self._plain = [param.unsharded for param in self._watched]
        self._versions = [param._version for param in self._plain]
        self._memory = [param.detach() for param in self._plain]
        self._forwards, self._handed, self._asked = 0, [], set()

    def set_linear(self, linear: Sequence[tuple[nn.Parameter, Place]]) -> None:
        """From the next forward on, gradients of these unsharded weights have places, and others have none."""
        self._hide_places()
        self.linear = linear

    def _hide_places(self) -> None:
        for weight, _ in self.linear:
            weight.__dict__.pop("place", None)
            if type(weight) is LinearWeight:
                weight.__class__ = nn.Parameter  # type: ignore[assignment]
                weight.__dict__.pop("handed", None)

    def registered(self, *, unsharded: bool) -> bool:
        """Whether the modules register exactly these of the group's parameters: the unsharded ones, or the shards."""
        for registry, attribute, param in self._owners:
            if registry.get(attribute) is not (param.unsharded if unsharded else param.sharded):
                return False
        return True

    def show_unsharded(self) -> None:
        """Let the modules see the unsharded parameters."""
        for registry, attribute, param in self._owners:
            if registry.get(attribute) is param.sharded:
                registry[attribute] = param.unsharded

    def show_sharded(self) -> None:
        """Register the shards wherever the unsharded parameters are. Anything else stays, for the next forward to reject."""
        for registry, attribute, param in self._owners:
            if registry.get(attribute) is param.unsharded:
                registry[attribute] = param.sharded

    def repair(self, *, unsharded: bool) -> None:
        """Register these, whatever is there."""
        for registry, attribute, param in self._owners:
            registry[attribute] = param.unsharded if unsharded else param.sharded

    def begin_forward(self) -> None:
        """Let linear layers that run now compute gradients in place, or not, and notice what modules write to parameters.

        Not while they are exposed.
        """
        if self.linear:
            self._follow_grad_mode()
        self._forwards += 1
        self.ran, looks = True, self._forwards <= LOOKS or self._forwards % LOOKS == 0
        if (looks or self._asked) and not compiler_in_use():  # which cannot follow the class
            for param in self._plain:
                if type(param) is nn.Parameter and (looks or id(param) in self._asked):
                    param.__class__, param.handed = RunningParameter, self._handed  # type: ignore[attr-defined]

    def _follow_grad_mode(self) -> None:
        if not computes_in_place():
            self._hide_places()
            return
        for weight, place in self.linear:
            weight.__class__ = LinearWeight
            weight.place, weight.handed = place, self._handed  # type: ignore[attr-defined]

    def take_writes(self) -> list[ShardedParam]:
        """The parameters whose gathered form modules have written since the last time. Only while `ran`, and not exposed."""
        self.ran, versions, through_data = False, [param._version for param in self._plain], set[int]()
        moved = [
            (param, memory)
            for param, memory in zip(self._plain, self._memory, strict=True)
            if type(param) is nn.Parameter and param.data_ptr() != memory.data_ptr()
        ]
        if moved:
            through_data = {id(param) for param, _ in moved}
            self._take_assigned(moved)
        if self._handed:
            through_data |= {id(param) for param, made in self._handed if made._version}
            self._asked.update(id(param) for param, _ in self._handed)
            self._handed.clear()
        if self._forwards <= LOOKS or self._forwards % LOOKS == 0:
            self._end_look()
        if versions == self._versions and not through_data:
            return []
        known, self._versions = self._versions, versions
        changed = zip(self._watched, versions, known, strict=True)
        return [param for param, version, old in changed if version != old or id(param.unsharded) in through_data]

    def _take_assigned(self, moved: Sequence[tuple[nn.Parameter, torch.Tensor]]) -> None:
        """A module has assigned other tensors to the `data` of parameters: move the values to where gathers fill them."""
        for param, memory in moved:
            check_assigned(param, param.shape, memory.shape)
        with torch.no_grad(), outside_transforms():
            values = [param.detach().clone() for param, _ in moved]  # one may have the memory of another: they were exchanged
            for (param, memory), value in zip(moved, values, strict=True):
                memory.copy_(value)
                param.data = memory
                self._asked.add(id(param))

    def _end_look(self) -> None:
        for param in self._plain:
            if type(param) is RunningParameter and id(param) not in self._asked:
                param.__class__ = nn.Parameter  # type: ignore[assignment]
                param.__dict__.pop("handed", None)

    def differ(self) -> bool:
        """Whether this rank's shards are not what was gathered of them. Only those are looked at that somebody has had as local
        tensors: the versions of others show all writes.
        """
        return any(watched.differs() for watched in self._watched if watched.sharded.handed_out)  # type: ignore[attr-defined]

    def expose(self) -> None:
        """From now on the user's code can reach the unsharded parameters: notice what it writes to them."""
        self.was_exposed = self.known = True
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
            if "place" in param.__dict__:
                param.__class__ = LinearWeight
            else:
                param.__class__ = nn.Parameter
                param.__dict__.pop("handed", None)
            param.__dict__.pop("sharded", None)  # which cannot be pickled
            param.__dict__.pop("hand_use", None)
            param.__dict__.pop("aliases", None)
        versions = [param._version for param in self._plain]
        if versions != self._versions:
            with outside_transforms():
                for watched, version, known in zip(self._watched, versions, self._versions, strict=True):
                    if version != known:
                        watched.keep_writes()
            self._versions = versions


def warn_of_writes(params: Iterable[ShardedParam], name: str, mesh: DeviceMesh) -> None:
    """Log, once for each of these parameters of a group, that modules write them while they run."""
    for param in params:
        if not param.was_named and mesh.size > 1 and mesh.rank == 0:
            _log.warning(
                f"'{param.name}' is written in the forward of '{name}': each of {mesh.size} ranks keeps what it has written "
                "itself to its own shard. That is right if all ranks write the same values, as by clipping or normalising. It "
                "is not if these depend on a rank's batch, as the averages of a codebook, or the rows that an "
                "nn.Embedding(max_norm=...) renormalises: have the ranks agree on the values before they are written, or keep "
                "the tensor in a buffer (logged once)"
            )
        param.was_named = True
