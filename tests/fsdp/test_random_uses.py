"""What users do with a sharded model, drawn together at random, beside one process (`tests/support/uses.py`)."""

import pytest

import uses
from ranks import on_ranks
from shardrt.comm import World

DRAWS, PARTS = 75, 3  # for each number of ranks, and the tests that share them


@pytest.mark.parametrize("part", range(PARTS))
@on_ranks(1, 2, 3, 4)
def test_random_uses(world: World, part: int) -> None:
    """`mpirun -n RANKS python tests/support/uses.py SEED 1` repeats one of them alone."""
    done = [uses.run(world, seed) for seed in range(part, DRAWS, PARTS)]
    assert sum(done) > 0.7 * len(done), "most of them are refused, so that little is compared"
