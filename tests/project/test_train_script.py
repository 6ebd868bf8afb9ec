"""The training script as users start it: the loss curve on any number of ranks, its files, its errors."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import shardrt
from common.experts import RATE, divide_experts, even_out
from common.models import BYTES, GPT, GPTConfig, Mixture, MLPExperts
from common.text import Corpus, find_files
from common.training_options import Options
from ranks import on_ranks, refused, run_script
from shardrt import World
from train import check_alike, check_survival, read_checked, recorded

TRAIN = Path(__file__).parents[2] / "scripts" / "train.py"
STEPS = 20
SMALL = (
    f"--steps {STEPS} --layers 2 --heads 2 --channels 32 --context 32 --batch 12 "
    "--eval-every 10 --eval-batches 1 --sample-bytes 20"
)
FLOAT64 = "--dtype float64 --steps 10"
FEW = "--dtype float64 --steps 5 --warmup 2"
MIXTURE = "--untied --experts 4"

# Each rank writes to its own file, so that the launcher cannot mix their output.
LAUNCH = """
import os, runpy, sys
rank = os.environ.get("PMI_RANK") or os.environ["OMPI_COMM_WORLD_RANK"]
output = os.open(f"{folder}/output.{{rank}}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(output, 1)
os.dup2(output, 2)
sys.argv = [flag.replace("RANK", rank) for flag in {command}]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
with open(f"{folder}/modules.{{rank}}", "w") as file:
    print(*sys.modules, sep="\\n", file=file)
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
    command = [str(TRAIN), "--out", str(out), *flags.split()]  # RANK in a flag is the rank's number
    done = run_script(LAUNCH.format(folder=folder, command=command), ranks)
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


@pytest.mark.parametrize(("ranks", "flags"), [(2, "--check-every 10 --timeline"), *MORE])
def test_the_loss_curve_does_not_depend_on_the_ranks(alone: Run, tmp_path: Path, ranks: int, flags: str) -> None:
    done = train(tmp_path, ranks, flags)
    assert len(done.curve()) == STEPS
    assert done.curve() == pytest.approx(alone.curve(), rel=0, abs=1e-5)
    assert done.curve("grad_norm") == pytest.approx(alone.curve("grad_norm"), rel=1e-4)
    assert done.log()[-1]["validation_loss"] == pytest.approx(alone.log()[-1]["validation_loss"], abs=1e-5)
    assert not any(done.output[1:]), "only rank 0 may print"
    assert ("replicas at step 9: " in done.output[0]) == ("check" in flags)
    files = [path.name for path in (*sorted(done.out.glob("timeline/*")), *done.out.glob("memory.png"))]
    assert files == (["rank-0.json", "rank-1.json", "memory.png"] if "timeline" in flags else [])


def test_a_run_learns_and_leaves_log_plot_and_sample(alone: Run) -> None:
    header, *steps = alone.log()
    assert (header["ranks"], header["steps"], header["batch"]) == (1, STEPS, 12)
    assert [line["step"] for line in steps] == list(range(STEPS))
    validated = [line["step"] for line in steps if line["validation_loss"] is not None]
    assert validated == [9, 19]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert all(line["throughput(tps)"] > 0 and line["memory/max_active(GiB)"] > 0 for line in steps)
    flops = [line["tflops"] * 1e12 * line["time_metrics/end_to_end(s)"] for line in steps]  # of a step
    assert flops == pytest.approx([flops[0]] * STEPS)
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


@pytest.mark.all
@pytest.mark.parametrize(("ranks", "split"), [(2, "--tp 2"), (4, "--tp 2"), (2, "--cp 2"), (4, "--cp 2"), (4, "--cp 2 --tp 2")])
def test_ranks_with_parts_of_a_sequence_have_the_loss_curve_of_one(
    alone_float64: Run, tmp_path: Path, ranks: int, split: str
) -> None:
    """The sample as well, whose sequences do not divide by the ranks."""
    done = train(tmp_path, ranks, f"{FLOAT64} {split}")
    assert len(done.curve()) == 10
    assert done.curve() == pytest.approx(alone_float64.curve(), rel=0, abs=1e-12)
    assert done.curve("grad_norm") == pytest.approx(alone_float64.curve("grad_norm"), rel=1e-10)
    assert done.log()[-1]["validation_loss"] == pytest.approx(alone_float64.log()[-1]["validation_loss"], rel=0, abs=1e-12)
    assert (done.out / "sample.txt").read_text() == (alone_float64.out / "sample.txt").read_text()


@pytest.fixture(scope="module")
def alone_with(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Run]:
    """The run of a few steps of a model on one rank, by its flags."""
    return cache(lambda model: train(tmp_path_factory.mktemp("alone"), 1, f"{FEW} {model}"))


@pytest.mark.rest
@pytest.mark.parametrize(
    ("ranks", "model", "split"),
    [
        (4, MIXTURE, "--cp 2 --ep 2 --pp 2"),
        pytest.param(2, MIXTURE, "--ep 2 --micro-batches 3", marks=pytest.mark.all),
        pytest.param(4, MIXTURE, "--cp 2 --ep 2", marks=pytest.mark.all),
        pytest.param(2, "--untied", "--pp 2", marks=pytest.mark.all),
        pytest.param(4, "--untied", "--pp 2 --tp 2 --micro-batches 3", marks=pytest.mark.all),
        pytest.param(3, "--untied --layers 4", "--pp 3 --micro-batches 4 --check-every 2", marks=pytest.mark.all),
    ],
)
def test_ranks_with_experts_or_stages_have_the_loss_curve_of_one(
    alone_with: Callable[[str], Run], tmp_path: Path, ranks: int, model: str, split: str
) -> None:
    expected, done = alone_with(model), train(tmp_path, ranks, f"{FEW} {model} {split}")
    assert done.curve() == pytest.approx(expected.curve(), rel=0, abs=1e-12)
    assert done.curve("grad_norm") == pytest.approx(expected.curve("grad_norm"), rel=1e-10)
    assert done.log()[-1]["validation_loss"] == pytest.approx(expected.log()[-1]["validation_loss"], rel=0, abs=1e-12)
    assert (done.out / "sample.txt").read_text() == (expected.out / "sample.txt").read_text()
    assert not any(done.output[1:]), "only rank 0 may print"
    assert "torch.distributed.pipelining" not in (expected.out.parent / "modules.0").read_text().split()


@pytest.mark.rest
@pytest.mark.parametrize(
    ("ranks", "split", "tolerance"),
    [(2, "--ep 2", 1e-12), pytest.param(4, "--pp 2 --ep 2", 0.0, marks=pytest.mark.all)],
)
def test_stages_and_experts_go_on_as_they_were_or_divided_otherwise(
    tmp_path: Path, ranks: int, split: str, tolerance: float
) -> None:
    """From step 3 of 5, which two stages of two ranks have saved."""
    flags = f"{FEW} {MIXTURE} --resume auto --save-every 3"
    whole = train(tmp_path, 4, f"{flags} --pp 2 --ep 2")
    log = whole.log()
    shutil.rmtree(whole.out / "checkpoints" / "step-00000005")
    done = train(tmp_path, ranks, f"{flags} {split}")
    for name in ("loss", "grad_norm"):
        assert done.curve(name) == pytest.approx([line[name] for line in log[1:]], rel=0, abs=tolerance)
    assert done.log()[-1]["validation_loss"] == pytest.approx(log[-1]["validation_loss"], rel=0, abs=tolerance)


@pytest.mark.all
def test_tensor_parallel_ranks_in_float32(alone: Run, tmp_path: Path) -> None:
    done = train(tmp_path, 4, "--tp 2 --micro-batches 2")
    assert done.curve() == pytest.approx(alone.curve(), rel=0, abs=1e-5)


@pytest.mark.all
@pytest.mark.parametrize(("ranks", "tolerance"), [(2, 0.0), (3, 1e-12)])
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
    for name in ("loss", "grad_norm", "lr"):
        assert done.curve(name) == pytest.approx([line[name] for line in log[1:]], rel=0, abs=tolerance)
    assert done.log()[-1]["validation_loss"] == pytest.approx(log[-1]["validation_loss"], rel=0, abs=tolerance)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps 0", "argument --steps: 0: expected a number of at least 1"),
        ("--batch 7", "--batch 7 does not divide by 2 ranks"),
    ],
)
def test_a_bad_flag_ends_every_rank_with_one_message(tmp_path: Path, flags: str, message: str) -> None:
    done = run(tmp_path, 2, flags)
    assert done.code == 2
    assert not done.out.exists()
    assert done.output[0].startswith(f"train.py: error: {message}")
    assert (done.output[0].count("\n"), done.output[1]) == (1, "")


@pytest.mark.mpi
def test_data_that_one_rank_lacks_ends_every_rank_with_one_message(tmp_path: Path) -> None:
    """Its name is no text, nor is the one of the folder."""
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    (folder / "text.0").write_bytes(bytes(range(256)) * 4)
    done = run(tmp_path, 2, f"{SMALL} --data {folder}/text.RANK")
    assert done.code == 2
    assert not done.out.exists()
    expected = f"train.py: error: no such file or folder: {tmp_path}/caf\\udce9/text.1 (on rank 1)\n"
    assert done.output == [expected, ""]


OPTIONS = Options(
    data=[], max_bytes=1 << 20, layers=2, heads=2, channels=32, context=32, untied=False, experts=0, top_k=2, tp=1, cp=1, ep=1,
    pp=1, steps=1, batch=12, micro_batches=1, lr=1e-3, warmup=1, weight_decay=0.0, clip=1.0, dtype="float32", eval_every=1,
    eval_batches=1, check_every=0, peak_tflops=0.0, tensorboard=False, timeline=False, prompt="def", sample_bytes=1, seed=0,
    resume="never", save_every=1, keep=1, out=Path("runs"),
)  # fmt: skip
STAGES = {"pp": 2, "untied": True, "micro_batches": 2}


@pytest.mark.parametrize(
    ("changed", "ranks", "message"),
    [
        ({"tp": 4}, 2, "--tp 4: the product does not divide the 2 ranks"),
        ({"tp": 2, "cp": 2}, 2, "--tp 2 and --cp 2: the product does not divide the 2 ranks"),
        ({"cp": 3}, 3, "--context 32 does not divide by 2 x --cp 3"),
        ({"tp": 2, "heads": 3, "channels": 96}, 2, "--heads 3 does not divide by --tp 2"),
        ({"tp": 2, "batch": 7, "micro_batches": 2}, 4, r"--batch 7 .*2 groups of ranks x 2 micro-batches: use a multiple of 4"),
        ({"tp": 2, "pp": 2, "untied": True}, 6, "--tp 2 and --pp 2: the product does not divide the 6 ranks"),
        ({"pp": 2}, 2, "--pp 2: the first stage has the embedding, .* pass --untied"),
        ({"pp": 3, "untied": True, "micro_batches": 3}, 3, "--pp 3 with --layers 2: each stage has at least one"),
        (STAGES | {"micro_batches": 1}, 2, "--pp 2 with --micro-batches 1: use at least as many as stages"),
        (
            {"pp": 2, "untied": True, "micro_batches": 2, "tp": 4, "cp": 2, "heads": 4, "context": 36},
            16,
            "18 bytes, .* by --tp",
        ),
        ({"ep": 2}, 2, "--ep 2 divides experts, and there are none: give --experts"),
        ({"experts": 3, "ep": 2}, 2, "--experts 3 does not divide by --ep 2"),
        ({"experts": 6, "ep": 3}, 4, "--ep 3 does not divide the 4 ranks"),
        (
            {"experts": 4, "ep": 4, "pp": 2, "untied": True, "micro_batches": 2},
            4,
            "--ep 4 does not divide the 2 ranks of a stage",
        ),
        ({"experts": 4, "tp": 2}, 2, "--experts 4 with --tp 2"),
        ({"experts": 4, "top_k": 5}, 1, "top_k=5: expected 1 to 4"),
        ({"prompt": ""}, 1, "--prompt is empty"),
        ({"out": TRAIN}, 1, "--out .*train.py is not a folder"),
    ],
)
def test_options_that_cannot_work(changed: dict[str, Any], ranks: int, message: str) -> None:
    refused(message, lambda: read_checked(replace(OPTIONS, **changed), ranks))


def test_a_plot_that_cannot_be_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused("needs matplotlib", lambda: read_checked(OPTIONS, 1))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(2, [0, 1]), (6, [0, 1, "opened", 2, 3, 4, "closed", 5, "drawn"]), (3, [0, 1, "opened", 2, "closed", "drawn"])],
)
def test_steps_are_recorded_if_there_are_any_and_drawn_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, steps: int, expected: list[object]
) -> None:
    done: list[object] = []

    @contextmanager
    def timeline(_: Path) -> Iterator[SimpleNamespace]:
        done.append("opened")
        yield SimpleNamespace(events=())
        done.append("closed")

    monkeypatch.setattr(shardrt, "Timeline", timeline)
    monkeypatch.setattr("train.draw_memory", lambda events, path: done.append("drawn"))
    for step in recorded(iter(range(steps)), tmp_path, 0):
        done.append(step)
    assert done == expected


@pytest.mark.parametrize(
    ("changed", "digest", "message"),
    [
        ({"lr": 2e-3}, "a", "--lr is 0.001 on rank 0 and 0.002 on rank 1"),
        ({"check_every": 5}, "a", "--check-every is 0 on rank 0 and 5 on rank 1"),
        ({}, "b", "the ranks read different text"),
        ({"data": [TRAIN], "out": TRAIN}, "a", None),
    ],
)
def test_options_that_differ_between_ranks(changed: dict[str, Any], digest: str, message: str | None) -> None:
    corpora = [Corpus(torch.empty(0), torch.empty(0), 1, text) for text in ("a", digest)]
    given: list[object] = []

    def run_as(options: Options, corpus: Corpus, exchange: Callable[[object], list[object]]) -> None:
        check_alike(options, corpus, cast(World, SimpleNamespace(comm=SimpleNamespace(exchange=exchange))))

    def keep(mine: object) -> list[object]:
        given.append(mine)
        return [mine]

    run_as(replace(OPTIONS, **changed), corpora[1], keep)
    with nullcontext() if message is None else pytest.raises(ValueError, match=message):
        run_as(OPTIONS, corpora[0], lambda mine: [mine, *given])


def test_what_cannot_go_on_without_lost_ranks_is_refused() -> None:
    world = cast(World, SimpleNamespace(settings=SimpleNamespace(survive=True), size=4))
    options = replace(OPTIONS, resume="auto")
    for fine in (options, replace(options, tp=2), replace(options, experts=4, ep=2, cp=2)):
        check_survival(fine, world)
    for changed, message in (
        (replace(options, pp=2), "--pp 2 under shardrt.launch --survive"),
        (replace(options, resume="never"), "a loss ends the job without --resume auto"),
        (replace(options, tp=2, cp=2), "--tp 2 and --cp 2 under shardrt.launch --survive: with any rank, all 4 ranks are lost"),
        (replace(options, experts=4, ep=4), "--ep 4 under shardrt.launch --survive: with any rank, all 4 ranks are lost"),
    ):
        with pytest.raises(ValueError, match=message):
            check_survival(changed, world)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_stages_are_the_whole_model_in_parts(count: int) -> None:
    from common.stages import GPTStage  # it imports torch.distributed

    whole = GPT(GPTConfig(5, 2, 8, 6, tied=False)).double()
    names, sizes = list(whole.state_dict()), list[int]()
    tokens = torch.arange(12).view(2, 6)
    expected, positions, x, found = whole(tokens), torch.arange(6).expand(2, 6), tokens, list[str]()
    for index in range(count):
        stage = GPTStage(whole, index, count)
        x = stage(x, positions)
        found += stage.state_dict()
        sizes.append(len(stage.blocks))
    assert found == names
    assert max(sizes) - min(sizes) <= 1
    torch.testing.assert_close(x, expected, rtol=0, atol=0)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_experts_are_a_sum_over_what_each_token_chose(top_k: int) -> None:
    """One after the other, and gradients; nobody chooses the last expert."""
    torch.manual_seed(0)
    experts = MLPExperts(GPTConfig(1, 1, 6, 8, experts=4, top_k=top_k)).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter)
    hidden, weights = torch.randn(7, 6, dtype=torch.float64, requires_grad=True), torch.rand(7, top_k, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(3)[:top_k] for _ in range(7)])
    rows = []
    for row, own, weight in zip(hidden, chosen.tolist(), weights, strict=True):
        terms = [
            w * (experts.down[e] @ torch.nn.functional.gelu(experts.up[e] @ row)) for e, w in zip(own, weight, strict=True)
        ]
        rows.append(torch.stack(terms).sum(0))
    expected, found = torch.stack(rows), experts(hidden, chosen, weights)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    given = (hidden, *experts.parameters())
    grads = [torch.autograd.grad(made.square().sum(), given, allow_unused=True) for made in (found, expected)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12)


@on_ranks(2)
def test_biases_follow_the_loads_of_all_ranks(world: World) -> None:
    config = GPTConfig(layers=2, heads=2, channels=8, context=9, experts=4)
    tokens = torch.randint(BYTES, (world.size, 9), generator=torch.Generator().manual_seed(1))
    whole, chosen = GPT(config).double(), list[torch.Tensor]()
    for module in whole.modules():
        if isinstance(module, MLPExperts):
            module.register_forward_pre_hook(lambda _, given: chosen.append(given[1]))
    whole(tokens)
    model = GPT(config).double()
    divide_experts(model, world.mesh, 2)
    model(tokens[world.rank : world.rank + 1])
    even_out(model, world.mesh)
    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]
    assert len(mixtures) == 2
    for mixture, choices in zip(mixtures, chosen, strict=True):
        loads = torch.bincount(choices.flatten(), minlength=4).double()
        assert loads.max() > loads.min(), "else there is nothing to even out"
        torch.testing.assert_close(mixture.bias, RATE * (loads.mean() - loads).sign(), rtol=0, atol=0)


def test_what_is_read_as_text(tmp_path: Path) -> None:
    """Regular files, whatever their names, and no more of them than is wanted."""
    text = tmp_path / "a\udcff"
    text.write_bytes(b"0123456789" * 1000)
    with text.open("r+b") as file:
        file.truncate(1 << 40)  # 1 TiB without blocks
    os.mkfifo(tmp_path / "pipe")
    assert find_files([tmp_path]) == [text]
    corpus = read_checked(replace(OPTIONS, data=[text], max_bytes=1000), 1)
    assert (len(corpus.train), len(corpus.validation), corpus.files) == (900, 100, 1)
    refused(r"neither a regular file nor a folder: .*/pipe", lambda: find_files([tmp_path / "pipe"]))
    (tmp_path / "empty").mkdir()
    refused("the text has 0 bytes in 0 files", lambda: read_checked(replace(OPTIONS, data=[tmp_path / "empty"]), 1))
