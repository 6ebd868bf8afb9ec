"""Fixtures that several files of tests share."""

from collections.abc import Iterator

import pytest

from slurm import Slurm, install


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A running Slurm; the test is skipped where there can be none."""
    if reason := install():
        pytest.skip(f"no Slurm: {reason}")
    with Slurm() as running:
        yield running
