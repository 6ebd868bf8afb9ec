"""What a rank takes of a checkpoint: which tensor goes where, and what is missing."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..tensor.dtensor import DTensor
from .dcp.objects import check_object
from .dcp.stored import Stored
from .errors import CheckpointError
from .names import Path as Keys
from .names import joined
from .parts import memory_of
from .reading import Fetch, fetches, read_all
from .shown import reason, shown
from .trees import flattened, key_of, placed

_LISTED = 20  # names in an error


class Contents:
    """A checkpoint as one rank loads it.

    Tensors that are asked for are read later, all at once; objects are read at once. What is missing, or does not fit, is
    collected, and reported together by `check`.
    """

    def __init__(self, folder: Path, stored: Stored) -> None:
        self.folder, self.stored = folder, stored
        self.fetches: list[Fetch] = []
        self.finish: list[Callable[[], object]] = []  # called in this order when all tensors have been read
        self.missing: list[str] = []
        self._unfit: list[str] = []
        self._inside: dict[Keys, list[tuple[Keys, str]]] = {}
        for name in (*stored.tensors, *stored.objects):
            path = stored.paths.get(name, ())
            if len(path) < 2:  # none, or that of a dict whose keys were flat already
                path = tuple(name.split("."))
            for length in range(len(path) + 1):
                self._inside.setdefault(path[:length], []).append((path[length:], name))

    def __contains__(self, name: str) -> bool:
        return name in self.stored.tensors or name in self.stored.objects

    def inside(self, path: Keys) -> list[tuple[Keys, str]]:
        """The names of what lies at a path or below it, with their paths from there."""
        return self._inside.get(tuple(key for key in path if key != ""), [])

    def read_into(self, name: str, target: torch.Tensor) -> None:
        """Have a stored tensor read into `target`, a plain tensor or a `DTensor` of its shape, and of any dtype."""
        stored = self.stored.tensors.get(name)
        if stored is None:
            found = "an object" if name in self.stored.objects else "nothing"
            self._unfit.append(f"'{name}': expected a tensor of shape {tuple(target.shape)}, found {found}")
        elif tuple(stored.shape) != tuple(target.shape):
            self._unfit.append(f"'{name}': expected shape {tuple(target.shape)}, found {tuple(stored.shape)}")
        elif stored.dtype.is_complex and not target.dtype.is_complex:
            self._unfit.append(f"'{name}': expected {target.dtype}, found {stored.dtype}")
        else:
            self.fetches += fetches(name, stored, memory_of(name, target))

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Read the tensors that are asked for in the `with` block at its end."""
        before, self.fetches = self.fetches, []
        yield
        read_all(self.stored, self.fetches)
        self.fetches = before

    def fresh(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new plain tensor into which a stored one is read whole."""
        stored = self.stored.tensors[name]
        made = torch.empty(tuple(stored.shape), dtype=stored.dtype, device=device)
        self.read_into(name, made)
        return made

    def value(self, name: str, current: Any = None) -> Any:
        """A stored object; or a stored tensor, which is read into `current` if that is a tensor of its shape."""
        if name in self.stored.objects:
            return self._object(name)
        fits = isinstance(current, torch.Tensor) and tuple(current.shape) == tuple(self.stored.tensors[name].shape)
        if not fits and not isinstance(current, DTensor):
            return self.fresh(name, current.device if isinstance(current, torch.Tensor) else "cpu")
        self.read_into(name, current)
        return current

    def tree(self, path: Keys, current: Any) -> Any:
        """What lies at a path, as nested dicts and lists; `current` says what is there now.

        Tensors are read into those of `current`. Of its keys, each that has something has to be in the checkpoint.
        """
        if joined(path) in self:
            return self.value(joined(path), current)
        found, own = self.inside(path), dict(flattened(current, ()))
        made: Any = {key: value for key, value in current.items() if value == {}} if isinstance(current, Mapping) else None
        for rest, name in sorted(found, key=lambda each: len(each[0])):
            made = placed(made, rest, self.value(name, own.get(rest)), current)
        here = {rest[0] for rest, _ in found if rest}
        if not found:
            self.missing += [joined((*path, *rest)) for rest, value in own.items() if rest or value != {}]
        elif isinstance(current, Mapping) and here:
            kept = {key_of(current, step) for step in here if isinstance(step, str)}
            self.missing += [joined((*path, key)) for key, value in current.items() if key not in kept and value != {}]
        return made

    def check(self) -> None:
        """Raise CheckpointError if anything is missing or does not fit."""
        problems = [_listed("the checkpoint lacks", [f"'{name}'" for name in self.missing])] if self.missing else []
        problems += [_listed("it does not fit the state:", self._unfit)] if self._unfit else []
        if problems:
            raise CheckpointError(f"cannot load {str(self.folder)!r}: {'; '.join(problems)}")

    def _object(self, name: str) -> Any:
        stored = self.stored.objects[name]
        with self.stored.open(stored.file) as reader:
            data = bytes(reader.read(stored.offset, stored.length))
        where = f"{str(self.folder / stored.file)!r}, object {shown(name)}"
        check_object(data, where)
        try:
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{where} cannot be loaded without running code of its author, or is damaged: {reason(error)}"
            ) from error


def _listed(before: str, items: list[str]) -> str:
    more = f", and {len(items) - _LISTED} more" if len(items) > _LISTED else ""
    return f"{before} {', '.join(items[:_LISTED])}{more}"
