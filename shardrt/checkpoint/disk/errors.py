"""The errors of checkpoints, how all ranks raise them, and how their messages show values that come from a file.

The text for such a value is bounded in length, and made without a visit of all its parts: a file of a few hundred bytes may
have tuples of shared tuples, whose `repr` is larger than any memory, or a number with so many digits that `repr` raises. Names
may have characters that a terminal would act on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice

import torch

from ...comm import Communicator
from ...comm.core.calls import RemoteError
from ...comm.core.fingerprint import printable


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message names the file, the tensor, and what to do.

    Collective calls raise it on every rank: if one rank has failed, the message has that rank's number and reason, and the
    cause is the `shardrt.comm.RemoteError` with its traceback. Names that come from a file are printable in it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was written: a checksum differs, a file is cut off, missing, or of another save.

    Another checkpoint of the training may be whole. Errors of the file system, and a state that does not fit, are no damage.
    """


@contextmanager
def agreed(comm: Communicator) -> Iterator[None]:
    """Whatever a rank raises in the `with` block becomes a CheckpointError on every rank; else as `comm.agree()`.

    A DamagedCheckpointError remains one.
    """
    try:
        with comm.agree():
            yield
    except RemoteError as error:
        failed = error.failure.error  # begins with the name of the class
        kind = DamagedCheckpointError if failed.startswith(f"{DamagedCheckpointError.__name__}:") else CheckpointError
        raise kind(f"rank {error.failure.rank} raised {failed}") from error


# ---------------------------------------------------------------------- values that come from a file


_CHARACTERS, _ITEMS, _LEVELS = 200, 4, 3
_LISTED = 20  # names in an error


def shown(value: object) -> str:
    """What `repr` gives for plain values, cut to a few hundred characters; the type of any other value."""
    return _cut(_shown(value, _LEVELS))


def listed(names: Sequence[str]) -> str:
    """The first names of a list."""
    return first_of([*map(shown, names[:_LISTED]), *names[_LISTED:]])


def first_of(texts: Sequence[str], between: str = ", ") -> str:
    """The first of these texts, and how many more there are."""
    more = f", and {len(texts) - _LISTED} more" if len(texts) > _LISTED else ""
    return between.join(texts[:_LISTED]) + more


def reason(error: BaseException) -> str:
    """An exception's class and message."""
    words = (arg if isinstance(arg, str) else shown(arg) for arg in error.args)
    return f"{type(error).__name__}: {_cut(' '.join(islice(words, _ITEMS)))}"


def _shown(value: object, levels: int) -> str:
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= _CHARACTERS else f"{value[:_CHARACTERS]!r}..."
    if isinstance(value, int) and value.bit_length() > _CHARACTERS:
        return f"an integer of {value.bit_length():,} bits"
    if isinstance(value, Mapping):
        pairs = (f"{_shown(key, levels - 1)}: {_shown(item, levels - 1)}" for key, item in value.items())
        return f"{{{_few(pairs, len(value), levels)}}}"
    if isinstance(value, list | tuple):
        items = _few((_shown(item, levels - 1) for item in value), len(value), levels)
        return f"[{items}]" if isinstance(value, list) else f"({items}{',' * (len(value) == 1)})"
    if value is None or isinstance(value, bool | int | float | torch.dtype):
        return repr(value)
    return f"a {type(value).__name__}"


def _few(texts: Iterable[str], count: int, levels: int) -> str:
    if levels <= 0 and count:
        return "..."
    more = f", ... {count:,} in all" if count > _ITEMS else ""
    return ", ".join(islice(texts, _ITEMS)) + more


def _cut(text: str) -> str:
    return text if len(text) <= 2 * _CHARACTERS else f"{text[: 2 * _CHARACTERS]}..."
