"""Packages that import their modules when a name of theirs is first used (PEP 562): commands show their help without torch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The `__getattr__` and `__dir__` of a package whose public names are those of its module `exports`.

    A module of the package is imported by itself. Any other name imports `exports`, all of whose names become the package's
    own: later uses cost nothing. Errors of these imports are raised as they are.
    """
    own = vars(sys.modules[package])

    def load(module: str) -> ModuleType:
        try:
            return import_module(f"{package}.{module}")
        except AttributeError as error:  # which would look as if the package had no such name
            raise ImportError(f"the import of {package}.{module} failed: {error}") from error

    def share() -> None:
        exports = load("exports")
        own.update({name: getattr(exports, name) for name in exports.__all__}, __all__=exports.__all__)

    def get(name: str) -> Any:
        if name == "__all__" or not name.startswith("_"):
            # Hazard: `from . import module` asks for it, in modules that `exports` needs.
            if (spec := find_spec(f"{package}.{name}")) is not None and spec.origin:  # no leftover folder
                return load(name)
            share()
            if name in own:
                return own[name]
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        share()
        return sorted(own)

    return get, names
