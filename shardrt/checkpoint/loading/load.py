"""Loading a state: every rank reads what it needs, straight into the memory of its shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterator, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import chain
from operator import setitem
from pathlib import Path
from typing import Any, overload
from zlib import crc32

import torch
from torch import nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from ...comm import Communicator
from ...comm.core.fingerprint import printable
from ...comm.ending.report import log
from ...comm.startup.bootstrap import world
from ...instruments.progress import told_each_minute
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.inference_mode import outside_inference_mode
from ...tensor.placement.snapshots import wait_to_write
from ..disk.errors import CheckpointError, agreed
from ..disk.storage import located
from ..formats.dcp.metadata_reader import read_stored
from ..formats.geometry import memory_of
from ..formats.stored import without_checksums
from ..state.dtypes import sentence
from ..state.entries import Folder, folder_and_state, members, modules_of, optimizers_of
from ..state.fresh import is_fresh
from ..state.models import materialise
from ..state.names import ParameterNames, cleaner, joined
from ..state.names import Path as Keys
from ..state.optimizers import parameters_of, split_flat
from ..state.several_names import Twins, told_by_all
from ..state.stateful import SomeNames, has_state
from ..state.trees import fill, fills, has_inside, placed
from .compared import unlike
from .contents import Contents
from .optimizers import OptimizerLoader
from .reading import Fetch, on_any_rank, read_all, share_of
from .renaming import KeyMap

Bring = Callable[[set[str]], None]
_log = logging.getLogger("shardrt")


@overload
def load(folder: Folder, state: dict[str, Any], *, strict: bool = True, key_map: KeyMap | None = None) -> None: ...
@overload
def load(state_dict: dict[str, Any], *, checkpoint_id: Folder, strict: bool = True, key_map: KeyMap | None = None) -> None: ...
def load(*given: Any, strict: bool = True, key_map: KeyMap | None = None, **named: Any) -> None:
    """Load the checkpoint in `folder` into `state`, on any number of ranks and with any placements. Collective.

    Called as `load(folder, state)`, or as torch.distributed.checkpoint's `load(state_dict, checkpoint_id=folder)`.
    state: as for `save`. Tensors of modules, of optimizers and of the state itself keep their memory, dtype and placements, and
    get the values; other objects get theirs by `load_state_dict`, and values are replaced in their dicts and lists.
    A module with parameters on the meta device gets memory first; its optimizers go on with the new parameters. State
    that an optimizer does not have yet is made from the parameter and the checkpoint. What the checkpoint has at the top of
    the state, and beside modules and optimizers in a dict, is loaded only if the state has the key.
    strict: raise for names of the state that the checkpoint lacks; for names of a module, of an optimizer's parameters, or of
        tensors in a dict or list, that no rank's state has a place for; for different values of several names, where the state
        has one tensor with these names; and for an optimizer of another class, as its hyperparameters show. False: one
        warning on rank 0 names them, and everything else is loaded; of an optimizer of another class, the hyperparameters that
        both have. What is missing stays as it is: on the meta device, it gets memory without values.
    A warning on rank 0 also names tensors that the checkpoint has in a wider dtype than the state.
    key_map: from names in the checkpoint to names in the state: a function, a dict, or pairs of regular expressions and
        replacements, all of which are applied in order (`re.sub`). What becomes None is left out. The state of optimizers
        follows the names of the modules' parameters.

    Each rank reads what it needs, and the rest of the blocks of 16 KiB in which that begins and ends: for large tensors, less
    than a twentieth more; where columns are read, as much once more. All of it is verified, except parts of items that stock
    DCP wrote: `verify` of the command line does that. Where columns are read, the ranks of the mesh share the verification.
    Raises: CheckpointError on every rank, with the reason, if the ranks give different folders, if the names do not fit (see
    `strict`) or a shape differs, or if a file is damaged or cannot be read, which names file and tensor. In the last case, the
    state may be partly loaded.
    """
    folder, state = folder_and_state("load", given, named)
    wait_to_write()
    with outside_inference_mode():
        _load(folder, state, key_map, strict=strict)


def load_copy(folder: Path, state: dict[str, Any], bring: Bring) -> None:
    """Load as `load` does, from a folder without checksums, of which each node has a part. Collective.

    bring: is called on every rank alike, with the names of files that this rank is about to read.
    """
    with outside_inference_mode():
        _load(folder, state, None, strict=True, bring=bring)


def _load(folder: Folder, state: dict[str, Any], key_map: KeyMap | None, *, strict: bool, bring: Bring | None = None) -> None:
    comm = world().comm
    with agreed(comm):
        path = located(folder)
        stored = read_stored(path)
    if bring is not None:
        stored = without_checksums(stored)
        bring({found.file for found in stored.objects.values()})
    with agreed(comm):
        contents = Contents(stored, key_map, rank=comm.rank, ranks=comm.size)
        modules = modules_of(state)
    _check_same(comm, f"'{path.resolve()}' ({contents.stored.save_id})")
    with agreed(comm), torch.no_grad():
        for module in modules.values():
            materialise(module, comm.device, optimizers_of(state).values())
        _Loader(contents, modules).load((), state)
    contents.unexpected = _on_no_rank(comm, contents.unexpected)
    with agreed(comm), torch.no_grad():  # in a copy of this state, tied tensors are stored once
        found = unlike(contents.stored, contents.twins) if bring is None else []
    contents.unlike, rounded = told_by_all(found, sentence(contents.rounded, comm.rank), comm)
    contents.warnings += [rounded] if rounded else []
    with agreed(comm), torch.no_grad():
        loose = contents.check(strict=strict)
    if bring is not None:
        bring({fetch.chunk.file for fetch in contents.fetches})
    needed = sum(fetch.memory.numel() * fetch.memory.element_size() for fetch in contents.fetches)
    say = partial(log, 0) if comm.rank == 0 else _log.debug
    with agreed(comm), torch.no_grad():
        read = read_all(contents.stored, contents.fetches, told_each_minute(f"load of '{path}'", needed, say))
    shared = on_any_rank(sorted(read.unverified), comm)
    with agreed(comm), torch.no_grad():
        nbytes = read.nbytes + read_all(contents.stored, _shares(contents, shared)).nbytes
    with agreed(comm), torch.no_grad():
        # Not before every rank has read: a rank must not have values of a checkpoint that another rank found damaged.
        for finish in contents.finish:
            finish()
        _log.debug("loaded '%s': read %d bytes for %d bytes of tensors (rank %d)", path, nbytes, needed, comm.rank)
    for warning in (*contents.warnings, *([f"{loose}; the rest is loaded"] if loose else [])) if comm.rank == 0 else ():
        _log.warning("load of '%s': %s", path, printable(warning))


def _check_same(comm: Communicator, folder: str) -> None:
    """Raise CheckpointError on every rank if the ranks load different folders, or find different saves there."""
    others = comm.compare(crc32(folder.encode()), lambda: folder) or []
    for rank, other in enumerate(others):
        if other != others[0]:
            raise CheckpointError(
                f"the ranks load different folders: rank 0 {others[0]}, rank {rank} {other}. Give all "
                "ranks the same: what latest() finds on one of them"
            )


def _shares(contents: Contents, names: Sequence[str]) -> Iterator[Fetch]:
    """The blocks that this rank verifies of these tensors."""
    for name in names:
        if (mesh := contents.meshes.get(name)) is not None:
            yield from share_of(name, contents.stored.tensors[name], mesh.rank, mesh.size())


def _on_no_rank(comm: Communicator, unexpected: list[str]) -> list[str]:
    """The names among these that no rank has a place for: ranks may have different modules under one key. Collective."""
    asked = comm.exchange(unexpected if comm.rank == 0 else [])[0]
    if not asked:
        return []
    own = set(unexpected)
    answers = comm.exchange(bytes(name in own for name in asked))
    return [name for place, name in enumerate(asked) if all(answer[place] for answer in answers)]


class _Loader:
    """Asks for everything that a state has, value by value."""

    def __init__(self, contents: Contents, modules: Mapping[str, nn.Module]) -> None:
        self._contents, self._modules = contents, modules
        self._params: dict[str, set[str]] = {}  # by the name of the state in a dict of an optimizer: the optimizer's parameters

    def load(self, path: Keys, value: Any) -> Any:
        """Have a value loaded; returns what takes its place: itself, if it keeps its identity."""
        if isinstance(value, nn.Module):
            self._load_module(path, value)
        elif isinstance(value, Optimizer):
            names = ParameterNames(joined(path), value, self._modules)
            OptimizerLoader(value, path, names, self._modules, self._contents).load()
        elif has_state(value):
            loaded = self._contents.tree(path, value.state_dict())
            self._contents.finish.append(lambda: value.load_state_dict(loaded))
        elif has_inside(value):
            self._load_items(path, value)
        elif isinstance(value, torch.Tensor):
            self._read(path, (), value)
        else:
            made = self._contents.tree(path, value)
            if not fills(value, made):
                return made
            self._contents.finish.append(partial(fill, value, made))
        return value

    def _load_items(self, path: Keys, container: Any) -> None:
        """Load the values of a dict or list: they are filled, or replaced in it."""
        if isinstance(container, Mapping) and (params := parameters_of(container)):
            self._params[joined((*path, "state"))] = params
        for key, item in list(container.items() if isinstance(container, Mapping) else enumerate(container)):
            made = self.load((*path, key if isinstance(container, list) else str(key)), item)
            if made is not item:
                self._contents.finish.append(partial(setitem, container, key, made))
        if not any(members(path, container)):
            self._load_more(path, container)

    def _load_more(self, path: Keys, container: Any) -> None:
        """Load the values that the checkpoint has and a dict or list lacks, except tensors, which may be of any size.

        At the top of the state nothing is missed but the state of an optimizer.
        """
        here = {joined((*path, str(key))) for key in (container if isinstance(container, Mapping) else range(len(container)))}
        left, more, is_top = list[str](), None, not joined(path)
        for rest, name in self._contents.inside(path) if not is_top or "state" in self._params else ():
            keys = name.split(".")
            if any(".".join(keys[:count]) in here for count in range(1, len(keys) + 1)) or (is_top and keys[0] != "state"):
                continue
            if name in self._contents.stored.tensors:
                left.append(name)
            elif not is_top:
                more = placed(more, rest, self._contents.value(name), None)
        if not isinstance(container, SomeNames):
            self._contents.unexpected += filter(self._is_lost, left)
        if isinstance(more, Mapping) and isinstance(container, MutableMapping):
            self._contents.finish.append(partial(container.update, more))
        elif isinstance(more, list) and isinstance(container, list) and not left:
            self._contents.finish.append(partial(container.extend, more[len(container) :]))

    def _is_lost(self, name: str) -> bool:
        """Whether a tensor that a dict lacks is no state of parameters that its optimizer has not, which is left."""
        for key, params in self._params.items():
            if name.startswith(f"{key}."):
                keys = split_flat(f"state.{name.removeprefix(f'{key}.')}", params)
                return bool(keys) and keys[1] in params
        return True

    def _load_module(self, path: Keys, module: nn.Module) -> None:
        """Load a module: the memory of its parameters and buffers in place, everything else by `load_state_dict`."""
        clean, others, trees = cleaner(module), dict[str, Any](), list[str]()
        tensors = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
        own = {clean(name): tensor for name, tensor in tensors}
        saved = {clean(raw): (raw, value) for raw, value in module.state_dict().items()}
        aliases = _aliases(own, saved)
        for name, (raw, value) in saved.items():
            if not isinstance(value, torch.Tensor) or name.endswith("_extra_state"):  # extra state may change its shape
                others[raw] = self._contents.tree((*path, name), value)
                trees.append(f"{name}.")
                continue
            in_place = name in own and _same_memory(value, own[name])
            if not in_place:
                others[raw] = value
            names = aliases.get(name, [name])
            if not in_place or names[0] == name:  # a tied parameter is read once
                self._read((*path, name), [(*path, each) for each in names], value)
        if others:
            self._contents.finish.append(lambda: module.load_state_dict(others, strict=False))
        self._contents.unexpected += self._unexpected(path, {*own, *saved}, trees)
        # A new version makes the next forward gather again, and says that what was on the meta device has values.
        loaded = [own[name] for name in saved.keys() & own.keys() if not own[name].is_inference()]
        self._contents.finish.append(lambda: increment_version(loaded))

    def _unexpected(self, path: Keys, known: set[str], trees: Sequence[str]) -> Iterator[str]:
        """The names under a module's key that it lacks. Under an empty key, only those with the first part of one of its names.

        known: the module's names.   trees: what the names inside of its extra state begin with.
        """
        heads = {name.split(".")[0] for name in known} if path[-1] == "" else None
        for rest, name in self._contents.inside(path):
            own = joined(rest)
            if own not in known and not own.startswith(tuple(trees)) and (heads is None or own.split(".")[0] in heads):
                yield name

    def _read(self, path: Keys, aliases: Sequence[Keys], target: torch.Tensor) -> None:
        """Have a tensor read, by the first of its names that the checkpoint has."""
        found = [name for name in dict.fromkeys(map(joined, (path, *aliases))) if name in self._contents]
        if found:
            self._contents.read_into(found[0], target)
            self._contents.twins += (Twins(found[0], other, target) for other in found[1:])
        elif not is_fresh(target):
            self._contents.missing.append(joined(path))


def _aliases(tensors: Mapping[str, torch.Tensor], first: Container[str]) -> dict[str, list[str]]:
    """All names of each tensor that has several, under each of them; those in `first` come first."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: item[0] not in first):
        by_tensor.setdefault(id(tensor), []).append(name)
    return {name: names for names in by_tensor.values() if len(names) > 1 for name in names}


def _same_memory(value: torch.Tensor, own: torch.Tensor) -> bool:
    memories = [memory_of("", tensor) for tensor in (value, own)]
    first, second = (memory._local_tensor if isinstance(memory, DTensor) else memory for memory in memories)
    return (first.data_ptr(), first.dtype, first.shape) == (second.data_ptr(), second.dtype, second.shape)
