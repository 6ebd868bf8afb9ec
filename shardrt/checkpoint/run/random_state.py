"""The state of the random numbers of all ranks, as an entry of a checkpoint.

    name             what                                           written by           read by
    random.rows      (ranks, width) uint8: a row for each rank      each rank, its row   each rank, its row, in the same layout
    random.first     (width,) uint8: rank 0's row                   rank 0               every rank, in another layout
    random.digests   (ranks, 2) int64: hashes of each row's parts   each rank, its row   every rank, in another layout

The layout is the number of ranks and the width of a row, which depends on the device.

A row has the states of torch's generators (the CPU's, and that of this rank's GPU) and of Python's `random`. The regions of
`shardrt.manual_seed` need nothing more, since their state is the seed of a generator. The state of numpy's generator is a
`PerRank`, since older checkpoints lack it; it is packed as Python's is: both are Mersenne twisters.
"""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from ...comm import World, world
from ...tensor.dtensor.dtensor import DTensor
from ...tensor.placement.placement import Shard
from ..state.stateful import PerRank, SomeNames, mark_differing

_PYTHON = struct.Struct("<625I?d")  # see `_packed`
_PYTHON_VERSION = 3


class RandomState:
    """The random numbers of this rank, for the state of a checkpoint: `state = {"model": model, "random": RandomState()}`.

    On as many ranks as saved it, each rank goes on with its own numbers, bit by bit. On another number, what was the same on
    all ranks (torch's state, Python's, or numpy's) stays so; otherwise each rank is seeded anew, from rank 0's state and its
    rank. `numpy.random` is part of it where numpy has been imported; generators that the program made are not.
    saved: the shape of the `rows` that will be loaded, which `Run` knows; None: that of this world's.
    """

    def __init__(self, saved: tuple[int, ...] | None = None) -> None:
        self._saved = saved

    def state_dict(self) -> dict[str, Any]:
        """The current state; if `saved` is another layout, tensors of its shapes, into which that state can be loaded."""
        here = world()
        row = _capture(here.device)
        if self._saved not in (None, (here.size, row.numel())):
            ranks, width = self._saved
            first = torch.zeros(width, dtype=torch.uint8, device="cpu")
            digests = torch.zeros(ranks, 2, dtype=torch.int64, device="cpu")
            return SomeNames(first=first, digests=digests, numpy=_NumpyNumbers())
        digests = torch.tensor([_digest(part) for part in _split(row)], device="cpu")
        # Hazard: loading writes into these tensors, so that they may not share memory.
        mark_differing([first := row.clone()])
        return {"rows": _row_of(here, row), "first": first, "digests": _row_of(here, digests), "numpy": _NumpyNumbers()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` returned, here or on other ranks."""
        here = world()
        if "numpy" in state:
            state["numpy"].restore()
        if isinstance(rows := state.get("rows"), DTensor):
            python, generators = _split(rows.to_local()[0].cpu())
            _restore_python(python)
            _restore_generators(here.device, generators)
            return
        python, generators = _split(state["first"])
        alike = (state["digests"] == state["digests"][0]).all(0).tolist()
        if alike[0]:
            _restore_python(python)
        else:
            random.seed(_digest(python, here.rank))
        if alike[1] and state["first"].numel() == _capture(here.device).numel():
            _restore_generators(here.device, generators)
        else:
            torch.manual_seed(_digest(generators, None if alike[1] else here.rank))


class _NumpyNumbers(PerRank):
    """The state of `numpy.random`: (width,) uint8; None where numpy is not imported, or has another generator there."""

    is_optional = True

    def __init__(self) -> None:
        super().__init__(self._captured(), self._of_this_rank)

    def restore(self) -> None:
        """Go on with the state."""
        if self.value is None:
            return
        with suppress(ImportError):
            import numpy

            (*words, place), normal = _unpacked(self.value)
            keys = numpy.array(words, numpy.uint32)
            numpy.random.set_state(("MT19937", keys, place, int(normal is not None), normal or 0.0))

    @staticmethod
    def _captured() -> torch.Tensor | None:
        numpy: Any = sys.modules.get("numpy")
        if numpy is None or (state := numpy.random.get_state(legacy=False))["bit_generator"] != "MT19937":
            return None
        words, place = state["state"]["key"], state["state"]["pos"]
        return _packed([*words.tolist(), place], state["gauss"] if state["has_gauss"] else None)

    @staticmethod
    def _of_this_rank(states: list[torch.Tensor | None]) -> torch.Tensor | None:
        """This rank's state, made from those of another number of ranks: theirs if all have the same, else a new one."""
        found = [state for state in states if state is not None]
        if not found or all(torch.equal(state, found[0]) for state in found):
            return found[0] if found else None
        own = random.Random(_digest(found[0], world().rank))
        _, words, _ = own.getstate()
        return _packed(words, None)


def _row_of(here: World, row: torch.Tensor) -> DTensor:
    """A tensor with a row for each rank, of which `row` is this rank's."""
    return DTensor.from_local(row[None].to(here.device), here.mesh, [Shard(0)])


def _capture(device: torch.device) -> torch.Tensor:
    """The row of this rank: (width,) uint8 on the CPU."""
    version, words, normal = random.getstate()
    assert version == _PYTHON_VERSION, "since Python 3.2"
    parts = [_packed(words, normal), torch.get_rng_state()]
    if device.type == "cuda":
        parts.append(torch.cuda.get_rng_state(device))
    return torch.cat(parts)


def _packed(words: Sequence[int], normal: float | None) -> torch.Tensor:
    """The state of a Mersenne twister: 624 words and a position, and the second normal number, if there is one."""
    data = _PYTHON.pack(*words, normal is not None, normal or 0.0)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _unpacked(part: torch.Tensor) -> tuple[tuple[int, ...], float | None]:
    *words, has_normal, normal = _PYTHON.unpack(bytes(part.tolist()))
    return tuple(words), normal if has_normal else None


def _split(row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of a row for Python, and that for torch."""
    return row[: _PYTHON.size], row[_PYTHON.size :]


def _restore_python(part: torch.Tensor) -> None:
    random.setstate((_PYTHON_VERSION, *_unpacked(part)))


def _restore_generators(device: torch.device, part: torch.Tensor) -> None:
    size = torch.get_rng_state().numel()
    torch.set_rng_state(part[:size].clone())
    if device.type == "cuda":
        torch.cuda.set_rng_state(part[size:].clone(), device)


def _digest(part: torch.Tensor, rank: int | None = None) -> int:
    """A hash of 63 bits, of the part and, if it is given, of the rank."""
    text = bytes(part.tolist()) + (b"" if rank is None else rank.to_bytes(8, "little"))
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
