"""The training script as users start it: the loss curve on any number of ranks, its files, its errors."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from ranks import run_script

TRAIN = Path(__file__).parent.parent / "scripts" / "train.py"
STEPS = 20
SMALL = (
    f"--steps {STEPS} --layers 2 --heads 2 --channels 32 --context 32 --batch 12 "
    "--eval-every 10 --eval-batches 1 --sample-bytes 20"
)
FLOAT64 = "--dtype float64 --steps 10"

# Each rank writes to its own file, so that the launcher cannot mix their output.
LAUNCH = """
import os, sys
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
output = os.open(f"{folder}/output.{{rank}}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(output, 1)
os.dup2(output, 2)
os.execv(sys.executable, [sys.executable, *{command}])
"""


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a job."""

    code: int
    out: Path
    output: list[str]  # by rank

    def log(self) -> list[dict[str, float]]:
        """A line with the configuration, then one per step."""
        return [json.loads(line) for line in (self.out / "log.jsonl").read_text().splitlines()]

    def curve(self, name: str = "loss") -> list[float]:
        return [line[name] for line in self.log()[1:]]


def run(folder: Path, ranks: int, flags: str) -> Run:
    out = folder / "out"
    command = [str(TRAIN), "--out", str(out), *flags.split()]
    done = run_script(LAUNCH.format(folder=folder, command=command), ranks, deadline_s=50.0)
    output = [(folder / f"output.{rank}").read_text() for rank in range(ranks)]
    return Run(done.returncode, out, output)


def train(folder: Path, ranks: int, flags: str = "") -> Run:
    done = run(folder, ranks, f"{SMALL} {flags}")
    assert done.code == 0, "\n".join(done.output)
    return done


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run on one rank."""
    return train(tmp_path_factory.mktemp("alone"), 1)


MORE = [pytest.param(4, "", marks=pytest.mark.all), pytest.param(2, "--micro-batches 3", marks=pytest.mark.all)]


@pytest.mark.parametrize(("ranks", "flags"), [(2, ""), *MORE])
def test_the_loss_curve_does_not_depend_on_the_ranks(alone: Run, tmp_path: Path, ranks: int, flags: str) -> None:
    done = train(tmp_path, ranks, flags)
    assert len(done.curve()) == STEPS
    assert done.curve() == pytest.approx(alone.curve(), rel=0, abs=1e-5)
    assert done.curve("norm") == pytest.approx(alone.curve("norm"), rel=1e-4)
    assert done.log()[-1]["validation_loss"] == pytest.approx(alone.log()[-1]["validation_loss"], abs=1e-5)
    assert not any(done.output[1:]), "only rank 0 may print"


def test_a_run_learns_and_leaves_log_plot_and_sample(alone: Run) -> None:
    header, *steps = alone.log()
    assert (header["ranks"], header["steps"], header["batch"]) == (1, STEPS, 12)
    assert [line["step"] for line in steps] == list(range(STEPS))
    validated = [line["step"] for line in steps if line["validation_loss"] is not None]
    assert validated == [9, 19]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert all(line["tokens_per_second"] > 0 and line["peak_mb"] > 0 for line in steps)
    assert (alone.out / "loss.png").read_bytes().startswith(b"\x89PNG")
    sample = (alone.out / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert "tokens/s" in alone.output[0]
    assert sample in alone.output[0]


@pytest.mark.all
def test_bfloat16_stays_near_float32(alone: Run, tmp_path: Path) -> None:
    done = train(tmp_path, 2, "--dtype bfloat16")
    assert done.curve() != alone.curve()
    assert done.curve() == pytest.approx(alone.curve(), abs=0.1)


@pytest.fixture(scope="module")
def alone_float64(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Ten steps on one rank."""
    return train(tmp_path_factory.mktemp("alone"), 1, FLOAT64)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.all)], ids=["1-D", "2-D"])
def test_tensor_parallel_ranks_have_the_loss_curve_of_one(alone_float64: Run, tmp_path: Path, ranks: int) -> None:
    """The sample as well, whose sequences do not divide by the ranks."""
    done = train(tmp_path, ranks, f"{FLOAT64} --tp 2")
    assert len(done.curve()) == 10
    assert done.curve() == pytest.approx(alone_float64.curve(), rel=0, abs=1e-12)
    assert done.curve("norm") == pytest.approx(alone_float64.curve("norm"), rel=1e-10)
    assert done.log()[-1]["validation_loss"] == pytest.approx(alone_float64.log()[-1]["validation_loss"], rel=0, abs=1e-12)
    assert (done.out / "sample.txt").read_text() == (alone_float64.out / "sample.txt").read_text()


@pytest.mark.all
def test_tensor_parallel_ranks_in_float32(alone: Run, tmp_path: Path) -> None:
    done = train(tmp_path, 4, "--tp 2 --micro-batches 2")
    assert done.curve() == pytest.approx(alone.curve(), rel=0, abs=1e-5)


@pytest.mark.parametrize(("ranks", "tolerance"), [pytest.param(2, 0.0, marks=pytest.mark.all), (3, 1e-12)])
def test_a_run_goes_on_on_any_number_of_ranks(tmp_path: Path, ranks: int, tolerance: float) -> None:
    """From step 5 of 10, with log lines of later steps, one of them cut off: bitwise on as many ranks, else nearly."""
    flags = f"{FLOAT64} --resume auto --save-every 5 --keep 2"
    whole = train(tmp_path, 2, flags)
    log, last = whole.log(), whole.out / "checkpoints" / "step-00000010"
    assert sorted(path.name for path in last.parent.iterdir()) == ["step-00000005", "step-00000010"]
    shutil.rmtree(last)
    with open(whole.out / "log.jsonl", "a") as file:
        file.write('{"step": 10, "lo')
    done = train(tmp_path, ranks, flags)
    assert [line["step"] for line in done.log()[1:]] == list(range(10))
    assert "10/10" in done.output[0]
    for name in ("loss", "norm", "lr"):
        assert done.curve(name) == pytest.approx([line[name] for line in log[1:]], rel=0, abs=tolerance)
    assert done.log()[-1]["validation_loss"] == pytest.approx(log[-1]["validation_loss"], rel=0, abs=tolerance)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "argument --steps: 0: expected a number of at least 1"),
        ("--batch 7", "--batch 7 does not divide by 2 ranks"),
        ("--tp 4", "--tp 4 does not divide the 2 ranks"),
        ("--tp 2 --heads 3 --channels 96", "--heads 3 does not divide by --tp 2"),
    ],
)
def test_a_bad_flag_ends_every_rank_with_the_message(tmp_path: Path, flags: str, message: str) -> None:
    done = run(tmp_path, 2, flags)
    assert done.code == 2
    assert not done.out.exists()
    for output in done.output:
        assert output.startswith(f"train.py: error: {message}")
        assert output.count("\n") == 1
