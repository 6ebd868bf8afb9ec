"""The command line of the planner."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...comm.program.options import Parser, at_least
from ..program.known_models import PRESETS
from ..program.names import AXES, GRADIENT_SYNCS, OPTIMIZERS, SCHEDULES

_DTYPES = ("float32", "bfloat16", "float16", "float64")


def plan_parser(description: str) -> Parser:
    """The options of a forecast."""
    parser = Parser(
        prog="shardrt-plan",
        usage="shardrt-plan (FACTORY | CONFIG | --preset NAME) --ranks N [options]\n       shardrt-plan sheets\n       "
        "shardrt-plan sheet FILE",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "factory",
        nargs="?",
        help="package.module:function, which returns a module, or a module and a step; or a causal language model of "
        "transformers: its config.json, the folder of it, or its name",
    )
    parser.add_argument("--preset", metavar="NAME", help=f"instead of a factory: {', '.join(PRESETS)}")
    _add_ranks(parser.add_argument_group("ranks"))
    _add_step(parser.add_argument_group("a step"))
    _add_policies(parser.add_argument_group("policies"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_ranks(group: Any) -> None:
    group.add_argument("--ranks", type=at_least(1), required=True, metavar="N", help="of the whole job")
    group.add_argument("--tp", type=at_least(1), default=1, metavar="N", help="ranks of tensor parallelism")
    group.add_argument("--cp", type=at_least(1), default=1, metavar="N", help="ranks with parts of the same sequences")
    group.add_argument("--ep", type=at_least(1), default=1, metavar="N", help="ranks that divide a layer's experts")
    group.add_argument("--pp", type=at_least(1), default=1, metavar="N", help="stages of a pipeline")
    group.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline (default: 1f1b)")
    group.add_argument("--replicas", type=at_least(1), default=1, metavar="N", help="of the sharded model (hybrid sharding)")
    group.add_argument(
        "--best",
        type=_degrees,
        metavar="all|DEGREES",
        help=f"find the best of these degrees for as many ranks and rows of a step: all, or some of {','.join(AXES)}",
    )
    group.add_argument("--sheet", default="h100", help="hardware: a name of `shardrt-plan sheets`, or a TOML file")
    group.add_argument("--ranks-per-node", type=at_least(1), metavar="N", help="instead of the sheet's")


def _add_step(group: Any) -> None:
    group.add_argument("--batch", type=at_least(1), default=1, metavar="N", help="rows of a micro-batch on each rank")
    group.add_argument("--sequence", type=at_least(1), metavar="N", help="tokens of a row (default: the preset's)")
    group.add_argument("--micro-batches", type=at_least(1), default=1, metavar="N", help="accumulated in a step")
    group.add_argument(
        "--gradient-sync",
        choices=GRADIENT_SYNCS,
        default="every",
        help="micro-batches that reduce gradients; last: unsharded ones are kept until then (default: every, as of FSDP2)",
    )
    group.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    again = group.add_mutually_exclusive_group()
    again.add_argument("--checkpoint-activations", action="store_true", help="recompute each block in the backward")
    again.add_argument(
        "--selective-ac",
        type=_selective,
        metavar="op|N",
        help="op: recompute blocks, but keep attention and every second matrix product; N: recompute every N-th block",
    )
    group.add_argument("--step", metavar="package.module:function", help="step(model, job) returns the loss of a micro-batch")


def _add_policies(group: Any) -> None:
    group.add_argument("--param-dtype", choices=_DTYPES, help="of gathered parameters and compute")
    group.add_argument("--reduce-dtype", choices=_DTYPES, help="of the reduction of gradients")
    group.add_argument(
        "--reshard-after-forward", type=_reshard, metavar="true|false|K", help="K: keep 1 / K on each of K neighbouring ranks"
    )
    group.add_argument("--offload", action="store_true", help="shards, gradients and optimizer state lie on the host")
    group.add_argument("--quantize-gather", choices=("int8", "float8_e4m3fn"), help="gather large parameters as 8-bit codes")
    group.add_argument("--quantize-reduce", choices=("int8",), help="reduce large gradients as 8-bit codes")
    group.add_argument("--quantize-min-numel", type=at_least(1), metavar="N", help="elements of a large parameter, at least")
    group.add_argument("--full-precision-ranks", type=at_least(1), metavar="N", help="reduce in full precision among so many")
    group.add_argument("--prefetch-groups", type=at_least(0), metavar="N", help="gathered ahead of use, at most")
    group.add_argument("--prefetch-bytes", type=at_least(0), metavar="N", help="gathered ahead of use, at most")


def _add_output(group: Any) -> None:
    group.add_argument("--json", action="store_true", help="print JSON")
    group.add_argument("--plot", type=Path, metavar="FILE", help="draw memory over a step: .png, .svg or .pdf")
    group.add_argument("--timeline", type=Path, metavar="FOLDER", help="write the step as a trace for Perfetto")
    group.add_argument(
        "--no-search", action="store_true", help="look for no largest batch, and no links that 8-bit codes pay on"
    )


def _reshard(text: str) -> bool | int:
    named = {"true": True, "false": False}.get(text.lower())
    if named is not None:
        return named
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected true, false or a number of ranks")
    return int(text)


def _degrees(text: str) -> tuple[str, ...]:
    named = AXES if text == "all" else tuple(text.split(","))
    if not set(named) <= set(AXES):
        raise argparse.ArgumentTypeError(f"{text}: expected all, or some of {','.join(AXES)}, with commas between them")
    return named


def _selective(text: str) -> str | int:
    if text == "op":
        return text
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: expected op, or a whole number of at least 1")
    return int(text)
