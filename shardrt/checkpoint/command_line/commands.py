"""What the commands of `python -m shardrt.checkpoint` do, and the exit codes of their errors."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TextIO

from ...comm.core.fingerprint import printable
from ...instruments.progress import progress
from ..disk.storage import located, on_disk
from ..formats.dcp.metadata_reader import read_stored
from .checkpoints import open_checkpoint
from .convert import convert, select
from .report import as_json, description, items_of, verify


def run(options: argparse.Namespace) -> int:
    """Run one command; returns the exit code."""
    try:
        return {"inspect": _inspect, "verify": _verify, "convert": _convert}[options.command](options)
    except BrokenPipeError:  # the reader has ended, as in `inspect | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        _print(f"error: {' '.join(str(error).split())}", sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


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
