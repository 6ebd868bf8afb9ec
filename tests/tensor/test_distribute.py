"""How `DTensor`s are made: from one rank's values, from each rank's part, and by functions that fill them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardrt.tensor
from placements import drawn, sample_placements
from ranks import on_ranks, refused
from shardrt import DTensor, FlatShard, Partial, RaggedShard, Replicate, Shard, distribute_tensor
from shardrt.comm import DeviceMesh, World
from shardrt.parallel.boundaries.axis import Part, axis_of
from shardrt.parallel.boundaries.relayout import as_dtensor
from shardrt.tensor import Placement

AS_IT_IS = (torch.bool, torch.int8, torch.bfloat16, torch.complex64, torch.float8_e4m3fn)


# ---------------------------------------------------------------------- distribute_tensor


@pytest.mark.parametrize("shape", [(5, 6), (2, 3, 4), (1,), ()], ids=str)
@on_ranks(1, 2, 3, 4)
def test_one_ranks_values(world: World, shape: tuple[int, ...]) -> None:
    """Ranks that have other values take those of the source, rank 0's by default, and keep their own tensors."""
    mine = drawn(*shape, seed=world.rank)
    kept = mine.clone()
    cuts = sample_placements(shape, world.size) if shape else [Replicate(), Shard(0)]
    for placement in [*cuts, Partial(), Partial("max")]:
        for source in {0, world.size - 1}:
            tensor = distribute_tensor(mine, world.mesh, [placement], src_data_rank=source)
            assert torch.equal(tensor.full_tensor(), drawn(*shape, seed=source)), placement
            assert tensor.to_local().is_contiguous()
            assert tensor.to_local().untyped_storage().nbytes() == tensor.to_local().numel() * 8
            tensor.to_local().zero_()
        assert torch.equal(distribute_tensor(mine, world.mesh, [placement]).full_tensor(), drawn(*shape)), placement
    assert torch.equal(mine, kept)


@on_ranks(4)
def test_one_ranks_values_on_two_axes(world: World) -> None:
    mesh = DeviceMesh(world.comm, (2, 2), ("outer", "inner"))
    columns = RaggedShard(1, (1, 5) if mesh.coordinates[0] else (4, 2))  # another cut in each column
    for placements in (
        [Shard(0), Shard(1)],
        [Shard(0), Shard(0)],
        [Replicate(), Shard(0)],
        [Shard(1), Partial()],
        [Shard(0), columns],
        [Partial(), Replicate()],
        [FlatShard(1, (11, 19)), Shard(0)],
    ):
        for source in (0, 1):  # a coordinate on both axes: ranks 0 and 3
            tensor = distribute_tensor(drawn(5, 6, seed=world.rank), mesh, placements, src_data_rank=source)
            assert torch.equal(tensor.full_tensor(), drawn(5, 6, seed=3 * source)), placements
    mesh.close()


@on_ranks(2)
def test_what_is_distributed(world: World) -> None:
    """Any dtype, parameters, tensors that are not contiguous, on the meta device, or distributed already."""
    for dtype in AS_IT_IS:
        values = drawn(5, 6).to(dtype)
        bits = distribute_tensor(values.clone(), world.mesh, [Shard(0)]).full_tensor()
        assert torch.equal(bits.view(torch.uint8), values.view(torch.uint8))
    param = distribute_tensor(nn.Parameter(drawn(5, 6)), world.mesh)
    assert (param.placements, param.requires_grad, param.is_leaf) == ((Replicate(),), True, True)
    turned = distribute_tensor(drawn(6, 5).t(), world.mesh, [Shard(0)])
    assert torch.equal(turned.full_tensor(), drawn(6, 5).t())
    assert (turned.stride(), (turned * 2).stride(), turned.contiguous().stride()) == ((1, 5), (1, 5), (6, 1))
    assert nn.Parameter(turned).redistribute([Replicate()]).stride() == (1, 5)
    assert distribute_tensor(turned, world.mesh, [Shard(0)]) is turned
    wrong = r"of a DTensor of Spec.*Shard\(dim=0\).*to Spec.*Replicate.*use .redistribute"
    refused(wrong, lambda: distribute_tensor(turned, world.mesh, [Replicate()]))
    if world.rank == 1:  # alone: no communication
        meta = distribute_tensor(nn.Parameter(torch.empty(5, 6, device="meta")), world.mesh, [Shard(0)])
        assert (meta.is_meta, meta.shape, meta.to_local().shape, meta.requires_grad) == (True, (5, 6), (2, 6), True)


@on_ranks(2, 3)
def test_tensors_that_differ_are_refused(world: World) -> None:
    """On every rank, with the ranks that differ; the next call works."""
    last, mesh = world.rank == world.size - 1, world.mesh
    own = drawn(5, 6, seed=int(last))
    wide, other = torch.ones((5, 7) if last else (5, 6)), Shard(1) if last else Shard(0)
    fewer = own[0] if last else own
    cases: list[tuple[str, torch.Tensor, list[Placement], int | None]] = [
        (rf"same values on every rank; on ranks \[{world.size - 1}\]", own, [Shard(0)], None),
        (r"the same shape.*found \(5, 6\) on rank 0, and \(5, 7\)", wide, [Replicate()], 0),
        (r"the same placements.*Shard\(dim=0\).*and .*Shard\(dim=1\)", own, [other], 0),
        (r"the same src_data_rank on every rank", own, [Replicate()], None if last else 0),
        (r"src_data_rank=9\) on DeviceMesh.*expected a coordinate", own, [Replicate()], 9),
        (r"Shard\(dim=2\) of a tensor", own, [Shard(2)], 0),
        (r"Shard\(dim=1\) of a tensor|rank \d raised ValueError: Shard", fewer, [Shard(1)], 0),
    ]
    for match, tensor, cut, source in cases:
        with pytest.raises(ValueError, match=match):
            distribute_tensor(tensor, mesh, cut, src_data_rank=source)
    leaf = torch.ones(5, 6, requires_grad=True)
    refused("that is not a leaf", lambda: distribute_tensor(leaf * 2, world.mesh, [Shard(0)]), RuntimeError)
    same = torch.full((5, 6), torch.nan)
    assert distribute_tensor(same, world.mesh, [Shard(0)], src_data_rank=None).full_tensor().isnan().all()


# ---------------------------------------------------------------------- from_local, to_local, redistribute


@on_ranks(2)
def test_names_of_placements(world: World) -> None:
    assert [p.is_shard() for p in (Shard(0), FlatShard(0, (1, 2)), Replicate(), Partial())] == [True, True, False, False]
    assert RaggedShard(1, (1, 2)).is_shard(1)
    assert not Shard(1).is_shard(0)
    assert Replicate().is_replicate()
    assert not Partial().is_replicate()
    assert Partial("avg").is_partial()
    assert Partial("avg").is_partial("avg")
    assert not Partial("avg").is_partial("sum")


@on_ranks(2)
def test_the_default_mesh_and_placements(world: World) -> None:
    grid = DeviceMesh(world.comm, (1, 2), ("a", "b"))
    refused("no mesh was given", lambda: distribute_tensor(torch.ones(2)), RuntimeError)
    with world.mesh as entered:
        assert entered is world.mesh
        assert distribute_tensor(torch.ones(2)).device_mesh is world.mesh
        with grid:
            assert DTensor.from_local(torch.ones(2)).placements == (Replicate(), Replicate())
        assert shardrt.tensor.zeros(2).device_mesh is world.mesh
    refused("no mesh was given", lambda: DTensor.from_local(torch.ones(2)), RuntimeError)
    grid.close()


@on_ranks(2)
def test_strides_of_local_tensors(world: World) -> None:
    local = drawn(6, 2).t()
    tensor = DTensor.from_local(local, world.mesh, [Shard(0)])
    assert (tensor.shape, tensor.stride(), tensor.is_contiguous()) == ((4, 6), (1, 4), False)
    assert torch.equal(tensor.to_local(), local)
    assert tensor.to_local().stride() == (1, 2)
    given = DTensor.from_local(local.contiguous(), world.mesh, [Shard(0)], shape=(4, 6), stride=(1, 4))
    assert given.stride() == (1, 4)
    refused(
        r"stride \(1, 5\) of a tensor of shape \(4, 6\): expected that of a dense one, such as \(1, 4\)",
        lambda: DTensor.from_local(local, world.mesh, [Shard(0)], stride=(1, 5)),
    )
    leaf = nn.Parameter(tensor)
    leaf.flatten().sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.full_tensor(), torch.ones(4, 6, dtype=torch.float64))
    refused("from_local on rank . of a DTensor", lambda: DTensor.from_local(tensor, world.mesh, [Shard(0)]), TypeError)


@on_ranks(3)
def test_dtypes_of_a_redistribution(world: World) -> None:
    """Values and gradients are sent in the dtypes that are asked for; the gradient comes out in the tensor's."""
    part = drawn(5, 2, seed=world.rank).requires_grad_()
    whole = torch.cat([drawn(5, 2, seed=rank) for rank in range(3)], 1)
    tensor = DTensor.from_local(part, world.mesh, [Shard(1)])
    moved = tensor.redistribute(world.mesh, [Replicate()], async_op=True, forward_dtype=torch.float16)
    assert moved.dtype is torch.float16
    assert torch.equal(moved.to_local(), whole.half())
    third = torch.full((5, 6), 1 / 3, dtype=torch.float64)
    for dtype in (torch.bfloat16, None):
        (tensor.redistribute([Replicate()], backward_dtype=dtype).to_local() * third).sum().backward()
        grad, part.grad = part.grad, None
        assert torch.equal(grad, third[:, :2].to(dtype or torch.float64).double())
    assert tensor.redistribute([Shard(1)], forward_dtype=torch.float32).dtype is torch.float32
    assert tensor.redistribute([Shard(1)], forward_dtype=torch.float64) is tensor


@on_ranks(2)
def test_placements_of_gradients(world: World) -> None:
    term = drawn(4, 3).requires_grad_()
    mine = drawn(4, 3, seed=world.rank)
    total = drawn(4, 3) + drawn(4, 3, seed=1)
    full = DTensor.from_local(term, world.mesh, [Replicate()], grad_placements=[Partial()])
    (full.to_local(grad_placements=[Partial()]) * mine).sum().backward()  # a sum of terms, of which each rank keeps one
    grad = term.grad
    assert grad is not None
    assert torch.equal(DTensor.from_local(grad, world.mesh, [Partial()]).full_tensor(), total)
    wrong = r"grad_placements \(Shard\(dim=0\),\).*expected those that give its gradient the shape \(4, 3\), found \(2, 3\)"
    refused(wrong, lambda: DTensor.from_local(term, world.mesh, [Replicate()], grad_placements=[Shard(0)]))
    refused(wrong, lambda: full.to_local(grad_placements=[Shard(0)]))


@on_ranks(2, 3)
def test_gradients_of_leaves_lie_as_the_leaves(world: World) -> None:
    """Whatever autograd makes: plain gradients of reductions, terms of sums, and sharded ones of what is replicated."""
    for placement in (Replicate(), Shard(0), Shard(1), FlatShard(0, (30, *[0] * (world.size - 1)))):
        for leaf in (
            distribute_tensor(drawn(5, 6).requires_grad_(), world.mesh, [placement]),
            nn.Parameter(distribute_tensor(drawn(5, 6), world.mesh, [placement])),
            shardrt.tensor.ones(5, 6, dtype=torch.float64, device_mesh=world.mesh, placements=[placement], requires_grad=True),
        ):
            leaf.sum().backward()
            assert isinstance(leaf.grad, DTensor)
            assert leaf.grad.placements == leaf.placements
            (leaf[1].sum() + (leaf @ leaf.new_ones(6, 2)).sum()).backward()
            expected = torch.full((5, 6), 3.0, dtype=torch.float64)
            expected[1] += 1
            assert torch.equal(leaf.grad.full_tensor(), expected)
    replicated = distribute_tensor(drawn(5, 6).requires_grad_(), world.mesh, [Replicate()])
    (replicated * distribute_tensor(drawn(5, 6, seed=1), world.mesh, [Shard(0)])).sum().backward()
    assert isinstance(replicated.grad, DTensor)
    assert torch.equal(replicated.grad.to_local(), drawn(5, 6, seed=1))
    # Gradients of gradients pass as well.
    leaf = distribute_tensor(drawn(5, 6).requires_grad_(), world.mesh, [Shard(0)])
    (first,) = torch.autograd.grad((leaf.full_tensor() ** 3).sum() + leaf.mean(), leaf, create_graph=True)
    (second,) = torch.autograd.grad((first.full_tensor()).sum(), leaf)
    torch.testing.assert_close(second.full_tensor(), 6 * drawn(5, 6), rtol=1e-14, atol=0)


# ---------------------------------------------------------------------- functions that fill


@on_ranks(1, 2, 3)
def test_factories(world: World) -> None:
    tensor, mesh = shardrt.tensor, world.mesh
    for placement in sample_placements((5, 6), world.size):
        cut: list[Placement] = [placement]
        for made, plain in (
            (tensor.zeros(5, 6, device_mesh=mesh, placements=cut), torch.zeros(5, 6)),
            (tensor.ones((5, 6), dtype=torch.float64, device_mesh=mesh, placements=cut), torch.ones(5, 6, dtype=torch.float64)),
            (tensor.full([5, 6], 7, device_mesh=mesh, placements=cut), torch.full((5, 6), 7)),
            (tensor.full((5, 6), 0.5, requires_grad=True, device_mesh=mesh, placements=cut), torch.full((5, 6), 0.5)),
            (tensor.empty(5, 6, device_mesh=mesh, placements=cut).fill_(2), torch.full((5, 6), 2.0)),
        ):
            assert (made.placements, made.dtype, made.is_leaf) == (
                distribute_tensor(plain, mesh, cut).placements,
                plain.dtype,
                True,
            )
            assert torch.equal(made.full_tensor(), plain)
        for draw in (tensor.rand, tensor.randn):
            torch.manual_seed(5 + world.rank)  # rank 0's generator counts
            found = draw(5, 6, device_mesh=mesh, placements=cut, requires_grad=True)
            torch.manual_seed(5 + world.rank)
            expected = draw(5, 6, device_mesh=mesh)
            assert found.requires_grad
            assert torch.equal(found.full_tensor(), expected.to_local())
    assert 0 <= float(tensor.rand(1000, device_mesh=mesh).min()) <= float(tensor.rand(1000, device_mesh=mesh).max()) < 1
    assert abs(float(tensor.randn(10000, device_mesh=mesh).std()) - 1) < 0.05
    assert tensor.zeros(3, device_mesh=mesh).placements == (Replicate(),)
    refused("ones of shape .5, 6.*found .Partial", lambda: tensor.ones(5, 6, device_mesh=mesh, placements=[Partial()]))
    refused("strided; found torch.sparse_coo", lambda: tensor.zeros(5, layout=torch.sparse_coo, device_mesh=mesh))


# ---------------------------------------------------------------------- where activations go


@on_ranks(2)
def test_redistributed_activations_are_still_refused(world: World) -> None:
    axis = axis_of(world.mesh)
    part = distribute_tensor(drawn(4, 6), world.mesh, [Shard(0)]).to_local()
    moved = as_dtensor(axis, Part(part, Shard(0), torch.Size([4, 6]))).redistribute([Shard(1)])
    for call in (lambda: moved.mm(torch.ones(6, 6)), lambda: moved.norm(dim=1), lambda: torch.ones(4, 6).add_(moved)):
        refused("activations are not gathered unasked", call, NotImplementedError)
