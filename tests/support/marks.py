"""Parameters of tests that do not run every time."""

from typing import Any

import pytest


def rest(*values: Any) -> list[Any]:
    """These parameters (tuples of them, if the test takes several) with the mark `rest`."""
    return [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.rest) for value in values]
