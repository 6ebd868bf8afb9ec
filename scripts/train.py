"""Train a byte-level GPT on text, sharded over the ranks that started this script.

    mpirun -n 2 python scripts/train.py         # trains on the source of Python's standard library
    mpirun -n 4 python scripts/train.py --data ~/books --steps 2000 --dtype bfloat16
    mpirun -n 4 python scripts/train.py --tp 2         # 2-D: each matrix in two parts, sharded over two ranks each
    mpirun -n 4 python scripts/train.py --cp 2 --context 512     # each sequence in two parts; parameters on all four ranks
    python -m shardrt.launch --restarts 5 -n 4 scripts/train.py --resume auto --out runs/a      # goes on after whatever ends it
    python -m shardrt.launch --survive -n 4 scripts/train.py --resume auto --out runs/a         # also without lost ranks

One step, the same on every rank:
  1. draw this rank's rows of the global batch, one micro-batch at a time
  2. forward and backward of each micro-batch; the last backward averages the gradients over the ranks
  3. clip by the norm over all ranks, set the learning rate, step the optimizer on the local shards
  4. average the loss over the ranks
and every --eval-every steps the validation loss. Only rank 0 writes: a progress bar, then log.jsonl
(a line with the configuration, then one per step, of shardrt.Metrics), loss.png and sample.txt in --out.
The global batch does not depend on the number of ranks, so neither does the loss curve.

With --tp N, groups of N neighbouring ranks have the parts of each matrix and, between the matrices,
of each sequence; they read the same rows. Parameters are sharded over the groups.
With --cp N, groups of N ranks read the same rows as well, and each rank has its part of every sequence, in attention too.

With --check-every N, the ranks compare what they must have alike, before the first step and after every N steps, and the run
ends if they do not: the initial model, parameters that are not sharded, the optimizer's steps and learning rates.

With --timeline, the ranks record three steps. `python -m shardrt.timeline merge OUT/timeline -o steps.json` makes one file.

With --resume auto, checkpoints are saved in OUT/checkpoints, and the script starts from the newest one, on any number of ranks.
The lines of the log from there on are written anew.

With it, under `shardrt.launch --survive`, it goes on within seconds when ranks are lost, from copies in memory, and under
`--replace` also on as many ranks as before: --batch has to be divisible by the numbers of ranks that may be left.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from common.models import GPT, GPTConfig, next_byte_loss, shard
from common.options import Parser, agreed, at_least, exit_with_usage_error
from common.parallel import gpt_plan
from common.text import Corpus, batch, default_files, find_files, rank_rows, read_corpus, write_sample
from shardrt.parallel import context_parallel, context_parallel_shard, cross_entropy, parallelize_module
from shardrt.timeline.picture import draw_memory

# ---------------------------------------------------------------------- options


@dataclass(frozen=True, slots=True)
class Options:
    """The command line, one field per flag."""

    data: list[Path]
    max_bytes: int
    layers: int
    heads: int
    channels: int
    context: int
    untied: bool
    tp: int
    cp: int
    steps: int
    batch: int
    micro_batches: int
    lr: float
    warmup: int
    weight_decay: float
    clip: float
    dtype: str
    eval_every: int
    eval_batches: int
    check_every: int
    peak_tflops: float
    tensorboard: bool
    timeline: bool
    prompt: str
    sample_bytes: int
    seed: int
    resume: str
    save_every: int
    keep: int
    out: Path

    @property
    def readers(self) -> int:
        """How many ranks read the same rows."""
        return self.tp * self.cp

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(self.layers, self.heads, self.channels, self.context, not self.untied)


def parse_options() -> Options:
    parser = Parser(description=__doc__)
    add, count = parser.add_argument, at_least(1)
    text = parser.add_argument_group("text").add_argument
    text("--data", type=Path, nargs="+", default=[], help="files or folders; default: Python's standard library")
    text("--max-bytes", type=count, default=1 << 25, help="read no more than this")
    shape = parser.add_argument_group("model").add_argument
    shape("--layers", type=count, default=4)
    shape("--heads", type=count, default=4)
    shape("--channels", type=count, default=128)
    shape("--context", type=count, default=128, help="sequence length in bytes")
    shape("--untied", action="store_true", help="do not share the weight of the head and the embedding")
    add("--tp", type=count, default=1, metavar="N", help="tensor-parallel ranks, with sequence parallelism")
    add("--cp", type=count, default=1, metavar="N", help="context-parallel ranks: each has a part of every sequence")
    add("--steps", type=count, default=1000)
    add("--batch", type=count, default=12, help="sequences per step over all ranks")
    add("--micro-batches", type=count, default=1, help="accumulate gradients over this many micro-batches per rank")
    add("--lr", type=at_least(0.0, float), default=4e-3, help="the highest learning rate")
    add("--warmup", type=at_least(0), default=30, help="steps until the highest learning rate")
    add("--weight-decay", type=at_least(0.0, float), default=0.1)
    add("--clip", type=at_least(0.0, float), default=1.0, help="the maximum gradient norm")
    dtype = "of the computation; with float64, of the parameters as well"
    add("--dtype", choices=("float32", "bfloat16", "float64"), default="float32", help=dtype)
    add("--eval-every", type=count, default=100, help="steps between two validations")
    add("--eval-batches", type=count, default=4)
    add("--check-every", type=at_least(0), default=0, metavar="N", help="steps between two comparisons of the ranks; 0: none")
    add("--peak-tflops", type=at_least(0.0, float), default=0.0, help="of one device, for mfu(%%) in the log; 0: not known")
    add("--tensorboard", action="store_true", help="write the figures for TensorBoard as well, to OUT/tensorboard")
    add("--timeline", action="store_true", help="record three steps for Perfetto in OUT/timeline, and draw OUT/memory.png")
    add("--prompt", default="def ", help="start of the sample")
    add("--sample-bytes", type=at_least(0), default=300)
    add("--seed", type=at_least(0), default=0)
    saving = parser.add_argument_group("checkpoints").add_argument
    resume = "auto: save checkpoints in OUT/checkpoints, and continue from the newest one; never: no checkpoints (default)"
    saving("--resume", choices=("auto", "never"), default="never", help=resume)
    saving("--save-every", type=count, default=100, help="steps between two checkpoints")
    saving("--keep", type=count, default=3, help="how many checkpoints remain")
    add("--out", type=Path, help="folder for log, plot and sample; default: runs/, and in it one named by the time")
    options = parser.parse_args()
    if options.out is None and options.resume == "auto":
        exit_with_usage_error("--resume auto needs --out: the folder to continue in")
    options.out = options.out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    return Options(**vars(options))


def read_checked(options: Options, ranks: int) -> Corpus:
    """The text. Raises ValueError or OSError for options that cannot work, or not on so many ranks. No collective."""
    if not options.prompt:
        raise ValueError("--prompt is empty: the model needs at least one byte to continue")
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out {options.out} is not a folder")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("the plot of the losses needs matplotlib: pip install 'shardrt[train]'")
    check_ranks(options, ranks)
    if options.heads % options.tp != 0:
        raise ValueError(f"--heads {options.heads} does not divide by --tp {options.tp}: each rank has whole heads")
    if options.context % (2 * options.cp) != 0:
        raise ValueError(f"--context {options.context} does not divide by 2 x --cp {options.cp}: ranks have equal parts of it")
    _ = options.model  # raises ValueError for an invalid shape
    files = find_files(options.data) if options.data else default_files()
    return read_corpus(files, options.context, options.max_bytes)


def check_ranks(options: Options, ranks: int) -> None:
    """Raise ValueError for options that cannot work on so many ranks. No collective."""
    if ranks % options.readers != 0:
        which = " and ".join(f"--{name} {size}" for name, size in (("tp", options.tp), ("cp", options.cp)) if size > 1)
        raise ValueError(f"{which}: the product does not divide the {ranks} ranks")
    readers = ranks // options.readers
    parts = readers * options.micro_batches
    if options.batch % parts != 0:
        what = "ranks" if options.readers == 1 else "groups of ranks"
        raise ValueError(
            f"--batch {options.batch} does not divide by {readers} {what} x "
            f"{options.micro_batches} micro-batches: use a multiple of {parts}"
        )


def check_alike(options: Options, corpus: Corpus, world: shardrt.World) -> None:
    """Exit with a usage error unless all ranks have the same text and options. Only rank 0's --out matters. Collective."""
    mine = {**asdict(options), "data": "", "out": ""}  # where the text lies may depend on the machine
    everyone = world.comm.exchange((mine, corpus.digest))
    for rank, (theirs, digest) in enumerate(everyone):
        if other := next((name for name in mine if theirs[name] != everyone[0][0][name]), None):
            flag, first = other.replace("_", "-"), everyone[0][0]
            exit_with_usage_error(
                f"--{flag} is {first[other]!r} on rank 0 and {theirs[other]!r} on rank {rank}: give all the same"
            )
        if digest != everyone[0][1]:
            exit_with_usage_error("the ranks read different text: pass --data that is the same on all machines")


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
        shape = world.size // options.readers, options.cp, options.tp
        self.mesh = shardrt.DeviceMesh(world.comm, shape, ("dp", "cp", "tp"))
        self.model = GPT(options.model, options.seed).to(world.device)
        self.zero = torch.zeros((), device=world.device)  # of the dtype in which losses are added
        if options.dtype == "float64":
            self.model.double()  # the same numbers: they are drawn in float32
            self.zero = self.zero.double()
        if options.check_every > 0:
            shardrt.check_replicas(self.model)  # as long as each rank has all of it
        if options.tp > 1:
            parallelize_module(self.model, self.mesh["tp"], gpt_plan(shardrt.parallel, shardrt))
        policy = shardrt.MixedPrecisionPolicy()
        if options.dtype == "bfloat16":
            policy = shardrt.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        mesh = self.mesh["dp", "cp"].flatten()
        shard(
            self.model,
            lambda module: shardrt.fully_shard(module, mesh=mesh, mp_policy=policy, quantization_policy=quantization),
        )
        parameters = self.model.parameters()
        decay = options.weight_decay
        self.optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.95), weight_decay=decay, fused=True)

    def step(self, step: int) -> Step:
        """One optimizer step on global batch `step`."""
        loss = self.forward_backward(step)
        norm = shardrt.clip_grad_norm_(self.model.parameters(), self.options.clip)
        lr = learning_rate(self.options, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Step(loss, norm, lr)

    def check(self, step: int) -> None:
        """With --check-every, raise RuntimeError on every rank if the ranks have gone apart by the end of step `step`."""
        every = self.options.check_every
        if every > 0 and (step + 1) % every == 0:
            compared = shardrt.check_replicas(self.model, self.optimizer, step=step)
            if step < every and self.world.rank == 0:
                tqdm.write(f"replicas at step {step}: {compared}")

    def forward_backward(self, step: int) -> torch.Tensor:
        """Accumulate this rank's gradients over its micro-batches; returns its mean loss, ()."""
        micro_batches, total = self.rows(), self.zero.clone()
        assert isinstance(self.model, shardrt.FSDPModule)  # since fully_shard
        for rows in micro_batches:
            self.model.set_requires_gradient_sync(rows is micro_batches[-1])
            with self.sequences():
                loss = self.loss(self.corpus.train, step, rows) / len(micro_batches)
                loss.backward()
            total += loss.detach()
        return total

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss over --eval-batches batches of the validation text, the same in every call. Collective."""
        steps = range(self.options.eval_batches)
        parts = [(step, rows) for step in steps for rows in self.rows()]
        total = self.zero.clone()
        for step, rows in parts:
            with self.sequences():
                total += self.loss(self.corpus.validation, step, rows) / len(parts)
        return self.world.mean(total).item()

    def loss(self, text: torch.Tensor, step: int, rows: range) -> torch.Tensor:
        options, device = self.options, self.world.device
        whole = *batch(text, options.seed, step, rows, options.batch, options.context), torch.arange(options.context)
        inputs, targets, positions = (each.to(device) for each in whole)
        if options.cp > 1:  # equal parts: the mean over the ranks is that over the tokens
            cut = context_parallel_shard(self.mesh["cp"], [inputs, targets, positions], [1, 1, 0])
            inputs, targets, positions = cut
        logits = self.model(inputs, positions)
        if isinstance(logits, shardrt.DTensor):  # in parts of the vocabulary
            return cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)
        return next_byte_loss(logits, targets)

    def sequences(self) -> AbstractContextManager[None]:
        """With --cp, a block in which attention reaches all parts of the sequences."""
        options = self.options
        return nullcontext() if options.cp == 1 else context_parallel(self.mesh["cp"], seq_len=options.context)

    def rows(self) -> list[range]:
        """This rank's rows of a global batch, one range per micro-batch. Tensor and context parallel ranks read the same."""
        options, dp = self.options, self.mesh["dp"]
        return rank_rows(options.batch, dp.rank, dp.size, options.micro_batches)


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
        survive = shardrt.Survival(group=options.readers) if world.settings.survive else None
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
            bar = tqdm(total=options.steps, initial=first, disable=world.rank != 0, unit="step", dynamic_ncols=True)
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


def main() -> None:
    options = parse_options()
    # Before anything may fail on one rank alone, such as the text of one machine: the others can then be told.
    world = shardrt.init()
    if world.is_newcomer:  # in the place of a lost rank: the others are past this, and wait in `Run`
        corpus = read_checked(options, world.size)
    else:
        corpus = agreed(world, lambda: read_checked(options, world.size))
        check_alike(options, corpus, world)
    training = Training(options, corpus)
    training.train()
    assert training.trainer is not None, "it has trained"
    sample = write_sample(training.trainer.model, options.prompt, options.sample_bytes, options.seed)
    if shardrt.comm.world().rank == 0:
        (options.out / "sample.txt").write_text(sample, encoding="utf-8")
        plot_losses(options.out / "log.jsonl", options.out / "loss.png")
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # a terminal may lack characters of it
        print(f"--- a sample ---\n{sample}\n--- the end ---")
        print(f"peak memory {training.peak:.0f} MB per rank; wrote {shown(options.out)}/", flush=True)
    shardrt.finalize()


if __name__ == "__main__":
    main()
