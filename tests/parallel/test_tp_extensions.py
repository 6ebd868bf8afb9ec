"""What `fully_shard` asks of its extensions about tensor-parallel parameters: each function, alone and by the runtime."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks
from shardrt import DTensor, FlatShard, RaggedShard, Replicate, Shard, distribute_tensor
from shardrt.comm import DeviceMesh, World
from shardrt.parallel.fsdp import DTensorExtensions
from shardrt.tensor.dtensor.replicated import mark_replicated
from shardrt.tensor.placement.placement import Box, Placement, Spec
from subclasses import PadsItself, set_on_locals
from toys import compare, step_all
from toys_2d import Toy, loss_of, meshes, parallelize, shard, words

ROWS = (5, 7, 10, 6, 1)


def grids(world: World) -> list[tuple[DeviceMesh, DeviceMesh]]:
    """The data parallel and the tensor parallel mesh, in each order of the axes: the ranks along one of them, or both."""
    made = [meshes(world, tp) for tp in range(1, world.size + 1) if world.size % tp == 0]
    return [*made, *((tp, dp) for dp, tp in made)]


def whole(rows: int, *, dims: int = 2) -> torch.Tensor:
    return torch.arange(rows * 4.0).reshape(rows, 4) if dims == 2 else torch.arange(float(rows))


def by_boxes(full: torch.Tensor, spec: Spec, dim: int = 0) -> torch.Tensor:
    """This rank's elements of the whole tensor, read box by box, with `dim` outermost in each."""
    parts = [full.new_empty(0)]
    for box in spec.boxes():
        found = full[tuple(slice(begin, begin + size) for begin, size in zip(*box, strict=True))]
        parts.append((found.movedim(dim, 0) if found.dim() else found).reshape(-1))
    return torch.cat(parts)


@pytest.mark.parametrize("rows", ROWS)
@on_ranks(1, 2, 3, 4)
def test_pre_flatten_transform(world: World, rows: int) -> None:
    extensions = DTensorExtensions()
    for _, tp in grids(world):
        param = nn.Parameter(distribute_tensor(whole(rows), tp, [Shard(0)]))
        local, spec = extensions.pre_flatten_transform(param)
        assert spec is not None
        assert (spec.mesh, spec.placements, spec.shape) == (tp, (Shard(0),), (rows, 4))
        assert torch.equal(local, Shard(0).resolve(spec.shape, tp.size).local_shard(whole(rows), tp.rank))
        plain = nn.Parameter(whole(rows))
        assert extensions.pre_flatten_transform(plain) == (plain, None)
        mark_replicated(plain, tp)
        assert extensions.pre_flatten_transform(plain) == (plain, Spec(tp, (Replicate(),), plain.shape))


@pytest.mark.parametrize("rows", ROWS)
@on_ranks(1, 2, 3, 4)
def test_chunk_tensor(world: World, rows: int) -> None:
    """The parts of all ranks, put where their boxes say, are the whole tensor, each element once."""
    extensions = DTensorExtensions()
    for dp, tp in grids(world):
        both = tp.product(dp)
        for placements in product((Shard(0), Shard(1)), repeat=2):
            part = extensions.chunk_tensor(whole(rows), both, placements)
            check_covers(world, whole(rows), part, Spec.of(both, placements, (rows, 4)))


def check_covers(world: World, full: torch.Tensor, part: torch.Tensor, spec: Spec) -> None:
    assert torch.equal(part.reshape(-1), by_boxes(full, spec))
    everyone = torch.cat(world.comm.exchange(part.detach().reshape(-1)))
    assert torch.equal(everyone.sort().values, full.reshape(-1).sort().values)


@pytest.mark.parametrize("rows", ROWS)
@on_ranks(1, 2, 3, 4)
def test_chunk_dtensor(world: World, rows: int) -> None:
    extensions, full = DTensorExtensions(), whole(rows)
    for dp, tp in grids(world):
        for cut in (Shard(0), Shard(1)):
            outer = distribute_tensor(full, tp, [cut])
            made = extensions.chunk_dtensor(outer, dp)
            assert (made.device_mesh, made.placements, made.shape) == (tp.product(dp), (cut, Shard(0)), full.shape)
            check_covers(world, full, made.to_local(), made.spec)
            assert torch.equal(made.full_tensor(), full)
            again = extensions.chunk_dtensor(made, dp, [Shard(1)])
            assert again.placements == (cut, Shard(1))
            assert torch.equal(again.full_tensor(), full)
        plain = extensions.chunk_dtensor(full, dp)
        assert (plain.device_mesh, plain.placements) == (dp, (Shard(0),))
    hybrid, tp = meshes(world, 1, replicas=world.size)
    assert extensions.chunk_dtensor(distribute_tensor(full, tp, [Shard(0)]), hybrid).placements == (
        Shard(0),
        Replicate(),
        Shard(0),
    )


@pytest.mark.parametrize("rows", ROWS)
@on_ranks(1, 2, 3, 4)
def test_all_gather_dtensor(world: World, rows: int) -> None:
    extensions, full = DTensorExtensions(), whole(rows)
    for dp, tp in grids(world):
        outer = distribute_tensor(full, tp, [Shard(0)])
        both = extensions.chunk_dtensor(outer, dp)
        assert torch.equal(extensions.all_gather_dtensor(both, tp), outer.to_local())
        assert torch.equal(extensions.all_gather_dtensor(both, None), full)


@pytest.mark.parametrize("rows", ROWS)
@on_ranks(1, 2, 3, 4)
def test_pre_load_state_dict_transform(world: World, rows: int) -> None:
    extensions, full = DTensorExtensions(), whole(rows)
    for dp, tp in grids(world):
        both = extensions.chunk_dtensor(distribute_tensor(full, tp, [Shard(1)]), dp)
        found, boxes = extensions.pre_load_state_dict_transform(both)
        assert found is both
        assert boxes == both.spec.boxes()
        check_covers(world, full, both.to_local(), both.spec)
    assert extensions.pre_load_state_dict_transform(full)[1] == (Box((0, 0), (rows, 4)),)


@pytest.mark.parametrize("rows", ROWS)
@on_ranks(1, 4, more=(2, 3))
def test_layouts_of_columns(world: World, rows: int) -> None:
    """Uneven parts: each column plans a layout of its own; the shards of all ranks are the whole, between rows or not."""
    for dp, tp in grids(world):
        model = nn.Module()
        for index, (size, placement) in enumerate([(rows, Shard(0)), (999, Shard(1)), (3, Shard(0)), (1000, Shard(0))]):
            full = torch.arange(size * 7.0).reshape(size, 7) if size != 3 else torch.arange(float(rows))
            cut = placement if full.dim() > 1 else Shard(0)
            model.register_parameter(f"p{index}", nn.Parameter(distribute_tensor(full, tp, [cut])))
        expected = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
        shardrt.fully_shard(model, mesh=dp)
        for name, param in model.named_parameters():
            check_covers(world, expected[name], param.to_local(), param.spec)
            assert torch.equal(param.full_tensor(), expected[name]), name
            for target in product((Shard(0), Shard(param.dim() - 1), Replicate()), repeat=2):
                moved = param.detach().redistribute(target)
                assert torch.equal(moved.to_local(), moved.spec.local_shard(expected[name])), (name, target)
                assert torch.equal(moved.redistribute(param.placements).to_local(), param.to_local()), (name, target)


@on_ranks(4)
def test_columns_that_are_cut_otherwise(world: World) -> None:
    """One column between rows, the other between elements: the same collectives run on all ranks."""
    dp, tp = meshes(world, 2)
    both, full = tp.product(dp), torch.arange(35.0).reshape(5, 7)
    for cut, sizes in ((Shard(0), (3, 2)), (Shard(1), (4, 3))):
        rows = (sizes[tp.rank], 7) if cut.dim == 0 else (5, sizes[tp.rank])
        numel = rows[0] * rows[1]
        inner: Placement = RaggedShard(0, (1, rows[0] - 1)) if tp.rank == 0 else FlatShard(0, (numel - 4, 4))
        source = distribute_tensor(full, both, (cut, inner))
        check_covers(world, full, source.to_local(), source.spec)
        for target in product((Shard(0), Shard(1), Replicate()), repeat=2):
            moved = source.redistribute(target)
            assert torch.equal(moved.to_local(), moved.spec.local_shard(full))
            assert torch.equal(moved.redistribute((cut, inner)).to_local(), source.to_local())


def test_boxes_of_runs() -> None:
    """Against the positions of the elements, for every run of a small tensor."""
    mesh: Any = type("Alone", (), {"axis_names": ("a",), "shape": (3,), "coordinates": (1,)})()
    for shape in ((), (5,), (3, 4), (2, 3, 4), (3, 0, 2)):
        full = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
        for dim in range(max(1, len(shape))):
            for start, stop in product(range(full.numel() + 1), repeat=2):
                if start <= stop:
                    spec = Spec(mesh, (FlatShard(dim, (start, stop - start, full.numel() - stop)),), full.shape)
                    assert torch.equal(by_boxes(full, spec, dim), spec.local_shard(full))


class Own(DTensorExtensions):
    """A class of the user's: notes what is asked of it, and lets the modules see `DTensor`s."""

    def __init__(self) -> None:
        self.calls: set[str] = set()

    def pre_flatten_transform(self, tensor: torch.Tensor) -> Any:
        self.calls.add("pre_flatten_transform")
        return super().pre_flatten_transform(tensor)

    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Spec) -> torch.Tensor:
        self.calls.add("post_unflatten_transform")
        return DTensor(tensor, param_extension) if self.wraps(param_extension) else tensor

    def chunk_tensor(self, tensor: torch.Tensor, *args: Any) -> torch.Tensor:
        self.calls.add("chunk_tensor")
        return super().chunk_tensor(tensor, *args)

    def chunk_dtensor(self, tensor: torch.Tensor, *args: Any) -> DTensor:
        self.calls.add("chunk_dtensor")
        return super().chunk_dtensor(tensor, *args)

    def pre_load_state_dict_transform(self, tensor: torch.Tensor) -> Any:
        self.calls.add("pre_load_state_dict_transform")
        return super().pre_load_state_dict_transform(tensor)

    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        self.calls.add("all_gather_dtensor")
        return super().all_gather_dtensor(tensor, parent_mesh)

    def wraps(self, spec: Spec) -> bool:
        return False


class Wrapping(Own):
    def wraps(self, spec: Spec) -> bool:
        return spec.shape == (3, 5)


@on_ranks(3, 4)
def test_a_class_of_the_users(world: World) -> None:
    dp, tp = meshes(world, 3 if world.size == 3 else 2)
    extensions, plain = Own(), Toy().double()
    model = shard(parallelize(copy.deepcopy(plain), tp), dp, extensions=extensions)
    assert extensions.calls == {"pre_flatten_transform", "chunk_dtensor"}
    loss_of(plain, words(0)).backward()
    loss_of(model, words(0).chunk(dp.size)[dp.rank]).backward()
    compare(plain, model, 1e-12, "")
    state = model.state_dict()
    model.load_state_dict(plain.state_dict())
    assert extensions.calls == {"pre_flatten_transform", "chunk_dtensor", "post_unflatten_transform", "chunk_tensor"}
    model.load_state_dict(state)
    model.load_state_dict({key: distribute_tensor(value, world.mesh, [Shard(0)]) for key, value in plain.state_dict().items()})
    assert extensions.calls >= {"pre_load_state_dict_transform", "all_gather_dtensor"}
    compare(plain, model, 1e-12, "loaded")


@on_ranks(2, 4)
def test_post_unflatten_transform(world: World) -> None:
    """Modules that see `DTensor`s use their local parts; the gradients come back as `DTensor`s."""
    dp, tp = meshes(world, 2)

    class Columns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(3, 5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(type(self.weight))
            return x @ (self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight).t()

    seen: list[type] = []
    reference, model = Columns(), Columns()
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), tp, [Shard(0)]))
    shardrt.fully_shard(model, mesh=dp, extensions=Wrapping())
    x = torch.linspace(0, 1, 4 * 5, dtype=torch.float64).reshape(4, 5)
    for _ in range(2):
        reference(x).square().mean(0).sum().backward()
        model(x.chunk(dp.size)[dp.rank]).square().mean(0).sum().backward()
    assert seen[-1] is DTensor
    compare(reference, model, 1e-12, "")


@pytest.mark.parametrize("afterwards", [False, True])
@pytest.mark.parametrize("cut", [Shard(0), Shard(1)], ids=str)
@on_ranks(2, 3, 4)
def test_parameters_that_define_what_is_gathered(world: World, cut: Shard, afterwards: bool) -> None:
    """Each column gathers its part, which may have fewer rows than another, by the methods of the parameter: here rounded."""
    dp, tp = meshes(world, 1 if world.size == 3 else 2)
    whole = nn.Linear(5, 7, bias=False)
    model = copy.deepcopy(whole)
    start = distribute_tensor(whole.weight.detach(), tp, [cut])
    local = start.to_local().clone()
    model.weight = nn.Parameter(DTensor(local if afterwards else PadsItself(local), start.spec))
    shardrt.fully_shard(model, mesh=dp)
    if afterwards:
        set_on_locals(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (whole, model)]
    for step in range(3):
        x = torch.randn(12, 5, generator=torch.Generator().manual_seed(step))
        target = Spec.of(tp, [cut], (7, 5))
        rounded = whole.weight.detach().bfloat16().float().requires_grad_()
        (x @ rounded.t()).square().sum(1).mean().backward()
        whole.weight.grad = rounded.grad
        mine = x.chunk(dp.size)[dp.rank]
        part = target.local_shard(rounded.detach())
        if cut == Shard(0):
            out = model(mine)
            assert torch.equal(out, mine @ part.t())
            out.square().sum(1).mean().backward()
        else:
            out = model(distribute_tensor(mine, tp, [cut]).to_local())
            rest = mine @ rounded.detach().t() - out.detach()
            (out + rest).square().sum(1).mean().backward()
        torch.testing.assert_close(gathered(model.weight.grad), rounded.grad, rtol=1e-5, atol=1e-5)
        step_all(*optimizers)
        torch.testing.assert_close(gathered(model.weight), whole.weight.detach(), rtol=1e-4, atol=1e-5)
    other = nn.Linear(5, 7, bias=False)
    for state in (other.state_dict(), {"weight": distribute_tensor(other.weight.detach(), tp, [cut])}):
        model.load_state_dict(whole.state_dict())
        model.load_state_dict(state)
        assert torch.equal(gathered(model.weight), other.weight.detach())


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().full_tensor()
