"""scripts/bench/gpu_forecast.py: its bounds, its sums, its page."""

from pathlib import Path

import pytest

from bench import gpu_forecast
from bench.gpu_forecast import Bounds, Row
from shardrt.plan.machine.hardware import Sheet, load_sheet

PAGE = Path(__file__).resolve().parents[2] / "docs" / "performance.md"


@pytest.fixture
def sheet(monkeypatch: pytest.MonkeyPatch) -> Sheet:
    """The sheet, with a small model to forecast."""
    pytest.importorskip("transformers")
    for name, value in (("MODEL", "gpt2"), ("SEQUENCE", 1024), ("WIDTH", 768)):
        monkeypatch.setattr(gpu_forecast, name, value)
    return load_sheet("h100")


@pytest.mark.rest
def test_parts_add_up_to_the_step(sheet: Sheet) -> None:
    """Before, the parts that the planner knows are its step, at least; what a change removes is no more afterwards."""
    found = gpu_forecast.planned(sheet)
    rows = gpu_forecast.step_rows(sheet, found)
    whole = gpu_forecast.total(rows)
    for side in ("before", "after"):
        parts = [getattr(row, side) for row in rows]
        assert getattr(whole, side).least == pytest.approx(sum(part.least for part in parts))
        assert getattr(whole, side).most == pytest.approx(sum(part.most for part in parts))
    for row in (*rows, whole, *gpu_forecast.other_rows(found)):
        assert 0 <= row.before.least <= row.before.most, row
        assert 0 <= row.after.least <= row.after.most <= row.before.most, row
    by_name = {row.name.partition(":")[0]: row for row in rows}
    planners = ("forward, backward", "optimizer", "exposed communication")
    assert sum(by_name[name].before.most for name in planners) == pytest.approx(found.step_seconds * 1e3)
    numel = sum(group.numel for group in found.groups)
    assert by_name["packing"].before.least == pytest.approx(numel * (2 + 4) / (3.35e12 * 0.9) * 1e3)
    assert by_name["late starts"].after == by_name["uploads"].after == (0.0, 0.0)


def test_figures_beside_the_step(sheet: Sheet) -> None:
    found = gpu_forecast.planned(sheet)
    memory, stall, inits = gpu_forecast.other_rows(found)
    assert (memory.before.most - memory.after.most) * 2**30 == pytest.approx(found.memory["packed"])
    nbytes = 3 * 4 * sum(group.numel for group in found.groups) / gpu_forecast.RANKS  # a parameter and its moments, float32
    assert stall.before.least == pytest.approx(nbytes / 64e9, rel=0.01)
    assert (inits.before, inits.after) == ((5.0, 5.0), (1.0, 1.0))


def test_a_switch_is_no_slower_than_a_ring(sheet: Sheet) -> None:
    """By hand: of S bytes of all blocks each of 8 GPUs sends 7/8, at 450 GB/s."""
    (link,) = gpu_forecast.in_switch(sheet).collectives.values()
    assert link.bandwidth.seconds(8e9) == pytest.approx(7e9 / 450e9)
    switch, ring = (gpu_forecast.planned(each) for each in (gpu_forecast.in_switch(sheet), sheet))
    assert switch.communication_seconds < ring.communication_seconds


def test_a_row() -> None:
    assert Row("a, ms", Bounds(1.2, 3456.7), Bounds.exactly(0.0), "b").line() == "| a, ms | 1 to 3,457 | 0 | b |"
    assert Row("a", Bounds(1.01, 1.02), Bounds(0.5, 0.75), "b", digits=1).line() == "| a | 1.0 | 0.5 to 0.8 | b |"


@pytest.mark.rest
def test_the_page_has_the_tables(sheet: Sheet) -> None:
    """It has their rows, and says what they are; the numbers are those of its model."""
    section = PAGE.read_text().partition("### Forecast of a step")[2]
    assert "forecasts: nothing in them has been measured" in section
    made = [line.split(" | ")[0] for line in gpu_forecast.lines(sheet) if line.startswith("| ")]
    kept = section.partition("<!-- scripts/bench/gpu_forecast.py -->\n")[2].partition("<!-- end -->")[0]
    assert made == [line.split(" | ")[0] for line in kept.splitlines() if line.startswith("| ")]
