"""The planner's command: jobs, factories, presets, and what it says about wrong ones."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from shardrt.comm.startup.dry import dry_world
from shardrt.fsdp.api.module import FSDPModule
from shardrt.fsdp.base.policy import MixedPrecisionPolicy, PrefetchPolicy, QuantizationPolicy
from shardrt.plan.__main__ import main
from shardrt.plan.machine.hardware import Curve, Memory, load_sheet
from shardrt.plan.program.factory import blocks, check_meta, load_factory, make_program
from shardrt.plan.program.job import Job, JobObserver, PlanError
from shardrt.plan.program.known_models import PRESETS
from shardrt.plan.program.presets import preset_factory
from shardrt.plan.program.recomputation import checkpoint_block, selective_contexts
from shardrt.plan.question import planning
from shardrt.plan.question.report import PlannedJob, lines
from shardrt.plan.run.history import History
from toys import uncompiled

FACTORIES = """
import dataclasses

import torch
from torch import nn

import shardrt

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        return x + self.linear(x).relu()

class Stack(nn.Module):
    def __init__(self, layers=3, width=16):
        super().__init__()
        self.tokens = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def stack():
    return Stack()

def with_step(job):
    return Stack(layers=job.batch), lambda model, job: model(torch.zeros(job.batch, 5, dtype=torch.int64)).mean()

def real():
    model = Stack()
    model.head.bias = nn.Parameter(torch.zeros(11, device="cpu"))
    return model

def nothing():
    return None

def raises():
    raise RuntimeError("no such thing")

def reads_data():
    return Stack(), lambda model, job: model(torch.zeros(1, 2, dtype=torch.int64)).mean().item()

def raises_in_forward():
    def step(model, job):
        return model(torch.zeros(1, 2, 3)).mean()
    return Stack(), step

def no_loss():
    return Stack(), lambda model, job: model(torch.zeros(1, 2, dtype=torch.int64))

def sharded_by_itself(job):
    model = Stack()
    shardrt.fully_shard(model, mesh=job.mesh(), reshard_after_forward=False)
    return model

def replaced(job):
    mine = dataclasses.replace(job, mp_policy=shardrt.MixedPrecisionPolicy(torch.bfloat16))
    return shardrt.fully_shard(Stack(), **mine.shard_options())

def sharded_everywhere():
    return shardrt.fully_shard(Stack())

class Pair(Stack):
    def forward(self, tokens):
        logits = super().forward(tokens)
        return logits, logits.mean()

def pair():
    return Pair()

def loss_of_pair(model, job):
    return model(torch.zeros(job.batch, job.sequence, dtype=torch.int64))[1]

def wide():
    return Stack(layers=1, width=1024)

def wide_and_fixed():
    return Stack(layers=3, width=1024), lambda model, job: model(torch.zeros(2, 5, dtype=torch.int64)).mean()

def half():
    return Stack().bfloat16()

def fixed():
    return Stack(), lambda model, job: model(torch.zeros(2, 5, dtype=torch.int64)).mean()

def frozen():
    return Stack().requires_grad_(False)

def exits():
    raise SystemExit(0)

def of_the_host():
    mask = torch.ones(3, device="cpu")
    return Stack(), lambda model, job: model(torch.zeros(2, 5, dtype=torch.int64)).mean() * (mask + mask).sum().item()

def ranges():
    def step(model, job):
        one, two = torch.arange(0.0, 5.0), torch.arange(0.0, 10.0)
        return model(torch.zeros(2, 5, dtype=torch.int64)).mean() + (one + torch.ones(5)).sum() + (two + torch.ones(10)).sum()
    return Stack(), step

def no_blocks():
    return nn.Embedding(11, 11)

number = 3
"""
CAUSED = "try:\n    import no_such_package\nexcept ImportError as error:\n    raise RuntimeError('cannot start') from error\n"


@pytest.fixture(scope="module", autouse=True)
def factories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a module `plan_factories`, which can be imported. Forecasts are as in a process that compiles nothing."""
    folder = tmp_path_factory.mktemp("factories")
    (folder / "plan_factories.py").write_text(FACTORIES)
    (folder / "plan_broken.py").write_text("import no_such_package\n")
    (folder / "plan_caused.py").write_text(CAUSED)
    sys.path.insert(0, str(folder))
    with uncompiled():
        yield folder
    sys.path.remove(str(folder))
    sys.modules.pop("plan_factories", None)


def keeping(saved: list[torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A hook that lists what is saved for the backward."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    return keep


# ---------------------------------------------------------------------- jobs


def test_the_ranks_of_a_job() -> None:
    job = Job(512, tp=8, replicas=4, batch=2, sequence=8192, micro_batches=3)
    assert job.shards == 16
    assert job.rows == 2 * 3 * 64
    assert dataclasses.replace(job, cp=4).rows == 2 * 3 * 16
    assert dataclasses.replace(job, cp=3 + 1, sequence=10).local_sequence == 3
    assert Job(8, replicas=8, quantization_policy=QuantizationPolicy(reduce=torch.int8)).shards == 1  # replicas send codes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": 0}, r"ranks=0: expected a number of at least 1"),
        ({"ranks": 12, "tp": 8}, r"ranks=12 with tp=8: expected a multiple of 8 ranks"),
        ({"ranks": 16, "tp": 4, "replicas": 3}, r"expected a multiple of 12 ranks"),
        ({"ranks": 8, "cp": 3}, r"cp=3: expected a divisor of the 8 ranks sharded over"),
        ({"ranks": 8, "cp": 4, "sequence": 3}, r"cp=4 with sequence=3: expected a token for each rank"),
        ({"ranks": 8, "reshard_after_forward": 3}, r"reshard_after_forward=3: expected a divisor of the 8 ranks"),
        ({"ranks": 8, "gradient_sync": "first"}, r"gradient_sync='first': expected one of every, last"),
        ({"ranks": 8, "checkpoint_activations": "ops"}, r"checkpoint_activations='ops': expected True, False, \"op\" or"),
        ({"ranks": 8, "checkpoint_activations": 0}, r"checkpoint_activations=0: expected True"),
        ({"ranks": 8, "optimizer": "lion"}, r"optimizer='lion': expected one of adamw, adam, sgd"),
        ({"ranks": 8, "tp": 8, "quantization_policy": QuantizationPolicy(reduce=torch.int8)}, r"nobody to send codes to"),
    ],
)
def test_jobs_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Job(**options)


# ---------------------------------------------------------------------- factories


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plan_factories", "expected package.module:function"),
        ("no_such_module:make", "does not import: ModuleNotFoundError: No module named 'no_such_module'"),
        ("plan_broken:make", r"does not import: .*no_such_package.*plan_broken.py:1\)"),
        ("plan_caused:make", r"does not import: RuntimeError: cannot start .*caused by ModuleNotFoundError: .*no_such_package"),
        ("plan_factories:mistyped", "plan_factories has no 'mistyped'"),
        ("plan_factories:number", "expected a function that returns a module, found int"),
    ],
)
def test_names_of_factories(name: str, message: str) -> None:
    assert load_factory("plan_factories:stack")().head.out_features == 11
    with pytest.raises(PlanError, match=message):
        load_factory(name)


def test_the_first_tensor_that_holds_data_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    check_meta(model, "factory")
    model[1].register_buffer("running_mean", torch.zeros(3, device="cpu"))
    with pytest.raises(PlanError, match=r"factory: buffer '1.running_mean' is on cpu and holds data"):
        check_meta(model, "factory")


def test_blocks_are_the_elements_of_the_outermost_lists() -> None:
    inner = nn.Module()
    inner.experts = nn.ModuleList([nn.Linear(1, 1)])
    outermost = nn.ModuleList([inner, nn.ReLU()])
    assert list(blocks(nn.Sequential(nn.Linear(1, 1), outermost))) == list(outermost)


def program(name: str, **options: Any) -> Any:
    """The program of a factory in the world of 4 ranks, or as many as asked for, after one step."""
    job = Job(**{"ranks": 4, "sequence": 5, **options})
    with dry_world(job.ranks):
        made = make_program(load_factory(f"plan_factories:{name}"), job, name)
        made.step().backward()
    return made.model


def test_the_elements_of_lists_are_sharded_and_the_root() -> None:
    model = program("stack", batch=3)
    assert [name for name, module in model.named_modules() if isinstance(module, FSDPModule)] == [
        "", "blocks.0", "blocks.1", "blocks.2"
    ]  # fmt: skip
    assert len(program("with_step", batch=2).blocks) == 2


def test_a_sharded_model_is_taken_as_it_is() -> None:
    model = program("sharded_by_itself")
    assert [name for name, module in model.named_modules() if isinstance(module, FSDPModule)] == [""]


def test_a_job_knows_what_is_read_of_it_and_of_its_copies() -> None:
    """A copy that `dataclasses.replace` makes has the other fields; what it has got instead is no field of the job."""
    asked = Job(8, batch=5000, replicas=2)
    observer = JobObserver(asked)
    assert observer.reads == set()
    assert observer.job.batch == 5000
    assert observer.reads == {"batch"}
    assert program("replaced", reshard_after_forward=False).param_group.mp_policy.param_dtype is torch.bfloat16
    copy = dataclasses.replace(observer.job, replicas=4)
    assert "replicas" not in observer.reads
    assert copy.shards == 2
    assert "replicas" not in observer.reads
    assert repr(copy) == repr(dataclasses.replace(asked, replicas=4))
    assert copy == dataclasses.replace(asked, replicas=4)


def test_the_options_of_a_job_reach_the_groups() -> None:
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = program("stack", ranks=8, replicas=2, mp_policy=half, reshard_after_forward=2, prefetch_policy=PrefetchPolicy(0))
    group = model.blocks[0].param_group
    assert (group.mesh.size, group.replicas.size) == (4, 2)
    assert (group.mp_policy, group.settings.reshard_after_forward) == (half, 2)
    assert model.param_group.root_settings.prefetch == PrefetchPolicy(0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("real", {}, r"real: parameter 'head.bias' is on cpu and holds data; expected the meta device"),
        ("nothing", {}, r"nothing: expected an nn.Module, or a module and a step, found NoneType"),
        ("raises", {}, r"raises raised RuntimeError: no such thing \(.*plan_factories.py:45\)"),
        ("reads_data", {}, r"reads_data: the forward on the meta device failed: RuntimeError: .*meta.*plan_factories.py:48\)"),
        ("raises_in_forward", {}, r"failed: RuntimeError: .*plan_factories.py:\d+\)"),
        ("no_loss", {}, r"expected a step that returns the loss, a tensor of one element; found Tensor of shape \(1, 2, 11\)"),
        ("stack", {"sequence": None}, r"expected a sequence length \(--sequence\)"),
        ("stack", {"tp": 2}, r"no module is tensor-parallel, with tp=2"),
        ("pair", {}, r"returns tuple of Tensor of shape \(1, 5, 11\), Tensor of shape \(\); .*--step package.module:function"),
        ("sharded_by_itself", {"checkpoint_activations": "op"}, r"checkpoint_activations='op' has no effect, as the factory"),
        ("sharded_by_itself", {"prefetch_policy": PrefetchPolicy(0)}, r"does not read job.prefetch_policy: use it there"),
        ("sharded_everywhere", {"reshard_after_forward": False}, r"reshard_after_forward=False has no effect"),
        ("sharded_everywhere", {"replicas": 2}, r"replicas=2 has no effect"),
        ("replaced", {"mp_policy": MixedPrecisionPolicy(torch.float16)}, r"mp_policy=.*float16.* has no effect"),
        ("sharded_everywhere", {"tp": 2}, r"no module is tensor-parallel, with tp=2"),
        ("stack", {"checkpoint_activations": 4}, r"every 4th block is to be recomputed, of 3; expected at most 3"),
        ("no_blocks", {"checkpoint_activations": True}, r"no nn.ModuleList whose elements could be checkpointed"),
    ],
)
def test_factories_that_cannot_be_forecast(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        program(name, **options)


def test_a_checkpointed_block_runs_again_in_the_backward() -> None:
    """Gradients are those of the plain block; nothing but its input is kept."""
    block = nn.Sequential(nn.Linear(3, 50), nn.Tanh(), nn.Linear(50, 3))
    x = torch.randn(2, 3)
    calls: list[int] = []
    block[0].register_forward_hook(lambda *_: calls.append(1))
    block(x).sum().backward()
    expected = [param.grad for param in block.parameters()]
    block.zero_grad()
    checkpoint_block(block)
    calls.clear()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(keeping(saved), lambda tensor: tensor):
        out = block(x)
    assert calls == [1]
    assert [each is x for each in saved] == [True]
    out.sum().backward()
    assert calls == [1, 1]
    for param, gradient in zip(block.parameters(), expected, strict=True):
        assert torch.equal(param.grad, gradient)


class Matmuls(TorchDispatchMode):
    """Lists the matrix multiplications that run, by the columns of their results."""

    def __init__(self) -> None:
        super().__init__()
        self.columns: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.columns.append(out.shape[-1])
        return out


def test_selective_recomputation_keeps_attention_and_every_second_product() -> None:
    """The gradients are those of the plain block; of its four products, one runs again."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.mix, self.up, self.out = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.mix(self.into(x).sin()).cos()[:, None]
            attended = F.scaled_dot_product_attention(heads, heads, heads)[:, 0].sin()
            return cast("torch.Tensor", self.out(attended @ self.up.weight.T))

    block, x = Block().double(), torch.randn(2, 3, 4, dtype=torch.float64)
    block(x).sum().backward()
    expected = {name: param.grad for name, param in block.named_parameters()}
    block.zero_grad()
    with Matmuls() as plain:
        block(x).sum().backward()
    block.zero_grad()
    checkpoint_block(block, selective_contexts)
    with Matmuls() as forward:
        out = block(x).sum()
    with Matmuls() as backward:
        out.backward()
    assert forward.columns == [8, 8, 16, 4]
    again = list(backward.columns)
    for column in plain.columns[4:]:
        again.remove(column)
    assert again == [8], "mix; the last one, which nobody needs, does not run again"
    for name, param in block.named_parameters():
        assert (param.grad is None) == (expected[name] is None)
        assert param.grad is None or torch.equal(param.grad, expected[name])


# ---------------------------------------------------------------------- the command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """The exit code of `shardrt-plan`, and what it has printed."""
    try:
        code = main(arguments)
    except SystemExit as error:
        code = int(error.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What `shardrt-plan --json` says of three blocks of 16 channels on 4 ranks, 2 x 5 tokens each."""
    common = ("plan_factories:stack", "--json", "--ranks", "4", "--batch", "2", "--sequence", "5")
    code, out, err = run(capsys, *common, *arguments)
    assert (code, err) == (0, "")
    return cast("dict[str, Any]", json.loads(out))


NUMEL = 11 * 16 + 3 * (16 * 16 + 16) + (16 * 11 + 11)


def test_the_figures_of_a_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--no-search", "--reshard-after-forward", "false")
    gathered = sum(group["gathered_nbytes"] for group in found["groups"])
    assert found["parameters"] == NUMEL
    assert gathered == 4 * NUMEL + found["padding_nbytes"]
    assert found["memory"]["parameters"] == found["memory"]["gradients"] == gathered / 4
    assert found["memory"]["optimizer"] >= 2 * gathered / 4
    assert found["received_within_nbytes"] == 2 * 3 / 4 * gathered, "each group is gathered once and reduced once"
    assert found["received_across_nbytes"] == 0
    assert found["model_flops"] == 3 * 2 * 10 * (3 * 16 * 16 + 16 * 11)
    assert found["tokens_per_second"] == pytest.approx(4 * 10 / found["step_seconds"])
    assert found["mfu"] == pytest.approx(found["model_flops"] / found["step_seconds"] / 67e12)
    assert found["fits"] is True
    assert found["largest_batch"] is None


def test_memory_of_a_communicator_is_counted_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Gradients of large groups are packed into it. A block's gradients are activations until then."""
    code, out, _ = run(capsys, "plan_factories:wide", "--json", "--ranks", "4", "--sequence", "5", "--no-search")
    assert code == 0
    memory = json.loads(out)["memory"]
    assert memory["packed"] >= 4 * (1024 * 1024 + 1024)
    assert memory["activations"] < 1.1 * memory["packed"]


def test_the_report_has_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("plan_factories:stack", "--ranks", "8", "--replicas", "2", "--sequence", "5", "--param-dtype", "bfloat16")
    code, out, err = run(capsys, *arguments, "--ranks-per-node", "2")
    assert (code, err) == (0, "")
    assert out.startswith(f"plan_factories:stack: {NUMEL / 1000:.4g} k parameters on 8 ranks (2 replicated x 4 sharded)\n")
    for label in (
        *("memory of a rank", "  parameters", "  gradients", "  optimizer", "  gathered", "  packed", "  activations"),
        *("  peak of the sum", "padding", "  inside the node", "  across nodes", "  compute", "  communication", "  step"),
        *("throughput", "bound by", "largest batch"),
    ):
        assert f"\n{label}  " in out, label
    assert "fits in 79.6" in out
    assert "s into the step, at Stack\n" in out  # when all groups have gradients


def test_options_change_the_forecast(capsys: pytest.CaptureFixture[str]) -> None:
    plain, checkpointed, half, sgd, two = (
        planned(capsys, "--no-search", *options)
        for options in (
            (),
            ("--checkpoint-activations",),
            ("--param-dtype", "bfloat16"),
            ("--optimizer", "sgd"),
            ("--micro-batches", "2"),
        )
    )
    assert checkpointed["memory"]["activations"] < plain["memory"]["activations"]
    assert checkpointed["flops"] == plain["flops"] + 2 * 10 * 3 * 16 * 16
    assert checkpointed["model_flops"] == plain["model_flops"] == two["model_flops"] / 2
    assert half["received_within_nbytes"] < 0.6 * plain["received_within_nbytes"]
    assert sgd["memory"].get("optimizer", 0) == 0


def test_each_micro_batch_reduces_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    """Bytes are those of one micro-batch times their number; with one reduction for all, gradients wait unsharded."""
    common = ("plan_factories:wide_and_fixed", "--json", "--ranks", "4", "--sequence", "5")
    one, every, last = (
        json.loads(run(capsys, *common, *more)[1])
        for more in (("--no-search",), ("--micro-batches", "3"), ("--micro-batches", "3", "--gradient-sync", "last"))
    )
    assert every["received_within_nbytes"] == 3 * one["received_within_nbytes"]
    reduced = 3 / 4 * sum(group["gathered_nbytes"] for group in one["groups"])
    assert last["received_within_nbytes"] == every["received_within_nbytes"] - 2 * reduced
    assert last["peak_nbytes"] > every["peak_nbytes"] + 0.5 * 4 * 1024 * 1024
    for used, other in ((every, last), (last, every)):
        assert used["other_gradient_sync"] == {key: other[key] for key in ("peak_nbytes", "fits", "step_seconds")}
    assert one["other_gradient_sync"] is None
    report = run(capsys, *common[:1], *common[2:], "--micro-batches", "3")[1]
    assert "\ngradients             reduced in every micro-batch\n" in report
    assert "--gradient-sync last, in the last micro-batch only: peak " in report


def test_numbers_are_read_without_exponents() -> None:
    """A rate of 48,572 tokens/s and rank, a step of 1,234 s, and links of 1,440 Gb/s."""
    sheet, job = load_sheet("h100"), Job(1, batch=48_572, quantization_policy=QuantizationPolicy())
    found = planning.Planner(load_factory("plan_factories:fixed"), "fixed", sheet, 8).forecast(job)
    slow = dataclasses.replace(found, step_seconds=1.0, peak_at=found.peak_at._replace(seconds=1234.4))
    report = "\n".join(lines(PlannedJob("fixed", 10**17, job, sheet, 8, slow, pays_below=180e9)))
    for expected in ("48.57 k rows/s, 48,570 on each rank", "; 1,230 s into", "up to 1,440 Gb/s", "100,000 T parameters"):
        assert expected in report, expected


def test_a_step_of_another_function(capsys: pytest.CaptureFixture[str]) -> None:
    """A model that returns its loss too needs one."""
    common = ("--ranks", "4", "--batch", "2", "--sequence", "5", "--no-search", "--json")
    found = json.loads(run(capsys, "plan_factories:pair", "--step", "plan_factories:loss_of_pair", *common)[1])
    plain = json.loads(run(capsys, "plan_factories:stack", *common)[1])
    assert found["flops"] == plain["flops"]
    for wrong, message in (
        (("plan_factories:fixed",), "fixed: the factory returns a step of its own"),
        (("--preset", "gpt2"), "--step with --preset: a preset has a step of its own"),
    ):
        code, _, err = run(capsys, *wrong, "--step", "plan_factories:loss_of_pair", *common)
        assert code == 2
        assert message in err


def test_the_largest_batch_fits_and_the_next_one_does_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(load_sheet("h100"), memory=Memory(40_000, Curve((1.0,), (1e12,))))
    monkeypatch.setattr(planning, "load_sheet", lambda name: small)
    found = planned(capsys)
    largest = found["largest_batch"]
    assert largest > 2
    assert planned(capsys, "--no-search", "--batch", str(largest))["fits"] is True
    assert planned(capsys, "--no-search", "--batch", str(largest + 1))["fits"] is False


def test_offloaded_shards_take_no_memory_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    common = ("plan_factories:wide", "--json", "--ranks", "1", "--sequence", "5", "--no-search")
    here, offloaded = (json.loads(run(capsys, *common, *more)[1]) for more in ((), ("--offload",)))
    kinds = ("parameters", "gradients", "optimizer")
    assert [offloaded["memory"][kind] for kind in kinds] == pytest.approx([here["memory"][kind] for kind in kinds], rel=0.01)
    assert offloaded["peak_nbytes"] < here["peak_nbytes"] - 0.9 * here["memory"]["optimizer"]


def test_operations_are_those_of_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The dtype of arithmetic; sizes that floats decide; a step that looks at no batch has no largest one."""
    common = ("--ranks", "4", "--sequence", "5")
    half = json.loads(run(capsys, "plan_factories:half", *common, "--no-search", "--json")[1])
    assert half["mfu"] == pytest.approx(half["model_flops"] / half["step_seconds"] / 989e12)
    assert run(capsys, "plan_factories:ranges", *common, "--no-search")[0] == 0
    report = run(capsys, "plan_factories:fixed", *common)[1]
    assert "largest batch" not in report
    assert "the step does not read job.batch: --batch changes nothing but the rows and tokens counted here\n" in report
    assert "note" not in run(capsys, "plan_factories:stack", *common)[1]


def test_from_which_links_codes_pay() -> None:
    """At twice the bandwidth they cost time; at half of it they save some."""
    sheet = load_sheet("h100")
    assert sheet.across is not None
    planner = planning.Planner(load_factory("plan_factories:wide"), "wide", sheet, 2)
    policy = QuantizationPolicy(torch.int8, min_numel=1)
    job = Job(8, batch=1, sequence=2, quantization_policy=policy)
    bandwidth = planner.pays_below(job)
    assert bandwidth > 0.0
    for factor, pays in ((0.5, True), (2.0, False)):
        across = dataclasses.replace(sheet.across, bandwidth=Curve((1.0,), (factor * bandwidth,)))
        other = dataclasses.replace(sheet, across=across)
        whole = dataclasses.replace(job, quantization_policy=QuantizationPolicy())
        seconds = [planner.forecast(each, other).step_seconds for each in (job, whole)]
        assert (seconds[0] < seconds[1]) is pays
    plan = PlannedJob("wide", planner.numel, job, sheet, 2, planner.forecast(job), pays_below=0.0)
    assert list(lines(plan))[-1].split(maxsplit=2)[2].startswith("do not pay")


@pytest.mark.parametrize(("per_node", "advised"), [(8, False), (2, True)])
def test_codes_are_advised_between_nodes_only(per_node: int, advised: bool) -> None:
    sheet, job = load_sheet("h100"), Job(8, batch=1, sequence=2)
    found = planning.Planner(load_factory("plan_factories:wide"), "wide", sheet, per_node).forecast(job)
    exposed = dataclasses.replace(found, exposed_seconds=found.step_seconds)
    advice = list(lines(PlannedJob("wide", 1, job, sheet, per_node, exposed)))[-1]
    assert advice.startswith("advice")
    assert ("--quantize-gather" in advice) is advised


def test_the_picture_and_the_timeline_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    planned(capsys, "--no-search", "--plot", str(tmp_path / "memory.png"), "--timeline", str(tmp_path / "traces"))
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    trace = json.loads((tmp_path / "traces" / "rank-0-forecast.json").read_text())
    assert any(event["name"] == "backward blocks.1" for event in trace["traceEvents"])


def test_the_history_keeps_the_peak() -> None:
    """Ten thousand changes become at most 1,500 moments and a few more, the highest among them."""
    clock = [0.0]
    history = History()
    history.add("parameters", "", 7)
    history.restart(lambda: clock[0])
    total, peak = 7, 0
    for number in range(10_000):
        clock[0] = number / 10_000
        nbytes = 1_000 if number == 5_001 else -1_000 if number == 5_002 else 1 - 2 * (number % 2)
        history.add("gathered", f"blocks.{number % 3}", nbytes)
        total += nbytes
        peak = max(peak, total)
    counters = history.counters()
    assert len(counters) <= 1_502
    assert counters[0].values == {"parameters": 7}
    values: dict[str, float] = {}
    totals = [sum((values := values | dict(counter.values)).values()) for counter in counters]
    assert (max(totals), totals[-1]) == (peak, total)


def test_the_sheets_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "sheets")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["a100", "b200", "h100", "h200"]


STACK = ("plan_factories:stack", "--ranks", "8", "--sequence", "5", "--no-search")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: --ranks"),
        (("--ranks", "8"), "expected either a factory, package.module:function, a config.json, or --preset"),
        (("no_such_module:make", "--ranks", "8"), "does not import: ModuleNotFoundError"),
        (
            ("plan_factories:frozen", *STACK[1:]),
            "the step on the meta device failed: RuntimeError: element 0 of tensors does not",
        ),
        (("plan_factories:exits", *STACK[1:]), "exits raised SystemExit: 0"),
        (("plan_factories:of_the_host", *STACK[1:]), "of a tensor on cpu, which holds data"),
        ((*STACK, "--ranks", "9" * 23), "expected less than 2**31"),
        ((*STACK, "--timeline", __file__), "test_plan_command.py: expected a folder"),
        (("plan_factories:nothing", "--ranks", "8"), "expected an nn.Module"),
        (("plan_factories:real", "--ranks", "8"), "parameter 'head.bias' is on cpu and holds data"),
        (("--preset", "", "--ranks", "8"), "preset '': expected one of llama3-8b"),
        ((*STACK, "--timeline", f"{__file__}/traces"), "error: [Errno 20] Not a directory: "),
        (("--preset", "llama4", "--ranks", "8"), "preset 'llama4': expected one of llama3-8b"),
        ((*STACK, "--ranks", "0"), "argument --ranks: 0: expected a whole number of at least 1"),
        ((*STACK, "--tp", "3"), "ranks=8 with tp=3: expected a multiple of 3"),
        ((*STACK, "--sheet", "h1000"), "hardware sheet h1000: expected one of a100, b200, h100, h200, or a TOML file"),
        ((*STACK, "--reshard-after-forward", "3"), "expected a divisor of the 8 ranks"),
        ((*STACK, "--reshard-after-forward", "maybe"), "maybe: expected true, false or a number of ranks"),
        ((*STACK, "--selective-ac", "mm"), "argument --selective-ac: mm: expected op, or a whole number of at least 1"),
        ((*STACK, "--selective-ac", "2", "--checkpoint-activations"), "not allowed with argument --selective-ac"),
        ((*STACK, "--step", "plan_factories:nobody"), "step plan_factories:nobody: plan_factories has no 'nobody'"),
        ((*STACK, "--step", "step"), "step 'step': expected package.module:function"),
        ((*STACK, "--quantize-min-numel", "3"), "--quantize-min-numel without --quantize-gather or --quantize-reduce"),
        ((*STACK, "--full-precision-ranks", "2"), "--full-precision-ranks without --quantize-reduce"),
        ((*STACK, "--replicas", "8", "--quantize-gather", "int8"), "it has nobody to send codes to"),
        ((*STACK, "--plot", "memory.txt"), "expected a file that ends in .png, .svg, .pdf"),
        ((*STACK, "--plot", "/no/such/folder/memory.png"), "there is no folder /no/such/folder"),
        (("sheet", "/no/such/file.json"), "/no/such/file.json"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert err.startswith("shardrt-plan")
    assert err.count("\n") == 1


# ---------------------------------------------------------------------- presets

PUBLISHED = {  # parameters, as the models' pages at Hugging Face count them
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "gpt2": 124_439_808,
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.all) if "0" in name else name for name in PUBLISHED]
)  # many blocks take long
def test_presets_have_the_published_sizes(name: str) -> None:
    pytest.importorskip("transformers")
    with dry_world(8), torch.device("meta"):
        model, _ = preset_factory(name)(Job(8, sequence=128))
    assert sum(param.numel() for param in model.parameters()) == PUBLISHED[name]
    assert set(PRESETS) == set(PUBLISHED)


@pytest.mark.parametrize(
    ("name", "options", "matrices"),
    [
        ("mixtral-8x7b", ("--ranks", "512"), 2 * (10240 + 8) * 4096 + 2 * 2 * 3 * 4096 * 14336 + 4096 * 32000),
        ("llama3-8b", ("--ranks", "16", "--tp", "8"), (2 * (10240 * 4096 + 3 * 4096 * 14336) + 4096 * 128256) // 8),
    ],
)
def test_presets_are_forecast(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    options: tuple[str, ...],
    matrices: int,
) -> None:
    """Two layers of them. matrices: elements of those that a token is multiplied with on a rank."""
    pytest.importorskip("transformers")
    small = {**PRESETS[name].config, "num_hidden_layers": 2}
    monkeypatch.setitem(PRESETS, name, dataclasses.replace(PRESETS[name], config=small))
    half = ("--param-dtype", "bfloat16", "--reduce-dtype", "float32", "--checkpoint-activations", "--no-search", "--json")
    code, out, err = run(capsys, "--preset", name, *options, "--sequence", "512", *half)
    assert (code, err) == (0, "")
    found = json.loads(out)
    attention = 2 * 3 * 4 * 512**2 * 4096 // found["job"]["tp"]
    assert found["model_flops"] == 3 * 2 * 512 * matrices + attention
    assert found["flops"] > 1.1 * found["model_flops"], "recomputed"
    assert found["fits"] is True


def test_selective_recomputation_of_a_preset(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of Llama 3 8B, few tokens in all. Of the products q, k, v, o, gate, up and down, k, o and up run again."""
    pytest.importorskip("transformers")
    small = {**PRESETS["llama3-8b"].config, "num_hidden_layers": 2, "vocab_size": 256}
    monkeypatch.setitem(PRESETS, "llama3-8b", dataclasses.replace(PRESETS["llama3-8b"], config=small))
    common = ("--preset", "llama3-8b", "--ranks", "8", "--sequence", "8192")
    options = ("--param-dtype", "bfloat16", "--no-search", "--json")
    plain, full, op, second, tp = (
        json.loads(run(capsys, *common, *options, *more)[1])
        for more in (
            (),
            ("--checkpoint-activations",),
            ("--selective-ac", "op"),
            ("--selective-ac", "2"),
            ("--selective-ac", "op", "--tp", "8"),
        )
    )
    again = 2 * 2 * 8192 * (1024 * 4096 + 4096 * 4096 + 4096 * 14336)
    assert op["flops"] - plain["flops"] == again
    assert full["flops"] - plain["flops"] == 2 * (second["flops"] - plain["flops"]) > again
    assert tp["flops"] - tp["model_flops"] == pytest.approx((op["flops"] - op["model_flops"]) / 8, rel=1e-6)
    kept = [found["memory"]["activations"] for found in (full, op, plain)]
    assert kept == sorted(set(kept))
    assert full["memory"]["activations"] <= second["memory"]["activations"] < plain["memory"]["activations"]


def test_sequences_in_parts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two layers of Llama 3 8B with 64 k tokens: a rank's activations and arithmetic fall with its part of the sequence."""
    pytest.importorskip("transformers")
    small = {**PRESETS["llama3-8b"].config, "num_hidden_layers": 2, "vocab_size": 256}
    monkeypatch.setitem(PRESETS, "llama3-8b", dataclasses.replace(PRESETS["llama3-8b"], config=small))
    common = ("--preset", "llama3-8b", "--ranks", "16", "--sequence", "65536", "--param-dtype", "bfloat16")
    whole, halves, eighths = (
        json.loads(run(capsys, *common, "--checkpoint-activations", "--no-search", "--json", *more)[1])
        for more in ((), ("--cp", "2"), ("--cp", "8"))
    )
    matrices = 2 * 65536 * 2 * (10240 * 4096 + 3 * 4096 * 14336) + 2 * 65536 * 4096 * 256  # of a forward
    for found, parts in ((halves, 2), (eighths, 8)):
        assert found["memory"]["activations"] == pytest.approx(whole["memory"]["activations"] / parts, rel=0.05)
        pairs = 65536**2 * (2 * parts + 2) / (4 * parts**2)  # a rank's own ones all, of the others' two chunks of four
        assert found["model_flops"] == pytest.approx(3 * (matrices / parts + 2 * 4 * pairs * 4096), rel=1e-3)
        assert found["tokens_per_second"] * found["step_seconds"] == pytest.approx(16 * 65536 / parts)
    assert eighths["received_within_nbytes"] > halves["received_within_nbytes"] > whole["received_within_nbytes"]


def test_a_step_that_does_not_cut_its_sequence() -> None:
    def whole_step(model: nn.Module, job: Job) -> torch.Tensor:
        q = torch.zeros((1, 1, 64, 8)) * model.weight.sum()
        return F.scaled_dot_product_attention(q, q, q).sum()

    job = Job(4, cp=2, sequence=64)
    with dry_world(4):
        program = make_program(lambda: (nn.Linear(8, 8), whole_step), job)
        with job.sequences(), pytest.raises(PlanError, match="32 tokens"):
            program.step()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2", {"tp": 2}, "preset gpt2 with tp=2: there is no tensor-parallel plan"),
        ("llama3-8b", {"tp": 16}, "expected a divisor of its 8 key and value heads"),
        ("gpt2", {"sequence": 2048}, "preset gpt2 with sequence=2048: expected at most 1024 tokens"),
    ],
)
def test_presets_that_cannot_be_forecast(name: str, options: dict[str, Any], message: str) -> None:
    pytest.importorskip("transformers")
    with torch.device("meta"), pytest.raises(PlanError, match=message):
        preset_factory(name)(Job(**{"ranks": 32, "sequence": 128, **options}))


def test_presets_need_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(PlanError, match="preset gpt2 needs the package transformers: pip install transformers"):
        preset_factory("gpt2")


def test_what_breaks_inside_transformers_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers raises it: from what has failed below."""

    class Lazy(ModuleType):
        def __getattr__(self, name: str) -> object:
            try:
                raise ImportError("libcudart.so.12: cannot open shared object file")
            except ImportError as error:
                raise ModuleNotFoundError(f"Could not import module '{name}'.") from error

    monkeypatch.setitem(sys.modules, "transformers", Lazy("transformers"))
    with pytest.raises(PlanError, match=r"does not import: .*'GPT2Config'.*caused by ImportError: libcudart.so.12") as caught:
        preset_factory("gpt2")
    assert "pip install" not in str(caught.value)


# ---------------------------------------------------------------------- configurations

_DECODER = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 32, "num_attention_heads": 4}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_EXPERTS = {"n_routed_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16},
    "deepseek_v2": _LATENT | _EXPERTS,
    "deepseek_v3": _LATENT | _EXPERTS,
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96},
    "mixtral": {"num_local_experts": 4},
    "phi": {},
}


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_configurations_are_forecast(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    """A folder with a config.json; as many parameters as the model has, whatever dtype its weights would have."""
    transformers = pytest.importorskip("transformers")
    grouped = {} if kind in ("phi", "gpt2") or "deepseek" in kind else {"num_key_value_heads": 2}
    given = _DECODER | grouped | CONFIGURATIONS[kind] | {"model_type": kind, "dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(given))
    common = ("--ranks", "4", "--sequence", "16", "--param-dtype", "bfloat16", "--no-search", "--json")
    code, out, err = run(capsys, str(tmp_path), *common)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert json.loads(run(capsys, str(tmp_path / "config.json"), *common)[1])["memory"] == found["memory"]
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert found["parameters"] == sum(param.numel() for param in model.parameters())
    assert found["memory"]["parameters"] >= found["parameters"], "float32 on four ranks"
    assert found["flops"] > 0


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("config.json", None, "there is no such file or folder; expected a config.json"),
        ("", None, "expected a folder with a config.json"),
        ("config.json", "{", "is not a valid JSON file"),
        ("config.json", "{}", "Unrecognized model"),
        ("config.json", '{"model_type": "t5"}', "raised ValueError: Unrecognized configuration class"),
    ],
)
def test_configurations_that_are_none(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, source: str, content: str | None, message: str
) -> None:
    pytest.importorskip("transformers")
    if content is not None:
        (tmp_path / source).write_text(content)
    code, out, err = run(capsys, str(tmp_path / source), "--ranks", "4", "--sequence", "16")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_name_that_nobody_can_look_up(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a network: transformers looks into its cache alone."""
    hub = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    code, out, err = run(capsys, "nobody/nothing", "--ranks", "4")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "model nobody/nothing: expected package.module:function, a config.json, a folder that has one, or the name" in err
    assert "transformers says: We couldn't connect to 'https://huggingface.co'" in err
