"""Features in each split of four ranks, beside one process: the cells of `scripts/matrix.py`."""

from __future__ import annotations

import pytest

import matrix
from ranks import on_ranks
from shardrt.comm import World

DIMENSIONS = {each.name: each for each in matrix.DIMENSIONS}
SHORT = ("clipping", "GradScaler", "freezing", "checkpoints")
REFUSED = {"PEFT adapters of experts"}


@pytest.mark.parametrize("name", [name for name in DIMENSIONS if name.startswith(("PP", "CP x"))])
@on_ranks(4)
def test_pairs_of_dimensions(world: World, name: str) -> None:
    for feature in SHORT:
        assert matrix.cell(world, DIMENSIONS[name], matrix.FEATURES[feature]) == "yes", feature


@pytest.mark.parametrize("name", DIMENSIONS)
@on_ranks(more=(4,))
def test_all_cells(world: World, name: str) -> None:
    for feature, run in matrix.FEATURES.items():
        found = matrix.cell(world, DIMENSIONS[name], run)
        assert found in ("yes", "-") or (feature in REFUSED and found.startswith("refused")), f"{feature}: {found}"
