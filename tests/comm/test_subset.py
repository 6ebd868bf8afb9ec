"""Communicators that some ranks make alone, and messages with tags."""

from __future__ import annotations

import pytest
import torch

from ranks import on_ranks, refused
from shardrt.comm import ReduceOp, World
from shardrt.comm.backends import messages
from shardrt.comm.backends.tagged import TaggedMessages
from shardrt.comm.core.streams import INLINE

pytestmark = pytest.mark.mpi


@on_ranks(1, 2, 3, 4)
def test_members_alone_make_a_subset(world: World) -> None:
    """Pairs of neighbours, in either order; a rank in two of them makes both, one after the other."""
    number = world.comm.number
    for first in range(world.size - 1):
        ranks = [first + 1, first]
        if world.rank not in ranks:
            continue
        pair = world.comm.subset(ranks, f"pair{first}")
        assert list(pair.ranks) == ranks
        assert pair.rank == ranks.index(world.rank)
        for numel in (3, 8192, 8193):
            gathered = torch.empty(2 * numel)
            pair.all_gather(gathered, torch.full((numel,), float(world.rank)), stream=INLINE)
            assert (gathered[0].item(), gathered[-1].item()) == (first + 1, first)
        inner = pair.subset([pair.rank], "alone")
        inner.all_reduce(gathered, gathered, ReduceOp.SUM, stream=INLINE)
        inner.close()
        pair.close()
    assert world.comm.number == number, "not every rank has made a call"
    world.comm.exchange(None)


@on_ranks(2)
def test_bad_subsets_are_refused(world: World) -> None:
    for ranks in ([1 - world.rank], [0, 0, 1], [0, 1, 2], []):
        with pytest.raises(ValueError, match="expected distinct ranks below 2, with this rank"):
            world.comm.subset(ranks, "bad")


def numbers(numel: int, seed: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@on_ranks(2, 3)
def test_messages_of_every_size_by_tags(world: World) -> None:
    tagged = TaggedMessages(world.comm)
    before, after = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    sizes = [0, 1, 8191, 8192, 8193, 300_000]
    sent = [tagged.isend(numbers(numel, world.rank), after, tag=tag) for tag, numel in enumerate(sizes)]
    received = [torch.empty(numel) for numel in sizes]
    requests = [tagged.irecv(received[tag], before, tag) for tag in reversed(range(len(sizes)))]
    world.barrier()  # takes no message for its own
    for request in (*requests, *sent):
        request.wait()
        assert request.is_done()
    assert all(request.source == before for request in requests)
    for numel, found in zip(sizes, received, strict=True):
        assert torch.equal(found, numbers(numel, before))
    world.barrier()
    tagged.close()


@on_ranks(2)
def test_messages_of_several_parts(world: World) -> None:
    whole, messages._MESSAGE_NBYTES = messages._MESSAGE_NBYTES, 1000
    try:
        tagged = TaggedMessages(world.comm)
        found = torch.empty(777)
        sent = tagged.isend(numbers(777, world.rank), 1 - world.rank)
        tagged.irecv(found, 1 - world.rank).wait()
        assert torch.equal(found, numbers(777, 1 - world.rank))
        sent.wait()
        refused("from any rank come in 4 parts", lambda: tagged.irecv(found, None), NotImplementedError)
        short = tagged.isend(numbers(260, 0), 1 - world.rank, tag=1)  # 1040 bytes, where 3108 are expected
        with pytest.raises(RuntimeError, match=r"recv float32 777 from \d tag 1 .* expected 3108 bytes, found fewer"):
            tagged.irecv(found, 1 - world.rank, tag=1).wait()
        short.wait()
        world.barrier()
        tagged.close()
    finally:
        messages._MESSAGE_NBYTES = whole


@on_ranks(2)
def test_bad_messages(world: World) -> None:
    tagged = TaggedMessages(world.comm)
    refused("expected a rank below 2, found 2", lambda: tagged.isend(torch.zeros(1), 2))
    refused("expected a tag from 0", lambda: tagged.irecv(torch.zeros(1), 1 - world.rank, -1))
    refused("contiguous", lambda: tagged.isend(torch.zeros(4, 2)[:, 0], 1 - world.rank))
    sent = tagged.isend(torch.zeros(10), 1 - world.rank)
    refused("expected 20 bytes, found more", tagged.irecv(torch.zeros(5), 1 - world.rank).wait, RuntimeError)
    sent.wait()
    world.barrier()
    tagged.close()
