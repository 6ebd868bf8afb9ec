"""What a rank loads from a checkpoint: which tensor goes where, and what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch

from ...comm import DeviceMesh
from ...tensor.dtensor.dtensor import DTensor
from ..disk.errors import CheckpointError, first_of, listed, shown
from ..formats.geometry import memory_of
from ..formats.stored import Stored
from ..state.dtypes import Rounded, narrows
from ..state.names import Path as Keys
from ..state.names import joined
from ..state.objects import ARRAY, decode, with_numpy
from ..state.several_names import Twins
from ..state.stateful import OF_RANK, PerRank
from ..state.trees import flattened, key_of, placed
from .reading import Fetch, fetches, read_all
from .renaming import KeyMap, with_new_names


class _OfRank(NamedTuple):
    """A value that rank `rank` of `ranks` saved for itself.   name: the one in the checkpoint."""

    rank: int
    ranks: int
    name: str


class Contents:
    """A checkpoint as one rank loads it.

    Tensors that are asked for are read later, all together; objects are read immediately. What is missing, unexpected, or does
    not fit, is collected, and reported together by `check`. A value that ranks saved for themselves goes by its name without
    the rank. Names are those that key_map gives; for what it has renamed, `old` has the names in the files.
    """

    def __init__(self, stored: Stored, key_map: KeyMap | None = None, *, rank: int = 0, ranks: int = 1) -> None:
        self.stored, self.old, self._left_out = with_new_names(stored, key_map)
        self._rank, self._ranks = rank, ranks
        self.fetches: list[Fetch] = []
        self.meshes: dict[str, DeviceMesh] = {}  # of the tensors that are read into a `DTensor`
        self.finish: list[Callable[[], object]] = []  # called in this order when all tensors have been read
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.rounded: list[Rounded] = []
        self.twins: list[Twins] = []  # further names of tensors that are read
        self.unlike: list[str] = []  # sentences about those that have other values
        self.other_classes: list[str] = []  # sentences about optimizers
        self.warnings: list[str] = []
        self._unfit: list[str] = []
        self._into: dict[object, str] = {}  # the names of what is read, by its place in memory
        self._of_ranks: dict[str, list[_OfRank]] = {}
        self._inside: dict[Keys, list[tuple[Keys, str]]] = {}
        for name in (*self.stored.tensors, *self.stored.objects):
            path = self.stored.paths.get(name, ())
            if len(path) < 2:  # there is no path, or that of a dict whose keys were flat already
                path = tuple(name.split("."))
            if match := OF_RANK.fullmatch(str(path[-1])):
                path = path[:-1]
                if not self._is_first(joined(path), _OfRank(int(match[1]), int(match[2]), name)):
                    continue
                name = joined(path)
            for length in range(len(path) + 1):
                self._inside.setdefault(path[:length], []).append((path[length:], name))

    def _is_first(self, name: str, saved: _OfRank) -> bool:
        """Note a value that a rank saved for itself; returns whether it is the first one of this name.

        If as many ranks saved as there are now, the values of other ranks are left out.
        """
        if saved.ranks == self._ranks and saved.rank != self._rank:
            return False
        found = self._of_ranks.setdefault(name, [])
        found.append(saved)
        return len(found) == 1

    def __contains__(self, name: str) -> bool:
        return name in self.stored.tensors or name in self.stored.objects or name in self._of_ranks

    def inside(self, path: Keys) -> list[tuple[Keys, str]]:
        """The names of what lies at a path or below it, with their paths from there."""
        return self._inside.get(tuple(key for key in path if key != ""), [])

    def renamed_in(self, key: str) -> dict[str, str | None]:
        """The new names in module `key` of what key_map has renamed, by the old names there; None for what it leaves out."""
        prefix = f"{key}." if key else ""
        found: dict[str, str | None] = {name.removeprefix(prefix): None for name in self._left_out if name.startswith(prefix)}
        for name, old in self.old.items():
            if name.startswith(prefix) and name in self.stored.tensors:
                found[str(old.path[-1]) if old.path else old.name.removeprefix(prefix)] = name.removeprefix(prefix)
        return found

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
        elif (first := self._into.setdefault(_place(target), name)) != name:
            self.twins.append(Twins(first, name, target))  # tensors of a dict that are tied
        else:
            self.fetches += fetches(name, stored, memory_of(name, target))
            if narrows(stored.dtype, target.dtype):
                self.rounded.append(Rounded(name, stored.dtype, target.dtype))
            if isinstance(target, DTensor):
                self.meshes[name] = target.spec.mesh

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Read the tensors that are asked for in the `with` block at its end."""
        before, (self.fetches, self._into) = (self.fetches, self._into), ([], {})
        yield
        read_all(self.stored, self.fetches)
        self.fetches, self._into = before

    def fresh(self, name: str, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new plain tensor into which a stored one is read whole."""
        stored = self.stored.tensors[name]
        made = torch.empty(tuple(stored.shape), dtype=stored.dtype, device=device)
        self.read_into(name, made)
        return made

    def value(self, name: str, current: Any = None) -> Any:
        """A stored object; or a stored tensor, which is read into `current` if that is a tensor of its shape."""
        if isinstance(current, PerRank):
            self.finish.append(partial(current.take, self._of_rank(name, current.convert)))
            return current
        if name in self._of_ranks:
            return self._of_rank(name, None)
        if name in self.stored.objects:
            return self._object(name)
        fits = isinstance(current, torch.Tensor) and tuple(current.shape) == tuple(self.stored.tensors[name].shape)
        if not fits and not isinstance(current, DTensor):
            return self.fresh(name, current.device if isinstance(current, torch.Tensor) else "cpu")
        self.read_into(name, current)
        return current

    def tree(self, path: Keys, current: Any) -> Any:
        """What lies at a path, as nested dicts and lists; `current` says what is there now.

        Tensors are read into those of `current`. The checkpoint must have all keys of `current` whose values are not empty.
        """
        if joined(path) in self:
            return self.value(joined(path), current)
        if isinstance(current, PerRank) and current.is_optional:
            return current
        if isinstance(current, PerRank):  # the checkpoint has the state of an object, not of each rank
            self.finish.append(partial(current.take, self.tree(path, current.state())))
            return current
        found, own = self.inside(path), dict(flattened(current, ()))
        made: Any = {key: value for key, value in current.items() if _is_empty(value)} if isinstance(current, Mapping) else None
        for rest, name in sorted(found, key=lambda each: len(each[0])):
            made = placed(made, rest, self.value(name, own.get(rest)), current)
        here = {rest[0] for rest, _ in found if rest}
        if not found:
            self.missing += [joined((*path, *rest)) for rest, value in own.items() if rest or not _is_empty(value)]
            return current
        if isinstance(current, Mapping) and here:
            kept = {key_of(current, step) for step in here if isinstance(step, str)}
            lacking = {key: value for key, value in current.items() if key not in kept and not _is_empty(value)}
            self.missing += [joined((*path, key)) for key in lacking]
            made |= lacking
        return with_numpy(made) if any(rest and rest[-1] == ARRAY for rest, _ in found) else made

    def check(self, *, strict: bool) -> str:
        """Raise CheckpointError if anything does not fit or, if strict, is missing or unexpected; else returns what is."""
        loose = [f"the checkpoint lacks {listed(self.missing)}"] if self.missing else []
        loose += [f"the state has no place for {listed(self.unexpected)}"] if self.unexpected else []
        loose += [*self.unlike, *self.other_classes]
        problems = [f"it does not fit the state: {first_of(self._unfit)}"] if self._unfit else []
        if strict and loose:
            problems = [*loose, *problems, "key_map gives names that fit, and strict=False loads the rest"]
            if any(".state." in f".{name}" for name in self.unexpected):
                problems.append("of an optimizer without state, give the optimizer itself, in the place of its state dict")
        if problems:
            raise CheckpointError(f"cannot load {str(self.stored.folder)!r}: {'; '.join(problems)}")
        return "; ".join(loose)

    def _of_rank(self, name: str, convert: Callable[[list[Any]], Any] | None) -> Any:
        """This rank's value among those that ranks saved for themselves, or the value that was saved once for all ranks."""
        saved = self._of_ranks.get(name)
        if saved is None:
            return self.value(name)
        if saved[0].ranks == self._ranks:
            return self._object(saved[0].name)
        if convert is None:
            self._unfit.append(
                f"'{name}' was saved by each of {saved[0].ranks} ranks, and this job has {self._ranks}: give a function that "
                "makes this rank's value of all of theirs, as checkpoint.PerRank(value, convert)"
            )
            return None
        return convert([self._object(each.name) for each in sorted(saved)])

    def _object(self, name: str) -> Any:
        stored = self.stored.objects[name]
        with self.stored.open(stored.file) as reader:
            data = bytes(reader.read(stored.offset, stored.length))
        return decode(data, f"{str(self.stored.folder / stored.file)!r}, object {shown(name)}")


def _place(target: torch.Tensor) -> object:
    """Equal for tensors that are the same elements in memory."""
    local = target._local_tensor if isinstance(target, DTensor) else target
    if (type(local) is not torch.Tensor and type(local) is not torch.nn.Parameter) or not local.numel():
        return object()
    return local.data_ptr(), local.shape, local.stride(), local.dtype, local.device


def _is_empty(value: Any) -> bool:
    """Whether a value has nothing that a checkpoint must have."""
    return (isinstance(value, Mapping) and not value) or (isinstance(value, PerRank) and value.is_optional)
