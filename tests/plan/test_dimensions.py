"""The planner on pipelines, divided experts, and the best split of a number of ranks."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from shardrt import MixedPrecisionPolicy
from shardrt.comm.startup.dry import dry_world
from shardrt.plan.__main__ import main
from shardrt.plan.machine.cost import Costs
from shardrt.plan.machine.hardware import load_sheet
from shardrt.plan.program.factory import make_program
from shardrt.plan.program.forecast_result import Forecast
from shardrt.plan.program.job import Job, PlanError
from shardrt.plan.program.known_models import PRESETS
from shardrt.plan.program.pipeline import Pass, StageRun, blocks_of_stage, finish_times, forwards_ahead, turns
from shardrt.plan.program.presets import preset_factory
from shardrt.plan.question.splits import best_splits, splits
from shardrt.plan.run.forecast import forecast
from toys import uncompiled

WIDTH, ROWS, LAYERS = 64, 32, 4
Factory = Callable[[Job], Any]


@pytest.fixture(scope="module", autouse=True)
def as_in_a_new_process() -> Iterator[None]:
    with uncompiled():
        yield


class Stage(nn.Module):
    """Layers with a ReLU."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


def staged(job: Job) -> tuple[nn.Module, Callable[[nn.Module, Job], torch.Tensor]]:
    """Some layers on each stage; the last one adds up."""

    def step(model: nn.Module, job: Job) -> torch.Tensor:
        x: torch.Tensor = model(job.receive(job.batch * ROWS, WIDTH) if job.stage else torch.empty(job.batch * ROWS, WIDTH))
        return x.sum() if job.stage == job.pp - 1 else x

    return Stage(len(blocks_of_stage(LAYERS, job.stage, job.pp))), step


def forecast_of(factory: Factory, job: Job) -> Forecast:
    return forecast(lambda job: make_program(factory, job, "model"), job, Costs(load_sheet("h100")))


# ---------------------------------------------------------------------- pipelines


def text(*of_job: Any) -> str:
    return " ".join(f"{'F' if turn.kind is Pass.FORWARD else 'B'}{turn.micro_batch}" for turn in turns(*of_job))


def test_the_turns_of_stages() -> None:
    assert text("1f1b", 0, 3, 4) == "F0 F1 F2 B0 F3 B1 B2 B3"
    assert text("1f1b", 1, 3, 4) == "F0 F1 B0 F2 B1 F3 B2 B3"
    assert text("1f1b", 2, 3, 4) == "F0 B0 F1 B1 F2 B2 F3 B3"
    assert text("1f1b", 0, 4, 2) == "F0 F1 B0 B1"
    assert text("gpipe", 1, 3, 3) == "F0 F1 F2 B0 B1 B2"
    assert text("1f1b", 0, 1, 2) == "F0 B0 F1 B1"


@pytest.mark.parametrize("stages", [1, 2, 3, 7])
@pytest.mark.parametrize("micro_batches", [1, 2, 5, 16])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_the_bubble_of_equal_stages(stages: int, micro_batches: int, schedule: str) -> None:
    """By the formula: p - 1 of m + p - 1 forwards and backwards. GPipe's messages are waited for on the way there and back."""

    def run(stage: int, message: float) -> StageRun:
        every = turns(schedule, stage, stages, micro_batches)
        return StageRun([(turn, 1.0 if turn.kind is Pass.FORWARD else 2.0) for turn in every], message=message)

    alone = 3.0 * (micro_batches + stages - 1)
    assert max(finish_times([run(stage, 0.0) for stage in range(stages)])) == alone
    with_messages = max(finish_times([run(stage, 0.25) for stage in range(stages)]))
    assert with_messages >= alone + 2 * 0.25 * (stages - 1)
    if schedule == "gpipe":
        assert with_messages == alone + 2 * 0.25 * (stages - 1)


def test_a_link_carries_one_message_at_a_time() -> None:
    """Sixteen of a second each, one after the other, and their gradients back as the last has come."""
    runs = [
        StageRun([(turn, 0.1 if turn.kind is Pass.FORWARD else 0.2) for turn in turns("gpipe", stage, 2, 16)], message=1.0)
        for stage in range(2)
    ]
    assert finish_times(runs)[1] == pytest.approx(0.1 + 16 * 1.0 + 0.1 + 16 * 0.2)
    assert finish_times(runs)[0] == pytest.approx(0.1 + 16 * 1.0 + 0.1 + 0.2 + 16 * 1.0 + 0.2)


def test_a_slow_stage_decides() -> None:
    runs = [StageRun([(turn, seconds) for turn in turns("1f1b", stage, 3, 8)]) for stage, seconds in enumerate((1.0, 5.0, 1.0))]
    assert finish_times(runs) == [
        1 + 80 + 1,
        1 + 80,
        1 + 80 - 2 * 5 + 2,
    ]  # the third is done before two turns


@pytest.mark.parametrize("blocks", [3, 4, 126])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_blocks_are_divided_evenly(blocks: int, stages: int) -> None:
    parts = [blocks_of_stage(blocks, stage, stages) for stage in range(stages)]
    assert [at for part in parts for at in part] == list(range(blocks))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_bytes_of_a_pipeline(keeps: bool, schedule: str) -> None:
    """By hand: 4 layers on 2 stages of 2 ranks, 5 micro-batches of A bytes; W bytes in a weight."""
    job = Job(4, pp=2, micro_batches=5, schedule=schedule, reshard_after_forward=not keeps)
    found, weight, activation = forecast_of(staged, job), 4 * WIDTH * WIDTH, 4 * ROWS * WIDTH
    root = 16  # it has no parameters, and the smallest segment
    assert [stage.numel for stage in found.stages] == [2 * WIDTH * WIDTH] * 2
    assert found.memory["parameters"] == found.memory["optimizer"] / 2 + root == 2 * weight // 2 + root
    assert found.peak_nbytes == found.stages[found.fullest_stage].peak_nbytes == max(each.peak_nbytes for each in found.stages)
    # Half of a gathered layer comes from the other rank; it is reduced once, gathered for each pass or once in a step.
    gathers = 1 if keeps else 10
    within = 2 * (gathers + 1) * weight // 2 + 5 * activation  # one message for each micro-batch
    assert found.received_within_nbytes == pytest.approx(within, abs=64)
    assert found.received_across_nbytes == 0
    assert found.memory["messages"] == 5 * activation, "torch has a buffer for each"
    assert found.model_flops * 2 == forecast_of(staged, Job(2, micro_batches=5)).model_flops
    assert found.step_seconds == pytest.approx(found.bubble_seconds + found.stages[0].busy_seconds)
    assert found.bounds["pipeline bubble"] == pytest.approx(found.bubble_seconds / found.step_seconds)
    assert sum(found.bounds.values()) == pytest.approx(1)


@pytest.mark.parametrize(("schedule", "more"), [("1f1b", 1), ("gpipe", 0)])
def test_micro_batches_in_flight(schedule: str, more: int) -> None:
    """A layer keeps its ReLU's result, beside what was received; on an earlier stage, of one micro-batch more."""
    found = forecast_of(staged, Job(8, pp=4, micro_batches=6, schedule=schedule))
    peaks = [stage.peak_nbytes for stage in found.stages]
    assert peaks[1] - peaks[2] == more * 4 * ROWS * WIDTH
    assert [forwards_ahead(schedule, stage, 4, 6) for stage in range(4)] == ([3, 2, 1, 0] if more else [6] * 4)


def test_equal_stages_are_stages() -> None:
    found = forecast_of(equal_stages, Job(4, pp=2, micro_batches=3))
    assert [stage.numel for stage in found.stages] == [2 * WIDTH * WIDTH] * 2


def test_messages_between_nodes_cost_more() -> None:
    """The stages are on one node of eight, or on two."""
    near, far = (forecast_of(staged, Job(ranks, pp=2, micro_batches=4)) for ranks in (8, 16))
    assert near.received_across_nbytes == 0
    assert far.received_across_nbytes == 4 * 4 * ROWS * WIDTH
    assert far.bubble_seconds > near.bubble_seconds


@pytest.mark.parametrize("sheet", ["h100", "cpu"])
@pytest.mark.parametrize(
    "options",
    [
        {"micro_batches": 9},
        {"micro_batches": 6, "gradient_sync": "last"},
        {"micro_batches": 5},
        {"micro_batches": 12, "pp": 4},
        {"micro_batches": 12, "pp": 2, "reshard_after_forward": False},
        {"micro_batches": 7, "pp": 2, "schedule": "gpipe"},
    ],
)
def test_micro_batches_that_count_without_being_run(
    options: dict[str, Any], sheet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All figures are the same where all of them run."""
    machine = load_sheet("h100")
    if sheet == "cpu":
        machine = dataclasses.replace(machine, device="cpu")
    calls: list[int] = []

    def counted(job: Job) -> Any:
        model, step = staged(job)

        def counting(model: nn.Module, job: Job) -> torch.Tensor:
            calls.append(1)
            return step(model, job)

        return model, counting

    def run() -> Forecast:
        calls.clear()
        return forecast(lambda job: make_program(counted, job, "model"), Job(8, **options), Costs(machine))

    few, ran = run(), len(calls)
    monkeypatch.setattr("shardrt.plan.run.forecast._FIRST", 1000)
    all_of_them = run()
    assert (ran < len(calls)) == (options.get("schedule") != "gpipe")
    assert figures(few) == pytest.approx(figures(all_of_them), rel=1e-9)


def figures(found: Forecast) -> dict[str, float]:
    """All numbers of a forecast, by name."""
    made = dataclasses.asdict(found)
    flat = {name: value for name, value in made.items() if isinstance(value, int | float)}
    for name in ("memory", "bounds"):
        flat |= {f"{name}.{key}": value for key, value in made[name].items()}
    for at, stage in enumerate(made["stages"]):
        flat |= {f"{at}.{key}": value for key, value in stage.items()}
    return {**flat, "peak_at": found.peak_at.seconds}


def test_a_copy_of_a_job_receives_as_the_job_does() -> None:
    """A factory may go on with a job in which it has replaced something."""

    def copied(job: Job) -> Any:
        model, step = staged(job)
        return model, lambda model, job: step(model, dataclasses.replace(job, optimizer="sgd"))

    job = Job(4, pp=2, micro_batches=3)
    assert forecast_of(copied, job) == forecast_of(staged, job)


def careless(job: Job) -> Any:
    return staged(Job(job.ranks))[0], lambda model, job: model(torch.empty(ROWS, WIDTH)).sum()


def other_shapes(job: Job) -> Any:
    model, step = staged(job)
    return model, step if job.stage == 0 else lambda model, job: model(job.receive(ROWS // 2, WIDTH)).sum()


def an_empty_stage(job: Job) -> Any:
    model, step = staged(job)
    return (model if job.stage == 0 else nn.Identity()), step


def equal_stages(job: Job) -> Any:
    """Their step alone looks at the stage."""
    return Stage(2), staged(job)[1]


def early(job: Job) -> Any:
    model, _ = staged(job)
    return model, lambda model, job: job.receive(3, WIDTH)


def no_output(job: Job) -> Any:
    model, _ = staged(job)
    return model, lambda model, job: None


def model_alone(job: Job) -> Any:
    return staged(job)[0]


@pytest.mark.parametrize(
    ("factory", "options", "message"),
    [
        (
            careless,
            {"pp": 2},
            r"stage 0 of 2 sends .*, and stage 1 receives nothing: expected the same. A factory makes",
        ),
        (early, {"pp": 2}, r"receive\(3, 64\) on stage 0 of 2: expected a later stage"),
        (no_output, {"pp": 2}, r"what stage 0 of 2 sends, a tensor that needs a gradient .*; found NoneType"),
        (other_shapes, {"pp": 2}, r"stage 0 of 2 sends torch.float32 of shape \(32, 64\), and stage 1 receives .* \(16, 64\)"),
        (an_empty_stage, {"pp": 2}, r"stage 1 of 2 has no parameters: expected some on each"),
        (staged, {"ep": 2}, r"no module's experts are divided, with ep=2: .*job.expert_mesh\(\)"),
        (model_alone, {"pp": 2}, r"pp=2 with a factory that returns a module alone: return \(model, step\), both of job.stage"),
    ],
)
def test_factories_without_stages_or_experts(factory: Factory, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        forecast_of(factory, Job(4, sequence=5, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 8, "pp": 3}, r"ranks=8 with pp=3: expected a multiple of 3 ranks"),
        ({"ranks": 8, "pp": 2, "tp": 2, "replicas": 3}, r"ranks=8 with pp=2, tp=2, replicas=3: expected a multiple of 12"),
        ({"ranks": 8, "pp": 4, "ep": 4}, r"ep=4: expected a divisor of the 2 ranks sharded over"),
        (
            {"ranks": 8, "ep": 8, "reshard_after_forward": 8},
            r"=8: expected a divisor of the 1 ranks that share an expert, with ep=8",
        ),
        ({"ranks": 8, "pp": 0}, r"pp=0: expected a number of at least 1"),
        ({"ranks": 8, "pp": 2, "stage": 2}, r"stage=2 of pp=2: expected 0 to 1"),
        ({"ranks": 8, "schedule": "2f2b"}, r"schedule='2f2b': expected one of 1f1b, gpipe"),
    ],
)
def test_jobs_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Job(**options)


# ---------------------------------------------------------------------- presets


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four layers of the presets, and few tokens in all."""
    pytest.importorskip("transformers")
    for name in ("llama3-8b", "mixtral-8x7b"):
        config = {**PRESETS[name].config, "num_hidden_layers": 4, "vocab_size": 512}
        monkeypatch.setitem(PRESETS, name, dataclasses.replace(PRESETS[name], config=config))


HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("options", [{"pp": 2}, {"pp": 4, "tp": 2}, {"pp": 2, "tp": 2, "cp": 2}, {"pp": 3}])
def test_the_stages_of_a_preset(options: dict[str, int]) -> None:
    """Together they have the model's parameters and its arithmetic."""
    factory, ranks = preset_factory("llama3-8b"), 24
    whole_options = {name: size for name, size in options.items() if name != "pp"}
    job = Job(ranks, sequence=256, mp_policy=HALF, micro_batches=5, **options)
    with dry_world(ranks // job.pp), torch.device("meta"):
        model, _ = factory(Job(ranks // job.pp, sequence=256, **whole_options))
    found = forecast_of(factory, job)
    whole = forecast_of(factory, Job(ranks // job.pp, sequence=256, mp_policy=HALF, micro_batches=5, **whole_options))
    assert sum(stage.numel for stage in found.stages) == sum(param.numel() for param in model.parameters())
    assert found.model_flops == pytest.approx(whole.model_flops / job.pp, rel=1e-6)
    peaks = [stage.peak_nbytes for stage in found.stages[1:-1]]
    assert peaks == sorted(peaks, reverse=True), "fewer micro-batches are in flight on later stages"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("ep", [2, 8])
def test_the_experts_of_a_preset(ep: int) -> None:
    """By hand: what is gathered, reduced and sent; the memory of shards is that without division."""
    tokens, width, layers, experts = 256, 4096, 4, 8
    factory, common = preset_factory("mixtral-8x7b"), {"sequence": tokens, "mp_policy": HALF, "reshard_after_forward": False}
    found, whole = forecast_of(factory, Job(8, ep=ep, **common)), forecast_of(factory, Job(8, **common))
    shards = sum((1 + 2) * each.gathered_nbytes * (each.ranks - 1) / each.ranks for each in found.groups)
    rows = 2 * 2 * 2 * (2 * tokens) * width * 2  # there and back, forward and backward, two choices, bfloat16
    counts = 8 * (ep + experts)
    assert found.received_within_nbytes == pytest.approx(shards + layers * (rows / 2 + counts) * (ep - 1) / ep, rel=1e-6)
    assert found.memory["parameters"] == pytest.approx(whole.memory["parameters"], rel=1e-3)
    assert found.memory["gathered"] < whole.memory["gathered"] / (0.9 * ep) + 2 * 4 * 4096 * 10240
    assert found.model_flops == pytest.approx(whole.model_flops, rel=1e-3)


@pytest.mark.usefixtures("small")
def test_experts_in_stages_with_parts_of_sequences() -> None:
    job = Job(16, pp=2, ep=4, cp=2, replicas=2, sequence=256, mp_policy=HALF, micro_batches=4, checkpoint_activations=True)
    found = forecast_of(preset_factory("mixtral-8x7b"), job)
    assert len(found.stages) == 2
    assert {group.ranks for group in found.groups} == {1, 4}, "experts are sharded over 4 / ep ranks, the rest over 4"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2", {"pp": 2}, "preset gpt2 with pp=2: its first and last layers share a weight; expected pp=1"),
        ("gpt2", {"ep": 2}, "preset gpt2 with ep=2: expected ep=1: it has no experts"),
        ("mixtral-8x7b", {"ep": 16}, "preset mixtral-8x7b with ep=16: expected a divisor of its 8 experts"),
        ("mixtral-8x7b", {"pp": 64}, "preset mixtral-8x7b with pp=64: expected at most its 32 layers"),
    ],
)
def test_presets_that_cannot_be_divided(name: str, options: dict[str, Any], message: str) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"), pytest.raises(PlanError, match=message):
        preset_factory(name)(Job(**{"ranks": 128, "sequence": 128, **options}))


# ---------------------------------------------------------------------- the best split


def test_splits_have_the_same_rows() -> None:
    job = Job(24, batch=2, micro_batches=3, sequence=64, tp=2)
    found = splits(job, ("pp", "tp", "cp"), 8)
    assert job in found
    assert all((each.rows, each.ranks, each.batch, each.ep) == (job.rows, 24, 2, 1) for each in found)
    assert all(each.tp <= 8 and each.pp <= each.micro_batches for each in found)
    assert len(found) == len(set(map(degrees, found))) > 20
    assert {degrees(each) for each in splits(job, ("pp",), 8)} == {
        (1, 2, 1),
        (2, 2, 1),
        (3, 2, 1),
        (4, 2, 1),
        (6, 2, 1),
        (12, 2, 1),
    }


def degrees(job: Job) -> tuple[int, int, int]:
    return job.pp, job.tp, job.cp


def test_the_best_split_fits_and_is_the_fastest() -> None:
    """A model that refuses tensor parallelism by itself is not asked again; of what does not fit, the smallest comes first."""
    base, asked = forecast_of(staged, Job(4)), list[Job]()

    def made(job: Job) -> Forecast:
        asked.append(job)
        if job.tp > 1:
            raise PlanError("no tensor parallelism")
        return dataclasses.replace(base, peak_nbytes=100 // (job.pp * job.cp), step_seconds=float(job.pp))

    jobs = splits(Job(8, micro_batches=8, sequence=64), ("pp", "tp", "cp"), 8)
    done: list[int] = []
    found, refused = best_splits(jobs, made, 30, done.append)
    assert len(found) + len(refused) == len(jobs)
    assert sum(done) == len(jobs)
    assert sum(job.tp > 1 for job in asked) == 3, "2, 4 and 8, alone"
    fitting = [split for split in found if split.fits]
    assert (fitting[0].job.pp, fitting[0].job.cp) == (1, 4) or (fitting[0].job.pp, fitting[0].job.cp) == (1, 8)
    assert [split.forecast.step_seconds for split in fitting] == sorted(split.forecast.step_seconds for split in fitting)
    rest = found[len(fitting) :]
    assert [split.forecast.peak_nbytes for split in rest] == [50, 50, 100]


@pytest.mark.rest
@pytest.mark.usefixtures("small")
def test_the_command_finds_the_best_split(capsys: pytest.CaptureFixture[str]) -> None:
    """Its report is that of the best one; the table has them all."""
    given = ("--preset", "llama3-8b", "--ranks", "8", "--sequence", "64", "--micro-batches", "2", "--param-dtype", "bfloat16")
    assert main((*given, "--best", "pp,tp", "--no-search", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["splits"][0]
    assert {name: found["job"][name] for name in ("pp", "tp", "micro_batches")} == {
        name: best[name] for name in ("pp", "tp", "micro_batches")
    }
    assert found["step_seconds"] == best["step_seconds"] == min(split["step_seconds"] for split in found["splits"])
    assert all(split["shards"] * split["pp"] * split["tp"] == 8 for split in found["splits"])
    assert main((*given, "--pp", "2", "--best", "tp", "--no-search")) == 0
    table = capsys.readouterr().out
    assert "ways to divide 8 ranks" in table
    assert "stages, 1f1b" in table
    assert main(("--preset", "gpt2", "--ranks", "8", "--pp", "2", "--best", "tp", "--no-search")) == 2
    error = capsys.readouterr().err
    assert "--best tp: the model can be divided over 8 ranks in none of" in error
    assert "the first because: preset gpt2 with pp=2: its first and last layers share a weight" in error
    with pytest.raises(SystemExit):
        main((*given, "--best", "tp,dp"))
    assert "tp,dp: expected all, or some of pp,tp,cp,ep" in capsys.readouterr().err
