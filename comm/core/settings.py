"""The settings of a job: the variables that shardrt reads, each parsed once, before MPI starts, and compared over the ranks.

A variable that is empty counts as not set. One that is malformed on any rank, and one that differs between ranks, is an error
on every rank: nothing has been sent yet that depends on it. SHARDRT_RECORDER and SHARDRT_DUMP may differ, since they change
what a rank keeps, and where: a folder may be a node's own. SHARDRT_TIMEOUT may not: the shortest would end the job for all.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from ..ending.guard.node import RANK, RANKS_ALONE, REPLACE, SURVIVE, WORLD_SIZE, launcher_variables
from ..ending.processes import is_launched
from ..ending.report import PROGRESS
from ..ending.words import name_ranks
from ..program.version import __version__
from .nccl_policy import NcclPolicy

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_MAX_SECONDS = 1e8  # three years
_MAX_CALLS = 10_000_000
_MAX_RANKS = 10_000_000


class SettingsError(ValueError):
    """A variable or an argument of `init` that is malformed, or that the ranks do not have in common; a line for each."""


class MalformedVariable(NamedTuple):
    """A variable, or an argument of `init`, that is malformed on this rank."""

    found: str  # such as "SHARDRT_TIMEOUT='nan'"
    expected: str


class Launched(NamedTuple):
    """The number of ranks, as the launcher says, or the least that it can be."""

    variable: str
    ranks: int


@dataclass(frozen=True, slots=True)
class EnvironmentSettings:
    """What the environment and the argument of `init` ask for. Made once, by `read`; the same on all ranks after `agree`."""

    device: torch.device  # without an index, unless the program chose one
    nccl: NcclPolicy  # the argument of `init`
    timeout_s: float  # SHARDRT_TIMEOUT; infinity for no limit
    start_timeout_s: float  # SHARDRT_START_TIMEOUT; infinity for no limit
    patience_s: float  # SHARDRT_PATIENCE; infinity for no limit
    straggler: float  # SHARDRT_STRAGGLER, a share of the time; 0.0: off
    check: bool  # SHARDRT_CHECK
    check_batches: bool  # SHARDRT_CHECK_BATCHES
    check_weights: bool  # SHARDRT_CHECK_WEIGHTS
    recorded_calls: int  # SHARDRT_RECORDER
    dumps: Path | None  # SHARDRT_DUMP; None: a folder among the temporary files
    host_streams: str | None  # SHARDRT_HOST_STREAMS, "inline" or "threaded"; None: by the number of nodes
    node_memory: bool  # SHARDRT_NODE_MEMORY
    ranks_per_node: int | None  # SHARDRT_RANKS_PER_NODE; None: those that share memory
    survive: bool  # SHARDRT_SURVIVE: a rank that is lost does not end the job
    replace: bool  # SHARDRT_REPLACE: lost ranks are replaced
    progress: Path | None  # SHARDRT_PROGRESS: the file in which shardrt.launch looks how far this job is
    monitor_timing: str  # SHARDRT_MONITOR_TIMING, for tests: parsed by monitor/timing.py

    def compared(self) -> dict[str, str]:
        """What has to be the same on every rank, as it takes effect: names and values in words."""
        return {
            "shardrt": __version__,
            "torch": torch.__version__,
            "device": self.device.type,
            "init(nccl=)": str(self.nccl),
            "SHARDRT_TIMEOUT": f"{self.timeout_s:g}",
            "SHARDRT_START_TIMEOUT": f"{self.start_timeout_s:g}",
            "SHARDRT_PATIENCE": f"{self.patience_s:g}",
            "SHARDRT_STRAGGLER": f"{self.straggler:g}",
            "SHARDRT_CHECK": f"{self.check:d}",
            "SHARDRT_CHECK_BATCHES": f"{self.check_batches:d}",
            "SHARDRT_CHECK_WEIGHTS": f"{self.check_weights:d}",
            "SHARDRT_HOST_STREAMS": self.host_streams or "not set",
            "SHARDRT_NODE_MEMORY": f"{self.node_memory:d}",
            "SHARDRT_RANKS_PER_NODE": f"{self.ranks_per_node or 'not set'}",
            "SHARDRT_SURVIVE": f"{self.survive:d}",
            "SHARDRT_REPLACE": f"{self.replace:d}",
            "SHARDRT_MONITOR_TIMING": self.monitor_timing or "not set",
        }


def read(
    environment: Mapping[str, str], device: str | torch.device | None = None, nccl: NcclPolicy | None = None
) -> tuple[EnvironmentSettings, list[MalformedVariable]]:
    """This rank's settings, and what is malformed: its default stands in for it. device, nccl: the arguments of `init`."""
    reader = _VariableReader(environment)
    kind = reader.device(device)
    settings = EnvironmentSettings(
        device=kind,
        nccl=nccl or NcclPolicy(),
        timeout_s=reader.seconds("SHARDRT_TIMEOUT", 600.0),
        start_timeout_s=reader.seconds("SHARDRT_START_TIMEOUT", 120.0),
        patience_s=reader.seconds("SHARDRT_PATIENCE", 3600.0),
        straggler=reader.share("SHARDRT_STRAGGLER", 0.25),
        check=reader.flag("SHARDRT_CHECK", default=kind.type == "cpu"),
        check_batches=reader.flag("SHARDRT_CHECK_BATCHES", default=True),
        check_weights=reader.flag("SHARDRT_CHECK_WEIGHTS", default=True),
        recorded_calls=reader.number("SHARDRT_RECORDER", range(_MAX_CALLS + 1), 2000),
        dumps=reader.folder("SHARDRT_DUMP"),
        host_streams=reader.one_of("SHARDRT_HOST_STREAMS", ("inline", "threaded")),
        node_memory=reader.flag("SHARDRT_NODE_MEMORY", default=True),
        ranks_per_node=reader.number("SHARDRT_RANKS_PER_NODE", range(1, _MAX_RANKS + 1), 0) or None,
        survive=reader.flag(SURVIVE, default=False),
        replace=reader.flag(REPLACE, default=False),
        progress=reader.progress(),
        monitor_timing=reader.text("SHARDRT_MONITOR_TIMING"),
    )
    return settings, reader.problems


def agree(comm: MPI.Intracomm, own: EnvironmentSettings, problems: Sequence[MalformedVariable]) -> None:
    """Raise SettingsError on every rank if any has a problem, or if the ranks differ. Collective over all ranks.

    Only texts are exchanged: the ranks may run different versions.
    """
    answers: list[tuple[list[tuple[str, str]], dict[str, str]]] = comm.allgather(([tuple(p) for p in problems], own.compared()))
    ranks: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank, (found, _) in enumerate(answers):
        for problem in found:
            ranks[problem].append(rank)
    lines = [f"{found} on {_name(at, len(answers))}: expected {expected}" for (found, expected), at in ranks.items()]
    lines = lines or _differences([values for _, values in answers])
    if lines:
        raise SettingsError("\n".join(lines))


def launched(environment: Mapping[str, str]) -> Launched | None:
    """The number of ranks that the launcher says it has started; None for a process that may be alone.

    Raises: SettingsError for a variable that is no number, before MPI starts, which fails on it without naming it.
    """
    variables = launcher_variables(environment)
    if variables is not None:
        variable, _ = variables
        reader = _VariableReader(environment)
        ranks = reader.number(variable, range(1, _MAX_RANKS + 1), 1)
        for found, expected in reader.problems:
            raise SettingsError(f"{found}, which the launcher sets: expected {expected}, the ranks of the job")
        if ranks > 1:
            return Launched(variable, ranks)
    if environment.get(RANK) and (ranks := _number_of(environment, WORLD_SIZE)) > 1:
        return Launched(WORLD_SIZE, ranks)
    numbers = () if variables is not None else RANKS_ALONE
    return next((Launched(name, number + 1) for name in numbers if (number := _number_of(environment, name))), None)


def _number_of(environment: Mapping[str, str], variable: str) -> int:
    """A number that other programs have set; 0 for any other text."""
    text = environment.get(variable, "")
    return int(text) if re.fullmatch(r"\d{1,9}", text, re.ASCII) else 0


def seconds(text: str) -> float | None:
    """Seconds from 0 to 1e8, written as a decimal number; None for any other text, such as "nan"."""
    number = _decimal(text)
    return number if number <= _MAX_SECONDS else None


def _decimal(text: str) -> float:
    """A number of at least 0, written with digits; infinity for any other text."""
    return float(text) if re.fullmatch(r"(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text, re.ASCII) else float("inf")


def _share(text: str) -> float | None:
    number = _decimal(text)
    return number if number < 1.0 else None


class _VariableReader:
    """Parses variables, and collects those that are malformed."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment
        self.problems: list[MalformedVariable] = []

    def text(self, variable: str) -> str:
        return self._environment.get(variable, "").strip()

    def seconds(self, variable: str, default: float) -> float:
        """Seconds, infinity for 0."""
        expected = f"seconds, at most {_MAX_SECONDS:g}, or 0 for no limit"
        return self._parsed(variable, seconds, default, expected) or float("inf")

    def share(self, variable: str, default: float) -> float:
        """A number from 0 to below 1."""
        return self._parsed(variable, _share, default, "a share of the time, below 1, or 0 for off")

    def flag(self, variable: str, default: bool) -> bool:
        return {"0": False, "1": True, None: default}[self.one_of(variable, ("0", "1"))]

    def one_of(self, variable: str, values: tuple[str, str]) -> str | None:
        return self._parsed(variable, {value: value for value in values}.get, None, " or ".join(map(repr, values)))

    def number(self, variable: str, allowed: range, default: int) -> int:
        def parse(text: str) -> int | None:
            return int(text) if re.fullmatch(r"\d{1,18}", text, re.ASCII) and int(text) in allowed else None

        return self._parsed(variable, parse, default, f"a whole number from {allowed[0]} to {allowed[-1]}")

    def _parsed(self, variable: str, parse: Callable[[str], T | None], default: T, expected: str) -> T:
        """What `parse` makes of a variable's text; the default if it is not set, or malformed: `parse` returns None."""
        text = self.text(variable)
        value = parse(text) if text else default
        if value is None and text:
            self._refuse(variable, expected)
        return default if value is None else value

    def folder(self, variable: str) -> Path | None:
        text = self._environment.get(variable, "")
        if os.path.exists(text) and not os.path.isdir(text):
            self._refuse(variable, "a folder, or a name for one")
        return Path(text) if text else None

    def progress(self) -> Path | None:
        text = self._environment.get(PROGRESS)
        return Path(text) if text and is_launched(self._environment) else None

    def device(self, device: str | torch.device | None) -> torch.device:
        """The device that `init` was asked for."""
        if device is None:
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        expected = "'cpu' or 'cuda'"
        try:
            requested = torch.device(device)
        except (RuntimeError, TypeError):
            requested = None
        if requested is not None and requested.type == "cuda" and not torch.cuda.is_available():
            expected = f"'cpu', since torch {torch.__version__} sees no CUDA device here"
        elif requested is not None and requested.type == "cuda" and (requested.index or 0) >= torch.cuda.device_count():
            expected = f"'cuda', or a number below {torch.cuda.device_count()}, the GPUs that torch sees here"
        elif requested is not None and requested.type in ("cpu", "cuda"):
            return requested
        self.problems.append(MalformedVariable(f"init(device={device!r})", expected))
        return torch.device("cpu")

    def _refuse(self, variable: str, expected: str) -> None:
        self.problems.append(MalformedVariable(f"{variable}={self._environment[variable]!r}", expected))


def _differences(ranks: Sequence[Mapping[str, str]]) -> list[str]:
    """A line for each name whose value is not the same on all ranks. Ranks of another version may lack a name."""
    lines = []
    for name in dict.fromkeys(name for values in ranks for name in values):
        groups: dict[str, list[int]] = defaultdict(list)
        for rank, values in enumerate(ranks):
            groups[values.get(name, "unknown")].append(rank)
        if len(groups) > 1:
            *few, (common, most) = sorted(groups.items(), key=lambda group: len(group[1]))
            found = [f"{value} on {name_ranks(at)}" for value, at in few]
            found.append(f"{common} on {'all others' if len(most) > 1 else name_ranks(most)}")
            lines.append(f"{name} differs between the ranks: {', '.join(found)}; expected the same on all ranks")
    return lines


def _name(ranks: Sequence[int], size: int) -> str:
    return "all ranks" if 1 < len(ranks) == size else name_ranks(ranks)
