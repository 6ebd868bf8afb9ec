"""How far the training of this process is: reports say which ranks are elsewhere. Whoever trains writes it."""

from __future__ import annotations


class Progress:
    """steps: of optimizers that are done, those after the same forwards counted once.   forwards: begun since, with a graph.
    accumulates: gradients of the newest backward stay on each rank, for later micro-batches.
    """

    __slots__ = ("accumulates", "forwards", "steps")

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """A world begins: all of its ranks count from here."""
        self.steps = self.forwards = 0
        self.accumulates = False

    def end_step(self) -> None:
        """An optimizer has made a step."""
        if self.forwards:
            self.steps += 1
            self.forwards = 0
        self.accumulates = False


def described(steps: int, forwards: int, *, accumulates: bool) -> str:
    """A progress in words."""
    place = f"in forward {forwards} of step {steps + 1}" if forwards else f"after step {steps}"
    return f"{place}, whose gradients wait for more" if accumulates else place


progress = Progress()
