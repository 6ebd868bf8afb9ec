"""Contiguous tensors for a communicator: where a call is given others, or lists, copies on the call's stream."""

from __future__ import annotations

from functools import partial

import torch

from ...comm import Stream

Tensors = list[torch.Tensor]


class Staging:
    """What one call sends and receives. kept: tensors that have to live until the call is done."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.kept: Tensors = []

    def inp(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor with these values."""
        made = tensor if tensor.is_contiguous() else self._new(tensor.numel(), tensor).view(tensor.shape)
        self.kept += [tensor, made]
        if made is not tensor:
            self._stream.submit(partial(_copy, made, tensor))
        return made

    def joined(self, tensors: Tensors) -> torch.Tensor:
        """The tensors' values, one tensor after the other: (sum of elements,)."""
        made = self._new(sum(tensor.numel() for tensor in tensors), tensors[0])
        self.kept += [*tensors, made]
        self._stream.submit(partial(_join, made, tensors))
        return made

    def new(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        """A (numel,) tensor of the dtype of `like` to receive in."""
        made = self._new(numel, like)
        self.kept.append(made)
        return made

    def out(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous tensor to receive in, given to `copy_out` afterwards."""
        self.kept.append(tensor)
        return tensor if tensor.is_contiguous() else self.new(tensor.numel(), tensor).view(tensor.shape)

    def copy_out(self, tensor: torch.Tensor, received: torch.Tensor) -> None:
        """Let `tensor` have what was received for it."""
        if received is not tensor:
            self._stream.submit(partial(_copy, tensor, received))

    def copy_parts(self, tensors: Tensors, received: torch.Tensor) -> None:
        """Let `tensors` have what was received for them, one after the other."""
        self.kept += tensors
        self._stream.submit(partial(_part, tensors, received))

    def _new(self, numel: int, like: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(False):  # other threads write to it
            return torch.empty(numel, dtype=like.dtype, device=like.device)


@torch.no_grad()
def _copy(out: torch.Tensor, inp: torch.Tensor) -> None:
    out.copy_(inp.view(out.shape))


@torch.no_grad()
def _join(out: torch.Tensor, tensors: Tensors) -> None:
    for part, tensor in zip(out.split([tensor.numel() for tensor in tensors]), tensors, strict=True):
        part.view(tensor.shape).copy_(tensor)


@torch.no_grad()
def _part(tensors: Tensors, received: torch.Tensor) -> None:
    for tensor, part in zip(tensors, received.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))
