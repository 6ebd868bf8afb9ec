"""Hardware sheets: what a machine can do, in TOML.

    name = "..."                what it is
    device = "cuda"             or "cpu": the host computes, and communicates inline
    ranks_per_node = 8          whole, one rank per device
    sources = ["https://..."]   where the figures are from

    [memory]
    nbytes = 80_000_000_000     of one rank
    reserved_nbytes = 2e9       of it, what no tensor can have: the driver's context, libraries, the allocator's slack
    bandwidth = 3.35e12         bytes/s, read and written
    fraction = 0.9              of the bandwidth, what kernels achieve

    [compute]
    fraction = 0.75             of the rates below, what matrix multiplications achieve
    attention = 0.5             of the rates, what fused attention achieves on the scores that it computes, which are half of
                                them under a causal mask; without this key, all scores take the time of other matrices
    functions = 2e9             elements/s of square roots, exponentials and the like, where they are slower than memory
    [compute.flops]             per second, of dense matrices; a dtype without a rate has float32's
    float32 = 67e12
    bfloat16 = 989e12

    [overhead]                  seconds
    kernel = 2e-6               a kernel that does nothing, on the device
    operation = 5e-6            the host's time for one operation; a view or an allocation takes a quarter of it
    group = 1e-4                the host's time for one sharded group and step, beside its operations

    [within]                    between ranks of a node, per rank and direction
    bandwidth = 450e9           bytes/s
    fraction = 0.8              of it, what collectives achieve
    latency = 2e-6              seconds for each step of a collective from rank to rank
    start = 8e-6                seconds that a collective takes whatever it sends

    [across]                    between nodes, the same keys; without it, forecasts of several nodes are refused

    [collectives]               measured ones, by name, instead of [within]: seconds, and bytes/s of all blocks together
    all_gather = { latency = 1e-5, bandwidth = 1e10 }

`bandwidth` and a rate of `flops` are numbers, or pairs: of bytes, for `flops` of operations per byte, and the rate there,
rising. Between two points the rate follows a power law, beyond them it stays.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

import torch

from ...comm.stress.names import COLLECTIVES

DEVICES = ("cuda", "cpu")


class SheetError(ValueError):
    """A hardware sheet that does not exist or cannot be used."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A rate that depends on something: a size, or an intensity. at: rising.   rates: per second, at each of them."""

    at: tuple[float, ...]
    rates: tuple[float, ...]

    def rate(self, at: float) -> float:
        """A power law between two points; beyond them the nearest one's."""
        index = bisect_right(self.at, at)
        if index in (0, len(self.at)):
            return self.rates[max(0, index - 1)]
        (low, high), (slow, fast) = self.at[index - 1 : index + 1], self.rates[index - 1 : index + 1]
        return slow * (fast / slow) ** (math.log(at / low) / math.log(high / low))

    def seconds(self, size: float) -> float:
        """The time for `size`, which decides the rate; 0 for nothing."""
        return size / self.rate(size) if size > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Memory:
    """The sheet's table [memory]."""

    nbytes: int
    bandwidth: Curve
    fraction: float = 1.0
    reserved_nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Compute:
    """The sheet's table [compute]."""

    flops: Mapping[str, Curve]
    fraction: float = 1.0
    attention: float | None = None
    functions: float = math.inf


@dataclass(frozen=True, slots=True)
class Overhead:
    """The sheet's table [overhead], in seconds."""

    operation: float
    kernel: float = 0.0
    group: float = 0.0


@dataclass(frozen=True, slots=True)
class NetworkLink:
    """The sheet's tables [within] and [across], per rank and direction, and a measured collective."""

    bandwidth: Curve
    latency: float
    fraction: float = 1.0
    start: float = 0.0


@dataclass(frozen=True, slots=True)
class Sheet:
    """A machine. `hardware` has the keys and their units."""

    name: str
    device: str
    ranks_per_node: int
    memory: Memory
    compute: Compute
    overhead: Overhead
    within: NetworkLink
    across: NetworkLink | None = None
    collectives: Mapping[str, NetworkLink] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise SheetError(f"device = {self.device!r}: expected one of {', '.join(DEVICES)}")
        if "float32" not in self.compute.flops:
            raise SheetError("missing key compute.flops.float32, the rate of dtypes that have none")


def sheet_names() -> list[str]:
    """The sheets that come with shardrt."""
    return sorted(entry.name.removesuffix(".toml") for entry in _sheets().iterdir() if entry.name.endswith(".toml"))


def load_sheet(name: str | Path) -> Sheet:
    """The sheet of that name, or in that file. Raises SheetError, which names the file and the key."""
    if str(name).lower() in sheet_names():
        return parse_sheet((_sheets() / f"{str(name).lower()}.toml").read_text(), str(name))
    try:
        text = Path(name).read_text()
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(sheet_names())
        raise SheetError(
            f"hardware sheet {name}: expected one of {known}, or a TOML file that can be read ({error})"
        ) from error
    return parse_sheet(text, str(name))


def parse_sheet(text: str, name: str) -> Sheet:
    """A sheet's TOML. name: in messages. Raises SheetError."""
    try:
        sheet = _read_table(Sheet, tomllib.loads(text), "")
    except (tomllib.TOMLDecodeError, SheetError) as error:
        raise SheetError(f"hardware sheet {name}: {error}") from error
    assert isinstance(sheet, Sheet)
    return sheet


def _sheets() -> Any:
    return resources.files(__package__) / "sheets"


# ---------------------------------------------------------------------- reading


def _read_table(kind: type, value: object, key: str) -> object:
    """A dataclass from a table whose keys are its fields."""
    if not isinstance(value, Mapping):
        raise _wrong(key, "a table", value)
    known = {entry.name: entry for entry in fields(kind)}
    prefix = f"{key}." if key else ""
    _check_keys(value, known, prefix)
    for entry in known.values():
        if entry.name not in value and entry.default is MISSING and entry.default_factory is MISSING:
            raise SheetError(f"missing key {prefix}{entry.name}")
    hints = get_type_hints(kind)
    return kind(**{name: _read(hints[name], value[name], prefix + name) for name in known if name in value})


def _check_keys(value: Mapping[str, object], known: Collection[str], prefix: str) -> None:
    for unknown in value.keys() - known:
        nearest = difflib.get_close_matches(unknown, known, n=1, cutoff=0)[0]
        raise SheetError(f"unknown key {prefix}{unknown}; the nearest one is {prefix}{nearest}")


def _read(hint: object, value: object, key: str) -> object:
    if hint == NetworkLink | None:
        hint = NetworkLink
    if isinstance(hint, type) and is_dataclass(hint) and hint is not Curve:
        return _read_table(hint, value, key)
    return _READERS[hint](value, key)


def _read_text(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise _wrong(key, "a text", value)
    return value


def _read_texts(value: object, key: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise _wrong(key, "a list of texts", value)
    return tuple(_read_text(item, key) for item in value)


def _read_number(value: object, key: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1 << 1023
    number = float(value) if is_number else math.nan  # type: ignore[arg-type]
    if (key.endswith(".fraction") or key == "compute.attention") and not 0 < number <= 1:
        raise _wrong(key, "more than 0 and at most 1", value)
    if key == "compute.functions" and not 0 < number < math.inf:
        raise _wrong(key, "a number of more than 0", value)
    if not 0 <= number < math.inf:
        raise _wrong(key, "a number of at least 0", value)
    return number


def _read_whole(value: object, key: str) -> int:
    number = _read_number(value, key)
    if number != int(number) or (number == 0 and "reserved" not in key):
        raise _wrong(key, "a whole number of at least 1", value)
    return int(number)


def _read_curve(value: object, key: str) -> Curve:
    pairs = value if isinstance(value, list) else [[1, value]]
    if not pairs or any(not isinstance(pair, list) or len(pair) != 2 for pair in pairs):
        raise _wrong(key, "a number, or pairs of numbers", value)
    at, rates = ([_read_number(number, key) for number in column] for column in zip(*pairs, strict=True))
    if min(*at, *rates) <= 0 or at != sorted(set(at)):
        raise _wrong(key, "numbers of more than 0, the first of each pair rising", value)
    return Curve(tuple(at), tuple(rates))


def _read_named(hint: object, names: Collection[str], value: object, key: str) -> Mapping[str, object]:
    """A table whose keys are some of these names."""
    if not isinstance(value, Mapping):
        raise _wrong(key, "a table", value)
    _check_keys(value, names, f"{key}.")
    return MappingProxyType({name: _read(hint, item, f"{key}.{name}") for name, item in value.items()})


def _wrong(key: str, expected: str, found: object) -> SheetError:
    return SheetError(f"{key} = {found!r}: expected {expected}")


_DTYPES = frozenset(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))
_COLLECTIVES = frozenset({*COLLECTIVES, "send", "recv", "barrier"})
_READERS: dict[object, Callable[[object, str], object]] = {
    str: _read_text,
    int: _read_whole,
    float: _read_number,
    float | None: _read_number,
    Curve: _read_curve,
    tuple[str, ...]: _read_texts,
    Mapping[str, Curve]: partial(_read_named, Curve, _DTYPES),
    Mapping[str, NetworkLink]: partial(_read_named, NetworkLink, _COLLECTIVES),
}
