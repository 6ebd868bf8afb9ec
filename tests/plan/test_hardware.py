"""Hardware sheets: those that come with shardrt, what is wrong with others, and rates by size."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shardrt.comm.stress.sweeps.compute import MOST_ROWS, SIDES
from shardrt.plan.machine.hardware import Curve, SheetError, load_sheet, parse_sheet, sheet_names
from shardrt.plan.run.measured import fit, operations_of_small_model, sheet_of_stress

SMALL = """
name = "small"
device = "cpu"
ranks_per_node = 2
[memory]
nbytes = 1000000000
bandwidth = 1e10
[compute.flops]
float32 = [[1000, 1e8], [100000, 1e10]]
[overhead]
operation = 2e-6
[within]
bandwidth = 1e9
latency = 1e-6
"""


def test_sheets_that_come_with_shardrt() -> None:
    assert sheet_names() == ["a100", "b200", "h100", "h200"]
    sheets = {name: load_sheet(name) for name in sheet_names()}
    assert load_sheet("H100") == sheets["h100"]
    by_hand = {"a100": (312e12, 2.039e12, 300e9, 25e9), "h100": (989e12, 3.35e12, 450e9, 50e9)}
    by_hand |= {"h200": (989e12, 4.8e12, 450e9, 50e9), "b200": (2250e12, 7.7e12, 900e9, 50e9)}
    for name, figures in by_hand.items():
        sheet = sheets[name]
        assert sheet.across is not None
        curves = (sheet.compute.flops["bfloat16"], sheet.memory.bandwidth, sheet.within.bandwidth, sheet.across.bandwidth)
        assert tuple(1e15 / curve.seconds(1e15) for curve in curves) == pytest.approx(figures)
        assert (sheet.device, sheet.ranks_per_node) == ("cuda", 8)
        assert all(source.startswith("https://") for source in sheet.sources)
        assert len(sheet.sources) >= 3


def test_matrices_are_measured_where_arithmetic_bounds_them() -> None:
    """Products of bfloat16 with the most rows, on every GPU that has a sheet: more operations for a byte than it needs."""
    rows, side = MOST_ROWS["cuda"], SIDES["cuda"]
    intensity = 2 * rows * side * side / (2 * side * (2 * rows + side))
    for name in sheet_names():
        sheet = load_sheet(name)
        assert sheet.compute.flops["bfloat16"].rate(1e15) < intensity * sheet.memory.bandwidth.rate(1e15), name


def test_a_rate_follows_its_points() -> None:
    curve = parse_sheet(SMALL, "small").compute.flops["float32"]
    assert curve == Curve((1000.0, 100000.0), (1e8, 1e10))
    assert curve.seconds(0) == 0
    assert curve.seconds(10) == pytest.approx(1e-7), "below the first size the rate stays"
    assert curve.seconds(1000) == pytest.approx(1e-5)
    assert curve.rate(10_000) == pytest.approx(1e9)
    assert curve.seconds(10_000) == pytest.approx(10_000 / 1e9), "the rate in the middle of both, by their logarithms"
    assert curve.seconds(1e7) == pytest.approx(1e-3), "above the last size the rate stays"
    assert Curve((1.0,), (4.0,)).seconds(0.5) == 0.125, "one rate for every size"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("bandwidth = 1e10", "bandwith = 1e10", "unknown key memory.bandwith; the nearest one is memory.bandwidth"),
        ("float32 =", "bflaot16 = 1\nfloat32 =", "unknown key compute.flops.bflaot16; .* compute.flops.bfloat16"),
        ("[within]", "[collectives]\nall_gathr = 1\n[within]", "unknown key collectives.all_gathr; .* collectives.all_gather"),
        ("[compute.flops]", "[compute]\nfunctions = 0\n[compute.flops]", "compute.functions = 0: expected .* more than 0"),
        ("[compute.flops]", "[compute]\nattention = 1.5\n[compute.flops]", "compute.attention = 1.5: expected more than 0"),
        ("operation = 2e-6", f"operation = 1{'0' * 400}", "overhead.operation = 10+: expected a number of at least 0"),
        ("[within]", "[withn]", "unknown key withn; the nearest one is within"),
        ("latency = 1e-6", "", "missing key within.latency"),
        ("operation = 2e-6", "operation = -1", "overhead.operation = -1: expected a number of at least 0"),
        ("operation = 2e-6", "operation = nan", "overhead.operation = nan: expected a number of at least 0"),
        ("operation = 2e-6", "operation = true", "overhead.operation = True: expected a number of at least 0"),
        ("latency = 1e-6", "latency = 1e-6\nfraction = 1.5", "within.fraction = 1.5: expected more than 0 and at most 1"),
        ("ranks_per_node = 2", "ranks_per_node = 0", "ranks_per_node = 0: expected a whole number of at least 1"),
        ("nbytes = 1000000000", "nbytes = '1 GB'", "memory.nbytes = '1 GB': expected a number of at least 0"),
        (
            "bandwidth = 1e9",
            "bandwidth = 0",
            "within.bandwidth = 0: expected numbers of more than 0, the first of each pair rising",
        ),
        ("[[1000, 1e8], [100000, 1e10]]", "[[5, 1], [4, 1]]", r"compute.flops.float32 = \[\[5, 1\], \[4, 1\]\]: .* rising"),
        ("[[1000, 1e8], [100000, 1e10]]", "[[5, 1, 2]]", "compute.flops.float32 = .*expected a number, or pairs"),
        ("[[1000, 1e8], [100000, 1e10]]", "[]", "compute.flops.float32 = .*expected a number, or pairs"),
        ("float32 =", "bfloat16 =", "missing key compute.flops.float32"),
        ('device = "cpu"', 'device = "tpu"', "device = 'tpu': expected one of cuda, cpu"),
        ('name = "small"', "name = 3", "name = 3: expected a text"),
        ('name = "small"', 'name = "small"\nsources = "a"', "sources = 'a': expected a list of texts"),
        ('name = "small"', 'name = "small"\nmemory = 1', "Cannot"),
        ('name = "small"', "name =", "Invalid value"),
    ],
)
def test_bad_sheets(old: str, new: str, message: str) -> None:
    assert old in SMALL
    with pytest.raises(SheetError, match=f"^hardware sheet small: .*{message}"):
        parse_sheet(SMALL.replace(old, new), "small")


def test_sections_that_are_no_tables() -> None:
    text = "name = 'n'\ndevice = 'cpu'\nranks_per_node = 1\nmemory = 1\ncompute = 2\noverhead = 3\nwithin = 4\n"
    with pytest.raises(SheetError, match="memory = 1: expected a table"):
        parse_sheet(text, "small")
    with pytest.raises(SheetError, match=r"compute\.flops = 2: expected a table"):
        parse_sheet(SMALL.replace("[compute.flops]\nfloat32 = [[1000, 1e8], [100000, 1e10]]", "[compute]\nflops = 2"), "small")


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    path.write_text(SMALL)
    assert load_sheet(path) == load_sheet(str(path)) == parse_sheet(SMALL, "")
    assert math.isclose(load_sheet(path).memory.bandwidth.seconds(1e10), 1)
    for bad, reason in ((tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(SheetError, match=f"{bad}: expected one of a100, b200, h100, h200, or a TOML file.*{reason}"):
            load_sheet(bad)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(SheetError, match=r"bytes\.toml: expected .* a TOML file"):
        load_sheet(tmp_path / "bytes.toml")


# ---------------------------------------------------------------------- of the machine at hand


def stressed(nodes: int = 1) -> dict[str, Any]:
    """What the stress tester writes on 2 ranks of a machine of 1 us and 1 GB/s."""

    def row(name: str, size: int, kind: str = "float32") -> dict[str, Any]:
        return {"collective": name, "size": size, "type": kind, "redop": "none", "out_of_place": {"min_us": 1 + size / 1000}}

    rows = [row(name, size) for name in ("sendrecv", "all_gather", "reduce_scatter") for size in (0, 1000, 4000)]
    return {
        "version": "1.2",
        "ranks": 2,
        "nodes": nodes,
        "rows": [*rows, row("all_gather", 1000, "int8")],
        "compute": {
            "device": "cpu",
            "nbytes": 12_000_000_000,
            "matmul": {"float32": [[0.5, 1e9], [8.0, 4e9]], "bfloat16": [[1.0, 2e9], [16.0, 8e9]]},
            "memory": [[65536, 1e11], [4194304, 1e10]],
            "collectives": {"reduce_scatter": 3e9},
            "functions": 1e9,
            "small_step_us": 1000.0,
        },
    }


def test_a_sheet_of_the_machine_at_hand(tmp_path: Path) -> None:
    path = tmp_path / "stress.json"
    path.write_text(json.dumps(stressed()))
    sheet = parse_sheet(sheet_of_stress(path), "machine")
    assert (sheet.name, sheet.device, sheet.ranks_per_node) == ("stress.json: 2 ranks on 1 nodes, shardrt 1.2", "cpu", 2)
    assert (sheet.memory.nbytes, sheet.memory.reserved_nbytes) == (12_000_000_000, 400_000_000)
    assert sheet.memory.bandwidth == Curve((65536.0, 4194304.0), (1e11, 1e10))
    assert sheet.compute.flops["bfloat16"].rate(4.0) == pytest.approx(4e9)
    assert sheet.compute.functions == 1e9
    assert sheet.overhead.operation * operations_of_small_model() == pytest.approx(1e-3, rel=1e-3)
    assert [sheet.within.latency, sheet.within.bandwidth.rate(1)] == pytest.approx([2e-6, 4000 / 3e-6], rel=1e-3)
    assert sheet.across is None
    measured = sheet.collectives["all_gather"]
    assert [measured.latency, measured.bandwidth.rate(1)] == pytest.approx([2e-6, 4000 / 3e-6], rel=1e-3), "of float32"
    assert sheet.collectives["reduce_scatter"].bandwidth.rate(1) == 3e9, "of messages that no cache holds"


def test_a_sheet_of_several_nodes(tmp_path: Path) -> None:
    """What was measured within and across nodes at once says nothing of jobs on one node."""
    path = tmp_path / "stress.json"
    path.write_text(json.dumps(stressed(nodes=2)))
    sheet = parse_sheet(sheet_of_stress(path), "machine")
    assert (sheet.ranks_per_node, sheet.across, dict(sheet.collectives)) == (1, sheet.within, {})


def test_files_that_no_sheet_can_be_made_of(tmp_path: Path) -> None:
    path = tmp_path / "stress.json"
    with pytest.raises(SheetError, match=r"stress\.json: expected the JSON of `shardrt-stress --compute` \(.*No such file"):
        sheet_of_stress(path)
    for text, message in (
        ("{", r"expected the JSON of `shardrt-stress --compute` \("),
        ("[]", "expected the JSON of `shardrt-stress --compute`"),
        (json.dumps(stressed() | {"compute": None}), "there is no compute: run `shardrt-stress --compute --json FILE`"),
        (json.dumps(stressed() | {"compute": stressed()["compute"] | {"matmul": [1]}}), "expected the JSON of"),
        (json.dumps(stressed() | {"nodes": 0}), "expected the JSON of `shardrt-stress"),
        (json.dumps(stressed() | {"rows": []}), "expected the JSON of `shardrt-stress --compute`, found no .*collectives"),
        (json.dumps(stressed() | {"ranks": "two"}), "expected the JSON of `shardrt-stress"),
    ):
        path.write_text(text)
        with pytest.raises(SheetError, match=message):
            sheet_of_stress(path)


def test_latency_and_bandwidth_of_measurements() -> None:
    points = [(1e3, 2e-6), (1e6, 1e-4), (1e8, 0.02 + 2e-6)]
    assert list(fit(points)) == pytest.approx([2e-6, 5e9])
    assert fit(points[:1]) == (2e-6, 1e9), "of one size, half"


def test_operations_of_the_small_model() -> None:
    """By torch's own operations: those that run no kernel count as a quarter."""
    number = operations_of_small_model()
    assert number == operations_of_small_model()
    launched = 8 * (3 + 1 + 2) + 2 + 8 * 4 * 9
    assert launched < number < 1.4 * launched
