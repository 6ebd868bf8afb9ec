"""Every command says which version it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from shardrt.checkpoint.__main__ import main as checkpoint
from shardrt.comm.merge_dumps import main as recorder
from shardrt.comm.stress.options import parse as stress
from shardrt.comm.version import __version__
from shardrt.launch import main as launch
from shardrt.plan.__main__ import main as plan
from shardrt.timeline.__main__ import main as timeline

COMMANDS: dict[str, Callable[[list[str]], object]] = {
    "shardrt-checkpoint": checkpoint,
    "shardrt-stress": stress,
    "shardrt-launch": launch,
    "shardrt-plan": plan,
    "shardrt-timeline": timeline,
    "shardrt.comm.recorder": recorder,
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_have_a_version(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        COMMANDS[name](["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{name} {__version__}\n"
