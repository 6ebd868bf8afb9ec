"""Train a byte-level GPT on text, sharded over the ranks that started this script.

    mpirun -n 2 python scripts/train.py         # trains on the source of Python's standard library
    mpirun -n 4 python scripts/train.py --data ~/books --steps 2000 --dtype bfloat16
    mpirun -n 4 python scripts/train.py --tp 2         # 2-D: each matrix in two parts, sharded over two ranks each
    mpirun -n 4 python scripts/train.py --cp 2 --context 512     # each sequence in two parts; parameters on all four ranks
    mpirun -n 4 python scripts/train.py --experts 8 --ep 2       # a mixture of experts, half of each layer's on each rank
    mpirun -n 4 python scripts/train.py --pp 2 --untied          # two pipeline stages, each sharded over two ranks
    mpirun -n 8 python scripts/train.py --cp 2 --ep 2 --pp 2 --experts 8 --untied
    python -m shardrt.launch --restarts 5 -n 4 scripts/train.py --resume auto --out runs/a      # goes on after whatever ends it
    python -m shardrt.launch --survive -n 4 scripts/train.py --resume auto --out runs/a         # also without lost ranks

One step, the same on every rank:
  1. draw this rank's rows of the global batch
  2. forward and backward of each micro-batch; the last backward averages the gradients over the ranks
  3. clip by the norm over all ranks, set the learning rate, step the optimizer on the local shards; with --experts, move the
     biases that even out their loads
  4. average the loss over the ranks
and every --eval-every steps the validation loss. Only rank 0 writes: a progress bar, then log.jsonl
(a line with the configuration, then one per step, of shardrt.Metrics), loss.png and sample.txt in --out.
The global batch does not depend on the number of ranks, so neither does the loss curve.

With --tp N, groups of N neighbouring ranks have the parts of each matrix and, between the matrices,
of each sequence; they read the same rows. Parameters are sharded over the groups.
With --cp N, groups of N ranks read the same rows as well, and each rank has its part of every sequence, in attention too.
With --experts N, each block has a router and N experts in the place of its MLP. With --ep N, groups of N neighbouring ranks
have these between them, and send each other the tokens that chose them; nothing else changes, each rank has its own rows.
With --pp N, the first of N equal parts of the ranks has the first blocks, the next one those that follow: stages of a pipeline,
through which --micro-batches go one after the other. They are saved under the names of the whole model, for any --pp.

With --check-every N, the ranks compare what they must have alike, before the first step and after every N steps, and the run
ends if they do not: the initial model, parameters that are not sharded, the optimizer's steps and learning rates.

With --timeline, the ranks record three steps. `python -m shardrt.timeline merge OUT/timeline -o steps.json` makes one file.

With --resume auto, checkpoints are saved in OUT/checkpoints, and the script starts from the newest one, on any number of ranks.
The lines of the log from there on are written anew.

With it, under `shardrt.launch --survive`, it goes on within seconds when ranks are lost, from copies in memory, and under
`--replace` also on as many ranks as before: --batch has to be divisible by the numbers of ranks that may be left. With a rank,
those leave that have other parts of the same matrices, sequences or experts. Stages of a pipeline do not go on so.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import common.checkout  # noqa: F401  # before shardrt
from common.training_options import Options, check_dimensions, check_ranks, parse_options

if __name__ == "__main__":
    OPTIONS = parse_options(__doc__)  # before the imports of torch: help and errors come at once

import torch
from torch import nn
from tqdm import tqdm

import shardrt
from common.experts import divide_experts, even_out, experts_of
from common.models import GPT, next_byte_loss, shard
from common.options import agreed
from common.parallel import gpt_plan
from common.text import Corpus, batch, default_files, find_files, rank_rows, read_corpus, write_sample
from shardrt.instruments.progress import logged_bar
from shardrt.parallel import context_parallel, context_parallel_shard, cross_entropy, parallelize_module
from shardrt.timeline.picture import draw_memory

if TYPE_CHECKING:
    from common.stages import Pipeline

# ---------------------------------------------------------------------- options


def read_checked(options: Options, ranks: int) -> Corpus:
    """The text. Raises ValueError or OSError for options that cannot work, or not on so many ranks. No collective."""
    if not options.prompt:
        raise ValueError("--prompt is empty: the model needs at least one byte to continue")
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out} is not a folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the plot of the losses needs matplotlib: pip install matplotlib")
    check_ranks(options, ranks)
    check_dimensions(options)
    files = find_files(options.data) if options.data else default_files()
    return read_corpus(files, options.context, options.max_bytes)


def check_alike(options: Options, corpus: Corpus, world: shardrt.World) -> None:
    """Raise ValueError unless all ranks have the same text and options. Only rank 0's --out matters. Collective."""
    mine = {**asdict(options), "data": "", "out": ""}  # where the text lies may depend on the machine
    everyone = world.comm.exchange((mine, corpus.digest))
    for rank, (theirs, digest) in enumerate(everyone):
        if other := next((name for name in mine if theirs[name] != everyone[0][0][name]), None):
            flag, first = other.replace("_", "-"), everyone[0][0]
            raise ValueError(f"--{flag} is {first[other]!r} on rank 0 and {theirs[other]!r} on rank {rank}: give all the same")
        if digest != everyone[0][1]:
            raise ValueError("the ranks read different text: pass --data that is the same on all machines")


def check_survival(options: Options, world: shardrt.World) -> None:
    """Raise ValueError if the job is to go on without lost ranks, and cannot. The same on every rank."""
    if not world.settings.survive:
        return
    if options.pp > 1:
        raise ValueError(
            f"--pp {options.pp} under shardrt.launch --survive: a stage is lost with its ranks; use --restarts instead"
        )
    if options.resume == "never":
        raise ValueError("under shardrt.launch --survive, a loss ends the job without --resume auto: pass it, with --out")
    if options.leaving == world.size:
        sizes = (("tp", options.tp), ("cp", options.cp), ("ep", options.ep))
        which = " and ".join(f"--{name} {size}" for name, size in sizes if size > 1)
        why = f"with any rank, all {world.size} ranks are lost, since they share matrices, sequences or experts"
        raise ValueError(
            f"{which or '-n 1'} under shardrt.launch --survive: {why if which else 'no rank would be left'}; start more ranks, "
            "or use --restarts instead"
        )


# ---------------------------------------------------------------------- training


class Step(NamedTuple):
    """What a step has to tell."""

    loss: torch.Tensor  # (), nats per byte, mean over this rank's rows
    norm: torch.Tensor  # of the gradient, before clipping
    lr: float


class Trainer:
    """The training step and the validation of one rank."""

    def __init__(
        self, options: Options, corpus: Corpus, world: shardrt.World, quantization: shardrt.QuantizationPolicy | None = None
    ) -> None:
        self.options, self.corpus, self.world = options, corpus, world
        shape = options.pp, world.size // options.readers, options.cp, options.tp
        self.mesh = shardrt.DeviceMesh(world.comm, shape, ("pp", "dp", "cp", "tp"))
        self.sharing = self.mesh["dp", "cp"].flatten()  # the ranks that share a parameter, each with tokens of its own
        whole = GPT(options.model, options.seed).to(world.device)
        if options.dtype == "float64":
            whole.double()  # the same numbers: they are drawn in float32
        if options.check_every > 0:
            shardrt.check_replicas(whole)  # as long as each rank has all of it
        self.model = self.divided(whole, quantization)
        self.micro_batches = self.scheduled()
        parameters = self.model.parameters()
        decay = options.weight_decay
        self.optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=decay, fused=True)

    def divided(self, model: nn.Module, quantization: shardrt.QuantizationPolicy | None) -> nn.Module:
        """What this rank has of the model: a stage of it, parts of that, and shards of these."""
        options, mesh = self.options, self.mesh
        if options.pp > 1:
            from common.stages import GPTStage  # imports torch.distributed, which nothing else here needs

            model = GPTStage(model, mesh["pp"].rank, options.pp)
        if options.tp > 1:
            plan = gpt_plan(shardrt.parallel, shardrt)
            own = {name: style for name, style in plan.items() if getattr(model, name.split(".")[0]) is not None}
            parallelize_module(model, mesh["tp"], own)
        policy = shardrt.MixedPrecisionPolicy()
        if options.dtype == "bfloat16":
            policy = shardrt.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard = partial(shardrt.fully_shard, mp_policy=policy, quantization_policy=quantization)
        if options.experts > 0:
            same_experts = divide_experts(model, self.sharing, options.ep)
            for experts in experts_of(model):
                fully_shard(experts, mesh=same_experts)
        shard(model, partial(fully_shard, mesh=self.sharing))
        return model

    def scheduled(self) -> MicroBatches | Pipeline:
        """What runs this rank's micro-batches through the model."""
        options, count = self.options, self.options.micro_batches
        if options.pp == 1:
            return MicroBatches(self.model, count)
        from common.stages import Pipeline

        rows, part = options.batch // (int(self.mesh["dp"].size) * count), options.context // options.cp
        tokens = torch.empty(rows, part, dtype=torch.int64, device="meta")
        shape, dtype = (rows, part // options.tp, options.channels), getattr(torch, options.dtype)
        activations = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        return Pipeline(self.model, self.mesh["pp"], loss_of, count, (tokens, activations))

    def step(self, step: int) -> Step:
        """One optimizer step on global batch `step`."""
        with self.sequences():
            loss = self.micro_batches.step(*self.batch(self.corpus.train, step))
        norm = shardrt.clip_grad_norm_(self.model.parameters(), self.options.clip)
        lr = learning_rate(self.options, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.options.experts > 0:
            even_out(self.model, self.sharing)
        return Step(loss, norm, lr)

    def check(self, step: int) -> None:
        """With --check-every, raise RuntimeError on every rank if the ranks have gone apart by the end of step `step`."""
        every = self.options.check_every
        if every > 0 and (step + 1) % every == 0:
            compared = shardrt.check_replicas(self.model, self.optimizer, mesh=self.mesh["dp", "cp", "tp"], step=step)
            if step < every and self.world.rank == 0:
                tqdm.write(f"replicas at step {step}: {compared}")

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over --eval-batches batches of the validation text, the same in every call. Collective."""
        self.model.eval()  # rows for experts are not counted
        losses = []
        for step in range(self.options.eval_batches):
            with self.sequences():
                losses.append(self.micro_batches.evaluate(*self.batch(self.corpus.validation, step)))
        self.model.train()
        return self.world.mean(torch.stack(losses).mean()).item()

    def batch(self, text: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """This rank's rows of a global batch, and with --cp its part of each: inputs (B, T), targets (B, T), positions (T,).

        Tensor and context parallel ranks, and the stages of a pipeline, read the same rows.
        """
        options, dp = self.options, self.mesh["dp"]
        rows = rank_rows(options.batch, dp.rank, int(dp.size))
        whole = *batch(text, options.seed, step, rows, options.batch, options.context), torch.arange(options.context)
        inputs, targets, positions = (each.to(self.world.device) for each in whole)
        if options.cp > 1:  # equal parts: the mean over the ranks is that over the tokens
            cut = context_parallel_shard(self.mesh["cp"], [inputs, targets, positions], [1, 1, 0])
            inputs, targets, positions = cut
        return inputs, targets, positions

    def sequences(self) -> AbstractContextManager[None]:
        """With --cp, a block in which attention reaches all parts of the sequences."""
        options = self.options
        return nullcontext() if options.cp == 1 else context_parallel(self.mesh["cp"], seq_len=options.context)


class MicroBatches:
    """A rank's micro-batches, one after the other, through a model that the rank runs from end to end."""

    def __init__(self, model: nn.Module, count: int) -> None:
        assert isinstance(model, shardrt.FSDPModule)  # since fully_shard
        self.model, self.count = model, count

    def step(self, inputs: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Add up this rank's gradients. Returns its mean loss, ()."""
        losses = []
        for number, (rows, wanted) in enumerate(self._cut(inputs, targets), 1):
            self.model.set_requires_gradient_sync(number == self.count)
            loss = loss_of(self.model(rows, positions), wanted) / self.count
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def evaluate(self, inputs: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """This rank's mean loss, ()."""
        losses = [loss_of(self.model(rows, positions), wanted) for rows, wanted in self._cut(inputs, targets)]
        return torch.stack(losses).mean()

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """The logits (B, T, V) of bytes (B, T). Collective."""
        logits = self.model(tokens)
        return logits.full_tensor() if isinstance(logits, shardrt.DTensor) else logits

    def _cut(self, inputs: torch.Tensor, targets: torch.Tensor) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        return zip(inputs.chunk(self.count), targets.chunk(self.count), strict=True)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean of the losses of the next bytes."""
    if isinstance(logits, shardrt.DTensor):  # in parts of the vocabulary
        return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)
    return next_byte_loss(logits, targets)


def learning_rate(options: Options, step: int) -> float:
    """A linear warm-up over --warmup steps, then a cosine decay to a tenth."""
    if step < options.warmup:
        return options.lr * (step + 1) / options.warmup
    done = (step - options.warmup) / max(1, options.steps - options.warmup)
    return options.lr * (0.55 + 0.45 * math.cos(math.pi * done))


# ---------------------------------------------------------------------- output


class Training:
    """The trainer on the ranks that there are, and its steps. With --resume auto, a `shardrt.Run` loads and saves its state."""

    def __init__(self, options: Options, corpus: Corpus) -> None:
        self.options, self.corpus = options, corpus
        self.peak = 0.0  # memory, in MiB
        self.trainer: Trainer | None = None
        self._shown: ShownSteps | None = None

    def build(self, world: shardrt.World) -> dict[str, Any]:
        """Make the trainer; returns its state."""
        check_ranks(self.options, world.size)
        self._close()
        self.trainer = None  # of the ranks that were: its memory is needed
        gc.collect()
        self.trainer = Trainer(self.options, self.corpus, world)
        return {"model": self.trainer.model, "optimizer": self.trainer.optimizer}

    def train(self) -> None:
        """Run all steps that remain."""
        try:
            self._train(shardrt.comm.world())
            if self._shown is not None:
                self._shown.finish()
        finally:
            self._close()

    def _train(self, world: shardrt.World) -> None:
        options = self.options
        if options.resume == "never":
            self.build(world)
            for index in range(options.steps):
                self.step(index)
            return
        survive = shardrt.Survival(group=options.leaving) if world.settings.survive else None
        folder = options.out / "checkpoints"
        with shardrt.Run(folder, self.build, options.save_every, options.keep, survive=survive) as run:
            run.train(options.steps, self.step)
            if self._shown is None:  # no step was left: the log may have more
                open_log(options, self.corpus, shardrt.comm.world(), run.done).close()

    def step(self, index: int) -> None:
        """Run one step, and show it."""
        if self._shown is None:
            assert self.trainer is not None, "it is made"
            self._shown = ShownSteps(self.trainer, index)
        self.peak = max(self.peak, self._shown.step(index))

    def _close(self) -> None:
        if self._shown is not None:
            self._shown.close()
            self._shown = None


def open_log(options: Options, corpus: Corpus, world: shardrt.World, first: int) -> shardrt.Metrics:
    """Open log.jsonl on rank 0: with its header line, and those of the steps before `first`."""
    path = options.out / "log.jsonl"
    if world.rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        header = {"ranks": world.size, "files": corpus.files, **asdict(options)}
        lines = path.read_text().splitlines()[: 1 + first] if first > 0 and path.exists() else [json.dumps(header, default=str)]
        new = path.with_suffix(".new")  # renamed, so that a run that is killed here does not lose its log
        new.write_text("".join(f"{line}\n" for line in lines))
        new.replace(path)
    peak = options.peak_tflops * 1e12 if options.peak_tflops else None
    board = options.out / "tensorboard" if options.tensorboard else None
    return shardrt.Metrics(path, count_flops=True, peak_flops=peak, tensorboard=board)


def recorded(steps: Iterator[int], folder: Path, rank: int) -> Generator[int, None, None]:
    """The steps, of which the third to the fifth are recorded: the order of use is known by then. folder: as rank 0 has it."""
    yield from islice(steps, 2)
    for third in islice(steps, 1):
        with shardrt.Timeline(folder / "timeline") as timeline:
            yield third
            yield from islice(steps, 2)
        yield from steps
        if rank == 0:  # after the last step, since it may fail on this rank alone
            draw_memory(timeline.events, folder / "memory.png")


class ShownSteps:
    """The steps of a trainer from `first` on: their progress bar, their log, and the recording of three with --timeline."""

    def __init__(self, trainer: Trainer, first: int) -> None:
        options, world = trainer.options, trainer.world
        self._trainer, self._validation = trainer, ""
        self._steps: Iterator[int] = iter(range(first, options.steps))
        with ExitStack() as opened:
            if options.timeline:
                recording = recorded(self._steps, world.comm.exchange(options.out)[0], world.rank)
                self._steps = opened.enter_context(closing(recording))
            self._metrics = opened.enter_context(open_log(options, trainer.corpus, world, first))
            bar = logged_bar(total=options.steps, initial=first, disable=world.rank != 0, unit="step", dynamic_ncols=True)
            self._bar = opened.enter_context(bar)
            self._opened = opened.pop_all()

    def step(self, index: int) -> float:
        """Run one step, show its progress and write it to the log. Returns its peak memory in MiB."""
        trainer, options = self._trainer, self._trainer.options
        next(self._steps)  # records, if it is time
        with self._metrics.step(options.batch * options.context):
            step = trainer.step(index)
        trainer.check(index)
        validation = None
        if (index + 1) % options.eval_every == 0 or index + 1 == options.steps:
            validation = trainer.validate()
            self._validation = f", validation {validation:.3f}"
        figures = self._metrics.log(index, loss=step.loss, grad_norm=step.norm, lr=step.lr, validation_loss=validation)
        assert figures is not None, "there is a line for each step"
        if not math.isfinite(figures["loss"]):
            raise RuntimeError(f"the loss is {figures['loss']} at step {index}: try a --lr below {step.lr:.1e}")
        peak = figures["memory/max_active(GiB)"] * 1024
        self._bar.set_postfix_str(
            f"loss {figures['loss']:.3f}{self._validation}, {figures['throughput(tps)'] * trainer.world.size:,.0f} tokens/s, "
            f"{figures['time_metrics/end_to_end(s)'] * 1e3:.0f} ms, peak {peak:.0f} MB",
            refresh=False,
        )
        self._bar.update()
        return peak

    def finish(self) -> None:
        """All steps are done: write what is being recorded. Collective."""
        next(self._steps, None)

    def close(self) -> None:
        """Show no more steps. Not collective: what is being recorded is given up."""
        self._opened.close()


def shown(path: Path) -> str:
    """A path as text, whatever its bytes."""
    return os.fsencode(path).decode(errors="backslashreplace")


def plot_losses(log: Path, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    from matplotlib import pyplot

    steps = [json.loads(line) for line in log.read_text().splitlines()[1:]]
    validated = [step for step in steps if step["validation_loss"] is not None]
    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.plot([s["step"] for s in steps], [s["loss"] for s in steps], label="training")
    points = [(s["step"], s["validation_loss"]) for s in validated]
    axes.plot(*zip(*points, strict=True), "o-", label="validation")
    axes.set(xlabel="step", ylabel="loss (nats per byte)", title=shown(log.parent))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=120)


def main(options: Options) -> None:
    # Before anything may fail on one rank alone, such as the text of one machine: the others can then be told.
    world = shardrt.init()
    if world.is_newcomer:  # in the place of a lost rank: the others are past this, and wait in `Run`
        corpus = read_checked(options, world.size)
    else:
        corpus = agreed(world, lambda: read_checked(options, world.size))
        agreed(world, lambda: check_alike(options, corpus, world))
        agreed(world, lambda: check_survival(options, world))
    training = Training(options, corpus)
    training.train()
    assert training.trainer is not None, "it has trained"
    logits, device = training.trainer.micro_batches.logits, shardrt.comm.world().device
    sample = write_sample(logits, options.context, device, options.prompt, options.sample_bytes, options.seed)
    if shardrt.comm.world().rank == 0:
        (options.out / "sample.txt").write_text(sample, encoding="utf-8")
        plot_losses(options.out / "log.jsonl", options.out / "loss.png")
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal may lack characters of it
        print(f"--- a sample ---\n{sample}\n--- the end ---")
        print(f"peak memory {training.peak:.0f} MB per rank; wrote {shown(options.out)}/", flush=True)
    shardrt.finalize()


if __name__ == "__main__":
    main(OPTIONS)
