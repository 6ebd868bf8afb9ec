"""Progress bars of commands, on a terminal and in a log."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

from shardrt.instruments import progress

pytest.importorskip("tqdm")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of bars, in seconds, which the test sets."""
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def written(monkeypatch: pytest.MonkeyPatch, clock: list[float], *, is_terminal: bool = False) -> str:
    """What a bar writes in ten minutes, of 6,000 steps, with a message after each thousandth."""
    monkeypatch.delenv("TQDM_MININTERVAL", raising=False)
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", file)
    with progress.logged_bar(total=6_000, unit="step") as bar:
        for step in range(6_000):
            clock[0] += 0.1
            bar.set_postfix_str(f"loss {step}", refresh=False)
            bar.update()
            if step % 1_000 == 999:
                bar.write(f"message {step}", file=file)
    return file.getvalue()


def test_a_log_has_a_line_a_minute_and_the_last_one(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    text = written(monkeypatch, clock)
    assert "\r" not in text
    lines = text.splitlines()
    assert sum(line.startswith("message") for line in lines) == 6
    shown = [line for line in lines if "step" in line]
    assert 10 <= len(shown) <= 12
    assert len(lines) == len(shown) + 6
    assert "6000/6000" in shown[-1]
    assert "loss 5999" in shown[-1]


def test_a_terminal_has_a_bar(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> None:
    assert written(monkeypatch, clock, is_terminal=True).count("\r") > 1_000


def test_a_bar_of_another_rank_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with progress.logged_bar(total=1, disable=True) as bar:
        bar.update()
    assert file.getvalue() == ""
