"""The example for users of PyTorch's FSDP2: few lines differ from the script it was made of, and the losses are the same."""

from __future__ import annotations

import difflib
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

from ranks import rank_environment, start

EXAMPLES = Path(__file__).parent.parent / "scripts" / "examples"
ORIGINAL, OURS = EXAMPLES / "fsdp2_original.py", EXAMPLES / "from_fsdp2.py"


def run_ours(*options: str) -> list[float]:
    process = start(2, [str(OURS), *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, err = process.communicate(timeout=120.0)
    assert process.returncode == 0, out + err
    return losses(out)


def run_original(*options: str) -> list[float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, os.fspath(ORIGINAL), *options]
        environment = rank_environment() | told
        ranks.append(subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    said = [process.communicate(timeout=120.0) for process in ranks]
    found = losses(said[0][0])
    # Not the exit codes: gloo's threads may abort a process ("terminate called ...") when its program has come to its end.
    assert found, said
    return found


def losses(out: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\S+)", out)]


def test_few_lines_differ() -> None:
    changes = list(difflib.ndiff(ORIGINAL.read_text().splitlines(), OURS.read_text().splitlines()))
    assert max(sum(line.startswith(sign) for line in changes) for sign in "-+") <= 12


def test_from_fsdp2_trains_as_the_original(tmp_path: Path) -> None:
    saved = os.fspath(tmp_path / "saved.pt")
    expected = run_original("--steps", "4")
    assert len(expected) == 4
    assert run_ours("--steps", "2", "--save", saved) + run_ours("--steps", "4", "--load", saved) == expected
