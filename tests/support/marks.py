"""Parameters of tests that do not run every time."""

from collections.abc import Iterable
from typing import Any

import pytest


def rest(*values: Any) -> list[Any]:
    """These parameters (tuples of them, if the test takes several) with the mark `rest`."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.rest) for value in values]


def usually(names: Iterable[str], *usual: str) -> list[Any]:
    """These names, with the mark `rest` on those that are not usual."""
    return [name if name in usual else pytest.param(name, marks=pytest.mark.rest) for name in names]
