"""Which tokens of a sequence each rank has, and which parts of their attention it computes: integers, without tensors.

Balanced, the sequence is cut into 2N chunks, and rank r of N has chunks r and 2N-1-r: under a causal mask an early token
attends to few and a late one to many, and so each rank computes as much (head-tail, as in torch's context parallelism and
Llama 3's, arXiv 2407.21783). Otherwise it is cut into N chunks. Sizes of chunks differ by one token at most; some may have
none.

A document is a run of tokens that attend to each other alone. Its part on a rank is a run of local tokens as well, since a rank
has its tokens in their order. So attention within documents is dense and causal rectangles, and needs no mask:

    tokens of rank 0 of 2, chunks 0 and 3, and documents a, b          0 0 0 a | a a b b | b b b b | b c c c
    keys of rank 1, chunks 1 and 2, for the part of b on rank 0        its last chunk attends to all b of chunks 1 and 2
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

Run = tuple[int, int]  # tokens from, to


class Piece(NamedTuple):
    """Queries and keys, as runs of local tokens, that attend to each other in one batch row (None: in all rows).

    causal: query i attends to keys up to i; the runs are of one size.
    """

    row: int | None
    queries: Run
    keys: Run
    causal: bool


@dataclass(frozen=True, slots=True)
class SequenceCut:
    """A sequence of `total` tokens over `size` ranks, with head-tail chunks if `balanced`."""

    total: int
    size: int
    balanced: bool

    def chunks(self, rank: int) -> tuple[Run, ...]:
        """The tokens of a rank, in order."""
        bounds = _bounds(self.total, (2 if self.balanced else 1) * self.size)
        numbers = (rank, 2 * self.size - 1 - rank) if self.balanced else (rank,)
        return tuple((bounds[number], bounds[number + 1]) for number in numbers)

    def length(self, rank: int) -> int:
        """How many tokens a rank has."""
        return sum(stop - start for start, stop in self.chunks(rank))

    @property
    def longest(self) -> int:
        """How many tokens the rank with the most has."""
        return max(self.length(rank) for rank in range(self.size))

    def pieces(self, rank: int, owner: int, causal: bool, documents: Documents | None) -> tuple[Piece, ...]:
        """What the queries of a rank compute with the keys of `owner`; every query is in a piece of its own rank."""
        return _pieces(self, rank, owner, causal, documents)


class Documents(NamedTuple):
    """For each batch row, or once for all rows, where documents begin, and the end of the sequence."""

    bounds: tuple[tuple[int, ...], ...]


@lru_cache(maxsize=1024)
def _bounds(total: int, chunks: int) -> tuple[int, ...]:
    small, longer = divmod(total, chunks)
    return tuple(accumulate((small + (chunk < longer) for chunk in range(chunks)), initial=0))


@lru_cache(maxsize=256)  # documents are others in each step
def _pieces(cut: SequenceCut, rank: int, owner: int, causal: bool, documents: Documents | None) -> tuple[Piece, ...]:
    mine, theirs = cut.chunks(rank), cut.chunks(owner)
    if documents is None:
        return tuple(_of_document((0, cut.total), mine, theirs, causal, None))
    alike = len(documents.bounds) == 1
    return tuple(
        piece
        for row, bounds in enumerate(documents.bounds)
        for document in pairwise(bounds)
        for piece in _of_document(document, mine, theirs, causal, None if alike else row)
    )


def _of_document(document: Run, mine: Sequence[Run], theirs: Sequence[Run], causal: bool, row: int | None) -> Iterator[Piece]:
    queries, keys = _local(mine, document), _local(theirs, document)
    if queries[0] == queries[1] or keys[0] == keys[1]:
        return
    if not causal or mine == theirs:
        yield Piece(row, queries, keys, causal)
        return
    # Chunks of two ranks have no token in common: all queries of a chunk see the same keys, those of earlier chunks.
    found: list[Piece] = []
    for start, stop in mine:
        part = _local(mine, (max(document[0], start), min(document[1], stop)))
        seen = _local(theirs, (document[0], max(document[0], min(document[1], start))))
        if part[0] == part[1] or seen[0] == seen[1]:
            continue
        if found and found[-1].keys == seen:  # one call for both chunks
            part = (found.pop().queries[0], part[1])
        found.append(Piece(row, part, seen, False))
    yield from found


def _local(chunks: Sequence[Run], tokens: Run) -> Run:
    """The local tokens that are among these of the sequence. An empty run, if none are, begins anywhere."""
    before = sum(min(max(tokens[0] - start, 0), stop - start) for start, stop in chunks)
    until = sum(min(max(tokens[1] - start, 0), stop - start) for start, stop in chunks)
    return before, max(before, until)
