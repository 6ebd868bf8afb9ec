"""Methods of Hugging Face models that read parameters outside of a forward, made to work on sharded models.

Models are those of transformers and of PEFT, which need not be installed.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from .. import comm
from ..fsdp.api.module import unsharded
from .world import full_state_dict


def make_methods_collective(model: nn.Module) -> None:
    """Let `save_pretrained` and `generate` of a sharded model work, where it has them. Every rank has to call them.

    Adapters are merged without gradients. What takes a PEFT model apart is refused: parameters of the root's group are gathered
    by the forward of what it throws away.
    """
    # Not closures: in a copy of the model these are the copy's.
    for name, made in (("save_pretrained", partial(_save_pretrained, model)), ("generate", _Generate(model))):
        if callable(getattr(type(model), name, None)):
            setattr(model, name, made)
    if hasattr(model, "peft_config") and hasattr(model, "base_model"):
        for name in ("merge_and_unload", "unload"):
            setattr(model, name, partial(_refuse, name))
        for name in ("merge_adapter", "unmerge_adapter"):
            setattr(model, name, partial(_without_gradients, model, name))


def _refuse(name: str, /, *args: object, **options: object) -> NoReturn:
    """A method of a PEFT model that cannot work once the model is sharded."""
    raise RuntimeError(
        f"{name} of a sharded PEFT model on rank {comm.world().rank}: the model that it returns would not gather its "
        "parameters. Save the adapters with save_pretrained(folder) or trainer.save_model(folder), and merge them in one "
        "process: PeftModel.from_pretrained(base_model, folder).merge_and_unload(); or merge them into the shards, by "
        "merge_adapter(), which unmerge_adapter() undoes"
    )


def _without_gradients(model: Any, name: str, /, *args: Any, **options: Any) -> Any:
    """Call a method of a PEFT model that computes with parameters outside of a forward: no backward is to follow."""
    with torch.no_grad():
        return getattr(model.base_model, name)(*args, **options)


def _save_pretrained(model: Any, /, save_directory: Any, *args: Any, **options: Any) -> None:
    """Rank 0 writes the files that a single process writes; all ranks return when they are written. Collective.

    With a `state_dict`, it is the model's own method: the caller has gathered, and says who writes.
    """
    if options.get("state_dict") is not None:
        type(model).save_pretrained(model, save_directory, *args, **options)
        return
    world = comm.world()
    state = full_state_dict(model, keep=world.rank == 0)
    with world.comm.agree():
        if world.rank == 0:
            type(model).save_pretrained(model, save_directory, *args, **{**options, "state_dict": state})


class _Generate:
    """`generate` with all parameters gathered, so that ranks may generate texts of different lengths."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._running = False

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Each rank gets its own inputs' result. Collective.   Cost: the memory of all parameters while it runs."""
        model: Any = self._model
        options.pop("synced_gpus", None)  # which would keep ranks in step by torch.distributed
        if self._running:  # some ways to generate call it again
            return type(model).generate(model, *args, **options)
        self._running = True
        try:
            with unsharded(model):
                return type(model).generate(model, *args, **options)
        finally:
            self._running = False
