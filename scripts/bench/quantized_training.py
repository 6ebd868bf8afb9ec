"""Train the byte-GPT of scripts/train.py in full precision and with 8-bit codes, from the same weights on the same batches.

    mpirun -n 2 python scripts/bench/quantized_training.py --steps 300 --eval-every 20 --out docs/pictures

Options are those of scripts/train.py. All matrices are quantised, the embeddings included. Rank 0 writes OUT/quantized.png, the
validation losses over the steps, and prints a table: the last validation loss, how far it is from full precision, bytes that a
rank receives in a step in gathers and reductions of gradients, and the fastest step, which other load disturbs least.
On the host codes are slower than what they save: ranks of one machine exchange memory, and encode and decode on the same cores.
The last line on stdout is JSON.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401  # before shardrt
import shardrt
from common.options import agreed
from common.text import Corpus
from common.training_options import Options, parse_options
from train import Trainer, check_alike, read_checked

SMALLEST = 1 << 12  # elements of a parameter that is quantised: the default leaves most of so small a model whole
CODES = torch.int8
POLICIES = {
    "nothing": None,
    "gathers": shardrt.QuantizationPolicy(gather=CODES, min_numel=SMALLEST),
    "reductions": shardrt.QuantizationPolicy(reduce=CODES, min_numel=SMALLEST),
    "both": shardrt.QuantizationPolicy(gather=CODES, reduce=CODES, min_numel=SMALLEST),
}
_CALL = re.compile(r"(all_gather|reduce_scatter|all_to_all) (\w+) (\d+)")


@dataclass(slots=True)
class Curve:
    """One training, so far."""

    losses: dict[int, float] = field(default_factory=dict)  # of the validation, by the number of steps
    received_mb: float = 0.0  # per rank and step, 10^6 bytes
    best_ms: float = math.inf  # the fastest step

    @property
    def loss(self) -> float:
        """At the end."""
        return list(self.losses.values())[-1]


def train(options: Options, corpus: Corpus, world: shardrt.World) -> dict[str, Curve]:
    """Train a model by each policy, in turns of a step, so that other load affects all alike. Collective."""
    trainers = {name: Trainer(options, corpus, world, policy) for name, policy in POLICIES.items()}
    curves = {name: Curve() for name in POLICIES}
    for step in range(options.steps):
        for name, trainer in trainers.items():
            curve, since, start = curves[name], time.time(), time.perf_counter()
            trainer.step(step)
            world.stream.synchronize()
            curve.best_ms = min(curve.best_ms, 1e3 * (time.perf_counter() - start))
            curve.received_mb = received_nbytes(world, since) / 1e6
            if (step + 1) % options.eval_every == 0 or step + 1 == options.steps:
                curve.losses[step + 1] = trainer.validate()
        if world.rank == 0 and (step + 1) in curve.losses:
            print(f"step {step + 1}: {', '.join(f'{curve.loss:.4f}' for curve in curves.values())}", file=sys.stderr)
    return curves


def received_nbytes(world: shardrt.World, since: float) -> int:
    """Bytes that this rank has received in gathers and reductions since a time, by the flight recorder."""
    total = 0
    for call in world.recorder.calls():
        for name, dtype, numel in _CALL.findall(call["what"]) if call["called"] > since else ():
            nbytes, ranks = int(numel) * getattr(torch, dtype).itemsize, len(call["ranks"])
            total += nbytes * (ranks - 1) // (1 if name == "all_gather" else ranks)
    return total


def table(curves: dict[str, Curve]) -> str:
    full = curves["nothing"]
    rows = ["| codes in | validation loss | difference | MB received | fastest step |", "|---|--:|--:|--:|--:|"]
    for name, curve in curves.items():
        difference = f"{curve.loss / full.loss - 1:+.2%}"
        rows.append(f"| {name} | {curve.loss:.4f} | {difference} | {curve.received_mb:.2f} | {curve.best_ms:.1f} ms |")
    return "\n".join(rows)


def plot(curves: dict[str, Curve], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # works without a display
    from matplotlib import pyplot

    figure, (losses, ratios) = pyplot.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    full = curves["nothing"]
    for name, curve in curves.items():
        losses.plot(list(curve.losses), list(curve.losses.values()), label=name, linewidth=1.2)
        away = [100 * (loss / full.losses[step] - 1) for step, loss in curve.losses.items()]
        ratios.plot(list(curve.losses), away, linewidth=1.2)
    losses.set(xlabel="steps", ylabel="validation loss (nats per byte)")
    losses.legend(frameon=False, title="int8 codes in")
    ratios.set(xlabel="steps", ylabel="% from full precision")
    figure.savefig(picture, dpi=100)


def main() -> None:
    options = replace(parse_options(__doc__), check_every=0, resume="never")
    world = shardrt.init()
    corpus = agreed(world, lambda: read_checked(options, world.size))
    agreed(world, lambda: check_alike(options, corpus, world))
    curves = train(options, corpus, world)
    if world.rank == 0:
        options.out.mkdir(parents=True, exist_ok=True)
        plot(curves, options.out / "quantized.png")
        print(table(curves))
        print(json.dumps({name: asdict(curve) for name, curve in curves.items()}))
    shardrt.finalize()


if __name__ == "__main__":
    main()
