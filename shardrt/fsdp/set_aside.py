"""Gradients that a group holds for parameters which do not require any at the moment.

Two optimizers that take turns, as those of a GAN, switch `requires_grad` of each other's parameters off. Gradients that one of
them accumulates without reducing them are set aside meanwhile, with their reduction, until its parameters are on again.
"""

from __future__ import annotations

from collections.abc import Sequence

from .packed import Held
from .param import ShardedParam
from .reduce import GradientReduction


class SetAside:
    """A group's reductions that hold gradients, by the parameters they are of; those of the trainable ones are not here."""

    _reductions: dict[tuple[ShardedParam, ...], GradientReduction]

    def __init__(self) -> None:
        self._reductions = {}

    def holds(self, current: GradientReduction | None) -> bool:
        """The group holds gradients. current: its reduction."""
        return bool(self._reductions) or (current is not None and current.held is not Held.NOTHING)

    def exchange(
        self, group: str, current: GradientReduction | None, trainable: Sequence[ShardedParam]
    ) -> GradientReduction | None:
        """Set `current` aside if it holds gradients. Returns: the reduction that holds those of exactly `trainable`, if any.

        group: its name and rank, for the error: RuntimeError if only some of the parameters of a reduction that holds gradients
        are trainable, or others with them. Nothing is changed then.
        """
        held = dict(self._reductions)
        if current is not None and current.held is not Held.NOTHING:
            held[tuple(current.params)] = current
        for params in held:
            if params != tuple(trainable) and not set(params).isdisjoint(trainable):
                raise RuntimeError(
                    f"requires_grad of parameters of {group} changed while it holds accumulated gradients: expected all "
                    f"{len(params)} that these are of, '{params[0].name}' among them, or none of them; run a backward with "
                    "set_requires_gradient_sync(True) first"
                )
        found = held.pop(tuple(trainable), None)
        self._reductions = held
        return found

    def discard(self) -> None:
        """Forget them, after a failed iteration."""
        for reduction in self._reductions.values():
            reduction.discard()
        self._reductions = {}
