"""Changes of placement: every pair of placements, exactly; which collectives they cost; gradients through them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from placements import Log, uneven
from ranks import on_ranks, refused
from shardrt import DTensor, FlatShard, Partial, RaggedShard, Replicate, Shard, distribute_tensor, fully_shard
from shardrt.checkpoint import StateDictOptions, get_optimizer_state_dict
from shardrt.comm import DeviceMesh, MismatchError, ReduceOp, World
from shardrt.tensor.placement.placement import Placement, Spec, local_shape
from shardrt.tensor.placement.redistribute import changes_in_order

REDUCED = {
    ReduceOp.SUM: lambda stacked: stacked.sum(0),
    ReduceOp.AVG: lambda stacked: stacked.mean(0),
    ReduceOp.MAX: lambda stacked: stacked.amax(0),
    ReduceOp.MIN: lambda stacked: stacked.amin(0),
    ReduceOp.PRODUCT: lambda stacked: stacked.prod(0),
}


def placements_for(shape: tuple[int, ...], size: int) -> list[Placement]:
    """All kinds, along all dims."""
    made: list[Placement] = [Replicate(), *(Partial(op) for op in ReduceOp)]
    for dim in range(max(1, len(shape))):
        extent = shape[dim] if shape else 1
        numel = torch.Size(shape).numel()
        made += [Shard(dim), RaggedShard(dim, uneven(extent, size)), FlatShard(dim, uneven(numel, size))]
    return made


def values(shape: Sequence[int], seed: int) -> torch.Tensor:
    """Whole numbers that 2, 3 and 4 divide, so that every reduction is exact."""
    return 12 * torch.randint(-9, 10, tuple(shape), generator=torch.Generator().manual_seed(seed)).double()


def tensor_and_whole(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> tuple[DTensor, torch.Tensor]:
    """A tensor with these placements, with different terms on partial axes, and its full tensor."""
    terms = torch.stack([values(shape, place) for place in range(mesh.size)]).view(*mesh.shape, *shape)
    mine = whole = terms
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        rank = mesh.coordinates[axis] if isinstance(placement, Partial) else 0
        mine = mine.movedim(axis, 0)[rank]
        if isinstance(placement, Partial):
            whole = REDUCED[placement.reduce_op](whole.movedim(axis, 0))
        else:
            whole = whole.movedim(axis, 0)[0]
    cuts = [Replicate() if isinstance(placement, Partial) else placement for placement in placements]
    local = Spec.of(mesh, cuts, torch.Size(shape)).local_shard(mine).clone()
    return DTensor.from_local(local, mesh, placements, shape), whole


def check_pair(mesh: DeviceMesh, source: Sequence[Placement], target: Sequence[Placement], shape: Sequence[int]) -> None:
    tensor, whole = tensor_and_whole(mesh, source, shape)
    before = tensor.to_local().clone()
    found = tensor.redistribute(target)
    what = f"{source} to {target} of {tuple(shape)}"
    assert found.placements == tuple(target), what
    if not any(isinstance(placement, Partial) for placement in target):
        assert torch.equal(found.to_local(), found.spec.local_shard(whole)), what
    assert found.to_local().shape == local_shape(mesh, target, whole.shape), what
    assert torch.equal(found.full_tensor(), whole), what
    if tuple(source) != tuple(target):
        found.to_local().fill_(99)
    assert torch.equal(tensor.to_local(), before), f"{what} wrote to its source"


@pytest.mark.parametrize("shape", [(5, 4), (3, 2, 7), (2,), (), (0, 3)], ids=str)
@on_ranks(2, 3, more=(1, 4))
def test_every_pair_on_one_axis(world: World, shape: tuple[int, ...]) -> None:
    mesh, placements = world.mesh, placements_for(shape, world.size)
    for source in placements:
        for target in placements:
            check_pair(mesh, [source], [target], shape)


S0, S1, R, P = Shard(0), Shard(1), Replicate(), Partial()
ON_TWO_AXES: list[tuple[Placement, Placement]] = [
    (S0, S0), (S0, S1), (S1, S0), (S1, S1), (S0, R), (R, S0), (R, R), (P, S0), (P, R), (R, P), (P, P), (S0, P),
    (Partial(ReduceOp.AVG), P),
    (Partial(ReduceOp.MAX), S1),
    (R, RaggedShard(0, (1, 4))),
    (RaggedShard(0, (4, 1)), S1),
    (RaggedShard(1, (0, 6)), RaggedShard(0, (2, 3))),
    (R, FlatShard(0, (7, 23))),
    (P, FlatShard(1, (30, 0))),
    (FlatShard(0, (20, 10)), S0),
    (FlatShard(1, (11, 19)), R),
    (S1, FlatShard(0, (2, 13))),
]  # fmt: skip


@pytest.mark.parametrize("shape", [(5, 6)], ids=str)
@on_ranks(4)
def test_every_pair_on_two_axes(world: World, shape: tuple[int, ...]) -> None:
    mesh = DeviceMesh(world.comm, (2, 2), ("replicate", "shard"))
    for source in ON_TWO_AXES:
        for target in ON_TWO_AXES:
            check_pair(mesh, source, target, shape)
    mesh.close()


@on_ranks(2, 3)
def test_dtypes(world: World) -> None:
    """Every dtype, and tensors that are not contiguous."""
    for dtype in (torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn):
        whole = torch.arange(15).view(3, 5).to(dtype).t()
        tensor = distribute_tensor(whole, world.mesh, [Shard(0)])
        for target in (Shard(1), Replicate(), FlatShard(1, uneven(15, world.size)), Shard(0)):
            tensor = tensor.redistribute([target])
            assert torch.equal(tensor.full_tensor().view(torch.uint8), whole.contiguous().view(torch.uint8)), target
    conjugate = torch.full((2 * world.size, 3), 1 + 2j).conj()  # its memory has other values, or there is none
    for values in (conjugate, conjugate.imag, torch._efficientzerotensor(2 * world.size, 3)):
        for placement, total in ((Partial(), world.size * values), (Shard(0), torch.cat([values] * world.size))):
            assert torch.equal(DTensor.from_local(values, world.mesh, [placement]).full_tensor(), total)
    strided = torch.arange(15.0).view(3, 5).t()
    for placement in (Partial(), Replicate()):
        tensor = DTensor.from_local(strided, world.mesh, [placement])
        total = strided * (world.size if placement == Partial() else 1)
        assert torch.equal(tensor.redistribute([Shard(1)]).full_tensor(), total)
    integers = DTensor.from_local(torch.ones(3, dtype=torch.int64), world.mesh, [Partial(ReduceOp.AVG)])
    refused(r"AVG of torch.int64 is not defined", integers.full_tensor)


def test_order_of_the_axes() -> None:
    """Inner axes that depend on a changing outer axis are gathered first, the innermost first; others keep their placement."""
    flat = FlatShard(0, (4, 4))
    for source, target, expected in [
        ((S0, S0, S0), (R, S0, S0), [(2, R), (1, R), (0, R), (1, S0), (2, S0)]),
        ((S0, S1, S0), (R, S1, S0), [(2, R), (0, R), (2, S0)]),
        ((S0, S1, S0), (S1, S1, P), [(2, R), (1, R), (0, S1), (1, S1), (2, P)]),
        ((P, S1, flat), (R, S1, flat), [(0, R)]),
        ((S0, P, flat), (R, P, R), [(2, R), (0, R), (2, R)]),
        ((R, S0, S1), (S1, S0, S1), [(2, R), (0, S1), (2, S1)]),
    ]:
        assert changes_in_order(source, target) == expected, f"{source} to {target}"


@on_ranks(4)
def test_collectives_of_a_change(world: World) -> None:
    """The table of `redistribute.py`: who talks along which axis, and how much each puts in."""
    mesh, log = DeviceMesh(world.comm, (2, 2), ("outer", "inner")), Log()
    for part in (mesh["outer"], mesh["inner"], mesh):
        part.communicator("tensor")._called.append(log.called)
    S2 = Shard(2)
    for source, target, expected in [
        ((P, S0), (R, S0), [("outer", "all_reduce", 32)]),
        ((R, S0), (R, R), [("inner", "all_gather", 32)]),
        ((S0, S1), (R, S1), [("outer", "all_gather", 16)]),
        ((S0, S0), (R, S0), [("inner", "all_gather", 16), ("outer", "all_gather", 32)]),
        ((P, R), (S0, R), [("outer", "reduce_scatter", 64)]),
        ((P, P), (S0, S0), [("outer", "reduce_scatter", 64), ("inner", "reduce_scatter", 32)]),
        ((S0, S1), (S2, S1), [("outer", "all_to_all", 16)]),
        ((R, RaggedShard(0, (1, 3))), (R, FlatShard(0, (32, 32))), [("inner", "all_to_all", (16, 48)[mesh["inner"].rank])]),
        ((R, S0), (R, FlatShard(1, (32, 32))), [("inner", "all_gather", 32)]),
        ((S0, R), (P, R), [("outer", "all_gather", 32)]),
        ((R, R), (S0, P), []),
    ]:
        tensor, _ = tensor_and_whole(mesh, source, (4, 4, 4))
        log.calls.clear()
        tensor.redistribute(target)
        assert log.calls == expected, f"{source} to {target}"
    tensor, _ = tensor_and_whole(mesh, (R, S0), (4, 4, 4))
    log.calls.clear()
    torch.linalg.vector_norm(tensor)
    assert log.calls == [("inner", "all_reduce", 1)]
    mesh.close()


@on_ranks(2)
def test_bad_placements_raise(world: World) -> None:
    whole, mesh = torch.ones(4, 3), world.mesh
    grid = DeviceMesh(world.comm, (1, 2), ("a", "b"))
    cases: list[tuple[list[Placement], str]] = [
        ([Shard(2)], r"Shard\(dim=2\) of a tensor of shape \(4, 3\): expected -2 <= dim < 2"),
        ([Shard(0), Shard(0)], r"expected one for each of its 1 axes"),
        ([RaggedShard(0, (1, 2))], r"expected 2 counts >= 0 that add up to 4; found 2 that add up to 3"),
        ([RaggedShard(0, (4,))], r"RaggedShard\(dim=0, rows=\(4,\)\).*on 2 ranks: expected 2 counts"),
        ([FlatShard(0, (-1, 13))], r"expected 2 counts >= 0 that add up to 12"),
    ]
    for placements, error in cases:
        with pytest.raises(ValueError, match=error):
            distribute_tensor(whole, mesh, placements)
        with pytest.raises(ValueError, match=error):
            distribute_tensor(whole, mesh, [Replicate()]).redistribute(placements)
    with pytest.raises(ValueError, match=r"which another axis flattens to one dim: expected -1 <= dim < 1"):
        distribute_tensor(whole, grid, [FlatShard(0, (12,)), Shard(1)])
    with pytest.raises(ValueError, match=r"the order of several kinds of reductions matters"):
        distribute_tensor(whole, grid, [Partial(), Partial(ReduceOp.MAX)])
    refused(r"0 is not a Placement", lambda: distribute_tensor(whole, mesh, [0]), TypeError)
    with pytest.raises(
        ValueError, match=r"from_local on rank \d: expected a local shard of shape \(2, 3\).*found \(4, 3\) on cpu"
    ):
        DTensor.from_local(whole, mesh, [Shard(0)], (4, 3))
    refused(r"pass the global shape", lambda: DTensor.from_local(whole, mesh, [RaggedShard(0, (1, 2))]))
    refused(r"'bad' is not a valid ReduceOp", lambda: Partial("bad"))


@on_ranks(2, 3)
def test_from_local_shares_memory_and_infers_the_shape(world: World) -> None:
    part = torch.full((2, 3), float(world.rank))
    tensor = DTensor.from_local(part, world.mesh, [Shard(-1)])
    assert (tensor.shape, tensor.placements, tensor.device_mesh) == ((2, 3 * world.size), (Shard(1),), world.mesh)
    part.add_(1)
    assert torch.equal(tensor.full_tensor()[0, ::3], torch.arange(1.0, world.size + 1))
    assert tensor.redistribute([Shard(1)]) is tensor
    assert Partial("max").reduce_op is ReduceOp.MAX


# ---------------------------------------------------------------------- gradients


@on_ranks(1, 2, 3, 4)
def test_gradients(world: World) -> None:
    mesh, size = world.mesh, world.size
    weights = torch.stack([values((5, 3), rank) for rank in range(size)])
    first, mine = weights[0], weights[world.rank]
    shard, replicate = Spec.of(mesh, [Shard(0)], first.shape), Spec.of(mesh, [Replicate()], first.shape)

    def leaf(spec: Spec) -> torch.Tensor:
        return spec.local_shard(torch.ones(5, 3, dtype=torch.float64)).clone().requires_grad_()

    # Every rank computes the same from the full tensor: each gets its shard of the gradient.
    part = leaf(shard)
    (DTensor.from_local(part, mesh, [Shard(0)], (5, 3)).full_tensor() * first).sum().backward()
    assert torch.equal(part.grad, shard.local_shard(first))
    # Every rank computes a different term: the gradients are summed.
    part = leaf(shard)
    whole = DTensor.from_local(part, mesh, [Shard(0)], (5, 3)).full_tensor(grad_placements=[Partial()])
    (whole * mine).sum().backward()
    assert torch.equal(part.grad, shard.local_shard(weights.sum(0)))
    # Terms that are reduced and scattered: each gets the full gradient, divided by the number of ranks for an average.
    for op, share in ((ReduceOp.SUM, 1), (ReduceOp.AVG, size)):
        term = leaf(replicate)
        summed = DTensor.from_local(term, mesh, [Partial(op)]).redistribute([Shard(0)])
        (summed.to_local() * shard.local_shard(first)).sum().backward()
        assert torch.equal(term.grad, first / share)
    # Replicated input, partial output, as of a linear layer that is sharded along its inputs.
    term = leaf(replicate)
    cut = DTensor.from_local(term, mesh, [Replicate()]).redistribute([Shard(1)]).to_local()
    out = DTensor.from_local(cut.sum(1), mesh, [Partial()]).full_tensor()
    (out * first[:, 0]).sum().backward()
    full = DTensor.from_local(term.grad, mesh, [Replicate()]).redistribute([Shard(1)]).full_tensor()
    assert torch.equal(full, first[:, :1].expand(5, 3))
    with pytest.raises(NotImplementedError, match=r"gradient of from_local with Partial\(reduce_op=.*MAX"):
        DTensor.from_local(leaf(replicate), mesh, [Partial(ReduceOp.MAX)]).full_tensor().sum().backward()


@on_ranks(4)
def test_gradients_of_a_parameter_on_two_axes(world: World) -> None:
    """A sharded leaf gets a gradient of the same spec, also through elementwise operations and several uses."""
    mesh = DeviceMesh(world.comm, (2, 2), ("replicate", "shard"))
    whole = values((5, 6), 3)
    spec = (Replicate(), RaggedShard(0, (1, 4)))
    param = torch.nn.Parameter(distribute_tensor(whole, mesh, spec))
    mine = values((5, 6), 10 + world.rank)
    total = torch.stack([values((5, 6), 10 + rank) for rank in range(4)]).sum(0)
    ((param * 2).full_tensor(grad_placements=(Partial(), Partial())) * mine).sum().backward()
    assert param.grad.spec is param.spec
    assert torch.equal(param.grad.full_tensor(), 2 * total)
    (param.redistribute((Shard(0), Shard(1))).to_local() * 3).sum().backward()
    assert torch.equal(param.grad.full_tensor(), 2 * total + 3)
    param.grad = None
    param.to_local().sum().backward()  # one element, expanded
    assert torch.equal(param.grad.mul_(2).full_tensor(), torch.full((5, 6), 2.0, dtype=torch.float64))
    mesh.close()


@on_ranks(2)
def test_parameters_in_other_orders(world: World) -> None:
    """Parameters of one size are not taken for each other, alone or in a full state dict."""
    model = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    model[0].weight.full_tensor()
    refused(r"of 0\.weight.*of 1\.weight", model[world.rank].weight.full_tensor, MismatchError)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    if world.rank:
        optimizer.state.update({param: optimizer.state.pop(param) for param in reversed(list(optimizer.state))})
    with pytest.raises(MismatchError, match=r"of state\.0\.weight\.momentum_buffer.*of state\.1\.bias\.momentum_buffer"):
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
