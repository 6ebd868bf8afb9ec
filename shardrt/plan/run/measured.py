"""A hardware sheet of the machine at hand, from the JSON of `shardrt-stress --compute --json FILE`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...comm.stress.sweeps.compute import SmallModel
from ...torch_internals import OpOverload
from ..machine.cost import UNLAUNCHED
from ..machine.hardware import SheetError, parse_sheet
from ..machine.work import work_of
from .operations import Cost, Operations

# The host's time for hooks, waits and registrations of a group in a step, in operations: of a hundred tiny groups on one rank.
_GROUP_OPERATIONS = 30
_RESERVED_NBYTES = {"cpu": 400_000_000, "cuda": 2_500_000_000}  # torch's libraries; CUDA's context, NCCL's buffers
_LINK = "sendrecv"  # shows a link as it is: each rank sends and receives one message


def sheet_of_stress(path: Path) -> str:
    """The TOML of a sheet, with the machine's measured rates. Raises SheetError for a file that has none."""
    try:
        found = json.loads(path.read_text())
        if not isinstance(found, dict) or not isinstance(found.get("compute"), dict):
            raise ValueError("there is no compute: run `shardrt-stress --compute --json FILE`")
        sheet = _sheet(found, path.name)
    except KeyError as error:
        raise SheetError(f"{path}: expected the JSON of `shardrt-stress --compute`, found no {error}") from error
    except (OSError, ValueError, TypeError, AttributeError, IndexError, ArithmeticError) as error:
        raise SheetError(f"{path}: expected the JSON of `shardrt-stress --compute` ({error})") from error
    parse_sheet(sheet, str(path))
    return sheet


def fit(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Latency (s) and bandwidth (bytes/s) of pairs of bytes and seconds, by rising bytes.

    The latency is that of the smallest message, the bandwidth that of the largest: others may be in a cache if they are sent
    again and again, which those of a training step are not.
    """
    latency, (nbytes, seconds) = points[0][1], points[-1]
    return latency, nbytes / max(seconds - latency, seconds / 2)


def _sheet(found: Mapping[str, Any], name: str) -> str:
    compute, ranks, nodes = found["compute"], int(found["ranks"]), int(found["nodes"])
    reserved, overhead = _RESERVED_NBYTES[compute["device"]], compute["small_step_us"] / 1e6 / operations_of_small_model()
    rates = [f"{dtype} = {_pairs(pairs)}" for dtype, pairs in compute["matmul"].items()]
    lines = [
        f'name = "{name}: {ranks} ranks on {nodes} nodes, shardrt {found["version"]}"',
        f'device = "{compute["device"]}"',
        f"ranks_per_node = {ranks // nodes}",
        f"[memory]\nnbytes = {compute['nbytes']}\nreserved_nbytes = {reserved}\nbandwidth = {_pairs(compute['memory'])}",
        f"[compute]\nfunctions = {compute['functions']:.4g}",
        "[compute.flops]  # by floating-point operations per byte",
        *rates,
        f"[overhead]\noperation = {overhead:.3e}\ngroup = {overhead * _GROUP_OPERATIONS:.3e}",
    ]
    pairs = {collective: fit(points) for collective, points in _points(found["rows"]).items()}
    large = compute["collectives"]
    fitted = {collective: _link(latency, large.get(collective, rate)) for collective, (latency, rate) in pairs.items()}
    if not fitted:
        raise KeyError("rows of collectives")
    link = fitted.get(_LINK) or next(iter(fitted.values()))
    if nodes == 1:
        collectives = [f"{collective} = {{ {', '.join(pair)} }}" for collective, pair in fitted.items()]
        lines += ["[within]", *link, "[collectives]", *collectives]
    else:  # what was measured within and across nodes at once
        lines += ["[within]", *link, "[across]", *link]
    return "\n".join(lines) + "\n"


def _link(latency: float, bandwidth: float) -> tuple[str, str]:
    return f"latency = {latency:.3e}", f"bandwidth = {bandwidth:.3e}"


def _points(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Bytes and seconds of each collective, of the first dtype and operation that it was measured with."""
    points: dict[str, list[tuple[float, float]]] = {}
    kinds: dict[str, tuple[str, str]] = {}
    for row in rows:
        kind = row["type"], row["redop"]
        if row["size"] and kinds.setdefault(row["collective"], kind) == kind:
            points.setdefault(row["collective"], []).append((row["size"], row["out_of_place"]["min_us"] / 1e6))
    return points


def _pairs(pairs: Sequence[Sequence[float]]) -> str:
    return f"[{', '.join(f'[{size:.8g}, {rate:.4g}]' for size, rate in pairs)}]"


class _OperationCounter:
    """Counts the operations that `Operations` shows it; those that run no kernel as parts of one."""

    number = 0.0

    def cost_of(self, func: OpOverload, args: Sequence[object], kwargs: Mapping[str, object], out: object) -> Cost:
        work = work_of(func, args, kwargs, out)
        return Cost(1.0 if work.is_launched else UNLAUNCHED, 0, work.dtype, ())

    def ran(self, cost: Cost, made: object) -> None:
        self.number += cost.seconds


def operations_of_small_model() -> float:
    """The operations of a step of the stress tester's small model, as a forecast sees them."""
    counter, model = _OperationCounter(), SmallModel(torch.device("meta"))
    with Operations(counter):
        model.step()  # makes the optimizer's state
        counter.number = 0.0
        model.step()
    return counter.number
