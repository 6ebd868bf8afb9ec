"""Options of the functions that get and set state dicts."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

_FQN_MODIFIERS = "_fqn_modifiers"


@dataclass(frozen=True, slots=True)
class StateDictOptions:
    """What `get_state_dict` returns and `set_state_dict` takes, with torch's names and defaults.

    full_state_dict: full tensors, as a single process has them, in the place of sharded ones; copies.
    cpu_offload: copies of the tensors, on the host; with full_state_dict, rank 0 alone gets them, all others an empty dict.
    ignore_frozen_params: leave out parameters that do not require a gradient.
    keep_submodule_prefixes: with `submodules`, names in the whole model; False: names in the submodule.
    strict: raise for names that the model, the optimizer or the state dict lacks.
    broadcast_from_rank0: rank 0 gives the state dict, and sends each rank one full tensor at a time; needs full_state_dict.
    flatten_optimizer_state_dict: one dict with keys such as "state.out.weight.exp_avg" and "param_groups.out.weight.lr".

    Raises ValueError for broadcast_from_rank0 without full_state_dict.
    """

    full_state_dict: bool = False
    cpu_offload: bool = False
    ignore_frozen_params: bool = False
    keep_submodule_prefixes: bool = True
    strict: bool = True
    broadcast_from_rank0: bool = False
    flatten_optimizer_state_dict: bool = False

    def __post_init__(self) -> None:
        if self.broadcast_from_rank0 and not self.full_state_dict:
            raise ValueError("StateDictOptions(broadcast_from_rank0=True): expected full_state_dict=True as well")

    @classmethod
    def of(cls, options: Any) -> StateDictOptions:
        """These options; torch's own have the same attributes. None: the defaults.

        Raises ValueError for torch's dsd_fqn_modifiers, which changes names.
        """
        if options is None or isinstance(options, cls):
            return options or cls()
        if (modifiers := getattr(options, "dsd_fqn_modifiers", _FQN_MODIFIERS)) != _FQN_MODIFIERS:
            raise ValueError(f"dsd_fqn_modifiers='{modifiers}': expected torch's default, '{_FQN_MODIFIERS}'; rename the keys")
        given: dict[str, Any] = {field.name: getattr(options, field.name, field.default) for field in fields(cls)}
        return cls(**given)
