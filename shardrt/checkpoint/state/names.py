"""Names of tensors in checkpoints: the model's, without what wrappers add, as torch's `get_state_dict` gives them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer

from ..disk.errors import CheckpointError

Path = tuple[str | int, ...]  # keys of dicts and indices of lists, from the state inwards

_WRAPPERS = frozenset(("_orig_mod", "_checkpoint_wrapped_module"))  # of torch.compile and of activation checkpointing


class LoadedKeys(NamedTuple):
    """What `strict=False` tolerates, with the names that torch's `load_state_dict` gives it."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def joined(path: Path) -> str:
    """The name of what lies at this path. An empty key leaves no trace."""
    return ".".join(str(key) for key in path if key != "")


def cleaner(module: nn.Module) -> Callable[[str], str]:
    """A function from names in the module to names in checkpoints."""
    wrapped = {
        (*_unwrapped(name), "module")
        for name, child in module.named_modules()
        if isinstance(child, (DataParallel, DistributedDataParallel))
    }

    def clean(name: str) -> str:
        keys = _unwrapped(name)
        return ".".join(key for place, key in enumerate(keys) if keys[: place + 1] not in wrapped)

    return clean


def clean_state(module: nn.Module, *, keep_vars: bool = False) -> dict[str, Any]:
    """The module's state dict by clean names: sharded tensors, as they lie in memory, and extra state."""
    clean = cleaner(module)
    return {clean(name): value for name, value in module.state_dict(keep_vars=keep_vars).items()}


def _unwrapped(name: str) -> tuple[str, ...]:
    # Some wrappers leave their part of a name out of state dicts, others do not.
    return tuple(key for key in name.split(".") if key and key not in _WRAPPERS)


class ParameterNames:
    """The names of an optimizer's parameters: those of the first module of the state that has all of them.

    If no module alone has them, a name begins with the key of its module.
    prefixes: by the key of a module, what the names of its parameters begin with.
    of_modules: the names of all parameters in the state.
    """

    def __init__(self, key: str, optimizer: Optimizer, modules: Mapping[str, nn.Module]) -> None:
        """key: of the optimizer in the state.   modules: those of the state, by their keys.

        Raises CheckpointError for a parameter that is in none of them.
        """
        self.params: list[torch.Tensor] = [param for group in optimizer.param_groups for param in group["params"]]
        tables = {module_key: _names(module) for module_key, module in modules.items()}
        whole = next((key for key, table in tables.items() if all(param in table for param in self.params)), None)
        self.prefixes = {key: f"{key}." for key in tables} if whole is None else {whole: ""}
        self._names = _qualified(tables) if whole is None else tables[whole]
        every = (*tables.values(), _qualified(tables))
        self.of_modules = {name for table in every for names in table.values() for name in names}
        self._check(key)

    def __getitem__(self, param: torch.Tensor) -> str:
        """The name under which the parameter's state is saved: the first one."""
        return self._names[param][0]

    def of(self, param: torch.Tensor) -> Sequence[str]:
        """All names of a parameter, several if it is tied."""
        return self._names[param]

    def __iter__(self) -> Iterator[str]:
        """All names of all parameters."""
        return (name for param in self.params for name in self._names[param])

    def _check(self, key: str) -> None:
        for index, param in enumerate(self.params):
            if param in self._names:
                continue
            name = getattr(param, "full_name", None)
            if name is None:
                raise CheckpointError(
                    f"optimizer '{key}': its parameter {index}, of shape {tuple(param.shape)}, is in no module of the state; "
                    "its state has no name: add the model"
                )
            self._names[param] = [name]


def _names(module: nn.Module) -> dict[Any, list[str]]:
    """The clean names of each parameter. Tensors are found by identity."""
    clean, found = cleaner(module), dict[Any, list[str]]()
    for name, param in module.named_parameters(remove_duplicate=False):
        found.setdefault(param, []).append(clean(name))
    return found


def _qualified(tables: Mapping[str, dict[Any, list[str]]]) -> dict[Any, list[str]]:
    found = dict[Any, list[str]]()
    for key, table in tables.items():
        for param, names in table.items():
            found.setdefault(param, []).extend(f"{key}.{name}" for name in names)
    return found
