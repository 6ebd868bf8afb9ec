"""The arguments of saves and loads: a folder and a state, in this order, or as those of torch.distributed.checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...comm import world
from ..errors import agreed

Folder = str | os.PathLike[str]

_FOLDER, _STATE = ("folder", "checkpoint_id"), ("state", "state_dict")


def folder_and_state(call: str, given: Sequence[object], named: Mapping[str, object]) -> tuple[Folder, dict[str, Any]]:
    """The folder and the state of a call: positional arguments are told apart by their types. Collective.

    Raises CheckpointError on every rank, with a TypeError as its reason, for other arguments on any of them.
    """
    with agreed(world().comm):
        folders: list[object] = [value for value in given if isinstance(value, (str, os.PathLike))]
        states: list[object] = [value for value in given if isinstance(value, Mapping)]
        folders += [named[name] for name in _FOLDER if named.get(name) is not None]
        states += [named[name] for name in _STATE if named.get(name) is not None]
        others = [type(value).__name__ for value in given if not isinstance(value, (str, os.PathLike, Mapping))]
        others += [f"{name}=" for name, value in named.items() if name not in (*_FOLDER, *_STATE) and value is not None]
        if len(folders) != 1 or len(states) != 1 or others:
            raise TypeError(
                f"{call}: expected a folder and a state, as in {call}('runs/a/step-100', state) or {call}(state, "
                f"checkpoint_id='runs/a/step-100'); found {len(folders)} folders, {len(states)} states"
                + (f", and {', '.join(others)}" if others else "")
            )
        _check(call, folders[0], states[0])
    return folders[0], states[0]  # type: ignore[return-value]


def _check(call: str, folder: object, state: object) -> None:
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"{call}: expected the folder as a string or path, found a {type(folder).__name__}: {folder!r}")
    if not isinstance(state, Mapping):
        raise TypeError(f"{call}: expected the state as a dict, found a {type(state).__name__}: as in {{'model': model}}")
