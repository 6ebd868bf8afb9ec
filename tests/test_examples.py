"""scripts/examples: each is short, runs on real ranks, and prints what its task promises."""

from __future__ import annotations

import difflib
import os
import random
import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from ranks import rank_environment, start

EXAMPLES = Path(__file__).parent.parent / "scripts" / "examples"
ORIGINAL, OURS = EXAMPLES / "fsdp2_original.py", EXAMPLES / "from_fsdp2.py"
SHORT = sorted(set(EXAMPLES.glob("*.py")) - {ORIGINAL, OURS})


def run_example(path: Path, *options: str, ranks: int = 2) -> str:
    process = start(ranks, [str(path), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=120.0)
    finally:
        process.kill()
    assert process.returncode == 0, out + err
    return out


def run_original(*options: str) -> list[float]:
    port, ranks = free_port(), []
    for rank in ("0", "1"):
        variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, os.fspath(ORIGINAL), *options]
        environment = rank_environment() | variables
        ranks.append(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    outputs = [process.communicate(timeout=120.0) for process in ranks]
    found = losses(outputs[0][0])
    # Not the exit codes: gloo's threads may abort a process ("terminate called ...") when its program has ended.
    assert found, outputs
    return found


def free_port() -> str:
    """A port that the kernel gives to no connection before the ranks take it."""
    with socket.socket() as free:
        for port in random.sample(range(20000, 32000), 100):
            with suppress(OSError):
                free.bind(("127.0.0.1", port))
                return str(port)
    raise OSError("100 ports are taken")


def losses(out: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)", out)]


# ---------------------------------------------------------------------- from FSDP2


def test_eleven_lines_differ() -> None:
    changes = list(difflib.ndiff(ORIGINAL.read_text().splitlines(), OURS.read_text().splitlines()))
    assert max(sum(line.startswith(sign) for line in changes) for sign in "-+") == 11  # as the documents say


def test_from_fsdp2_trains_as_the_original(tmp_path: Path) -> None:
    saved = os.fspath(tmp_path / "saved.pt")
    expected = run_original("--steps", "4")
    assert len(expected) == 4
    first = losses(run_example(OURS, "--steps", "2", "--save", saved))
    assert first + losses(run_example(OURS, "--steps", "4", "--load", saved)) == expected


# ---------------------------------------------------------------------- one task each


@pytest.mark.parametrize("path", SHORT, ids=lambda path: path.stem)
def test_an_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 60


def test_every_example_is_run() -> None:
    assert {path.stem for path in SHORT} == {"minimal", "comm_alone", "resume", "checkpoint", *PRINTED}


def test_minimal_trains_as_one_process_does() -> None:
    sharded, alone = (losses(run_example(EXAMPLES / "minimal.py", ranks=ranks)) for ranks in (2, 1))
    assert len(alone) == 20
    assert alone[-1] < alone[0] / 2
    assert sharded == pytest.approx(alone, abs=2e-4)  # as printed: sums in another order


@pytest.mark.all  # runs that go on are in test_run.py and test_train.py
def test_resume_goes_on_with_other_ranks(tmp_path: Path) -> None:
    path, folder = EXAMPLES / "resume.py", str(tmp_path / "run")
    first = losses(run_example(path, folder, "7"))
    found = first + losses(run_example(path, folder, "10", ranks=1))
    assert found == pytest.approx(losses(run_example(path, str(tmp_path / "alone"), "10", ranks=1)), abs=2e-4)
    assert (len(first), len(found)) == (7, 10)


def test_checkpoint_is_loaded_by_more_ranks(tmp_path: Path) -> None:
    path, parent = EXAMPLES / "checkpoint.py", tmp_path / "run"
    out = run_example(path, str(parent)) + run_example(path, str(parent), ranks=3)
    assert re.findall(r"step (\d+)", out) == [str(step) for step in range(20)]
    found = losses(out)
    assert found[10] < found[0] / 2  # it has not begun anew
    assert sorted(folder.name for folder in parent.iterdir()) == ["step-15", "step-20"]


# The number of ranks, and what is printed besides the losses.
PRINTED = {
    "hsdp": (4, r"a weight of \(32, 32\) lies in shards of \[(\d+), (\d+), \1, \2\] elements"),
    "mixed_precision_accumulation": (2, r"shards are in \{torch\.float32\}"),
    "meta_device": (2, r"4257 parameters in shards of \[2132, 2125\]"),
    "cpu_offload": (2, r"shards and optimizer state are on \{'cpu'\}"),
    "tensor_parallel": (4, r"up.weight \(128, 32\) \(Shard\(dim=0\), RaggedShard\(dim=0"),
    "custom_collective": (2, r"[5-9]\S* gathers and 1[78]\d{3}\S* bytes per step"),
}


_IN_EVERY_RUN = ("tensor_parallel", "custom_collective")


@pytest.mark.parametrize(
    "name", [name if name in _IN_EVERY_RUN else pytest.param(name, marks=pytest.mark.all) for name in PRINTED]
)
def test_a_task_in_training(name: str) -> None:
    ranks, line = PRINTED[name]
    out = run_example(EXAMPLES / f"{name}.py", ranks=ranks)
    found = losses(out)
    assert len(found) == 20
    assert found[-1] < found[0] / 2
    assert re.search(line, out), out


def test_comm_alone() -> None:
    out = run_example(EXAMPLES / "comm_alone.py").splitlines()
    ones, twos = [1.0] * 4, [2.0] * 4
    assert out == [f"gathered {ones + twos}, largest {twos}, received {twos}", "rank 0 caught RemoteError"]
