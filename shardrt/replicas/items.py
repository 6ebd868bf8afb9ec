"""What has copies on several ranks, and sums of digests of it.

| item                                        | a copy is on                                                               |
|---------------------------------------------|----------------------------------------------------------------------------|
| `DTensor`: parameter, buffer, state         | the ranks with the same coordinates on the axes that replicate it, in parts |
| plain parameter of tensor parallelism       | each rank of that mesh                                                     |
| other plain parameter, buffer               | each rank                                                                  |
| plain state of a parameter, one number      | each rank of the parameter's mesh                                          |
| ... more: of this rank's shard              | as the parameter; left out under tensor parallelism, where cuts may differ |
| hyperparameters of optimizers, named values | each rank                                                                  |
| random numbers of replicated regions        | each rank of the tensor parallel mesh                                      |
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..comm import DeviceMesh
from ..comm.core.fingerprint import fingerprint_of
from ..fsdp.api.module import FSDPModule
from ..parallel.styles.modules import ParallelizedModule
from ..tensor.dtensor.dtensor import DTensor
from ..tensor.dtensor.replicated import replicas_mesh
from ..tensor.placement.digest import digest
from ..tensor.placement.placement import Replicate, Sharded, Spec, flattened
from ..tensor.placement.redistribute import plain

MODULUS = 2**64
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)  # whose `repr` is the same on all ranks

Table = list[list[int]]  # the ranks of each copy, in the world; those of the same place have the same part


class Copied(NamedTuple):
    """The copies of an item, and what this rank has of them.

    key: equal for items whose copies are on the same ranks.   copies: their number.   parts: the ranks of each.
    copy: the one that this rank has a part of.
    """

    key: int
    copies: int
    parts: int
    copy: int

    @classmethod
    def of(cls, table: Table, rank: int) -> Copied:
        """The copies that a table has on these ranks, as this rank sees them."""
        copy = next(number for number, ranks in enumerate(table) if rank in ranks)
        return cls(fingerprint_of(repr(table)), len(table), len(table[0]), copy)


class CopiedValue(NamedTuple):
    """Something with copies.   value: a number or the like, or 1-D elements, before which the copy has `start` others."""

    name: str
    held: Copied
    value: object
    start: int = 0


class Items:
    """Collects what has copies on several ranks.

    tensors: how many of the items are.   unique: how many other tensors there are.   tables: by the keys of copies.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.items: list[CopiedValue] = []
        self.tensors = self.unique = 0
        self.tables: dict[int, Table] = {}
        self._mesh = mesh
        self._ranks = set(ranks_of(mesh))
        self._held: dict[tuple[DeviceMesh, tuple[int, ...]], Copied] = {}

    def add(self, model: nn.Module, optimizer: Optimizer | Sequence[Optimizer] | None, buffers: bool) -> None:
        """Add a model and its optimizers. Raises TypeError for what is none."""
        if not isinstance(model, nn.Module):
            raise TypeError(f"check_replicas: expected an nn.Module, found a {type(model).__name__}")
        optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
        ignored = _ignored(model)
        params = {name: _sharded(param) for name, param in model.named_parameters() if id(param) not in ignored}
        names = {id(param): name for name, param in params.items()}
        for number, each in enumerate(optimizers):
            if not isinstance(each, Optimizer):
                raise TypeError(f"check_replicas: expected an optimizer, found a {type(each).__name__}")
            self._add_optimizer(each, f" of optimizer {number}" if len(optimizers) > 1 else "", names, ignored)
        self._add_regions(model)
        for name, param in params.items():
            self._add_tensor(f"parameter '{name}'", param, replicas_mesh(param))
        for name, buffer in model.named_buffers() if buffers else ():
            self._add_tensor(f"buffer '{name}'", buffer)

    def add_values(self, values: Mapping[str, object], prefix: str = "", mesh: DeviceMesh | None = None) -> None:
        """Add values that each rank of the mesh has (None: every rank). Raises TypeError for what cannot be compared."""
        for key, given in values.items():
            for name, value in _parts(prefix + key, given):
                if isinstance(value, torch.Tensor):
                    self._add_tensor(name, value, mesh)
                elif not _is_plain(value):
                    raise TypeError(
                        f"check_replicas: expected numbers, strings, tensors, or lists, tuples and dicts of them; {name} is a "
                        f"{type(value).__name__}"
                    )
                elif (held := self._held_on(mesh or self._mesh)).copies > 1:
                    self.items.append(CopiedValue(name, held, value))

    def _add_optimizer(self, optimizer: Optimizer, which: str, names: Mapping[int, str], ignored: set[int]) -> None:
        for index, group in enumerate(optimizer.param_groups):
            given = (part for key, value in group.items() if key != "params" for part in _parts(key, value))
            self.add_values({key: value for key, value in given if _is_compared(value)}, f"parameter group {index}{which}: ")
            for place, param in enumerate(group["params"]):
                name = names.get(id(param)) or getattr(param, "full_name", None) or f"{place} of group {index}"
                if id(param) not in ignored:
                    self._add_state(f"state{which} of '{name}': ", param, optimizer.state.get(param, {}))

    def _add_state(self, prefix: str, param: torch.Tensor, state: Mapping[str, Any]) -> None:
        mesh = param.spec.mesh if isinstance(param, DTensor) else replicas_mesh(param)
        for key, value in state.items():
            for name, leaf in _parts(str(key), value):
                is_local = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and not isinstance(leaf, DTensor)
                if is_local and isinstance(param, DTensor):
                    self._add_local(prefix + name, leaf, param)
                elif _is_compared(leaf):
                    self.add_values({name: leaf}, prefix, mesh)

    def _add_local(self, name: str, local: torch.Tensor, param: DTensor) -> None:
        """Add plain state of this rank's shard of a parameter."""
        if param.gathered_spec is None:
            self._add_elements(name, self._held_on(param.spec.mesh, _replicating(param.spec)), plain(local).reshape(-1), 0)

    def _add_regions(self, model: nn.Module) -> None:
        states = [module.tp_state for module in model.modules() if isinstance(module, ParallelizedModule)]
        for axis in dict.fromkeys(state.axis for state in states if state is not None):
            if axis is not None and axis.regions.enabled:
                self.add_values({"random numbers of tensor-parallel ranks": axis.regions.counter()}, mesh=axis.mesh)

    def _add_tensor(self, name: str, tensor: torch.Tensor, mesh: DeviceMesh | None = None) -> None:
        """Add a tensor. mesh: that over which a plain one is replicated; None: all ranks."""
        if not isinstance(tensor, DTensor):
            self._add_elements(name, self._held_on(mesh or self._mesh), plain(tensor.detach()).reshape(-1), 0)
        elif not tensor.spec.partial:
            dim, start = _run(tensor.spec)
            held = self._held_on(tensor.spec.mesh, _replicating(tensor.spec))
            self._add_elements(name, held, flattened(plain(tensor._local_tensor.detach()), dim), start)

    def _add_elements(self, name: str, held: Copied, elements: torch.Tensor, start: int) -> None:
        if held.copies == 1:
            self.unique += 1
        elif not elements.is_meta:
            self.tensors += 1
            self.items.append(CopiedValue(name, held, elements, start))

    def _held_on(self, mesh: DeviceMesh, axes: tuple[int, ...] | None = None) -> Copied:
        """The copies on a mesh. axes: those that replicate; None: all."""
        key = mesh, tuple(range(mesh.ndim)) if axes is None else axes
        if key not in self._held:
            if missing := set(ranks_of(mesh)) - self._ranks:
                raise ValueError(
                    f"check_replicas over {self._mesh}: a tensor lies on {mesh}, with ranks {sorted(missing)[:8]} too; give "
                    "a mesh of all ranks of the model"
                )
            ranks = mesh.mesh.movedim(key[1], tuple(range(len(key[1]))))
            table: Table = ranks.reshape(ranks.shape[: len(key[1])].numel(), -1).tolist()
            self._held[key] = held = Copied.of(table, mesh.get_rank())
            self.tables[held.key] = table
        return self._held[key]


def ranks_of(mesh: DeviceMesh) -> list[int]:
    """The ranks of a mesh, in the world."""
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def _sharded(param: torch.Tensor) -> torch.Tensor:
    """The sharded parameter; a gathered one refers to it."""
    sharded = getattr(param, "sharded", None)
    return param if sharded is None else sharded


def _ignored(model: nn.Module) -> set[int]:
    modules = (module for module in model.modules() if isinstance(module, FSDPModule))
    places = {place for module in modules for group in module.param_groups for place in group.ignored}
    holders = [(holder, attribute) for module, attribute in places if (holder := module()) is not None]
    return {id(holder._parameters.get(attribute)) for holder, attribute in holders}


def _replicating(spec: Spec) -> tuple[int, ...]:
    return tuple(axis for axis, placement in enumerate(spec.placements) if placement == Replicate())


def _run(spec: Spec) -> tuple[int, int]:
    """The dim along which the innermost axis shards the tensor, and how many elements of other ranks come before.

    Those are in the order that has the dim outermost. 0 and 0 for what is not sharded.
    """
    shape, found = spec.shape, (0, 0)
    for placement, size, rank in zip(spec.placements, spec.mesh.shape, spec.mesh.coordinates, strict=True):
        if isinstance(placement, Sharded):
            shard = placement.resolve(shape, size)
            found = shard.dim, shard.shard_numels(shape).before(rank)
            shape = shard.shard_shape(shape, rank)
    return found


def _is_plain(value: object) -> bool:
    """Whether a value is compared by its `repr`. That of a tensor names its device, and leaves elements out."""
    return all(map(_is_plain, value)) if isinstance(value, (tuple, list)) else isinstance(value, _PLAIN)


def _is_compared(value: object) -> bool:
    return isinstance(value, torch.Tensor) or _is_plain(value)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A value with its name; of a list, tuple or dict that is not plain, its parts, with their places."""
    if isinstance(value, (tuple, list, Mapping)) and not _is_plain(value):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _parts(f"{name}[{key!r}]", part)
    else:
        yield name, value


# ---------------------------------------------------------------------- digests and sums


def digests_of(items: Sequence[CopiedValue]) -> list[int]:
    """The digest of each item, from 0 to 2^64 - 1. Cost: a host sync for each kind of device."""
    found, waiting = [0] * len(items), dict[torch.device, list[tuple[int, torch.Tensor]]]()
    for index, item in enumerate(items):
        if isinstance(item.value, torch.Tensor):
            bits = digest(item.value, item.start)
            waiting.setdefault(bits.device, []).append((index, bits))
        else:
            found[index] = fingerprint_of(repr(item.value))
    for together in waiting.values():
        numbers = torch.stack([bits for _, bits in together]).tolist()
        for (index, _), number in zip(together, numbers, strict=True):
            found[index] = number % MODULUS
    return found


def sums_of(items: Sequence[CopiedValue], digests: Sequence[int]) -> dict[Copied, int]:
    """For each kind of copies, the sum of the digests, each by an odd weight of the item's name. 1 stands for its presence."""
    sums = dict[Copied, int]()
    for item, bits in zip(items, digests, strict=True):
        sums[item.held] = (sums.get(item.held, 0) + (bits + 1) * (fingerprint_of(item.name) | 1)) % MODULUS
    return sums
