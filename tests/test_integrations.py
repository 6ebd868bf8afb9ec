"""Training frameworks on sharded models, compared with the same framework in a single process. One job for each framework.

The ranks of a job import this file and run one of its functions: frameworks are slow to import and change global state.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed
from torch import nn

import shardrt
from ranks import on_ranks, run_script, skip_at_home
from shardrt.comm import World


def run_on_ranks(body: str, folder: Path, *packages: str) -> None:
    """Run `body(world, folder)` of this file as a job of two ranks."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            skip_at_home(f"needs {package}: pip install 'shardrt[integrations]'")
    source = f"""
import pathlib, shardrt, test_integrations
world = shardrt.init("cpu")
test_integrations.{body}(world, pathlib.Path({str(folder)!r}))
shardrt.finalize()
"""
    done = run_script(source, 2)
    assert done.returncode == 0, done.stdout + done.stderr


@on_ranks(2)
def test_launcher_variables_are_hidden(world: World) -> None:
    def seen() -> list[str]:
        return [k for k in os.environ if k.startswith(("PMI", "OMPI", "MPI_LOCAL", "SLURM_")) or k == "RANK"]

    def look_and_fail() -> None:
        with shardrt.without_launcher_variables():
            assert not seen()
            assert os.environ["PATH"] == before["PATH"]
            with shardrt.without_launcher_variables():
                pass
            assert not seen()
            raise ZeroDivisionError

    os.environ["RANK"] = "1"
    before = dict(os.environ)
    assert len(seen()) > 1
    with pytest.raises(ZeroDivisionError):
        look_and_fail()
    assert dict(os.environ) == before
    del os.environ["RANK"]


def test_repeated_blocks_are_found_in_lists_only() -> None:
    from shardrt.integrations.world import repeated_blocks

    def make_block() -> nn.Module:
        return nn.ModuleDict({"mixed": nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))})

    model = nn.Module()
    model.body = nn.Module()
    model.body.blocks = nn.ModuleList(make_block() for _ in range(2))
    model.head = nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())
    model.last = nn.Linear(2, 2)
    assert repeated_blocks(model) == [*model.body.blocks, model.head[1], model.head[3]]


def test_launcher_variables_are_not_hidden_before_init() -> None:
    with pytest.raises(RuntimeError, match=r"call shardrt\.init\(\) first"), shardrt.without_launcher_variables():
        pass


def run_documentation(page: str, folder: Path) -> None:
    """Run the first Python block of a page of docs/."""
    text = (Path(__file__).parent.parent / "docs" / page).read_text()
    os.chdir(folder)
    exec(compile(text.split("```python\n")[1].split("```")[0], page, "exec"), {"__name__": "__main__"})


def compare_parameters(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        whole = param.full_tensor() if isinstance(param, shardrt.DTensor) else param
        torch.testing.assert_close(whole, expected, rtol=0, atol=tolerance, msg=name)


# ---------------------------------------------------------------------- transformers


def test_transformers(tmp_path: Path) -> None:
    run_on_ranks("train_with_transformers", tmp_path, "transformers", "accelerate")


def train_with_accelerate(world: World) -> None:
    from shardrt.integrations.accelerate import Accelerator

    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        if sharded:
            shardrt.fully_shard(model)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    rows = torch.randn(15, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sharded = False
    whole, step = make()
    for part in rows[:8], torch.cat([rows[8:], rows[:1]]):  # the last batch is filled from the first
        whole(part).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
        step.step()
        step.zero_grad()

    sharded = True
    accelerator = Accelerator(gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match=rf"parameter '0.weight' of 'Sequential' on rank {world.rank} is not sharded"):
        accelerator.prepare(whole)
    model, optimizer, loader = accelerator.prepare(*make(), torch.utils.data.DataLoader(rows, batch_size=2))
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).square().mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(accelerator.gather_for_metrics(batch))
    compare_parameters(model, whole, 1e-12)
    assert torch.equal(torch.cat(seen), rows)
    state = accelerator.get_state_dict(model)
    assert list(state) == (list(whole.state_dict()) if world.rank == 0 else [])
    assert accelerator.gather({"rank": torch.tensor(world.rank)})["rank"].tolist() == [0, 1]
    assert accelerator.reduce(torch.tensor([world.rank + 1]), "mean").tolist() == [1.5]
    padded = accelerator.pad_across_processes(torch.ones(2, world.rank + 1), dim=1, pad_index=7)
    assert padded.tolist() == [[1.0, 7.0 if world.rank == 0 else 1.0]] * 2
    with pytest.raises(RuntimeError, match=rf"save_state on rank {world.rank}"):
        accelerator.save_state("nowhere")
    with pytest.raises(RuntimeError, match=r"expected tensors, found \['str'\]"):
        accelerator.gather_for_metrics(["text"])
    torch.manual_seed(world.rank)  # a seed per rank, as for dropout
    shuffled = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(16), batch_size=2, shuffle=True))
    parts = world.comm.exchange([row for batch in shuffled for row in batch.tolist()])
    assert sorted(row for part in parts for row in part) == list(range(16))


class Sentences(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens; row n has n ignored labels."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(0, 50, (count, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        labels = self.tokens[row].clone()
        labels[: row % 7] = -100
        return {"input_ids": self.tokens[row], "labels": labels}


def make_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).double()


def train_with_transformers(world: World, folder: Path) -> None:
    import transformers
    from transformers import TrainingArguments

    from shardrt.integrations.transformers import ShardedTrainer

    train_with_accelerate(world)

    def accuracy(prediction: Any) -> dict[str, float]:
        assert prediction.predictions.shape == (7, 8, 50)
        return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    def make(kind: Any, name: str, accumulate: int, **options: Any) -> Any:
        with shardrt.without_launcher_variables():
            arguments = TrainingArguments(
                str(folder / name), max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=accumulate,
                per_device_eval_batch_size=accumulate, learning_rate=1e-2, max_grad_norm=0.5, logging_steps=1, report_to="none",
                save_steps=2, disable_tqdm=True, use_cpu=True, label_names=["labels"], **options,
            )  # fmt: skip
            return kind(make_gpt2(), arguments, train_dataset=Sentences(40), compute_metrics=accuracy)

    def evaluate(trainer: Any) -> tuple[float, float]:
        accurate = trainer.evaluate(Sentences(7))["eval_accuracy"]
        trainer.compute_metrics = None
        return accurate, trainer.evaluate(Sentences(8))["eval_loss"]

    # Run first, since all trainers of a process share Accelerate's state.
    whole = make(transformers.Trainer, f"whole{world.rank}", accumulate=4)
    whole.train()
    metrics = evaluate(whole)
    sharded = make(ShardedTrainer, "sharded", accumulate=2)
    assert (sharded.args.world_size, sharded.args.process_index) == (2, world.rank)
    sharded.train()

    def compare(model: nn.Module) -> None:
        compare_parameters(model, whole.model, 1e-12)

    compare(sharded.model)
    logs = [[log for log in one.state.log_history if "eval_loss" not in log] for one in (sharded, whole)]
    for mine, theirs in zip(*logs, strict=True):
        assert mine.keys() == theirs.keys()
        for key in {"loss", "grad_norm", "learning_rate", "train_loss", "total_flos"} & mine.keys():
            assert mine[key] == pytest.approx(theirs[key], rel=1e-6), key
    assert evaluate(sharded) == pytest.approx(metrics)

    # Full models and optimizer states are saved, and training resumes from them.
    for checkpoint in ("checkpoint-2", "checkpoint-4"):
        files = [{p.name for p in (folder / run / checkpoint).iterdir()} for run in ("sharded", f"whole{world.rank}")]
        assert files[0] - {f"rng_state_{rank}.pth" for rank in (0, 1)} == files[1] - {"rng_state.pth"}
    saved = transformers.AutoModelForCausalLM.from_pretrained(folder / "sharded" / "checkpoint-4", dtype=torch.float64)
    assert isinstance(saved, transformers.GPT2LMHeadModel)
    compare(saved)
    again = make(ShardedTrainer, "again", accumulate=2)
    again.train(resume_from_checkpoint=str(folder / "sharded" / "checkpoint-2"))
    compare(again.model)
    alone = make(transformers.Trainer, f"alone{world.rank}", accumulate=4)
    alone.train(resume_from_checkpoint=str(folder / "sharded" / "checkpoint-2"))
    compare(alone.model)

    # Labels are also shifted with label smoothing, which the Trainer decides by the class name.
    kinds = {"smooth": transformers.Trainer, "smooth_sharded": ShardedTrainer}
    smooth = [make(kind, name, accumulate=1, label_smoothing_factor=0.1) for name, kind in kinds.items()]
    batch = torch.utils.data.default_collate([Sentences(2)[row] for row in range(2)])
    losses = [float(one.compute_loss(one.model, dict(batch))) for one in smooth]
    assert losses[0] == pytest.approx(losses[1])

    with pytest.raises(ValueError, match=r"rank \d: expected no auto_find_batch_size in TrainingArguments"):
        make(ShardedTrainer, "refused", accumulate=1, auto_find_batch_size=True)
    run_documentation("transformers.md", folder)
    transformers.GPT2LMHeadModel.from_pretrained(folder / "runs" / "tiny" / "final")
    assert not torch.distributed.is_initialized()


# ---------------------------------------------------------------------- Lightning


def test_lightning(tmp_path: Path) -> None:
    run_on_ranks("train_with_lightning", tmp_path, "lightning")


def train_with_lightning(world: World, folder: Path) -> None:
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping

    from shardrt.integrations.lightning import ShardedStrategy

    class Regression(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.scale = nn.Parameter(torch.ones(5))  # a parameter of the module itself, not of a block
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)))
            self.seen: list[int] = []

        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            return (self.blocks(batch[:, 1:] * self.scale) - batch[:, 1:].sin()).square().mean()

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.seen += batch[:, 0].int().tolist()
            loss = self.loss(batch)
            self.log("loss", loss, sync_dist=True, on_step=False, on_epoch=True)
            self.log("largest", batch[:, 0].max(), sync_dist=True, reduce_fx="max", on_step=False, on_epoch=True)
            return loss

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            self.log("validation", self.loss(batch), sync_dist=True)

        def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return self.blocks(batch[:, 1:] * self.scale)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    # A step accumulates all rows, because Lightning's samplers shuffle them.
    rows = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rows = torch.cat([torch.arange(16.0, dtype=torch.float64)[:, None], rows], 1)

    def fit(name: str, strategy: Any, epochs: int, ckpt_path: Path | None = None) -> tuple[Any, Any]:
        loader: Any = torch.utils.data.DataLoader(rows, batch_size=8 if strategy == "auto" else 4)
        module = Regression()
        stop = EarlyStopping("validation", patience=9)
        trainer = lightning.Trainer(
            accelerator="cpu", strategy=strategy, devices=1, max_epochs=epochs, accumulate_grad_batches=2, precision="64-true",
            gradient_clip_val=0.1, logger=False, default_root_dir=folder / name, callbacks=[stop], log_every_n_steps=1,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, loader, loader, ckpt_path=ckpt_path)
        return trainer, module

    with shardrt.without_launcher_variables():
        alone, whole = fit(f"whole{world.rank}", "auto", epochs=3)
    trainer, module = fit("sharded", ShardedStrategy(), epochs=3)
    assert isinstance(module, shardrt.FSDPModule)
    assert sum(isinstance(block, shardrt.FSDPModule) for block in module.blocks) == 3
    assert sorted(row for seen in world.comm.exchange(module.seen[:8]) for row in seen) == list(range(16))

    compare_parameters(module, whole, 1e-12)
    for key, value in alone.callback_metrics.items():
        torch.testing.assert_close(trainer.callback_metrics[key], value, rtol=0, atol=1e-12, msg=key)
    (expected,) = alone.validate(whole, torch.utils.data.DataLoader(rows, 8), verbose=False)
    (found,) = trainer.validate(module, torch.utils.data.DataLoader(rows, 4), verbose=False)
    assert found == pytest.approx(expected, abs=1e-12)

    predicted = trainer.predict(module, torch.utils.data.DataLoader(rows[:5], 1))  # three rows on one rank, two on the other
    with torch.no_grad():
        expected_rows = [whole.predict_step(row[None], 0) for row in rows[world.rank : 5 : 2]]
    torch.testing.assert_close(predicted, expected_rows, rtol=0, atol=1e-12)

    # A checkpoint is full, and training resumes from it.
    first, _ = fit("first", ShardedStrategy(), epochs=1)
    saved = folder / "first.ckpt"
    first.save_checkpoint(saved)
    compare_parameters(fit("again", ShardedStrategy(), epochs=3, ckpt_path=saved)[1], whole, 1e-12)
    with shardrt.without_launcher_variables():
        _, loaded = fit(f"loaded{world.rank}", "auto", epochs=3, ckpt_path=saved)
    compare_parameters(loaded, whole, 1e-6)  # Lightning loads it before it makes the module float64

    strategy = trainer.strategy
    assert strategy.broadcast(f"from {world.rank}", src=1) == "from 1"
    assert strategy.reduce_boolean_decision(world.rank == 0, all=False)
    assert not strategy.reduce_boolean_decision(world.rank == 0)
    assert int(strategy.reduce(torch.tensor(world.rank + 1), reduce_op=torch.distributed.ReduceOp.SUM)) == 3
    assert float(strategy.reduce(torch.tensor(world.rank + 1))) == 1.5
    assert module.all_gather(torch.tensor([world.rank])).tolist() == [[0], [1]]
    with pytest.raises(ValueError, match=rf"parameter 'scale' of 'Regression' on rank {world.rank} is not sharded"):
        fit("part", ShardedStrategy(lambda module: shardrt.fully_shard(module.blocks)), epochs=1)
    run_documentation("lightning.md", folder)
    assert (folder / "runs" / "lightning.ckpt").is_file()
    assert not torch.distributed.is_initialized()
