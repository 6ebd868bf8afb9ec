"""Looks at checkpoints, checks and converts them, in one process: no ranks, no MPI.

    python -m shardrt.checkpoint inspect [--json] PATH             what is in it
    python -m shardrt.checkpoint verify FOLDER                     read all of it, and compare checksums
    python -m shardrt.checkpoint convert SOURCE TARGET --to KIND   dcp, safetensors or torch

A checkpoint is a folder in the format of torch.distributed.checkpoint (DCP), of shardrt or of torch; a safetensors file, or a
folder of such files; or a file of torch.save. Exit code 1: damaged, or not to be read; 2: wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from ..comm.fingerprint import printable
from ..comm.options import Parser
from ..progress import progress
from .command_line.checkpoints import open_checkpoint
from .command_line.convert import WRITERS, convert, select
from .command_line.report import as_json, description, items_of, verify
from .disk.storage import located, on_disk
from .formats.dcp.metadata import read_stored
from .formats.safetensors import parse_size


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except BrokenPipeError:  # the reader has ended, as in `inspect | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        _print(f"error: {' '.join(str(error).split())}", sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="shardrt-checkpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="print tensors, shapes, dtypes, bytes, step, and which ranks wrote")
    inspect.add_argument("path")
    inspect.add_argument("--json", action="store_true", help="the same for programs")
    inspect.set_defaults(run=_inspect)
    verify = commands.add_parser("verify", help="read everything and compare checksums; exit code 1 if anything is damaged")
    verify.add_argument("path", metavar="folder")
    verify.set_defaults(run=_verify)
    converting = commands.add_parser("convert", help="write a checkpoint as another kind")
    converting.add_argument("source")
    converting.add_argument("target", help="must not exist; of safetensors: a file if it ends so, else a folder")
    converting.add_argument("--to", choices=WRITERS, required=True)
    converting.add_argument("--only", metavar="KEY", help="take what lies under a key, such as model, and drop the key")
    converting.add_argument("--max-shard-size", type=_size, default="5GB", metavar="SIZE", help="of safetensors; default: 5GB")
    converting.set_defaults(run=_convert)
    return parser


def _size(text: str) -> int:
    try:
        return parse_size(int(text) if text.isdecimal() else text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _inspect(options: argparse.Namespace) -> int:
    if options.json:
        print(json.dumps(as_json(located(options.path)), indent=2))
        return 0
    for line in description(located(options.path)):
        _print(line)
    return 0


def _verify(options: argparse.Namespace) -> int:
    stored = read_stored(options.path)
    items = items_of(stored)
    with progress(sum(length for _, _, length in items), "B") as done:
        report = verify(stored, items, done)
    for line in report.damaged:
        _print(line)
    _print(f"{options.path}: {report.summary}")
    return 1 if report.damaged else 0


def _convert(options: argparse.Namespace) -> int:
    source = select(open_checkpoint(located(options.source)), options.only)
    with progress(sum(info.nbytes for info in source.tensors.values()), "B") as done:
        convert(source, options.to, on_disk(options.target), options.max_shard_size, done)
    if source.objects and options.to == "safetensors":
        prefix, more = "" if options.only is None else f"{options.only}.", ", ..." if len(source.objects) > 3 else ""
        names = ", ".join(prefix + name for name in source.objects[:3]) + more
        _print(f"left out, as safetensors has tensors only: {len(source.objects)} objects: {names}", sys.stderr)
    return 0


def _print(line: str, file: TextIO | None = None) -> None:
    """Print a line, with characters escaped that a terminal would act on.   file: None for stdout."""
    print(printable(line), file=file)


if __name__ == "__main__":
    sys.exit(main())
