"""Checkpoints: in PyTorch's DCP format and as safetensors, saved atomically, loaded on any number of ranks."""

from .errors import CheckpointError, DamagedCheckpointError
from .full.get import get_model_state_dict, get_optimizer_state_dict, get_state_dict
from .full.options import StateDictOptions
from .full.set import set_model_state_dict, set_optimizer_state_dict, set_state_dict
from .loading import load
from .per_rank import PerRank
from .random_state import RandomState
from .run import Run
from .safetensors.load import load_safetensors
from .safetensors.save import save_safetensors
from .saving import AsyncSave, async_save, save
from .storage import latest

__all__ = [
    "AsyncSave",
    "CheckpointError",
    "DamagedCheckpointError",
    "PerRank",
    "RandomState",
    "Run",
    "StateDictOptions",
    "async_save",
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
