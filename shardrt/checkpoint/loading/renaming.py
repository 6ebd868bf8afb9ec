"""Other names for what a checkpoint has: the `key_map` of `load` and of `load_safetensors`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ..disk.errors import CheckpointError
from ..formats.stored import Lazy, Stored
from ..state.names import Path
from ..state.stateful import OF_RANK

KeyMap = Callable[[str], str | None] | Mapping[str, str | None] | Sequence[tuple[str, str]]
Rename = Callable[[str], str | None]


class Old(NamedTuple):
    """The name and the path that an entry has in the checkpoint."""

    name: str
    path: Path


class Renamed(NamedTuple):
    """The contents of a checkpoint by their new names.

    old: the old names of what has another one now, by the new names.   left_out: the old names that have become None.
    """

    stored: Stored
    old: Mapping[str, Old]
    left_out: frozenset[str]


def renamer(key_map: KeyMap | None) -> Rename:
    """The key_map as a function. Raises re.error for an invalid regular expression."""
    if key_map is None:
        return lambda name: name
    if callable(key_map):
        return key_map
    if isinstance(key_map, Mapping):
        return lambda name: key_map.get(name, name)
    pairs = [(re.compile(pattern), replacement) for pattern, replacement in key_map]

    def rename(name: str) -> str:
        for pattern, replacement in pairs:
            name = pattern.sub(replacement, name)
        return name

    return rename


def with_new_names(stored: Stored, key_map: KeyMap | None) -> Renamed:
    """Rename all entries. One that a rank saved for itself is renamed as if it had been saved once for all ranks.

    Raises CheckpointError if two get the same name.
    """
    if key_map is None:
        return Renamed(stored, {}, frozenset())
    rename = renamer(key_map)

    def rename_any(name: str) -> str | None:
        base, _, last = name.rpartition(".")
        if not OF_RANK.fullmatch(last):
            return rename(name)
        return None if (new := rename(base)) is None else f"{new}.{last}"

    old = dict[str, str]()  # by the new names
    for name in (*stored.tensors, *stored.objects):
        if (new := rename_any(name)) is not None and (other := old.setdefault(new, name)) != name:
            where = os.fspath(stored.folder)
            raise CheckpointError(f"'{where}': key_map gives '{other}' and '{name}' the same name '{new}'")
    tensors = Lazy({new: partial(stored.tensors.__getitem__, name) for new, name in old.items() if name in stored.tensors})
    objects = {new: stored.objects[name] for new, name in old.items() if name in stored.objects}
    paths = {new: _new_path(stored.paths[name], new) for new, name in old.items() if name in stored.paths}
    changed = {new: Old(name, stored.paths.get(name, ())) for new, name in old.items() if new != name}
    left_out = frozenset((*stored.tensors, *stored.objects)).difference(old.values())
    return Renamed(replace(stored, tensors=tensors, objects=objects, paths=paths), changed, left_out)


def _new_path(path: Path, new: str) -> Path:
    """The path of a new name: the keys of the old path that the name begins and ends with, and one for each word between."""
    words, first, last = new.split("."), 0, len(path)
    while first < last and _words(path[first]) == words[: len(_words(path[first]))]:
        words = words[len(_words(path[first])) :]
        first += 1
    while first < last and _words(path[last - 1]) == words[-len(_words(path[last - 1])) :]:
        words = words[: -len(_words(path[last - 1]))]
        last -= 1
    return (*path[:first], *words, *path[last:])


def _words(key: str | int) -> list[str]:
    return str(key).split(".")
