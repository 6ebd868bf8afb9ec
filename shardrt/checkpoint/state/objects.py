"""Values that are no tensors, as bytes that load with `weights_only=True`, and back.

| value                         | in the bytes                                   | comes back as                         |
|-------------------------------|------------------------------------------------|---------------------------------------|
| None, numbers, strings, bytes | as torch.save writes them                      | the same                              |
| dict, list, tuple, set        | the same; of subclasses, as plain ones         | the same; `Counter` and `OrderedDict` |
| scalar of numpy               | a number of Python                             | a number of Python                    |
| array of numpy                | `{"numpy.ndarray": tensor}`                    | an array                              |
| classes that the program vouches for (`torch.serialization.add_safe_globals`)  | as torch.save writes them | the same |
"""

from __future__ import annotations

import dataclasses
import enum
import io
import numbers
import os
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from datetime import date, time, timedelta
from typing import Any

import torch

from ..disk.errors import CheckpointError, DamagedCheckpointError
from ..formats.torch_file.archive import Archive
from ..formats.torch_file.expansion import check_archive
from ..formats.torch_file.pickles import refusal
from ..formats.torch_file.whole import check_whole, with_checksum
from .stateful import has_state

_PLAIN = (bool, int, float, str, type(None))
ARRAY = "numpy.ndarray"


def encode(name: str, value: Any) -> bytes:
    """The bytes of an object.   name: for messages. Raises CheckpointError for one that would not load without its own code."""
    try:
        return with_checksum(_bytes_of(value))
    except Exception as error:
        raise CheckpointError(_refusal(name, value)) from error


def decode(data: bytes, where: str) -> Any:
    """The object. Runs no code but torch's, and that of classes that the program vouches for.

    where: its name in messages. Raises CheckpointError if it may not be loaded, DamagedCheckpointError if it is damaged.
    """
    has_arrays, is_whole = ARRAY.encode() in data, check_whole(data, where)
    archive = Archive(lambda start, nbytes: data[start : start + nbytes], len(data), where)
    check_archive(archive, where, is_copied=has_arrays)
    archive.verify()
    try:
        found = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        if is_whole:
            raise CheckpointError(f"{where} cannot be loaded by torch {torch.__version__}: {refusal(error)}") from error
        # Of other writers and earlier versions: an archive's headers, which no checksum covers.
        raise DamagedCheckpointError(f"{where} is damaged: {refusal(error)}") from error
    return with_numpy(found) if has_arrays else found


def _bytes_of(value: Any) -> bytes:
    # Cost: containers are copied only if they cannot be saved as they are.
    try:
        return _checked_bytes(value)
    except Exception:
        return _checked_bytes(without_numpy(value))


def _checked_bytes(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    if not _is_plain(value):
        decode(buffer.getvalue(), "the value")
    return buffer.getvalue()


def _is_plain(value: object) -> bool:
    if type(value) in (tuple, list):
        return all(map(_is_plain, value))  # type: ignore[call-overload]
    return type(value) in _PLAIN


# ---------------------------------------------------------------------- numpy


def without_numpy(value: Any) -> Any:
    """The value with numbers and tensors in the place of numpy's, and dicts in the place of their subclasses."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic) and value.dtype.kind in "biufcUS":
        return value.item()
    if numpy is not None and type(value) in (numpy.ndarray, numpy.memmap):
        return {ARRAY: torch.from_numpy(value.copy(order="C"))}
    return _mapped(value, without_numpy)


def with_numpy(value: Any) -> Any:
    """The value with arrays in the place of what `without_numpy` has made of them; they share the tensors' memory."""
    if type(value) is dict and value.keys() == {ARRAY} and isinstance(value[ARRAY], torch.Tensor):
        return value[ARRAY].numpy()
    return _mapped(value, with_numpy)


def _mapped(value: Any, convert: Callable[[Any], Any]) -> Any:
    """A copy of a container with its items converted; anything else as it is."""
    if type(value) in (list, tuple, set):
        return type(value)(map(convert, value))
    if isinstance(value, Mapping):
        kind: Any = type(value) if type(value) in (OrderedDict, Counter) else dict
        return kind({convert(key): convert(item) for key, item in value.items()})
    return value


# ---------------------------------------------------------------------- what is refused


def _refusal(name: str, value: Any) -> str:
    """One line: what cannot be saved, where it is, and what can."""
    place, found = _culprit(value)
    kind = type(found).__qualname__
    if (module := type(found).__module__) != "builtins":
        kind = f"{module}.{kind}"
    if _is_of_numpy(found, "ndarray"):
        kind += f" of {found.dtype}"
    what = f"has a {kind} {place}" if place else f"is a {kind}"
    return f"'{name}' {what}, which would not load without running its code: {_advice(found)}"


def _culprit(value: Any, place: str = "") -> tuple[str, Any]:
    """The innermost value that cannot be saved, and where in `value` it is."""
    inside: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        inside += [("among its keys", key) for key in value]
        inside += [(f"at {place.removeprefix('at ')}[{key!r:.40}]", item) for key, item in value.items()]
    elif type(value) in (list, tuple, set):
        inside += [(f"at {place.removeprefix('at ')}[{index}]", item) for index, item in enumerate(value)]
    for where, item in inside:
        try:
            _bytes_of(item)
        except Exception:
            return _culprit(item, where)
    return place, value


def _is_of_numpy(value: Any, kind: str) -> bool:
    return "numpy" in sys.modules and isinstance(value, getattr(sys.modules["numpy"], kind))


def _advice(value: Any) -> str:
    if has_state(value):
        return "put it into a dict or list, or alone into a PerRank, which save its state"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return "use dataclasses.asdict(x)"
    for kinds, advice in _ADVICE:
        if isinstance(value, kinds):
            return advice
    if callable(value):
        return "leave it out"
    if _is_of_numpy(value, "generic"):
        return "use str(x)"
    if _is_of_numpy(value, "ndarray"):
        return "use x.tolist()"
    return "save what it consists of, or give it state_dict() and load_state_dict()"


_ADVICE: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (enum.Enum, "use x.value"),
    ((os.PathLike, date, time, timedelta), "use str(x)"),
    (numbers.Number, "use float(x)"),
    (tuple, "use tuple(x)"),
    (frozenset, "use set(x)"),
    (range, "use list(x)"),
    (torch.Generator, "use x.get_state()"),
)
