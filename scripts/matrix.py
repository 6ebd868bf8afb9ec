"""What works in which dimension: each feature in each split of a GPT over four ranks, beside one process, in float64.

python -m shardrt.launch -n 4 scripts/matrix.py        prints a table; exits with 1 if a cell is wrong
python -m shardrt.launch -n 4 scripts/matrix.py --dimension PP --feature clipping        some cells

A cell says "yes" where gradients, parameters and losses are those of one process to 1e-9, or what refuses it by name.
"""

from __future__ import annotations

import argparse
import copy
import functools
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint as recomputed

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from common.experts import divide_experts, experts_of
from common.models import GPT, GPTConfig, next_byte_loss, shard
from common.parallel import gpt_plan
from shardrt import checkpoint
from shardrt.comm import DeviceMesh, World
from shardrt.instruments.progress import logged_bar
from shardrt.parallel import SummedGradients, context_parallel, context_parallel_shard, cross_entropy, parallelize_module

if TYPE_CHECKING:
    from common.stages import Pipeline

ROWS, CONTEXT, MICROBATCHES = 8, 16, 2
TOLERANCE = 1e-9
LR = 0.01


class Dimensions(NamedTuple):
    """A split of four ranks; what pp, cp and tp leave is data parallel, over `replicas` of shards.   ep: of these."""

    name: str
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    replicas: int = 1


DIMENSIONS = [
    Dimensions("FSDP"),
    Dimensions("HSDP", replicas=2),
    Dimensions("TP", tp=4),
    Dimensions("FSDP x TP", tp=2),
    Dimensions("CP", cp=4),
    Dimensions("FSDP x CP", cp=2),
    Dimensions("HSDP x CP", cp=2, replicas=2),
    Dimensions("EP", ep=4),
    Dimensions("FSDP x EP", ep=2),
    Dimensions("FSDP x PP", pp=2),
    Dimensions("HSDP x PP", pp=2, replicas=2),
    Dimensions("PP x TP", pp=2, tp=2),
    Dimensions("PP x CP", pp=2, cp=2),
    Dimensions("PP x EP", pp=2, ep=2),
    Dimensions("CP x TP", cp=2, tp=2),
    Dimensions("CP x EP", cp=2, ep=4),
]


@functools.cache
def mesh_of(world: World, dimensions: Dimensions) -> DeviceMesh:
    """One for all models that are split so: its communicators are made once."""
    _, pp, cp, tp, *_ = dimensions
    return DeviceMesh(world.comm, (pp, world.size // (pp * cp * tp), cp, tp), ("pp", "dp", "cp", "tp"))


class Side:
    """A model and its training: the whole one of one process, or this rank's part of it."""

    def __init__(self, model: nn.Module) -> None:
        self.model: Any = model
        self.scale: Callable[[torch.Tensor], torch.Tensor] = lambda loss: loss

    @property
    def params(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def loss(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The loss that a backward begins with."""
        return self.scale(
            cross_entropy(logits, targets) if isinstance(logits, shardrt.DTensor) else next_byte_loss(logits, targets)
        )

    def backward(self, key: int, *, syncs: bool = True) -> None:
        """Add the gradients of a batch.   syncs: reduce them, and what waits."""
        inputs, targets = batch(key)
        self.loss(self.model(inputs), targets).backward()

    @torch.no_grad()
    def evaluate(self, key: int) -> torch.Tensor:
        """The mean loss of a batch, ()."""
        inputs, targets = batch(key)
        self.model.eval()
        loss = next_byte_loss(self.model(inputs), targets)
        self.model.train()
        return loss


class Divided(Side):
    """A rank's part of the model, divided as `dimensions` say."""

    def __init__(self, world: World, whole: nn.Module, dimensions: Dimensions) -> None:
        self.world, self.dimensions, self.mesh = world, dimensions, mesh_of(world, dimensions)
        _, pp, _, tp, ep, replicas = dimensions
        sharing = self.mesh["dp", "cp"].flatten()
        over = (
            sharing if replicas == 1 else sharing.unflatten((replicas, int(sharing.size) // replicas), ("replicate", "shard"))
        )
        model: nn.Module = whole
        if pp > 1:
            from common.stages import GPTStage

            model = GPTStage(whole, self.mesh["pp"].rank, pp)
        if tp > 1:
            plan = gpt_plan(shardrt.parallel, shardrt)
            if any(name.endswith(".base_layer") for name, _ in model.named_modules()):
                plan |= adapted(plan)
            own = {name: style for name, style in plan.items() if getattr(model, name.split(".")[0]) is not None}
            parallelize_module(model, self.mesh["tp"], own)
        if ep > 1:
            same_experts = divide_experts(model, sharing, ep)
            for experts in experts_of(model):
                shardrt.fully_shard(experts, mesh=same_experts)
        shard(model, functools.partial(shardrt.fully_shard, mesh=over))
        super().__init__(model)
        self.pipeline = self._pipeline() if pp > 1 else None

    def _pipeline(self) -> Pipeline:
        from common.stages import Pipeline

        part = CONTEXT // self.dimensions.cp
        rows = ROWS // (int(self.mesh["dp"].size) * MICROBATCHES)
        tokens = torch.empty(rows, part, dtype=torch.int64, device="meta")
        shape = rows, part // self.dimensions.tp, config(experts=self.dimensions.ep > 1).channels
        activations = torch.empty(shape, dtype=torch.float64, device="meta", requires_grad=True)
        return Pipeline(self.model, self.mesh["pp"], self.loss, MICROBATCHES, (tokens, activations))

    def _batch(self, key: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dp, positions = self.mesh["dp"], torch.arange(CONTEXT)
        inputs, targets = (each.chunk(int(dp.size))[dp.rank] for each in batch(key))
        if self.dimensions.cp > 1:
            inputs, targets, positions = context_parallel_shard(self.mesh["cp"], [inputs, targets, positions], [1, 1, 0])
        return inputs, targets, positions

    def _sequences(self) -> AbstractContextManager[None]:
        return nullcontext() if self.dimensions.cp == 1 else context_parallel(self.mesh["cp"], seq_len=CONTEXT)

    def backward(self, key: int, *, syncs: bool = True) -> None:
        inputs, targets, positions = self._batch(key)
        with self._sequences():
            if self.pipeline is not None:
                self.pipeline.step(inputs, targets, positions)
            else:
                self.model.set_requires_gradient_sync(syncs)
                self.loss(self.model(inputs, positions), targets).backward()

    @torch.no_grad()
    def evaluate(self, key: int) -> torch.Tensor:
        inputs, targets, positions = self._batch(key)
        self.model.eval()
        with self._sequences():
            if self.pipeline is not None:
                loss = self.pipeline.evaluate(inputs, targets, positions)
            else:
                loss = self.loss(self.model(inputs, positions), targets)
        self.model.train()
        return self.world.mean(loss)


def config(*, experts: bool) -> GPTConfig:
    return GPTConfig(layers=2, heads=4, channels=16, context=CONTEXT, tied=False, experts=4 if experts else 0)


def batch(key: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of all ranks, and the next ones."""
    drawn = torch.randint(0, 256, (ROWS, CONTEXT + 1), generator=torch.Generator().manual_seed(key))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def adapted(plan: dict[str, Any]) -> dict[str, Any]:
    """The styles of attention with PEFT's adapters, as docs/tensor_parallel.md says."""
    colwise, rowwise = plan.pop("blocks.*.attention.qkv"), plan.pop("blocks.*.attention.out")
    return {
        "blocks.*.attention.qkv.base_layer": colwise,
        "blocks.*.attention.qkv.lora_B.default": colwise,
        "blocks.*.attention.out.base_layer": rowwise,
        "blocks.*.attention.out.lora_A.default": rowwise,
        "blocks.*.attention.out.lora_B.default": SummedGradients(),  # a stage returns a part of the tokens
    }


# ---------------------------------------------------------------------- comparisons


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, shardrt.DTensor) else tensor).detach()


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE, msg=lambda text: f"{what}: {text}")


def compare(plain: Side, ours: Side, when: str) -> None:
    """Every parameter and gradient of this rank's stage. Collective."""
    for name, param in ours.params.items():
        expected = plain.params[name]
        close(full(param), expected.detach(), f"{name} {when}")
        assert (param.grad is None) == (expected.grad is None), f"{name} {when}: a gradient on one side only"
        if param.grad is not None and expected.grad is not None:
            close(full(param.grad), expected.grad, f"the gradient of {name} {when}")


def adamw(side: Side) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in side.model.parameters() if p.requires_grad], LR, foreach=False)


def train(plain: Side, ours: Side, keys: range, optimizers: Sequence[torch.optim.Optimizer] | None = None) -> None:
    """Steps of both, compared."""
    optimizers = optimizers or [adamw(plain), adamw(ours)]
    for key in keys:
        for side in (plain, ours):
            side.backward(key)
        compare(plain, ours, f"after backward {key}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(plain, ours, "after the last step")


# ---------------------------------------------------------------------- features

Make = Callable[[Callable[[nn.Module], object] | None], tuple[Side, Divided]]


def training(make: Make) -> None:
    train(*make(None), range(3))


def clipping(make: Make) -> None:
    plain, ours = make(None)
    optimizers = [adamw(plain), adamw(ours)]
    for key in range(2):
        plain.backward(key)
        ours.backward(key)
        norms = nn.utils.clip_grad_norm_(plain.model.parameters(), 0.1), shardrt.clip_grad_norm_(ours.model.parameters(), 0.1)
        close(norms[1], norms[0], "the norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    compare(plain, ours, "after clipped steps")


def scaling(make: Make) -> None:
    plain, ours = make(None)
    optimizers, scalers = [adamw(plain), adamw(ours)], [torch.amp.GradScaler("cpu", growth_interval=1) for _ in range(2)]
    for side, scaler in zip((plain, ours), scalers, strict=True):
        scaler.scale(torch.zeros(()))
        side.scale = scaler.scale
    for key in range(4):
        for side, optimizer, scaler in zip((plain, ours), optimizers, scalers, strict=True):
            side.backward(key)
            if key == 1 and (param := side.params.get("tokens.weight")) is not None and param.grad is not None:
                (param.grad.to_local() if isinstance(param.grad, shardrt.DTensor) else param.grad)[-1:] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale(), (
            f"scales {[each.get_scale() for each in scalers]} in step {key}"
        )
    compare(plain, ours, "after scaled steps")


def accumulation(make: Make) -> None:
    plain, ours = make(None)
    for key in range(3):
        for side in (plain, ours):
            side.backward(key, syncs=key == 2)
    compare(plain, ours, "after three backwards")


def recomputation(make: Make) -> None:
    def wrap(model: nn.Module) -> None:
        for block in model.get_submodule("blocks").children():
            block.forward = functools.partial(recomputed, block.forward, use_reentrant=False)

    train(*make(wrap), range(2))


def evaluation(make: Make) -> None:
    plain, ours = make(None)
    optimizers = [adamw(plain), adamw(ours)]
    for key in range(2):
        losses = []
        for side, optimizer in zip((plain, ours), optimizers, strict=True):
            side.backward(key)
            losses.append(side.evaluate(7))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(side.evaluate(8))
        close(losses[2], losses[0], "the loss between backward and step")
        close(losses[3], losses[1], "the loss after a step")
    compare(plain, ours, "after steps with evaluations")


def freezing(make: Make) -> None:
    plain, ours = make(None)
    optimizers = [torch.optim.AdamW(side.model.parameters(), LR, foreach=False) for side in (plain, ours)]
    for key, trains in enumerate((True, False, True)):
        for side in (plain, ours):
            for name, param in side.params.items():
                if "attention." in name or name.startswith("tokens"):
                    param.requires_grad_(trains)
        train(plain, ours, range(key, key + 1), optimizers)


def adapters(make: Make) -> None:
    import peft

    def adapt(model: nn.Module) -> None:
        torch.manual_seed(0)
        options = peft.LoraConfig(r=3, target_modules=["qkv", "out"], init_lora_weights=False)
        peft.inject_adapter_in_model(options, model)
        model.double()

    train(*make(adapt), range(3))


def adapters_of_experts(make: Make) -> None:
    import peft

    def adapt(model: nn.Module) -> None:
        torch.manual_seed(0)
        options = peft.LoraConfig(
            r=3, target_modules=[], target_parameters=["experts.up", "experts.down"], init_lora_weights=False
        )
        peft.inject_adapter_in_model(options, model)
        model.double()

    train(*make(adapt), range(3))


def checkpoints(make: Make) -> None:
    """Saved in this split; loaded into one process's worth of FSDP, which trains on, and back."""
    plain, ours = make(None)
    optimizers = [adamw(plain), adamw(ours)]
    train(plain, ours, range(2), optimizers)
    with shared_folder(ours.world) as folder:
        checkpoint.save(folder / "a", {"model": ours.model, "optimizer": optimizers[1]})
        other = Divided(ours.world, GPT(config(experts=ours.dimensions.ep > 1), seed=5).double(), Dimensions("FSDP"))
        of_other = adamw(other)
        checkpoint.load(folder / "a", {"model": other.model, "optimizer": of_other})
        train(plain, other, range(2, 3), [optimizers[0], of_other])
        checkpoint.save(folder / "b", {"model": other.model, "optimizer": of_other})
        checkpoint.load(folder / "b", {"model": ours.model, "optimizer": optimizers[1]})
    train(plain, ours, range(3, 4), optimizers)


def weights_as_safetensors(make: Make) -> None:
    from safetensors.torch import load_file

    plain, ours = make(None)
    with shared_folder(ours.world) as folder:
        checkpoint.save_safetensors(ours.model, folder / "out")
        saved = {
            name: value for file in sorted((folder / "out").glob("*.safetensors")) for name, value in load_file(file).items()
        }
        assert saved.keys() >= plain.params.keys(), f"it lacks {plain.params.keys() - saved.keys()}"
        for name, param in plain.params.items():
            assert torch.equal(saved[name], param), name
        with torch.no_grad():
            for side in (plain, ours):
                for param in side.params.values():
                    param.mul_(2)
        checkpoint.load_safetensors(ours.model, folder / "out")
        for param in plain.params.values():
            param.data.div_(2)
    compare(plain, ours, "after the load")


def full_state_dicts(make: Make) -> None:
    plain, ours = make(None)
    optimizers = [adamw(plain), adamw(ours)]
    train(plain, ours, range(2), optimizers)
    options = checkpoint.StateDictOptions(full_state_dict=True)
    found = checkpoint.get_model_state_dict(ours.model, options=options)
    for name in ours.params:
        close(found[name], plain.params[name].detach(), name)
    state = checkpoint.get_optimizer_state_dict(ours.model, optimizers[1], options=options)
    for name, values in state["state"].items():
        close(values["exp_avg"], optimizers[0].state[plain.params[name]]["exp_avg"], f"exp_avg of {name}")
    checkpoint.set_model_state_dict(ours.model, found, options=options)
    checkpoint.set_optimizer_state_dict(ours.model, optimizers[1], state, options=options)
    train(plain, ours, range(2, 3), optimizers)


def averages(make: Make) -> None:
    plain, ours = make(None)
    optimizers = [adamw(plain), adamw(ours)]
    averaged = [AveragedModel(side.model) for side in (plain, ours)]
    for key in range(2):
        train(plain, ours, range(key, key + 1), optimizers)
        for each, side in zip(averaged, (plain, ours), strict=True):
            each.update_parameters(side.model)
    expected = dict(averaged[0].module.named_parameters())
    for name, param in averaged[1].module.named_parameters():
        close(full(param), expected[name].detach(), f"the average of {name}")


FEATURES: dict[str, Callable[[Make], None]] = {
    "training": training,
    "clipping": clipping,
    "GradScaler": scaling,
    "accumulation": accumulation,
    "recomputation": recomputation,
    "evaluation": evaluation,
    "freezing": freezing,
    "PEFT adapters": adapters,
    "PEFT adapters of experts": adapters_of_experts,
    "checkpoints": checkpoints,
    "safetensors": weights_as_safetensors,
    "full state dicts": full_state_dicts,
    "averaged weights": averages,
}


# ---------------------------------------------------------------------- the table


@contextmanager
def shared_folder(world: World) -> Iterator[Path]:
    folder = Path(world.comm.exchange(tempfile.mkdtemp() if world.rank == 0 else "")[0])
    try:
        yield folder
    finally:
        world.barrier()
        if world.rank == 0:
            shutil.rmtree(folder)


def cell(world: World, dimensions: Dimensions, feature: Callable[[Make], None]) -> str:
    """What a feature does in a split: "yes", "-" where it does not apply, who refuses it, or what is wrong. Collective."""

    def make(change: Callable[[nn.Module], object] | None) -> tuple[Side, Divided]:
        whole = GPT(config(experts=dimensions.ep > 1), seed=1).double()
        if change is not None:
            change(whole)
        return Side(whole), Divided(world, copy.deepcopy(whole), dimensions)

    if feature is adapters_of_experts and dimensions.ep == 1:
        return "-"
    try:
        feature(make)
        found = "yes"
    except AssertionError as error:
        found = f"WRONG: {error}"
    except (ValueError, NotImplementedError, RuntimeError) as error:
        found = f"refused: {type(error).__name__}: {error}"
    everyone = world.comm.exchange(found)
    wrong = [text for text in everyone if text.startswith("WRONG")]
    if not wrong and len({text[:20] for text in everyone}) > 1:
        return f"WRONG: the ranks differ: {everyone}"
    return (wrong or everyone)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dimension", choices=[each.name for each in DIMENSIONS], action="append", help="some columns")
    parser.add_argument("--feature", choices=list(FEATURES), action="append", help="some rows")
    chosen = parser.parse_args()
    warnings.simplefilter("ignore")
    world = shardrt.init("cpu")
    if world.size != 4:
        parser.error(f"expected 4 ranks, found {world.size}")
    columns = [each for each in DIMENSIONS if chosen.dimension is None or each.name in chosen.dimension]
    rows = {name: each for name, each in FEATURES.items() if chosen.feature is None or name in chosen.feature}
    notes, table = list[str](), list[list[str]]()
    with logged_bar(total=len(columns) * len(rows), disable=world.rank > 0) as progress:
        for dimensions in columns:
            table.append([])
            for name, feature in rows.items():
                found = cell(world, dimensions, feature)
                if found not in ("yes", "-"):
                    notes.append(f"{dimensions.name}, {name}: {found[:300]}")
                table[-1].append(found.partition(":")[0])
                progress.update()
    if world.rank == 0:
        print("| | " + " | ".join(rows) + " |\n|---|" + "---|" * len(rows))
        for dimensions, cells in zip(columns, table, strict=True):
            print(f"| {dimensions.name} | " + " | ".join(cells) + " |")
        print("\n".join(["", *notes]))
    return any("WRONG" in cells for cells in table)


if __name__ == "__main__":
    sys.exit(main())
