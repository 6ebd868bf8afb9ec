"""Every collective with every dtype and odd sizes, in place and out of place, compared with locally computed results."""

from __future__ import annotations

import torch

from shardrt.comm import PreMulSum, ReduceOp, World

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
REDUCED = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
MOVED = (*REDUCED, torch.int16, torch.float8_e4m3fn, torch.float8_e5m2)
SIZES = (0, 1, 1009, 1_000_003)


def values(world: World, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Every rank's (numel,) small integers; over 2, 4 or 8 ranks, sums and averages of them are exact."""
    steps = torch.arange(numel, device=world.device) * 7
    return [((steps + rank * 3) % 11).float().to(dtype) for rank in range(world.size)]


def join(blocks: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate as bytes: torch.cat does not support every dtype on a GPU."""
    return torch.cat([block.view(torch.uint8) for block in blocks]).view(blocks[0].dtype)


def compare(
    world: World, wrong: list[str], name: str, expected: torch.Tensor | None, inp: torch.Tensor | None, *args: object
) -> None:
    """Make the call, also in place if both sizes are equal. expected: this rank's result, None if it has none.

    A wrong result is appended to `wrong`: if one rank raised at once, the others would wait in the next call.
    """
    trials = [(None if expected is None else torch.zeros_like(expected), inp)]
    if name in ("all_reduce", "reduce", "broadcast", "all_to_all") and inp is not None:
        memory = inp.clone()
        trials.append((None if expected is None else memory, memory))
    stream = world.stream_for("check")
    for out, source in trials:
        stream.wait(world.stream.record())
        getattr(world.comm, name)(out, source, *args, stream=stream).synchronize()
        if out is not None and expected is not None and not torch.equal(out.view(torch.uint8), expected.view(torch.uint8)):
            wrong.append(f"{name} of {expected.numel()} elements, {expected.dtype}, {args}")


def moves(world: World) -> None:
    """Collectives that only move elements, of every dtype."""
    wrong: list[str] = []
    r, size, root = world.rank, world.size, world.size - 1
    for dtype in MOVED:
        for n in SIZES:
            rows = values(world, size * n, dtype)
            own, firsts, on_root = slice(r * n, (r + 1) * n), join([row[:n] for row in rows]), r == root
            compare(world, wrong, "all_gather", firsts, rows[r][:n])
            compare(world, wrong, "broadcast", rows[root], rows[r], root)
            compare(world, wrong, "gather", firsts if on_root else None, rows[r][:n], root)
            compare(world, wrong, "scatter", rows[root][own].clone(), rows[r] if on_root else None, root)
            compare(world, wrong, "all_to_all", join([row[own] for row in rows]), rows[r])
    _check_none(wrong)


def reductions(world: World) -> None:
    """Collectives that reduce, with every operator."""
    wrong: list[str] = []
    for dtype in REDUCED:
        for n in SIZES:
            wide = torch.stack([row.double() for row in values(world, world.size * n, dtype)])
            twos = 1 + wide % 2  # their product is exact
            cases: list[tuple[ReduceOp | PreMulSum, torch.Tensor, torch.Tensor]] = [
                (ReduceOp.SUM, wide, wide.sum(0)),
                (ReduceOp.PRODUCT, twos, twos.prod(0)),
                (ReduceOp.MIN, wide, wide.amin(0)),
                (ReduceOp.MAX, wide, wide.amax(0)),
            ]
            if dtype.is_floating_point:
                cases += [(ReduceOp.AVG, wide, wide.mean(0)), (PreMulSum(0.5), wide, wide.sum(0) * 0.5)]
            for op, rows, total in cases:
                expected, inp, root = _as(dtype, total), _as(dtype, rows[world.rank]), world.size - 1
                compare(world, wrong, "all_reduce", expected, inp, op)
                compare(world, wrong, "reduce_scatter", expected[world.rank * n :][:n].clone(), inp, op)
                compare(world, wrong, "reduce", expected if world.rank == root else None, inp, op, root)
    _check_none(wrong)


def _as(dtype: torch.dtype, numbers: torch.Tensor) -> torch.Tensor:
    """Cast `numbers` to `dtype`; integers wrap around, as in sums."""
    return numbers.to(dtype) if dtype.is_floating_point or dtype is torch.bool else numbers.long().to(dtype)


def _check_none(wrong: list[str]) -> None:
    assert not wrong, f"{len(wrong)} wrong results, first {wrong[0]}"


def groups(world: World) -> None:
    """A group of calls: send and recv around a ring, an uneven all-to-all, and all-reduces between buffers of `empty`."""
    size, r, stream, n = world.size, world.rank, world.stream, 1009
    rows, counts = values(world, 9 * size * size, torch.float32), [[s + 3 * p for p in range(size)] for s in range(size)]
    blocks = [row[: sum(count)].split(count) for row, count in zip(rows, counts, strict=True)]
    expected = torch.cat([sent[r] for sent in blocks])
    got, swapped = torch.zeros_like(rows[0]), torch.zeros_like(expected)
    ours = [[world.comm.empty(n, torch.float32, symmetric=symmetric) for _ in range(2)] for symmetric in (False, True)]
    for inp, _ in ours:
        inp.fill_(r + 1)
    with world.comm.group() as work:
        world.comm.send(rows[r], (r + 1) % size, stream=stream)
        world.comm.recv(got, (r - 1) % size, stream=stream)
        world.comm.all_to_all(swapped, torch.cat(blocks[r]), [count[r] for count in counts], counts[r], stream=stream)
        for inp, out in ours:
            world.comm.all_reduce(out, inp, ReduceOp.SUM, stream=stream)
    work.synchronize()
    assert torch.equal(got, rows[(r - 1) % size]), "send and recv"
    assert torch.equal(swapped, expected), "all_to_all"
    for _, out in ours:
        assert torch.equal(out, torch.full_like(out, size * (size + 1) / 2)), "all_reduce between buffers of empty()"
