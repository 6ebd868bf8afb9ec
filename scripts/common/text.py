"""Text as bytes: read it, draw the batches of each rank, sample from a model.

The data order does not depend on the number of ranks: the global batch is a function of the seed
and the step, and each rank takes a contiguous part of it.
"""

from __future__ import annotations

import hashlib
import os
import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

VALIDATION_PART = 10  # the last tenth is the validation set
TEMPERATURE = 0.8  # of sampling: below 1, likely bytes become likelier


@dataclass(frozen=True, slots=True)
class Corpus:
    """All text, split in two: (n,) uint8 each."""

    train: torch.Tensor
    validation: torch.Tensor
    files: int
    digest: str  # of all bytes: the ranks compare it to verify that they read the same text


def default_files() -> list[Path]:
    """The source of Python's standard library without its tests: about 10 MB, present on any machine."""
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    inside = (path for path in library.rglob("*.py"))
    return [path for path in inside if not skipped & set(path.relative_to(library).parts)]


def find_files(paths: list[Path]) -> list[Path]:
    """The given files and all regular files below the given folders. Raises ValueError for any other path."""
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise ValueError(f"no such file or folder: {path}")
        if not (path.is_file() or path.is_dir()):  # reading a FIFO would wait for a writer
            raise ValueError(f"neither a regular file nor a folder: {path}")
        found += filter(Path.is_file, path.rglob("*")) if path.is_dir() else [path]
    return found


def read_corpus(files: list[Path], context: int, max_bytes: int) -> Corpus:
    """Read files in a shuffled but fixed order until there are `max_bytes`, and no more.

    Raises: ValueError when the text is too short for one window; OSError for unreadable files.
    """
    order = sorted(files)
    random.Random(0).shuffle(order)  # so that both sets have the same kind of text
    text, used = bytearray(), 0
    for path in order:
        if len(text) >= max_bytes:
            break
        with path.open("rb") as file:
            text += file.read(max_bytes - len(text))
        used += 1
    cut = len(text) - len(text) // VALIDATION_PART
    needed = context + 1
    if min(cut, len(text) - cut) < needed:
        raise ValueError(
            f"the text has {len(text)} bytes in {used} files; a context of {context} needs at "
            f"least {VALIDATION_PART * needed}: pass more --data or a smaller --context"
        )
    data = torch.frombuffer(text, dtype=torch.uint8)
    return Corpus(data[:cut], data[cut:], used, hashlib.sha256(text).hexdigest())


def batch(text: torch.Tensor, seed: int, step: int, rows: range, size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `rows` of global batch `step`, which has `size` rows.

    Returns inputs and targets: (len(rows), context) int64 each.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    # Invariant: every rank draws the starts of the whole batch, then takes its rows.
    starts = torch.randint(len(text) - context, (size,), generator=generator)
    windows = starts[rows.start : rows.stop, None] + torch.arange(context + 1)
    tokens = text[windows].long()
    return tokens[:, :-1], tokens[:, 1:]


def rank_rows(size: int, rank: int, ranks: int) -> range:
    """The contiguous rows of rank `rank` in a global batch of `size` rows, which the ranks divide."""
    rows = size // ranks
    return range(rank * rows, (rank + 1) * rows)


def write_sample(
    logits: Callable[[torch.Tensor], torch.Tensor], context: int, device: torch.device, prompt: str, length: int, seed: int
) -> str:
    """Return `prompt` continued by `length` bytes that a model predicts.

    logits: from bytes (1, T) on `device`, at most `context` of them, to those of each next byte (1, T, V).
    prompt: from the command line; bytes of it that are no text are kept as they are.
    Collective: a sharded model's forward runs on all ranks. Every rank draws from the same generator
    and runs the same number of iterations.
    Cost: one forward per byte over at most `context` bytes; keys and values are not cached.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = list(os.fsencode(prompt))
    for _ in range(length):
        found = logits(torch.tensor([tokens[-context:]], device=device))[0, -1].double().cpu()  # (V,)
        probabilities = torch.softmax(found / TEMPERATURE, dim=0)
        tokens.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return bytes(tokens).decode(errors="replace")
