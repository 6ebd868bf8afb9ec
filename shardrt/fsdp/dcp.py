"""How other packages' helpers for checkpoints work with sharded modules. They are found in the call stack.

Functions of `torch.distributed.checkpoint.state_dict` (`get_model_state_dict`, `set_optimizer_state_dict` and so on) pass
tensors of classes they do not know through unchanged. Sharded state dicts therefore work in both directions, and whole ones can
be loaded if every rank has them. Two options cannot work and raise an error that names the function of `shardrt.checkpoint`
which takes them: `full_state_dict=True` when getting, which would return sharded tensors, and `broadcast_from_rank0=True`,
which needs a process group.
`save_pretrained` of Hugging Face models writes what `state_dict()` returns, and needs whole tensors: an error says what
gathers them.
"""

from __future__ import annotations

from types import FrameType

_MODULE = "torch.distributed.checkpoint.state_dict"
_HUGGING_FACE = ("transformers.", "peft.", "diffusers.")


def check_state_dict_options(module: str, rank: int, caller: FrameType) -> None:
    """Raise RuntimeError if `caller`, which reads buffers, was called by one of these functions with such an option.

    torch passes the options to nothing but its own functions, so they are read from its frames.
    """
    frame: FrameType | None = caller
    while frame is not None and frame.f_code.co_name != "_verify_options":
        frame = frame.f_back if frame.f_globals.get("__name__") == _MODULE else None
    if frame is None or frame.f_back is None:
        return
    options, function = frame.f_locals["options"], frame.f_back.f_code.co_name
    if options.broadcast_from_rank0:
        raise RuntimeError(
            f"{function}(broadcast_from_rank0=True) on the sharded module '{module}' (rank {rank}): the broadcast needs a "
            f"process group of torch.distributed; call shardrt.checkpoint.{function} with the same arguments"
        )
    if options.full_state_dict and function.startswith("get_"):
        raise RuntimeError(
            f"{function}(full_state_dict=True) on the sharded module '{module}' (rank {rank}): it would return sharded "
            f"tensors; call shardrt.checkpoint.{function} with the same arguments"
        )


def check_not_pretrained(module: str, rank: int, caller: FrameType) -> None:
    """Raise RuntimeError if `caller`, which reads a state dict, was called by `save_pretrained` of a Hugging Face model."""
    frame: FrameType | None = caller
    while frame is not None and not (
        frame.f_code.co_name == "save_pretrained" and frame.f_globals.get("__name__", "").startswith(_HUGGING_FACE)
    ):
        frame = frame.f_back
    if frame is not None:
        raise RuntimeError(
            f"save_pretrained of the sharded '{module}' (rank {rank}): its state dict has shards, not whole tensors; call "
            "shardrt.checkpoint.save_safetensors(model, folder) on every rank, and model.config.save_pretrained(folder); or "
            "shard the model with shardrt.integrations.transformers.shard_model, whose save_pretrained gathers"
        )
