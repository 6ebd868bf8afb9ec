"""Files in the memory of nodes, sent from one to another.

Moves run in rounds, in each of which a rank sends one file and receives one. A file gets its name when all of it is there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ....comm import Communicator, Stream

ARRIVING = "arriving-"  # begins the name of a file that is not there yet, beside the folders of copies
_CHUNK = 64 << 20  # bytes that are sent at once; with NCCL, of the GPU's memory


class FileMove(NamedTuple):
    """A file of `nbytes` bytes goes from rank `source` to rank `target`, which puts it in the place of the same name."""

    file: str
    nbytes: int
    source: int
    target: int


def move(comm: Communicator, folder: Path, moves: Sequence[FileMove], stream: Stream) -> None:
    """Make the moves, of files in `folder`, which each node has. Collective: the same moves, in the same order, on each rank.

    Hazard: a rank to which files are sent needs room for them: writing to memory that is not there kills it.
    """
    arriving = folder.parent / f"{ARRIVING}{comm.rank}"
    if moves:
        comm.barrier(stream=stream).synchronize()  # NCCL connects all ranks in a call that all of them make
    for found in rounds(moves):
        sent = next((each for each in found if each.source == comm.rank), None)
        got = next((each for each in found if each.target == comm.rank), None)
        arriving.unlink(missing_ok=True)
        source = _NOTHING if sent is None else _mapped(folder / sent.file, sent.nbytes)
        target = _NOTHING if got is None else _mapped(arriving, got.nbytes)
        for place in range(0, max(source.numel(), target.numel()), _CHUNK):
            outgoing, place_of_incoming = (each[place : place + _CHUNK] for each in (source, target))
            incoming = torch.empty_like(place_of_incoming, device=comm.device)
            with comm.group() as work:
                if sent is not None and outgoing.numel():
                    comm.send(outgoing.to(comm.device), sent.target, stream=stream)
                if got is not None and incoming.numel():
                    comm.recv(incoming, got.source, stream=stream)
            work.synchronize()
            place_of_incoming.copy_(incoming)
        if got is not None:
            folder.mkdir(exist_ok=True)
            arriving.rename(folder / got.file)


_NOTHING = torch.empty(0, dtype=torch.uint8)


def _mapped(path: Path, nbytes: int) -> torch.Tensor:
    """The bytes of a file, which is made if it is not there."""
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def rounds(moves: Iterable[FileMove]) -> list[list[FileMove]]:
    """The moves, each in the first round in which its source sends nothing yet, and its target receives nothing."""
    made, busy = list[list[FileMove]](), list[tuple[set[int], set[int]]]()  # of each round, who sends and who receives
    for each in moves:
        free = (at for at, (sources, targets) in enumerate(busy) if each.source not in sources and each.target not in targets)
        if (at := next(free, len(made))) == len(made):
            made.append([])
            busy.append((set(), set()))
        made[at].append(each)
        busy[at][0].add(each.source)
        busy[at][1].add(each.target)
    return made
