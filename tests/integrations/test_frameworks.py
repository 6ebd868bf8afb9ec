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
from ranks import FRESH, on_ranks, refused, run_script, skip_at_home
from shardrt.comm import World


def run_on_ranks(body: str, folder: Path, *packages: str) -> None:
    """Run `body(world, folder)` of this file as a job of two ranks."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            skip_at_home(f"needs {package}: pip install {package}")
    source = f"""
import pathlib, shardrt, test_frameworks
world = shardrt.init("cpu")
test_frameworks.{body}(world, pathlib.Path({str(folder)!r}))
shardrt.finalize()
"""
    run_script(source, 2, FRESH, code=0)


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
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    os.chdir(folder)
    exec(compile(text.split("```python\n")[1].split("```")[0], page, "exec"), {"__name__": "__main__"})


def compare_parameters(model: nn.Module, reference: nn.Module, tolerance: float) -> None:
    for (name, param), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        whole = param.full_tensor() if isinstance(param, shardrt.DTensor) else param
        torch.testing.assert_close(whole, expected, rtol=0, atol=tolerance, msg=name)


# ---------------------------------------------------------------------- transformers


@pytest.mark.rest
def test_transformers(tmp_path: Path) -> None:
    run_on_ranks("train_with_transformers", tmp_path, "transformers", "accelerate")


@pytest.mark.rest
def test_accelerate_utils(tmp_path: Path) -> None:
    run_on_ranks("call_accelerate_utils", tmp_path, "accelerate", "transformers")


def call_accelerate_utils(world: World, folder: Path) -> None:
    """Every public function of accelerate.utils.operations and member of the states that span processes."""
    import inspect

    import accelerate
    from accelerate import utils
    from accelerate.utils import (  # by name, before the world is joined
        broadcast,
        broadcast_object_list,
        copy_tensor_to_devices,
        gather,
        gather_object,
        operations,
        pad_across_processes,
        reduce,
        synchronize_rng_states,
    )
    from transformers import TrainingArguments

    from shardrt.integrations.accelerate import Accelerator
    from shardrt.integrations.transformers import world_state

    own = torch.tensor([[float(world.rank)]], dtype=torch.float64)
    with shardrt.without_launcher_variables():
        assert accelerate.PartialState(cpu=True).num_processes == 1
    assert torch.equal(gather(own), own)
    assert gather_object([world.rank]) == [world.rank]
    accelerate.PartialState._reset_state()

    accelerator = Accelerator()
    both = torch.zeros(2, 3)
    crossing: dict[str, tuple[Any, Any]] = {
        "broadcast": (lambda: broadcast({"a": own.clone().t()}, from_process=1)["a"].tolist(), [[1.0]]),
        "broadcast_object_list": (lambda: broadcast_object_list([f"rank {world.rank}"], from_process=1), ["rank 1"]),
        "copy_tensor_to_devices": (lambda: copy_tensor_to_devices(own + 3 if world.rank == 1 else None).tolist(), [[4.0]]),
        "gather": (lambda: [each.tolist() for each in gather([own, own[0, 0]])], [[[0.0], [1.0]], [0.0, 1.0]]),
        "gather_object": (lambda: gather_object([{"rank": world.rank}, None]), [{"rank": 0}, None, {"rank": 1}, None]),
        "gather_tensor_shape": (lambda: operations.gather_tensor_shape(both if world.rank else None)[0].tolist(), [[2], [3]]),
        "pad_across_processes": (
            lambda: pad_across_processes(torch.ones(1, world.rank + 1), dim=-1, pad_index=7, pad_first=True).tolist(),
            [[1.0, 1.0]] if world.rank else [[7.0, 1.0]],
        ),
        "reduce": (lambda: [reduce(own + 1, kind).item() for kind in ("sum", "mean", "max")], [3.0, 1.5, 2.0]),
    }
    local = {
        "GatheredParameters", "chained_operation", "concatenate", "convert_outputs_to_fp32", "convert_to_fp32",
        "find_batch_size", "find_device",
        "get_data_structure", "get_shape", "honor_type", "ignorant_find_batch_size", "initialize_tensors", "is_namedtuple",
        "is_tensor_information", "is_torch_tensor", "is_torch_xpu_tensor", "listify", "pad_input_tensors", "recursively_apply",
        "send_to_device", "slice_tensors", "verify_operation",
    }  # fmt: skip
    public = {
        name
        for name, value in inspect.getmembers(operations, inspect.isfunction)
        if value.__module__ == operations.__name__ and not name.startswith("_")
    }
    assert public == local | set(crossing), public ^ (local | set(crossing))
    for name, (call, expected) in crossing.items():
        assert call() == expected, name
    assert reduce(torch.tensor(world.rank), "sum").dtype == torch.int64
    with pytest.raises(ValueError, match=rf"copy_tensor_to_devices on rank {world.rank}: .*, found tensors on ranks \[0, 1\]"):
        copy_tensor_to_devices(own)
    with pytest.raises(ValueError, match=rf"_list on rank {world.rank}: expected from_process in 0..1, found 2"):
        broadcast_object_list([0], from_process=2)
    refused(rf"reduce on rank {world.rank}: expected one of sum, mean, max or none, found 'min'", lambda: reduce(own, "min"))
    assert str(inspect.signature(gather)) == "(tensor)"
    assert {name for name in dir(accelerate.PartialState) if not name.startswith("_")} == {
        "default_device", "destroy_process_group", "initialized", "print", "set_device",  # the same in one process
        "is_last_process", "is_local_main_process", "is_main_process", "use_distributed", "local_main_process_first",
        "main_process_first", "on_last_process", "on_local_main_process", "on_local_process", "on_main_process", "on_process",
        "split_between_processes", "wait_for_everyone",
    }  # fmt: skip

    def main_goes_first(first: Any) -> None:
        with first():
            if world.rank == 0:
                (folder / "first").touch()
            assert (folder / "first").exists()
        world.barrier()
        (folder / "first").unlink(missing_ok=True)
        world.barrier()

    states: list[Any] = [accelerate.PartialState(), accelerator.state, accelerator]
    for state in states:
        log: list[Any] = []
        with state.split_between_processes([0, 1, 2], apply_padding=True) as rows:
            assert rows == ([0, 1], [2, 2])[world.rank]
        with state.split_between_processes(torch.arange(3), apply_padding=True) as rows:
            assert rows.tolist() == ([0, 1], [2, 2])[world.rank]
        main_goes_first(state.main_process_first)
        main_goes_first(state.local_main_process_first)
        state.wait_for_everyone()
        members = {
            "num_processes": world.size,
            "process_index": world.rank,
            "local_process_index": world.local_rank,
            "is_main_process": world.rank == 0,
            "is_local_main_process": world.local_rank == 0,
            "is_last_process": world.rank == world.size - 1,
            "use_distributed": True,
            "device": world.device,
        }
        for name, expected in members.items():
            assert getattr(state, name) == expected, (name, type(state))
        if state is accelerator.state:
            continue  # it has no decorators
        state.on_main_process(log.append)("main")
        state.on_local_main_process(log.append)("local main")
        state.on_last_process(log.append)("last")
        state.on_process(log.append, process_index=1)("process 1")
        state.on_local_process(log.append, local_process_index=1)("local process 1")
        assert log == (["main", "local main"], ["last", "process 1", "local process 1"])[world.rank], type(state)

    utils.set_seed(3, device_specific=True)
    assert torch.initial_seed() == 3 + world.rank
    synchronize_rng_states(["torch"])
    assert len(set(gather_object([float(torch.rand(()))]))) == 1
    assert accelerator.gather_for_metrics([f"text {world.rank}"]) == ["text 0", "text 1"]
    if world.rank:
        accelerator.set_trigger()
    assert accelerator.check_trigger()

    with world_state():
        arguments = TrainingArguments(str(folder), use_cpu=True)
    assert (arguments.world_size, arguments.process_index) == (2, world.rank)
    main_goes_first(arguments.main_process_first)
    main_goes_first(lambda: arguments.main_process_first(local=False))


def accumulate_with_accelerate(world: World, accelerator: Any, model: nn.Module, whole: nn.Module, rows: torch.Tensor) -> None:
    with accelerator.no_sync(model):
        losses = [model(rows[2 * world.rank + 4 * i :][:2]).square().mean() for i in range(2)]
        accelerator.backward(losses[0])
        assert all(param.grad is None for param in model.parameters())
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1])
    whole.zero_grad()
    sum(whole(rows[4 * i : 4 * i + 4]).square().mean() for i in range(2)).backward()
    for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad / 2, rtol=0, atol=1e-12)
    model.zero_grad()
    with accelerator.join_uneven_inputs([model]):
        pass
    with pytest.raises(ValueError, match=rf"join_uneven_inputs on rank {world.rank}: all ranks have to run the same number"):
        accelerator.join_uneven_inputs([model], even_batches=False)


def train_with_accelerate(world: World, folder: Path) -> None:
    from accelerate import DataLoaderConfiguration

    from shardrt.integrations.accelerate import Accelerator

    rows16 = torch.arange(16)

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
    refused(rf"parameter '0.weight' of 'Sequential' on rank {world.rank} is not sharded", lambda: accelerator.prepare(whole))
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
    accumulate_with_accelerate(world, accelerator, model, whole, rows)
    padded = accelerator.pad_across_processes(torch.ones(2, world.rank + 1), dim=1, pad_index=7)
    assert padded.tolist() == [[1.0, 7.0 if world.rank == 0 else 1.0]] * 2
    with pytest.raises(ValueError, match=rf"save_state on rank {world.rank}: expected no weights_name"):
        accelerator.save_state("nowhere", weights_name="x")
    with pytest.raises(ValueError, match=rf"register_save_state_pre_hook on rank {world.rank}: .* leave the hook out"):
        accelerator.register_save_state_pre_hook(print)
    with pytest.raises(ValueError, match=rf"register_load_state_pre_hook on rank {world.rank}: .* leave the hook out"):
        accelerator.register_load_state_pre_hook(print)
    assert accelerator.gather(torch.full((1 + world.rank, 2), world.rank)).tolist() == [[0, 0], [1, 1], [1, 1]]
    resume_with_accelerate(world, folder)
    resume_a_drawn_order(folder)

    class Shuffled(torch.utils.data.RandomSampler):
        """A sampler that draws from torch's random numbers when it is iterated."""

        def __iter__(self) -> Any:
            return iter(torch.randperm(16).tolist())

    def seen_by_all(loader: Any) -> list[int]:
        return sorted(row for part in world.comm.exchange([row for batch in loader for row in batch.tolist()]) for row in part)

    torch.manual_seed(world.rank)  # a seed per rank, as for dropout
    for seedable in (False, True):
        accelerator.dataloader_config.use_seedable_sampler = seedable
        own_order: Any = type(
            "OwnOrder", (torch.utils.data.Sampler,), {"__iter__": Shuffled.__iter__, "__len__": lambda _: 16}
        )()
        for order in ({"shuffle": True}, {"sampler": own_order}):
            assert seen_by_all(accelerator.prepare(torch.utils.data.DataLoader(rows16, batch_size=2, **order))) == list(
                range(16)
            )
    uneven = Accelerator(dataloader_config=DataLoaderConfiguration(even_batches=False))
    with pytest.raises(ValueError, match=rf"even_batches=False on rank {world.rank}: 7 batches cannot be shared equally by 2"):
        uneven.prepare(torch.utils.data.DataLoader(torch.arange(13), batch_size=2))


def resume_with_accelerate(world: World, folder: Path) -> None:
    """Four steps, and two after two that another accelerator took and saved: the same parameters, state and order of rows."""
    from accelerate.utils import ProjectConfiguration

    from shardrt.integrations.accelerate import Accelerator

    rows = torch.randn(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def make() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(), nn.Linear(5, 1)).double()
        shardrt.fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        accelerator = Accelerator(step_scheduler_with_optimizer=False)
        loader: Any = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True)
        return accelerator, *accelerator.prepare(model, optimizer, scheduler, loader)

    def train(epochs: int, accelerator: Any, model: Any, optimizer: Any, scheduler: Any, loader: Any) -> None:
        for _ in range(epochs):
            for batch in loader:
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()

    made = make()
    train(1, *made)
    made[0].save_state(str(folder / "state"))
    train(1, *made)
    again = make()
    torch.manual_seed(5)
    again[0].load_state(str(folder / "state"))
    train(1, *again)
    for mine, theirs in zip(again[1].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(mine.full_tensor(), theirs.full_tensor())
    assert again[3].get_last_lr() == made[3].get_last_lr()

    def named() -> tuple[Any, ...]:
        made = make()
        made[0].project_configuration = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
        return made

    values: list[float] = []
    for saves in (2, 1, 1):  # a job that is resumed twice
        made = named()
        if values:
            made[0].load_state()
            assert float(made[1][0].bias.full_tensor()[0]) == values[-1]
        for _ in range(saves):
            values.append(float(len(values)))
            with torch.no_grad():
                made[1][0].bias.fill_(values[-1])
            made[0].save_state()
    world.barrier()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["checkpoint_2", "checkpoint_3"]
    fresh, *_ = named()
    fresh.project_configuration.iteration = 2
    refused(rf"save_state on rank {world.rank}: '.*checkpoint_2' exists already; call load_state", fresh.save_state)


def resume_a_drawn_order(folder: Path) -> None:
    """Rank 0 alone draws the order of rows: its generator goes on, and the others' stay where they are."""
    from shardrt.integrations.accelerate import Accelerator

    def weighted() -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(3)  # that of rank 0 alone draws
        sampler = torch.utils.data.WeightedRandomSampler([1.0] * 16, 16, generator=generator)
        accelerator = Accelerator()
        return accelerator, accelerator.prepare(torch.utils.data.DataLoader(torch.arange(16), batch_size=4, sampler=sampler))

    accelerator, loader = weighted()
    before = [batch.tolist() for batch in loader]
    accelerator.save_state(str(folder / "weighted"))
    expected = [batch.tolist() for batch in loader]
    accelerator, loader = weighted()
    accelerator.load_state(str(folder / "weighted"))
    assert [batch.tolist() for batch in loader] == expected != before


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

    train_with_accelerate(world, folder)

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

    # So does the state of an optimizer that steps on local shards.
    in_one_go, resumed = (make(ShardedTrainer, name, accumulate=2, optim="adamw_bnb_8bit") for name in ("bits", "more bits"))
    for trainer in (in_one_go, resumed):
        trainer.model.float()
    in_one_go.train()
    resumed.train(resume_from_checkpoint=str(folder / "bits" / "checkpoint-2"))
    compare_parameters(resumed.model, in_one_go.model, 0.0)

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


@pytest.mark.rest
def test_transformers_beside_one_process(tmp_path: Path) -> None:
    run_on_ranks("compare_with_one_process", tmp_path, "transformers", "accelerate", "peft")


def compare_with_one_process(world: World, folder: Path) -> None:
    """What once trained nothing, gave other values or crashed, beside a plain Trainer with the same global batches."""
    import transformers
    from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, Trainer, TrainingArguments

    from shardrt.integrations.transformers import ShardedTrainer, ShardedTrainerMixin, shard_model

    class ShardedSeq2Seq(ShardedTrainerMixin, Seq2SeqTrainer):
        pass

    def arguments(name: str, alone: bool, kind: Any = TrainingArguments, rows: int = 2, **options: Any) -> Any:
        rows = rows * 2 if alone else rows
        with shardrt.without_launcher_variables():
            return kind(
                str(folder / (f"{name}-alone-{world.rank}" if alone else name)), per_device_train_batch_size=rows,
                per_device_eval_batch_size=rows, learning_rate=1e-2, max_steps=3, report_to="none", disable_tqdm=True,
                use_cpu=True, save_strategy="no", **options,
            )  # fmt: skip

    def both(run: Any) -> list[Any]:
        """The results of a plain Trainer and of ShardedTrainer."""
        with shardrt.without_launcher_variables():
            alone = run(Trainer, True)
        return [alone, run(ShardedTrainer, False)]

    def with_optimizer(kind: Any, alone: bool) -> Any:
        model = make_gpt2()
        groups = [
            {"params": [param for param in model.parameters() if param.dim() > 1], "weight_decay": 0.1},
            {"params": [param for param in model.parameters() if param.dim() == 1], "lr": 0.03},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        batch = torch.utils.data.default_collate([Sentences(2)[row] for row in range(2)])
        model(**batch).loss.backward()  # the optimizer has state already
        optimizer.step()
        optimizer.zero_grad()
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        with_both = arguments("optimizers", alone)
        trainer = kind(model, with_both, train_dataset=Sentences(40), optimizers=(optimizer, scheduler))
        trainer.train()
        assert optimizer.param_groups[1]["lr"] == pytest.approx(0.03 / 4)
        return trainer.model

    whole, sharded = both(with_optimizer)
    compare_parameters(sharded, whole, 1e-12)
    with pytest.raises(
        ValueError, match=rf"parameter 0 of group 0 of SGD, of shape \(50, 16\), on rank {world.rank} is no parameter"
    ):
        ShardedTrainer(make_gpt2(), arguments("other", False), optimizers=(torch.optim.SGD(make_gpt2().parameters()), None))

    compare_evaluations(both, arguments)
    compare_classification(both, arguments)

    def refuses(match: str, **options: Any) -> None:
        refused(match, lambda: ShardedTrainer(make_gpt2(), arguments("refused", False, **options)))

    refuses("average_tokens_across_devices=False", average_tokens_across_devices=False)
    refuses("split_batches=True", accelerator_config={"split_batches": True})
    refuses("expected no eval_use_gather_object", eval_use_gather_object=True)
    refuses("remove 'inputs'", batch_eval_metrics=True, include_for_metrics=["inputs"])
    skipping: Any = make_gpt2()
    skipping.transformer.layerdrop = 0.1
    with pytest.raises(ValueError, match=rf"rank {world.rank}: layerdrop of 'transformer' is 0.1"):
        ShardedTrainer(skipping, arguments("skipping", False), train_dataset=Sentences(8)).train()
    skipping.transformer.layerdrop, skipping.config.encoder_layerdrop = 0.0, 0.1  # as of speech models
    with pytest.raises(ValueError, match=rf"rank {world.rank}: encoder_layerdrop of '.*GPT2LMHeadModel' is 0.1"):
        ShardedTrainer(skipping, arguments("skipping", False), train_dataset=Sentences(8)).train()

    def grouped(kind: Any, alone: bool) -> Any:
        options = arguments("grouped", alone, train_sampling_strategy="group_by_length")
        trainer = kind(make_gpt2(), options, train_dataset=Lengths(40), data_collator=pad)
        trainer.train()
        return trainer.model

    whole, sharded = both(grouped)
    compare_parameters(sharded, whole, 1e-12)
    drawn = world.comm.exchange(torch.rand(()).item())  # each rank its own dropout
    assert drawn[0] != drawn[1]

    # save_pretrained of the model itself; of a PEFT model, the adapters.
    sharded.save_pretrained(folder / "saved")
    saved = transformers.GPT2LMHeadModel.from_pretrained(folder / "saved", dtype=torch.float64)
    compare_parameters(saved, whole, 1e-12)
    save_adapters(folder, arguments)
    generate_while_evaluating(ShardedSeq2Seq, Seq2SeqTrainer, Seq2SeqTrainingArguments, arguments)

    # A block that shares a parameter with what is outside of it stays in the root's group.
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    tied: Any = transformers.ModernBertForMaskedLM(
        transformers.ModernBertConfig(**sizes, pad_token_id=0, cls_token_id=1, sep_token_id=2)
    )
    shard_model(tied)
    assert not isinstance(tied.model.embeddings, shardrt.FSDPModule)
    assert all(isinstance(layer, shardrt.FSDPModule) for layer in tied.model.layers)
    assert tied.decoder.weight is tied.model.embeddings.tok_embeddings.weight


class Lengths(Sentences):
    """Rows of three to eight tokens."""

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {key: value[: 3 + row * 5 % 6] for key, value in super().__getitem__(row).items()}


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch of rows, filled with ignored labels."""
    padded = torch.nn.utils.rnn.pad_sequence
    labels = padded([row["labels"] for row in rows], batch_first=True, padding_value=-100)
    tokens = padded([row["input_ids"] for row in rows], batch_first=True)
    return {"input_ids": tokens, "attention_mask": tokens.new_ones(tokens.shape), "labels": labels}


def compare_evaluations(both: Any, arguments: Any) -> None:
    """Losses, predictions and metrics are those of the dataset's rows, however they divide by ranks and batches."""
    import transformers

    class Stream(torch.utils.data.IterableDataset[dict[str, torch.Tensor]]):
        def __iter__(self) -> Any:
            return iter([Sentences(5)[row] for row in range(5)])

    def evaluate(kind: Any, alone: bool, data: Any, rows: int, **options: Any) -> Any:
        def metrics(found: Any) -> dict[str, float]:
            return {"rows": len(found.predictions), "right": float((found.predictions == found.label_ids).mean())}

        class OwnStep(kind):
            """A step of the user's, which a rank without rows runs too."""

            def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
                assert len(inputs["labels"]) > 0
                return transformers.Trainer.prediction_step(self, model, inputs, *args, **kwargs)

        losses = []
        for of_user in (kind, OwnStep):
            trainer = of_user(
                make_gpt2(), arguments("evaluate", alone, rows=rows, **options), eval_dataset=data, compute_metrics=metrics,
                preprocess_logits_for_metrics=lambda logits, labels: logits[:, :, :2].max(-1).indices + 0 * labels[:1],
            )  # fmt: skip
            found = trainer.evaluate()
            predicted = trainer.predict(data)
            losses.append((found["eval_loss"], found["eval_rows"], found["eval_right"], predicted.metrics["test_loss"]))
        return losses, predicted.predictions, predicted.label_ids

    for data, rows, options in [
        (Sentences(13), 3, {}),  # a row for one rank, and repeated ones for the other
        (Sentences(16), 3, {"label_smoothing_factor": 0.1}),
        (Sentences(1), 2, {}),  # fewer rows than ranks
        (Sentences(5), 1, {"eval_accumulation_steps": 2}),
        (Sentences(13), 3, {"dataloader_drop_last": True}),
        (Stream(), 2, {}),
    ]:
        whole, sharded = both(lambda kind, alone: evaluate(kind, alone, data, rows, **options))  # noqa: B023
        for expected, found in zip(whole[0], sharded[0], strict=True):
            assert found == pytest.approx(expected, rel=1e-6), (len(whole[1]), rows)
        assert (whole[1] == sharded[1]).all()
        assert (whole[2] == sharded[2]).all()


def compare_classification(both: Any, arguments: Any) -> None:
    """BERT takes the number of items, and does not divide by it: neither loss nor gradients may grow with the ranks."""
    from transformers import BertConfig, BertForSequenceClassification

    class Labelled(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
            return {"input_ids": Sentences(12).tokens[row], "labels": torch.tensor(row % 3)}

    def classify(kind: Any, alone: bool) -> Any:
        torch.manual_seed(0)
        sizes: Any = {
            "vocab_size": 50,
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 16,
        }
        config = BertConfig(**sizes | {"num_labels": 3}, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        options = arguments("classify", alone, optim="sgd", max_grad_norm=0.0, logging_steps=1)
        trainer = kind(BertForSequenceClassification(config).double(), options, train_dataset=Labelled())
        trainer.train()
        return trainer.model, [log["loss"] for log in trainer.state.log_history if "loss" in log], trainer.evaluate(Labelled())

    whole, sharded = both(classify)
    compare_parameters(sharded[0], whole[0], 1e-12)
    assert sharded[1] == pytest.approx(whole[1], rel=1e-6)
    assert sharded[2]["eval_loss"] == pytest.approx(whole[2]["eval_loss"], rel=1e-6)


def save_adapters(folder: Path, arguments: Any) -> None:
    """Adapters of a sharded PEFT model are merged in one process."""
    from peft import LoraConfig, PeftModel, get_peft_model

    from shardrt.integrations.transformers import ShardedTrainer

    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False, task_type="CAUSAL_LM")
    adapted: Any = get_peft_model(make_gpt2(), config).double()
    base = {name: value.clone() for name, value in make_gpt2().state_dict().items()}
    batch = torch.utils.data.default_collate([Sentences(2)[row] for row in range(2)])
    trainer = ShardedTrainer(adapted, arguments("adapters", False), train_dataset=Sentences(16))
    trainer.train()
    adapted.save_pretrained(folder / "adapters")
    with pytest.raises(RuntimeError, match=r"merge_and_unload of a sharded PEFT model on rank \d.*from_pretrained\(base_model"):
        adapted.merge_and_unload()
    with torch.no_grad():
        expected = adapted.eval()(**batch).logits
    for method in (adapted.merge_adapter, adapted.unmerge_adapter):
        method()
        with torch.no_grad():
            torch.testing.assert_close(adapted(**batch).logits, expected, rtol=0, atol=1e-12)
    with shardrt.unsharded(adapted):
        adapted.merge_adapter(safe_merge=True)
    with torch.no_grad():
        torch.testing.assert_close(adapted(**batch).logits, expected, rtol=0, atol=1e-12)
    plain = make_gpt2()
    plain.load_state_dict(base)
    merged = PeftModel.from_pretrained(plain, folder / "adapters").double().merge_and_unload().eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, expected, rtol=0, atol=1e-6)  # adapters are saved in their dtype


def generate_while_evaluating(sharded_kind: Any, kind: Any, arguments_kind: Any, arguments: Any) -> None:
    """Texts of different lengths on the ranks, and no repeated rows, though this trainer gathers all."""
    from transformers import GenerationConfig, T5Config, T5ForConditionalGeneration

    class Pairs(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
        def __len__(self) -> int:
            return 5

        def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
            tokens = Sentences(5).tokens[row]
            return {"input_ids": tokens, "labels": torch.where(torch.arange(8) < 8 - row, tokens.flip(0), -100)}

    def predict(trainer_kind: Any, alone: bool) -> Any:
        torch.manual_seed(0)
        sizes: Any = {
            "vocab_size": 50,
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 16,
            "num_layers": 1,
            "num_heads": 2,
            "dropout_rate": 0.0,
        }
        model = T5ForConditionalGeneration(
            T5Config(**sizes | {"decoder_start_token_id": 0}, pad_token_id=0, eos_token_id=2)
        ).double()
        lengths = GenerationConfig(max_length=9, decoder_start_token_id=0, pad_token_id=0, eos_token_id=list(range(2, 26)))
        options = {"predict_with_generate": True, "generation_config": lengths}
        trainer = trainer_kind(model, arguments("generate", alone, arguments_kind, **options), eval_dataset=Pairs())
        found, beams = trainer.predict(Pairs()), trainer.predict(Pairs(), num_beams=2, max_length=6)
        return found.metrics["test_loss"], found.predictions, found.label_ids, beams.predictions[:, :2]  # before texts end

    with shardrt.without_launcher_variables():
        expected = predict(kind, True)
    found = predict(sharded_kind, False)
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    for mine, theirs in zip(found[1:], expected[1:], strict=True):
        assert mine.shape == theirs.shape
        assert (mine == theirs).all()


# ---------------------------------------------------------------------- Lightning


def networks_take_turns(world: World, rows: torch.Tensor) -> None:
    """Two networks with an optimizer each, in manual optimization, with batch normalization over all ranks.

    Each toggles its own parameters; the first accumulates gradients while the second steps.
    """
    import lightning

    from shardrt.integrations.lightning import ShardedStrategy

    def network(outputs: int) -> nn.Sequential:
        blocks = (nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh()) for _ in range(2))
        return nn.Sequential(*blocks, nn.Linear(5, outputs))

    class Adversaries(lightning.LightningModule):
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.generator, self.critics = network(5), nn.ModuleList([network(1)])

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            first, second = self.optimizers()
            critic = self.critics[0]
            with first.toggle_model(sync_grad=batch_idx % 2 == 1):
                self.manual_backward(-critic(self.generator(batch)).mean())
            with second.toggle_model():
                second.zero_grad()
                made = self.generator(batch).detach()
                self.manual_backward(critic(made).square().mean() - critic(batch).tanh().mean())
                self.clip_gradients(second, 0.1, "norm")
                second.step()
            if batch_idx % 2:
                first.step()
                first.zero_grad()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            return [torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3) for net in (self.generator, self.critics)]

    def fit(module: Any, strategy: Any) -> None:
        alone = strategy == "auto"
        mine = rows if alone else rows.view(4, 2, 2, 5)[:, world.rank].flatten(0, 1)
        trainer = lightning.Trainer(
            accelerator="cpu", strategy=strategy, devices=1, max_epochs=2, precision="64-true", sync_batchnorm=not alone,
            use_distributed_sampler=False, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(mine, 4 if alone else 2))

    whole, module = Adversaries(), Adversaries()
    with shardrt.without_launcher_variables():
        fit(whole, "auto")
    fit(module, ShardedStrategy())
    assert not isinstance(module, shardrt.FSDPModule)
    found = module.state_dict()
    for name, expected in whole.state_dict().items():
        value = found[name].full_tensor() if isinstance(found[name], shardrt.DTensor) else found[name]
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12, msg=name)
    with pytest.raises(
        RuntimeError, match=r"requires_grad of parameter 'critics.0.\S+' changed within a forward of 'Adversaries'"
    ):
        fit(Adversaries(), ShardedStrategy(lambda module: shardrt.fully_shard(module) and None))
    own = Adversaries()
    own.scale = nn.Parameter(torch.ones(5))
    with pytest.raises(
        ValueError, match=rf"parameter 'scale' of 'Adversaries' itself \(rank {world.rank}\), which is not sharded"
    ):
        fit(own, ShardedStrategy())


@pytest.mark.rest
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
    networks_take_turns(world, rows[:, 1:])
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
