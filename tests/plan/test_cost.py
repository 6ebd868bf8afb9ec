"""What operations and collectives cost, against figures worked out by hand, and searches over forecasts."""

import itertools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from shardrt.comm.core.calls import CollectiveCall, Member, ReduceOp
from shardrt.comm.core.streams import INLINE
from shardrt.comm.stress.problem import bus_factor
from shardrt.plan.machine.cost import Bound, Costs, RanksOnNodes, Traffic, bounding, traffic_of
from shardrt.plan.machine.hardware import SheetError, parse_sheet
from shardrt.plan.machine.work import OperationWork, work_of
from shardrt.plan.question.search import break_even, largest_batch
from shardrt.plan.run.attention import FusedAttention

SHEET = """
name = "test"
device = "cuda"
ranks_per_node = 4
[memory]
nbytes = 1000000000
bandwidth = 1e10
fraction = 0.5
[compute]
fraction = 0.5
[compute.flops]
float32 = 1e12
bfloat16 = 4e12
[overhead]
operation = 5e-6
kernel = 2e-6
[within]
bandwidth = 1e9
fraction = 0.5
latency = 1e-6
start = 1e-5
[across]
bandwidth = 5e7
latency = 1e-4
start = 3e-5
"""
MEASURED = SHEET.replace("cuda", "cpu") + "[collectives]\nall_gather = { latency = 1e-3, bandwidth = 1e7 }\n"


def call(name: str, ranks: Sequence[int], rank: int, nbytes: int, *args: object) -> CollectiveCall:
    """A call with `nbytes` in all blocks. rank: of this process in the communicator."""
    comm = cast(Member, SimpleNamespace(name="c", ranks=ranks, rank=rank, size=len(ranks)))
    whole, block = (torch.empty(n, dtype=torch.uint8, device="meta") for n in (nbytes, nbytes // len(ranks)))
    out = block if name in ("reduce_scatter", "scatter") else None if name == "send" else whole
    inp = block if name in ("all_gather", "gather") else None if name in ("recv", "barrier") else whole
    return CollectiveCall(comm, 0, name, None if name == "barrier" else out, inp, args, INLINE)


# ---------------------------------------------------------------------- collectives


@pytest.mark.parametrize(
    ("ranks", "rank", "place"),
    [
        (range(1), 0, RanksOnNodes(1, 1, 1)),
        (range(4), 3, RanksOnNodes(4, 4, 1)),
        (range(16), 9, RanksOnNodes(16, 4, 4)),
        (range(2, 100_000, 4), 7, RanksOnNodes(25_000, 1, 25_000)),  # one rank of each node
        (range(1, 100_000, 2), 49_999, RanksOnNodes(50_000, 2, 25_000)),
        (range(6), 5, RanksOnNodes(6, 2, 3)),  # the last node is not full
    ],
)
def test_where_the_ranks_of_a_communicator_are(ranks: range, rank: int, place: RanksOnNodes) -> None:
    assert RanksOnNodes.of(call("barrier", ranks, rank, 0).comm, 4) == place


def ring_bytes(size: int, per_node: int, nbytes: int) -> tuple[float, float]:
    """What a rank receives within and across nodes if every rank's block goes around rings, block by block.

    Ring c passes the nodes one after the other, and enters each at the rank with local rank c; it carries a part of each block.
    """
    within = across = 0.0
    for ring in range(per_node):
        order = [node * per_node + (ring + i) % per_node for node in range(size // per_node) for i in range(per_node)]
        position = order.index(0)
        is_near = order[position - 1] // per_node == 0
        received = nbytes * (size - 1) / size / per_node
        within, across = within + received * is_near, across + received * (not is_near)
    return within, across


@pytest.mark.parametrize(("size", "per_node"), [(4, 4), (8, 4), (64, 4), (3, 1)])
def test_rings_by_walking_them(size: int, per_node: int) -> None:
    traffic = traffic_of(call("all_gather", range(size), 0, size * 1000), per_node)
    assert (traffic.received_within, traffic.received_across) == pytest.approx(ring_bytes(size, per_node, size * 1000))
    # nccl-tests' bus bandwidth: what one link moves in the time of the collective, if all of the ring are alike.
    assert traffic.received_within + traffic.received_across == pytest.approx(size * 1000 * bus_factor("all_gather", size))


@pytest.mark.parametrize(
    ("name", "args", "traffic"),
    [  # 8 ranks on 2 nodes of 4, 800 bytes; this is rank 5
        ("all_gather", (), Traffic(525, 175, 525, 175, 6, 1)),
        ("reduce_scatter", (ReduceOp.SUM,), Traffic(525, 175, 525, 175, 6, 1)),
        ("all_reduce", (ReduceOp.SUM,), Traffic(1200, 200, 1200, 200, 6, 2)),
        ("broadcast", (0,), Traffic(600, 200, 600, 200, 2, 1)),
        ("broadcast", (5,), Traffic(0, 0, 600, 200, 2, 1)),
        ("reduce", (ReduceOp.SUM, 5), Traffic(600, 200, 600, 200, 2, 1)),
        ("reduce", (ReduceOp.SUM, 1), Traffic(0, 0, 600, 200, 2, 1)),
        ("all_to_all", (None,), Traffic(300, 400, 300, 400, 3, 4)),
        ("gather", (5,), Traffic(300, 400, 300, 400, 3, 4)),
        ("gather", (0,), Traffic(0, 0, 300, 400, 3, 4)),
        ("scatter", (5,), Traffic(0, 0, 300, 400, 3, 4)),
        ("scatter", (0,), Traffic(300 * (1 / 7), 400 * (1 / 7), 300, 400, 3, 4)),
        ("send", (6,), Traffic(0, 0, 800, 0, 1, 0)),
        ("recv", (3,), Traffic(0, 800, 0, 800, 0, 1)),
        ("barrier", (), Traffic(0, 0, 0, 0, 4, 2)),
    ],
)
def test_bytes_and_steps(name: str, args: tuple[object, ...], traffic: Traffic) -> None:
    assert traffic_of(call(name, range(8), 5, 800, *args), 4) == traffic


def test_a_collective_takes_its_latency_and_its_slowest_link() -> None:
    costs = Costs(parse_sheet(SHEET, "test"))
    near = 1e-5 + 3 * 1e-6 + 3e6 / 5e8
    assert costs.collective([call("all_gather", range(4), 0, 4_000_000)]) == pytest.approx(near)
    assert costs.spent[Bound.WITHIN] == pytest.approx(3e6 / 5e8)
    assert costs.spent[Bound.LATENCY] == pytest.approx(1.3e-5)
    far = 3e-5 + 6 * 1e-6 + 1e-4 + 1.75e6 / 5e7  # of 8 MB, 7 MB come through 4 ports
    assert costs.collective([call("all_gather", range(8), 0, 8_000_000)]) == pytest.approx(far)
    assert costs.spent[Bound.ACROSS] == pytest.approx(1.75e6 / 5e7)
    one_per_node = 3e-5 + 1e-4 + 1e6 / 5e7
    assert costs.collective([call("reduce_scatter", (1, 5), 0, 2_000_000, ReduceOp.SUM)]) == pytest.approx(one_per_node)
    assert Costs(costs.sheet, per_node=8).collective([call("all_gather", range(8), 0, 8_000_000)]) < far
    assert costs.collective([call("all_gather", range(1), 0, 5_000_000)]) == pytest.approx(1e-5 + 1e7 / 5e9), "a copy"


def test_a_group_shares_its_latency_and_sends_while_it_receives() -> None:
    costs = Costs(parse_sheet(SHEET, "test"))
    one, other = (call("all_to_all", range(4), 0, nbytes, None) for nbytes in (4_000_000, 400))
    together = costs.collective([one, other])
    assert together == pytest.approx(costs.collective([one]) + 300 / 5e8)
    both = [call("send", range(4), 0, 1000, 1), call("recv", range(4), 0, 3000, 3)]
    assert costs.collective(both) == pytest.approx(costs.collective(both[1:]))
    assert costs.traffic(both) == Traffic(3000, 0, 3000, 0, 1, 0)


def test_measured_collectives_hold_within_the_node() -> None:
    costs = Costs(parse_sheet(MEASURED, "test"))
    assert costs.collective([call("all_gather", range(4), 0, 10_000)]) == pytest.approx(1e-3 + 1e-3)
    assert costs.collective([call("all_gather", range(4), 0, 4000)] * 2) == pytest.approx(1e-3 + 8e-4)
    assert costs.spent[Bound.LATENCY] == pytest.approx(2e-3)
    assert costs.spent[Bound.WITHIN] == pytest.approx(1.8e-3)
    unmeasured = Costs(parse_sheet(SHEET, "test")).collective
    for other in (call("all_gather", range(8), 0, 8000), call("reduce_scatter", range(4), 0, 4000, ReduceOp.SUM)):
        assert costs.collective([other]) == unmeasured([other])


def test_a_sheet_without_links_across_nodes() -> None:
    costs = Costs(parse_sheet(SHEET.partition("[across]")[0], "test"))
    costs.collective([call("all_gather", range(4), 0, 4000)])
    with pytest.raises(SheetError, match=r"'test' has no \[across\], and a collective spans several nodes of 4 ranks"):
        costs.collective([call("all_gather", range(5), 0, 5000)])


# ---------------------------------------------------------------------- operations


def works(fn: Callable[[], object]) -> list[tuple[str, OperationWork]]:
    """The operations that run in `fn`, and their work."""
    found: list[tuple[str, OperationWork]] = []

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            found.append((func.overloadpacket.__name__, work_of(func, args, kwargs or {}, out)))
            return out

    with Mode():
        fn()
    return found


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_work_of_operations() -> None:
    half = torch.bfloat16
    a, b, table, index = meta(4, 8), meta(8, 16), meta(1000, 8), torch.empty(5, dtype=torch.int64, device="meta")
    f32 = torch.float32
    for run, expected in (
        (lambda: a @ b, ("mm", OperationWork(2 * 4 * 8 * 16, 4 * (32 + 128 + 64), f32))),
        (lambda: a.add_(1), ("add_", OperationWork(0, 4 * 64, f32))),
        (lambda: a.copy_(a), ("copy_", OperationWork(0, 4 * 64, f32))),
        (lambda: torch.add(a, 1, out=a), ("add", OperationWork(0, 4 * 64, f32))),
        (lambda: torch._foreach_add_([a, b], 1), ("_foreach_add_", OperationWork(0, 4 * 2 * (32 + 128), f32))),
        (lambda: a.half(), ("_to_copy", OperationWork(0, 4 * 32 + 2 * 32, f32))),
        (lambda: b.t(), ("t", OperationWork(0, 0, f32, False))),
        (lambda: torch.empty_like(b), ("empty_like", OperationWork(0, 0, f32, False))),
        (lambda: meta(1, 8).expand(100, 8).add(1), ("add", OperationWork(0, 4 * 8 + 4 * 800, f32))),
        (lambda: F.embedding(index, table), ("embedding", OperationWork(0, 4 * (40 + 40) + 8 * 5, f32))),
        (
            lambda: meta(4, 8, dtype=half) @ meta(8, 16, dtype=half),
            ("mm", OperationWork(1024, 448, half)),
        ),
        (lambda: torch.ops.aten.add(index, 1), ("add", OperationWork(0, 80, f32))),
    ):
        assert works(cast(Callable[[], object], run))[-1] == expected


def test_an_operation_takes_its_overhead_and_its_roof() -> None:
    gpu = Costs(parse_sheet(SHEET, "test"))
    assert gpu.kernel(OperationWork(10**9, 10**6, torch.float32, True)) == pytest.approx(2e-6 + 2e-3)
    assert gpu.kernel(OperationWork(10**9, 10**7, torch.bfloat16, True)) == pytest.approx(2e-6 + 2e-3), "memory takes longer"
    assert gpu.kernel(OperationWork(10**9, 10**6, torch.float16, True)) == pytest.approx(2e-6 + 2e-3), (
        "no rate: that of float32"
    )
    assert gpu.kernel(OperationWork(0, 0, torch.float32, False)) == 0, "a view launches nothing"
    assert gpu.launch_seconds == 5e-6
    assert gpu.spent[Bound.ARITHMETIC] == pytest.approx(4e-3)
    assert gpu.spent[Bound.MEMORY] == pytest.approx(2e-3)
    assert gpu.spent[Bound.OVERHEAD] == pytest.approx(6e-6)
    host = Costs(parse_sheet(SHEET.replace("cuda", "cpu"), "test"))
    assert host.kernel(OperationWork(0, 0, torch.float32, False)) == 5e-6 / 4, "the host makes the view"
    assert host.launch_seconds == 0


@pytest.mark.parametrize(("is_causal", "part"), [(True, 2), (False, 1)])
def test_attention_has_a_rate_of_its_own(is_causal: bool, part: int) -> None:
    """Of the scores that it computes; flops are all of them, as MFU counts them."""
    q, k, v = (meta(2, 8, 256, 16, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    with FusedAttention("cuda"):
        (name, forward), *_, (last, backward) = (
            each
            for each in works(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).sum().backward())
            if "attention" in each[0]
        )
    product = 2 * 2 * 8 * 256 * 256 * 16
    assert (name, forward.flops, forward.scored) == ("_scaled_dot_product_flash_attention", 2 * product, 2 * product // part)
    assert (last, backward.flops) == ("_scaled_dot_product_flash_attention_backward", 5 * product)
    assert backward.scored == 5 * product // part
    own = Costs(parse_sheet(SHEET.replace("[compute]\n", "[compute]\nattention = 0.25\n"), "test"))
    assert own.kernel(forward._replace(nbytes=0)) == pytest.approx(2e-6 + 2 * product / part / 1e12)
    assert Costs(parse_sheet(SHEET, "test")).kernel(forward._replace(nbytes=0)) == pytest.approx(2e-6 + 2 * product / 2e12)


@pytest.mark.parametrize(("device", "dtype"), [("cuda", torch.bfloat16), ("cuda", torch.float32), ("cpu", torch.float32)])
@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_keeps_no_scores(device: str, dtype: torch.dtype, is_masked: bool) -> None:
    """2 sequences of 256 tokens, 8 heads of 16 channels; keys and values have 2 heads."""
    q = torch.empty(2, 8, 256, 16, dtype=dtype, device="meta", requires_grad=True)
    k, v = (torch.empty(2, 2, 256, 16, dtype=dtype, device="meta", requires_grad=True) for _ in range(2))
    mask = torch.empty(1, 1, 256, 256, dtype=dtype, device="meta") if is_masked else None

    def attend() -> None:
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not is_masked, enable_gqa=True)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        out.backward(torch.empty_like(out))
        assert q.grad is not None
        assert k.grad is not None
        assert k.grad.shape == k.shape

    scores = 2 * 8 * 256 * 256
    with FusedAttention(device):
        fused = works(attend)
    assert max(work.nbytes for _, work in fused) < scores * dtype.itemsize
    assert sum(work.flops for _, work in fused) == 7 * 2 * scores * 16, "2 products forward, 5 backward"
    assert max(work.nbytes for _, work in works(attend)) >= scores * dtype.itemsize, "torch's own, on the meta device"


def test_attention_is_fused_where_a_backward_runs_it_again() -> None:
    q = torch.empty(1, 2, 8, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)

    def attend() -> None:
        out = checkpoint(lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), q, use_reentrant=False)
        out.backward(torch.empty_like(out))

    with FusedAttention("cuda"):
        fused = works(attend)
    assert sum(work.flops > 0 for _, work in fused) == 3, "forward, forward again, backward"
    assert sum(work.flops for _, work in fused) == (2 + 2 + 5) * 2 * (2 * 8 * 8 * 8)


def test_experts_in_one_product() -> None:
    """6 rows by 3 matrices of 8 x 16: as many operations as with one matrix, and as many for each gradient."""
    rows, matrices, ends = (
        torch.empty(6, 8, dtype=torch.bfloat16, device="meta", requires_grad=True),
        torch.empty(3, 8, 16, dtype=torch.bfloat16, device="meta", requires_grad=True),
        torch.empty(3, dtype=torch.int32, device="meta"),
    )

    def multiply() -> None:
        out = F.grouped_mm(rows, matrices, offs=ends)
        out.backward(torch.empty_like(out))

    found = works(multiply)
    assert [work.flops for _, work in found if work.flops] == 3 * [2 * 6 * 8 * 16]


def test_attention_that_no_kernel_fuses_stays() -> None:
    q = torch.randn(2, 3, 5, 4)
    expected = F.scaled_dot_product_attention(q, q, q)
    with FusedAttention("cpu"):
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), expected)
        assert F.scaled_dot_product_attention(q.to("meta"), q.to("meta"), q.to("meta"), dropout_p=0.5).shape == q.shape


# Queries, keys and values as (batch, heads, tokens, channels), and other arguments.
ATTENTIONS: dict[str, tuple[tuple[Sequence[int], ...], dict[str, Any]]] = {
    "plain": (((2, 4, 16, 8),) * 3, {}),
    "latent": (((2, 4, 16, 24), (2, 4, 16, 24), (2, 4, 16, 16)), {}),
    "wide": (((2, 4, 16, 264),) * 3, {}),
    "odd": (((2, 4, 16, 5),) * 3, {}),
    "causal": (((2, 4, 16, 8),) * 3, {"is_causal": True}),
    "rectangle": (((2, 4, 8, 8), (2, 4, 16, 8), (2, 4, 16, 8)), {"is_causal": True}),
    "dropout": (((2, 4, 16, 8),) * 3, {"dropout_p": 0.5}),
    "mask": (((2, 4, 16, 8),) * 3, {"attn_mask": (16, 16)}),
    "mask of a row": (((2, 4, 16, 8),) * 3, {"attn_mask": (4, 1, 16)}),
    "grouped": (((2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8)), {"enable_gqa": True}),
    "latent and grouped": (((2, 4, 16, 24), (2, 2, 16, 24), (2, 2, 16, 16)), {"enable_gqa": True}),
    "one head": (((2, 4, 16, 8), (2, 1, 16, 8), (2, 1, 16, 8)), {}),
    "no batch": (((4, 16, 8),) * 3, {}),
    "no batch, mask": (((4, 16, 8),) * 3, {"attn_mask": (4, 1, 16)}),
    "no batch, mask of a row": (((4, 16, 8),) * 3, {"attn_mask": (16,)}),
    "no batch, grouped": (((4, 16, 8), (2, 16, 8), (2, 16, 8)), {"enable_gqa": True}),
    "no batch, grouped, rectangle": (((4, 16, 8), (2, 8, 8), (2, 8, 8)), {"enable_gqa": True}),
}


def attend(case: str, device: str, dtype: torch.dtype) -> list[tuple[str, OperationWork]]:
    """The operations of attention, and of its backward where it is not fused, as the rest is torch's."""
    shapes, options = ATTENTIONS[case]
    q, k, v = (torch.zeros(shape, dtype=dtype, device=device, requires_grad=True) for shape in shapes)
    if "attn_mask" in options:
        options = options | {"attn_mask": torch.ones(options["attn_mask"], dtype=torch.bool, device=device)}

    def run() -> None:
        out = F.scaled_dot_product_attention(q, k, v, **options)
        assert out.shape == (*shapes[0][:-1], shapes[2][-1])
        out.sum().backward()
        assert [each.grad.shape for each in (q, k, v) if each.grad is not None] == [torch.Size(shape) for shape in shapes]

    return works(run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ATTENTIONS)
def test_the_host_attends_as_it_is_forecast(case: str, dtype: torch.dtype) -> None:
    """The same kernels as in a real run, forwards and backwards, and as many operations in matrices."""
    real = attend(case, "cpu", dtype)
    with FusedAttention("cpu"):
        found = attend(case, "meta", dtype)
    kernels = [[name for name, _ in each if "scaled_dot_product" in name] for each in (real, found)]
    assert kernels[0] == kernels[1]
    if kernels[0]:
        assert sum(work.flops for _, work in found) == sum(work.flops for _, work in real)


FLASH, EFFICIENT = "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention"


@pytest.mark.parametrize(
    ("case", "half", "single"),
    [
        ("plain", FLASH, EFFICIENT),
        ("latent", EFFICIENT, EFFICIENT),
        ("wide", EFFICIENT, EFFICIENT),
        ("odd", FLASH, None),
        ("causal", FLASH, EFFICIENT),
        ("rectangle", EFFICIENT, EFFICIENT),
        ("dropout", FLASH, EFFICIENT),
        ("mask", EFFICIENT, EFFICIENT),
        ("mask of a row", EFFICIENT, EFFICIENT),
        ("grouped", FLASH, EFFICIENT),
        ("latent and grouped", EFFICIENT, EFFICIENT),
        ("one head", None, None),
        ("no batch", None, None),
    ],
)
def test_the_attention_of_a_gpu(case: str, half: str | None, single: str | None) -> None:
    for dtype, expected in (
        (torch.bfloat16, half),
        (torch.float16, half),
        (torch.float32, single),
        (torch.float64, None),
    ):
        with FusedAttention("cuda"):
            names = [name for name, _ in attend(case, "meta", dtype) if "scaled_dot_product" in name]
        assert names == ([] if expected is None else [expected, f"{expected}_backward"])


# ---------------------------------------------------------------------- what bounds a step, searches


def test_what_bounds_a_step() -> None:
    spent = {Bound.ARITHMETIC: 6.0, Bound.MEMORY: 2.0, Bound.OVERHEAD: 0.0}
    spent |= {Bound.LATENCY: 1.0, Bound.WITHIN: 0.0, Bound.ACROSS: 9.0}
    parts = bounding(spent, 10.0, 2.0)  # of 10 s of communication, 8 were hidden
    assert parts == pytest.approx(
        {Bound.ARITHMETIC: 0.6, Bound.MEMORY: 0.2, Bound.ACROSS: 0.18, Bound.LATENCY: 0.02, Bound.OVERHEAD: 0, Bound.WITHIN: 0}
    )
    assert next(iter(parts)) == Bound.ARITHMETIC
    assert next(iter(bounding(spent, 30.0, 22.0))) == Bound.ACROSS
    assert sum(bounding(dict.fromkeys(Bound, 0.0) | {Bound.ARITHMETIC: 1.0}, 1.0, 0.0).values()) == 1


def test_the_largest_batch() -> None:
    for peak in (lambda b: 10 + 7 * b, lambda b: 10 + 7 * b + b * b // 50, lambda b: 10 + 50 * (b // 8) + b):
        for capacity in (0, 10, 16, 17, 18, 100, 717, 5000, 10**7):
            asked: list[int] = []

            def peak_nbytes(batch: int, peak: Callable[[int], int] = peak, asked: list[int] = asked) -> int:
                asked.append(batch)
                return peak(batch)

            expected = max(itertools.chain([0], (b for b in range(1, 3000) if peak(b) <= capacity)))
            assert largest_batch(peak_nbytes, capacity, most=2999) == expected
            assert len(asked) == len(set(asked))
            assert len(asked) <= 14
    for step in (10**9, 100):
        batches: list[int] = []

        def nearly_flat(batch: int, step: int = step, batches: list[int] = batches) -> int:
            batches.append(batch)
            return 100 + batch // step

        assert largest_batch(nearly_flat, 1000) == 65536
        assert len(batches) <= 30
    count = itertools.count()
    assert largest_batch(lambda b: 10**9 + 12345 * b + 0 * next(count), 2 * 10**9) == 65536
    assert next(count) <= 6


def test_the_bandwidth_up_to_which_something_pays() -> None:
    """A second saved at 1 GB/s, less a cost of 10 ms at any speed: 100 GB/s."""
    pays = break_even(lambda bandwidth: 1e9 / bandwidth - 0.01, 1e8, 1e12)
    assert pays == pytest.approx(1e11, rel=0.03)
    assert break_even(lambda bandwidth: -1.0, 1e8, 1e12) == 0.0
    assert break_even(lambda bandwidth: 1.0, 1e8, 1e12) == math.inf
