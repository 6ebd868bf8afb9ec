"""Modules that some ranks skip: every rank gathers and reduces their groups all the same, in one order.

Ranks that skip modules at random, for layer drop or stochastic depth, do not know what the others run. So with
`set_reduce_scatter_unused_params(True, skipped_modules=True)` each group has its turn once in a forward and once in a backward,
in the order in which the modules are registered, and the other way round. A rank that comes to a turn first takes all turns
before it, of modules that it has skipped: it gathers their parameters, and reduces zeros. What is left when a module around
them ends, it takes then. So all ranks make the same calls, and record the same order of use.

| a rank comes to                   | it takes, as if the modules had run   |
|-----------------------------------|---------------------------------------|
| the start of a group              | all turns before it                   |
| the end of a group                | those of the groups inside that are left |
| the end of the root's backward    | all that are left                     |

`TurnOrder` has the order, and what has happened; `Turns` does what is to be done.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, auto
from typing import Protocol

import torch

from ...tensor.dtensor.dtensor import DTensor
from ..base.autograd import BackwardProgress, GroupPhase
from .param_group import ParamGroup

Turn = tuple[ParamGroup, bool]  # a group, and whether it starts (or else ends)


class _State(Enum):
    """What a group has done in this pass."""

    NOTHING = auto()  # its turn has not come, or it is not one that ranks may skip
    SKIPPED = auto()  # its turn has come without it
    RUNS = auto()


class TurnOrder:
    """The turns of a forward or a backward under one root."""

    _name: str
    _rank: int
    _turns: list[Turn]
    _places: dict[Turn, int]
    _next: int  # the place of the next turn; written by all methods that yield turns
    _states: dict[ParamGroup, _State]  # written by start(), and where a turn is passed

    def __init__(self, root: ParamGroup, *, backward: bool) -> None:
        self._name, self._rank = "backward" if backward else "forward", root.mesh.rank
        self._turns = list(_turns(root, backward=backward))
        self._places = {turn: place for place, turn in enumerate(self._turns)}
        self.restart()

    def restart(self) -> None:
        """The pass begins."""
        self._next, self._states = 0, dict.fromkeys((group for group, _ in self._turns), _State.NOTHING)

    def start(self, group: ParamGroup) -> Iterator[Turn]:
        """`group` is about to run. Yields the turns to take before it. Raises RuntimeError if its turn is over."""
        place = self._places[group, True]
        if place < self._next:
            self._check_again(group, place)
        else:
            yield from self._until(place)
            self._next = place + 1
        self._states[group] = _State.RUNS

    def end(self, group: ParamGroup) -> Iterator[Turn]:
        """`group` has run. Yields the turns to take before it, of groups inside it."""
        place = self._places[group, False]
        if place >= self._next:
            yield from self._until(place)
            self._next = place + 1

    def rest(self) -> Iterator[Turn]:
        """The pass is over. Yields the turns that are left."""
        yield from self._until(len(self._turns))

    def is_to_come(self, group: ParamGroup) -> bool:
        """Whether the turn of `group` has not begun."""
        return self._places[group, True] >= self._next

    def has_ended(self, group: ParamGroup) -> bool:
        """Whether the turn of `group` is over, although it may still run."""
        return self._places[group, False] < self._next

    def _until(self, place: int) -> Iterator[Turn]:
        while self._next < place:
            group, starts = turn = self._turns[self._next]
            self._next += 1
            if starts and group.settings.may_be_skipped:
                self._states[group] = _State.SKIPPED
            if self._states[group] is not _State.NOTHING:
                yield turn

    def runs(self, group: ParamGroup) -> bool:
        """Whether this rank runs it, in this pass."""
        return self._states[group] is _State.RUNS

    def _check_again(self, group: ParamGroup, place: int) -> None:
        """Raise RuntimeError for a group whose turn has come, unless nothing that ranks may skip was between."""
        if not self.has_ended(group):
            return  # a group inside it came first, or it has been recomputed
        if not any(other.settings.may_be_skipped for other, _ in self._turns[place : self._next]):
            return
        later = [other.name for other, starts in self._turns[place + 1 : self._next] if starts and self.runs(other)]
        found = "a second time" if self.runs(group) else f"after '{later[-1]}'" if later else "after the module around it"
        raise RuntimeError(
            f"the {self._name} of '{group.name}' runs {found} (rank {self._rank}): where ranks may skip modules, each runs "
            "once at most, one after the other in the order in which they are registered, and is recomputed by itself; for "
            "another order run all modules on all ranks, with set_reduce_scatter_unused_params(True) alone"
        )


class Steps(Protocol):
    """What a `Runtime` does for a group."""

    root: ParamGroup

    def enter_forward(self, group: ParamGroup) -> None: ...

    def leave_forward(self, group: ParamGroup, *, is_last: bool) -> None: ...

    def enter_backward(self, group: ParamGroup) -> None: ...

    def leave_backward(self, group: ParamGroup) -> None: ...

    def reduce(self, group: ParamGroup) -> None: ...


class Turns:
    """Takes the turns of modules that this rank skips: does what would be done around their forward and backward."""

    forward: TurnOrder
    backward: TurnOrder
    _runtime: Steps
    _evaluates: bool  # in eval(), all modules run, in any order, such as those of `generate()`

    def __init__(self, runtime: Steps) -> None:
        self._runtime, self._evaluates = runtime, not runtime.root.modules[0].training
        self.forward, self.backward = TurnOrder(runtime.root, backward=False), TurnOrder(runtime.root, backward=True)

    @classmethod
    def of(cls, runtime: Steps, groups: Sequence[ParamGroup]) -> Turns | None:
        """Those of a new iteration; None if none of the groups may be skipped.

        Raises ValueError for a group of several modules that may be: its turn would come several times.
        """
        skipped = [group for group in groups if group.settings.may_be_skipped]
        for group in skipped:
            if len(group.modules) > 1:
                raise ValueError(
                    f"set_reduce_scatter_unused_params(skipped_modules=True): '{group.name}' were sharded together (rank "
                    f"{group.mesh.rank}), and some might run without the others: shard each by itself, or leave "
                    "skipped_modules out for them"
                )
        return cls(runtime) if skipped else None

    def start_forward(self, group: ParamGroup) -> None:
        """`group` is about to run in forward."""
        root = self._runtime.root
        if self._evaluates:
            return
        if group is root or root.calls.phase is GroupPhase.FORWARD:
            self._pass_forward(self.forward.start(group))
        elif torch.is_grad_enabled() and not group.settings.user_has_unsharded:
            raise RuntimeError(
                f"'{group.name}' runs outside of the forward of '{root.name}' (rank {root.mesh.rank}): where ranks may skip "
                "modules, run it in there, or under torch.no_grad()"
            )

    @property
    def are_taken(self) -> bool:
        """Whether a forward is under way in which modules have turns."""
        return self._runtime.root.calls.phase is GroupPhase.FORWARD and not self._evaluates

    def end_forward(self, group: ParamGroup) -> None:
        """`group` has run in forward."""
        if self.are_taken:
            self._pass_forward(self.forward.end(group))

    def needs_backward(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether no backward would come back to these outputs of the root, but others may train what this rank has skipped."""
        if not self.are_taken or not torch.is_grad_enabled() or any(output.requires_grad for output in outputs):
            return False
        return any(group.trainable and not self.forward.runs(group) for group in self._runtime.root.with_descendants())

    @staticmethod
    def with_backward(output: torch.Tensor) -> torch.Tensor:
        """The same numbers, with a graph that leads to nothing: its backward takes the turns."""
        if isinstance(output, DTensor) or not (output.is_floating_point() or output.is_complex()):
            return output
        nothing = torch.zeros((), dtype=output.dtype, device=output.device, requires_grad=True)
        return output - nothing  # adding it would change -0.0

    def _pass_forward(self, turns: Iterable[Turn]) -> None:
        for group, starts in turns:
            if self.forward.runs(group):
                raise RuntimeError(
                    f"'{group.name}' runs a sharded module that is not inside of it (rank {group.mesh.rank}): where ranks may "
                    "skip modules, they run one after the other"
                )
            if starts:
                self._runtime.enter_forward(group)
            else:
                self._runtime.leave_forward(group, is_last=True)

    def start_backward(self, group: ParamGroup) -> None:
        """The backward of `group` begins."""
        self._pass_backward(self.backward.start(group))

    def end_of(self, group: ParamGroup) -> bool:
        """The backward of a call of `group` is over. Returns: whether it is to be reduced now."""
        if self.backward.has_ended(group):
            return False
        self._pass_backward(self.backward.end(group))
        return group.reduction_due(BackwardProgress.MODULE_DONE)

    def end_backward(self) -> None:
        """The whole backward is over."""
        self._pass_backward(self.backward.rest(), is_over=True)

    def _pass_backward(self, turns: Iterable[Turn], *, is_over: bool = False) -> None:
        for group, starts in turns:
            runs = self.backward.runs(group)
            if starts:
                group.calls.move(GroupPhase.BACKWARD, group)
                self._runtime.enter_backward(group)
            elif runs and not is_over and any(param.unsharded.grad is None for param in group.trainable):
                _refuse_open(group)
            elif group.reduction_due(BackwardProgress.BACKWARD_DONE):
                self._runtime.reduce(group)
            if not starts and not runs:
                self._runtime.leave_backward(group)


def _refuse_open(group: ParamGroup) -> None:
    """Raise RuntimeError for a group that may be skipped; another one is reduced when the backward ends, on all ranks alike."""
    if group.settings.may_be_skipped:
        raise RuntimeError(
            f"the backward of '{group.name}' is not known to be over when that of a module before it begins (rank "
            f"{group.mesh.rank}): where ranks may skip modules, they run one after the other, on inputs of which each that "
            "requires a gradient gets one, and one does"
        )


def _turns(group: ParamGroup, *, backward: bool) -> Iterator[Turn]:
    """The turns of a group and those inside it. Groups of the same modules lie inside each other, as their hooks do."""
    same = [child for child in group.children if child.modules == group.modules]
    inside = [child for child in group.children if child.modules != group.modules]
    around = [group, *same]
    yield from ((each, True) for each in around)
    for child in [*(child for each in same for child in each.children), *inside][:: -1 if backward else 1]:
        yield from _turns(child, backward=backward)
    yield from ((each, False) for each in reversed(around))
