"""The public names of `shardrt.checkpoint`, which takes them from here when one of them is used first."""

from .disk.errors import CheckpointError, DamagedCheckpointError
from .disk.storage import latest
from .loading.load import load
from .loading.safetensors import load_safetensors
from .run.random_state import RandomState
from .run.run import Run
from .run.survival.membership import Survival
from .saving.safetensors import async_save_safetensors, save_safetensors
from .saving.save import AsyncSave, async_save, save
from .state.stateful import PerRank
from .state_dicts.get import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, get_state_dict
from .state_dicts.set import set_model_state_dict, set_optimizer_state_dict, set_state_dict

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "DamagedCheckpointError",
    "PerRank",
    "RandomState",
    "Run",
    "StateDictOptions",
    "Survival",
    "async_save",
    "async_save_safetensors",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "get_state_dict",
    "latest",
    "load",
    "load_safetensors",
    "save",
    "save_safetensors",
    "set_model_state_dict",
    "set_optimizer_state_dict",
    "set_state_dict",
]
