"""Every command says which version it is, and its help and errors come at once, from one rank."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ranks import FRESH, run_job, run_script
from shardrt.checkpoint.__main__ import main as checkpoint
from shardrt.comm.program.version import __version__
from shardrt.comm.recorder.merge_dumps import main as recorder
from shardrt.comm.stress.options import parse as stress
from shardrt.launch import main as launch
from shardrt.plan.__main__ import main as plan
from shardrt.stress import main as stress_with_models
from shardrt.timeline.__main__ import main as timeline

ROOT = Path(__file__).resolve().parents[2]
TRAIN = str(ROOT / "scripts" / "train.py")
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


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("-c 'import shardrt'", 0),
        ("-m shardrt.launch --help", 0),
        ("-m shardrt.launch --join-timeout 0", 2),
        ("-m shardrt.stress --help", 0),
        ("-m shardrt.stress --fault none", 2),
        ("-m shardrt.comm.stress --help", 0),
        ("-m shardrt.comm.stress --dtypes none", 2),
        ("-m shardrt.checkpoint --help", 0),
        ("-m shardrt.checkpoint convert a b --to dcp --max-shard-size 0", 2),
        ("-m shardrt.plan --help", 0),
        ("-m shardrt.plan --ranks 8 --best none", 2),
        ("-m shardrt.plan sheets --help", 0),
        ("-m shardrt.plan sheet", 2),
        ("-m shardrt.timeline merge --help", 0),
        ("-m shardrt.timeline", 2),
        ("-m shardrt.comm.recorder --version", 0),
        ("-m shardrt.comm.recorder none", 2),
        (f"{TRAIN} --help", 0),
        (f"{TRAIN} --resume auto", 2),
    ],
)
def test_help_and_errors_import_no_torch(command: str, code: int) -> None:
    python = [sys.executable, "-X", "importtime", *shlex.split(command)]
    done = subprocess.run(python, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code
    imported = set(re.findall(r"^import time: .* (\S+)$", done.stderr, re.MULTILINE))
    assert "argparse" in imported or "-c" in command
    assert imported & {"torch", "numpy", "mpi4py"} == set()


def test_the_faults_that_need_a_model_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        stress_with_models(["--help"])
    assert {"kill", "nan", "diverged"} <= set(re.findall(r"[\w-]+", capsys.readouterr().out))


@pytest.mark.mpi
@pytest.mark.parametrize("program", [["-m", "shardrt.stress"], [TRAIN]], ids=["stress", "train"])
def test_one_rank_prints_for_all(program: list[str]) -> None:
    helped = run_job([*program, "--help"], 2, FRESH)
    assert (helped.returncode, helped.stderr, helped.stdout.count("usage: ")) == (0, "", 1)
    failed = run_job([*program, "--seed", "x"], 2, FRESH, code=2)
    assert failed.stderr.count("error: argument --seed: invalid int value: 'x'") == 1


@pytest.mark.rest
def test_a_rank_prints_what_the_first_one_has_not_found() -> None:
    code = """
import os, time
from shardrt.comm.stress.options import parse
rank = int(os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"])
parse(["--root", "-1"][: 2 * rank])
time.sleep(5)
"""
    done = run_script(code, 2, FRESH)
    assert (done.returncode, done.stderr.count("error: argument --root: -1: ")) == (2, 1)
