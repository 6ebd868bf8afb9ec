"""The command line of scripts/train.py, and what of it cannot work."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from common.options import Parser, at_least, exit_with_usage_error

if TYPE_CHECKING:
    from common.models import GPTConfig


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
    experts: int
    top_k: int
    tp: int
    cp: int
    ep: int
    pp: int
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
        return self.tp * self.cp * self.pp

    @property
    def leaving(self) -> int:
        """How many neighbouring ranks leave a job together when one of them is lost."""
        return math.lcm(self.readers, self.ep)

    @property
    def model(self) -> GPTConfig:
        from common.models import GPTConfig  # needs torch, and the command line does not

        return GPTConfig(
            self.layers, self.heads, self.channels, self.context, not self.untied, experts=self.experts, top_k=self.top_k
        )


def parse_options(description: str | None) -> Options:
    """The command line of this process; ends it with a usage error."""
    parser = Parser(description)
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
    shape("--experts", type=at_least(0), default=0, metavar="N", help="experts in the place of each block's MLP; 0: an MLP")
    shape("--top-k", type=count, default=2, metavar="K", help="experts that a token goes through")
    ranks = parser.add_argument_group("ranks").add_argument
    ranks("--tp", type=count, default=1, metavar="N", help="tensor-parallel ranks, with sequence parallelism")
    ranks("--cp", type=count, default=1, metavar="N", help="context-parallel ranks: each has a part of every sequence")
    ranks("--ep", type=count, default=1, metavar="N", help="expert-parallel ranks: each has some experts of every layer")
    ranks("--pp", type=count, default=1, metavar="N", help="pipeline stages: each has some blocks; needs --untied")
    add("--steps", type=count, default=1000)
    add("--batch", type=count, default=12, help="sequences per step over all ranks")
    parts = "accumulate gradients over this many micro-batches per rank; default: 1, with --pp as many as stages"
    add("--micro-batches", type=count, help=parts)
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
    options.micro_batches = options.micro_batches or options.pp
    options.out = options.out or Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    return Options(**vars(options))


def check_ranks(options: Options, ranks: int) -> None:
    """Raise ValueError for options that cannot work on so many ranks. No collective."""
    if ranks % options.readers != 0:
        sizes = (("tp", options.tp), ("cp", options.cp), ("pp", options.pp))
        which = " and ".join(f"--{name} {size}" for name, size in sizes if size > 1)
        raise ValueError(f"{which}: the product does not divide the {ranks} ranks")
    sharing = ranks // (options.pp * options.tp)
    if sharing % options.ep != 0:
        of_what = f"{ranks} ranks" if sharing == ranks else f"{sharing} ranks of a stage"
        raise ValueError(f"--ep {options.ep} does not divide the {of_what}: groups of so many have the experts of a layer")
    readers = ranks // options.readers
    parts = readers * options.micro_batches
    if options.batch % parts != 0:
        what = "ranks" if options.readers == 1 else "groups of ranks"
        raise ValueError(
            f"--batch {options.batch} does not divide by {readers} {what} x "
            f"{options.micro_batches} micro-batches: use a multiple of {parts}"
        )


def check_dimensions(options: Options) -> None:
    """Raise ValueError for a model that cannot be divided as the options say, on any number of ranks. No collective."""
    o, part = options, options.context // options.cp
    wrong = {
        f"--heads {o.heads} does not divide by --tp {o.tp}: each rank has whole heads": o.heads % o.tp != 0,
        f"--context {o.context} does not divide by 2 x --cp {o.cp}: ranks have equal parts of it": o.context % (2 * o.cp) != 0,
        f"--experts {o.experts} with --tp {o.tp}: the tensor-parallel plan has no experts; leave --tp out, or use --ep": (
            o.experts > 0 and o.tp > 1
        ),
        f"--ep {o.ep} divides experts, and there are none: give --experts": o.experts == 0 and o.ep > 1,
        f"--experts {o.experts} does not divide by --ep {o.ep}: each rank has as many": o.experts % o.ep != 0,
        f"--pp {o.pp}: the first stage has the embedding, the last the head, and they share a weight; pass --untied": (
            o.pp > 1 and not o.untied
        ),
        f"--pp {o.pp} with --layers {o.layers}: each stage has at least one": o.layers < o.pp,
        f"--pp {o.pp} with --micro-batches {o.micro_batches}: use at least as many as stages": o.micro_batches < o.pp,
        f"--pp {o.pp} with --tp {o.tp}: parts of a sequence, {part} bytes, do not divide by --tp": (
            o.pp > 1 and part % o.tp != 0
        ),
    }
    for message, is_wrong in wrong.items():
        if is_wrong:
            raise ValueError(message)
    _ = options.model  # raises ValueError for an invalid shape
