"""Two threads on one communicator: the second one is told, and nothing that the first does is wrong."""

from __future__ import annotations

from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import nn

from ranks import on_ranks
from shardrt import fully_shard
from shardrt.comm import ReduceOp, World
from shardrt.comm.core.calls import CallList, Hook
from shardrt.comm.groups.control import hooked


class Held(Hook):
    """Holds up one call of this name in the thread that makes it."""

    def __init__(self, name: str) -> None:
        self.name, self.inside, self.go_on = name, Event(), Event()

    def before(self, calls: CallList) -> None:
        if calls[0].name == self.name and not self.inside.is_set():
            self.inside.set()
            self.go_on.wait()


def in_use(first: str, name: str) -> Any:
    return pytest.raises(
        RuntimeError, match=rf"^{name} on .*'world', .*thread '.*' calls it while thread '{first}' is in a call"
    )


@on_ranks(1, 2, 3)
def test_a_second_thread_is_told_of_the_first(world: World) -> None:
    """Then both can go on."""
    value, total = torch.full((5,), world.rank + 1.0), torch.zeros(5)
    calls = {
        "all_reduce": lambda: world.comm.all_reduce(total, value, ReduceOp.SUM, stream=world.stream).synchronize(),
        "exchange": lambda: world.comm.exchange(world.rank),
    }
    for first, call in calls.items():
        held = Held(first)
        with hooked(held):
            thread = Thread(target=call, name="first")
            thread.start()
            held.inside.wait()
            for name, other in calls.items():
                with in_use("first", name):
                    other()
            held.go_on.set()
            thread.join()
        world.barrier()
    for call in calls.values():
        call()
    assert total.tolist() == [world.size * (world.size + 1) / 2] * 5


@on_ranks(2)
def test_models_of_two_threads(world: World) -> None:
    held, found = Held("exchange"), list[str]()

    def shard() -> None:
        try:
            fully_shard(nn.Linear(3, 3))
        except RuntimeError as error:
            found.append(str(error))

    with hooked(held):
        thread = Thread(target=shard, name="first")
        thread.start()
        held.inside.wait()
        shard()
        held.go_on.set()
        thread.join()
    assert len(found) == 1
    assert "while thread 'first' is in a call" in found[0]


@on_ranks(2)
def test_a_name_cannot_forge_a_line(world: World) -> None:
    made = world.comm.split(0, world.rank, "rows\n[shardrt] rank 1 \x1b[31mfailed\udc80, it's schön")
    assert made is not None
    assert made.name == r"rows\n[shardrt] rank 1 \x1b[31mfailed\udc80, it's schön"
    assert "\n" not in repr(made)
    inside = made.split(0, world.rank, f"{made.name}.inside")
    assert inside is not None
    assert inside.name == f"{made.name}.inside"
    inside.close()
    made.close()
