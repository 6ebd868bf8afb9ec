"""Looks at checkpoints, checks and converts them, in one process: no ranks, no MPI.

    python -m shardrt.checkpoint inspect [--json] PATH             what is in it
    python -m shardrt.checkpoint verify FOLDER                     read all of it, and compare checksums
    python -m shardrt.checkpoint convert SOURCE TARGET --to KIND   dcp, safetensors or torch

A checkpoint is a folder in the format of torch.distributed.checkpoint (DCP), of shardrt or of torch; a safetensors file, or a
folder of such files; or a file of torch.save. Exit code 1: damaged, or not to be read; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ..comm.program.options import Parser
from .formats.sizes import parse_size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    from .command_line.commands import run  # needs torch, and help and errors of usage do not

    return run(options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="shardrt-checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")
    inspect = commands.add_parser("inspect", help="print tensors, shapes, dtypes, bytes, step, and which ranks wrote")
    inspect.add_argument("path")
    inspect.add_argument("--json", action="store_true", help="the same for programs")
    verify = commands.add_parser("verify", help="read everything and compare checksums; exit code 1 if anything is damaged")
    verify.add_argument("path", metavar="folder")
    converting = commands.add_parser("convert", help="write a checkpoint as another kind")
    converting.add_argument("source")
    converting.add_argument("target", help="must not exist; of safetensors: a file if it ends so, else a folder")
    converting.add_argument("--to", choices=("dcp", "safetensors", "torch"), required=True)
    converting.add_argument("--only", metavar="KEY", help="take what lies under a key, such as model, and drop the key")
    converting.add_argument("--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="of safetensors; default: 5GB")
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
