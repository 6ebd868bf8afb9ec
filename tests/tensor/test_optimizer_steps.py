"""Sharded tensors: torch's optimizers step on them as on full ones; reductions equal those of the full tensor."""

import copy
import pickle

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks, refused
from shardrt.comm import DeviceMesh, World
from shardrt.tensor.dtensor.dtensor import DTensor
from shardrt.tensor.placement.placement import FlatShard, Partial, Placement, RaggedShard, Replicate, Shard
from toys import OddMLP, batch, compare, loss_of, paired, shard_blocks, without_scalars

OPTIMIZERS = {
    "adadelta": lambda p, **o: torch.optim.Adadelta(p, **o),
    "adafactor": lambda p, **o: torch.optim.Adafactor(p, **o),
    "adagrad": lambda p, **o: torch.optim.Adagrad(p, **o),
    "adam": lambda p, **o: torch.optim.Adam(p, amsgrad=True, eps=1e-3, **o),
    "adamax": lambda p, **o: torch.optim.Adamax(p, **o),
    "adamw": lambda p, **o: torch.optim.AdamW(p, eps=1e-3, **o),
    "asgd": lambda p, **o: torch.optim.ASGD(p, **o),
    "nadam": lambda p, **o: torch.optim.NAdam(p, eps=1e-3, **o),
    "radam": lambda p, **o: torch.optim.RAdam(p, eps=1e-3, **o),
    "rmsprop": lambda p, **o: torch.optim.RMSprop(p, momentum=0.9, centered=True, eps=1e-3, **o),
    "rprop": lambda p, **o: torch.optim.Rprop(p, **o),
    "sgd": lambda p, **o: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **o),
}
FUSED = {"adagrad", "adam", "adamw", "sgd"}
VARIANTS = [
    *((name, {"foreach": foreach}) for name in OPTIMIZERS for foreach in (False, True)),
    *((name, {"fused": True}) for name in sorted(FUSED)),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS, ids=lambda value: str(value))
@on_ranks(3, more=(2,))
def test_optimizers(world: World, name: str, options: dict[str, bool]) -> None:
    whole, sharded = OddMLP().double(), OddMLP().double()
    if name == "rprop":  # it indexes with masks, which on a 0-dim tensor is no elementwise operation
        without_scalars(whole), without_scalars(sharded)
    sharded.load_state_dict(whole.state_dict())
    shard_blocks(sharded)
    optimizers = [OPTIMIZERS[name](m.parameters(), **options) for m in (whole, sharded)]
    for step in range(4):
        loss_of(whole, batch(step)).backward()
        loss_of(sharded, batch(step).chunk(world.size)[world.rank]).backward()
        for optimizer in optimizers:
            optimizer.step()
        compare(whole, sharded, 1e-9, f"after step {step}")
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=step != 1)


@on_ranks(2, 3)
def test_muon_and_lbfgs(world: World) -> None:
    """Optimizers that use full matrices or vectors gather sharded tensors."""
    whole = nn.Sequential(nn.Linear(5, 9, bias=False), nn.Tanh(), nn.Linear(9, 3, bias=False)).double()
    for make in (
        lambda p: torch.optim.Muon(p, lr=0.05),
        lambda p: torch.optim.LBFGS(p, max_iter=4, line_search_fn="strong_wolfe"),
    ):
        sharded = shardrt.fully_shard(copy.deepcopy(whole))
        reference = copy.deepcopy(whole)
        optimizers = [make(reference.parameters()), make(sharded.parameters())]
        for step in range(3):

            def closure_of(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.Tensor:
                optimizer.zero_grad()
                # The full batch on every rank: LBFGS needs its loss, not that of this rank's chunk.
                loss = loss_of(model, x)
                loss.backward()
                return loss

            for model, optimizer in zip((reference, sharded), optimizers, strict=True):
                optimizer.step(lambda m=model, o=optimizer, s=step: closure_of(m, batch(s), o))
        compare_parameters(reference, sharded)


def compare_parameters(whole: nn.Module, sharded: nn.Module) -> None:
    for expected, param in zip(whole.parameters(), sharded.parameters(), strict=True):
        # Muon's matrix iteration runs in bfloat16, where the order of a sum shows.
        torch.testing.assert_close(param.full_tensor(), expected.detach(), rtol=1e-2, atol=1e-3)


@on_ranks(1, 2, 3, 4)
def test_reductions_equal_those_of_the_full_tensor(world: World) -> None:
    torch.manual_seed(4)
    whole = nn.Linear(7, 5).double()
    sharded = shardrt.fully_shard(copy.deepcopy(whole))
    for expected, param in zip(whole.parameters(), sharded.parameters(), strict=True):
        full, part = expected.detach(), param.detach()
        for order in (1, 2, 3.5, float("inf")):
            torch.testing.assert_close(torch.linalg.vector_norm(part, order), torch.linalg.vector_norm(full, order))
            torch.testing.assert_close(part.norm(order), full.norm(order))
        for name in ("sum", "mean", "max", "min"):
            torch.testing.assert_close(getattr(part, name)(), getattr(full, name)())
        assert (part > 0).any().item() == (full > 0).any().item()
        assert (part < 99).all().item()
        assert torch.equal(part, part.clone())
        assert not torch.equal(part, part + 1)
    norms = torch._foreach_norm([p.detach() for p in sharded.parameters()], 2)
    torch.testing.assert_close(norms, torch._foreach_norm([p.detach() for p in whole.parameters()], 2))


@on_ranks(1, 2, 3, 4)
def test_copies_between_sharded_and_plain_tensors(world: World) -> None:
    whole = nn.Linear(7, 5)
    sharded = shardrt.fully_shard(copy.deepcopy(whole))
    for param in sharded.parameters():
        values = torch.randn(param.shape, generator=torch.Generator().manual_seed(6))
        with torch.no_grad():
            param.copy_(values)
        assert torch.equal(param.full_tensor(), values)
        assert torch.equal(param.spec.local_shard(values), param.to_local())
        assert torch.equal((param.detach() * values).full_tensor(), values * values)
        plain = torch.zeros_like(values)
        plain.copy_(param.detach())
        assert torch.equal(plain, values)
        assert param.detach().bfloat16().dtype == torch.bfloat16


@on_ranks(2)
def test_undefined_operations_raise(world: World) -> None:
    sharded = shardrt.fully_shard(nn.Linear(7, 5))
    weight, bias = (param.detach() for param in sharded.parameters())
    with pytest.raises(NotImplementedError, match=r"aten.native_group_norm.*shapes \[\(5, 7\).*full_tensor"):
        nn.functional.group_norm(weight, 1)
    with pytest.raises(ValueError, match="with different placements"):
        weight + bias
    with pytest.raises(ValueError, match="and a sharded tensor of shape"):
        weight + torch.ones(5)
    refused("cannot be pickled", lambda: pickle.dumps(weight), RuntimeError)


@on_ranks(2, 3, 4)
def test_placements(world: World) -> None:
    """Rows where their sizes need little padding, else elements; local shards have the shapes that the placements state."""
    if world.size != 3:
        flat = shardrt.fully_shard(nn.Linear(64, 64)).weight  # rows would pad more than 1 %
        assert isinstance(flat.placements[0], FlatShard)
        assert sum(flat.placements[0].numels) == 64 * 64
        assert flat.to_local().shape == (flat.placements[0].numels[world.rank],)
    rows = shardrt.fully_shard(nn.Linear(4, 50 * world.size, bias=False)).weight
    assert rows.placements == (RaggedShard(0, (50,) * world.size),)
    assert rows.to_local().shape == (50, 4)


@on_ranks(1, 2, 3)
def test_state_dict_in_memory(world: World) -> None:
    """Loading restores a sharded state dict, and loads full tensors too. No communication."""
    model = shard_blocks(OddMLP())
    model(batch(0).float())  # the root is gathered now; its state dict is sharded all the same
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(isinstance(value, shardrt.DTensor) for value in saved.values())
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model.load_state_dict(saved)
    for name, param in model.named_parameters():
        assert torch.equal(param.to_local(), saved[name].to_local())
    whole = OddMLP()
    model.load_state_dict(whole.state_dict())
    for (name, param), expected in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected), name
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**whole.state_dict(), "inp.weight": torch.zeros(3, 3)})


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@on_ranks(1, 2, 3, 4)
def test_clip_grad_norm(world: World, norm_type: float) -> None:
    for max_norm in (0.01, 1e6):
        whole, sharded = paired(OddMLP().double())
        loss_of(whole, batch(0)).backward()
        loss_of(sharded, batch(0).chunk(world.size)[world.rank]).backward()
        extra = nn.Parameter(torch.ones(3, dtype=torch.float64))  # a plain parameter, the same everywhere, counts once
        extra.grad = torch.full((3,), 0.7, dtype=torch.float64)
        other = nn.Parameter(extra.detach().clone())
        other.grad = extra.grad.clone()
        expected = nn.utils.clip_grad_norm_([*whole.parameters(), extra], max_norm, norm_type)
        # In torch's order: also from a generator, and of a single tensor.
        given = (param for param in [*sharded.parameters(), other])
        found = shardrt.clip_grad_norm_(given, max_norm, norm_type, True, max_norm < 1)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(other.grad, extra.grad, rtol=1e-12, atol=0)
        compare(whole, sharded, 1e-12, "clipped")
    weight, single = whole.out.weight, sharded.out.weight
    expected = nn.utils.clip_grad_norm_(weight, 0.001, norm_type, foreach=False)
    torch.testing.assert_close(shardrt.clip_grad_norm_(single, 0.001, norm_type, foreach=False), expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(single.grad.full_tensor(), weight.grad, rtol=1e-12, atol=0)
    refused("norm_type=0", lambda: shardrt.clip_grad_norm_(sharded.parameters(), 1.0, 0))


def on_several_meshes(world: World, whole: nn.Module) -> nn.Module:
    """A copy with sharded, hybrid-sharded, replicated and plain parameters of two dtypes."""
    model = copy.deepcopy(whole)
    hybrid = DeviceMesh(world.comm, (world.size // 2, 2), ("replicate", "shard"))
    replicas = DeviceMesh(world.comm, (world.size, 1), ("replicate", "shard"))
    for module, mesh in ((model.blocks[0], hybrid), (model.blocks[1], replicas), (model.blocks[2], hybrid["shard"])):
        shardrt.fully_shard(module, mesh=mesh)
    shardrt.replicate(model.inp)
    return shardrt.fully_shard(model, ignored_params={model.out.bias})


@pytest.mark.parametrize("foreach", [None, True, False])
@on_ranks(2, 4)
def test_torchs_clip_grad_norm(world: World, foreach: bool | None) -> None:
    """On any placement and on several meshes at once; on one mesh with a single collective."""
    whole = OddMLP()
    whole.blocks[1].double()
    draw = torch.Generator().manual_seed(1)
    grads = [torch.randn(param.shape, generator=draw).to(param.dtype) for param in whole.parameters()]
    for model in (shard_blocks(copy.deepcopy(whole)), on_several_meshes(world, whole)):
        for norm_type, max_norm in ((2.0, 0.5), (1.0, 1e9), (3.0, 0.5), (float("inf"), 0.5)):
            for param, sharded, grad in zip(whole.parameters(), model.parameters(), grads, strict=True):
                param.grad, mine = grad.clone(), grad.clone()
                if isinstance(sharded, DTensor):
                    mine = shardrt.distribute_tensor(mine, sharded.device_mesh, sharded.placements)
                sharded.grad = mine
            expected = nn.utils.clip_grad_norm_(whole.parameters(), max_norm, norm_type)
            found = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type, foreach=foreach)
            torch.testing.assert_close(found, expected)
            for param, sharded in zip(whole.parameters(), model.parameters(), strict=True):
                full = sharded.grad.full_tensor() if isinstance(sharded.grad, DTensor) else sharded.grad
                torch.testing.assert_close(full, param.grad)


@on_ranks(2)
def test_torchs_clipping_costs_a_collective(world: World) -> None:
    """For the whole model; all ranks see a gradient that is not finite on one."""
    model = shard_blocks(OddMLP())
    loss_of(model, batch(0).float().chunk(world.size)[world.rank]).backward()
    before = world.mesh.communicator("tensor")._number
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    nn.utils.clip_grad_value_(model.parameters(), 0.1)
    assert world.mesh.communicator("tensor")._number == before + 1
    if world.rank == 1:
        for param in model.parameters():
            param.grad.to_local().fill_(float("nan"))
    refused("non-finite", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True), RuntimeError)


# ---------------------------------------------------------------------- several axes, replicas, partial values


def grid(world: World) -> DeviceMesh:
    return DeviceMesh(world.comm, (2, 2), ("replicate", "shard"))


def sample_placements(mesh: DeviceMesh) -> list[tuple[Placement, ...]]:
    """Placements of a (5, 6) tensor on two axes, with replicas and empty shards."""
    return [
        (Replicate(), RaggedShard(0, (2, 3))),
        (Replicate(), FlatShard(0, (30, 0))),
        (Replicate(), Replicate()),
        (Shard(0), Shard(1)),
        (Shard(0), Shard(0)),
        (FlatShard(0, (11, 19)), Replicate()),
    ]


@on_ranks(4)
def test_reductions_count_replicas_once(world: World) -> None:
    mesh = grid(world)
    whole = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)).double()
    tensors = [shardrt.distribute_tensor(whole, mesh, placements) for placements in sample_placements(mesh)]
    for tensor in tensors:
        for order in (1, 2, float("inf")):
            torch.testing.assert_close(torch.linalg.vector_norm(tensor, order), torch.linalg.vector_norm(whole, order))
        for name in ("sum", "mean", "max", "min"):
            torch.testing.assert_close(getattr(tensor, name)(), getattr(whole, name)(), msg=f"{name} of {tensor.spec}")
        assert (tensor > 2).any().item() == (whole > 2).any().item()
        assert torch.equal(tensor, whole)
        assert not torch.equal(tensor, whole + 1)
        param = nn.Parameter(tensor.clone())
        param.grad = tensor.clone()
        torch.testing.assert_close(shardrt.clip_grad_norm_([param], 1.0), whole.norm())
        torch.testing.assert_close(param.grad.full_tensor(), whole / (whole.norm() + 1e-6))
    for norm in torch._foreach_norm([*tensors, *(t.to_local() for t in tensors[2:3])], 2):
        torch.testing.assert_close(norm, whole.norm())
    mesh.close()


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@on_ranks(4)
def test_optimizers_on_two_axes(world: World, options: dict[str, bool]) -> None:
    mesh = grid(world)
    draw = torch.Generator().manual_seed(2)
    whole = nn.Parameter(torch.randn(5, 6, generator=draw))
    params = [
        nn.Parameter(shardrt.distribute_tensor(whole.detach(), mesh, placements)) for placements in sample_placements(mesh)
    ]
    for name in sorted(FUSED):
        optimizers = [OPTIMIZERS[name](tensors, **options) for tensors in ([whole], params)]
        for _ in range(2):
            whole.grad = torch.randn(5, 6, generator=draw)
            for param in params:
                param.grad = shardrt.distribute_tensor(whole.grad, mesh, param.placements)
            for optimizer in optimizers:
                optimizer.step()
        for param in params:
            torch.testing.assert_close(param.full_tensor(), whole, msg=f"{name} {param.spec}")
    mesh.close()


@on_ranks(2)
def test_partial_values(world: World) -> None:
    """Copies and sums stay partial, operations on full tensors reduce first, all others raise."""
    value = torch.arange(6.0).view(2, 3) + world.rank
    whole = 2 * torch.arange(6.0).view(2, 3) + 1
    partial = shardrt.DTensor.from_local(value, world.mesh, [Partial()])
    total = (partial + partial.clone()).sub_(-partial)
    assert total.placements == (Partial(),)
    assert torch.equal(total.full_tensor(), 3 * whole)
    assert torch.equal(partial.mm(torch.eye(3)), whole)
    for wrong in (
        lambda: partial * 2, lambda: partial.sqrt(), lambda: partial + 1, lambda: partial.sum(), lambda: partial.norm(),
        lambda: torch.ones_like(partial), lambda: partial.fill_(1), lambda: torch._foreach_add([partial], 1.0),
        lambda: partial > 0, lambda: torch._foreach_norm([partial]), lambda: partial.add_(torch.tensor(1.0)),
    ):  # fmt: skip
        for recording in (False, True):
            with torch.set_grad_enabled(recording), pytest.raises(NotImplementedError, match="is not defined on"):
                wrong()
    highest = shardrt.DTensor.from_local(value, world.mesh, [Partial("max")])
    with pytest.raises(NotImplementedError, match="is not defined on"):
        highest + highest
    param = nn.Parameter(torch.zeros(2, 3))
    param.grad = partial.clone()
    refused(r"a gradient of .*Partial.*not reduced yet", lambda: shardrt.clip_grad_norm_([param], 1.0))


@on_ranks(2)
def test_different_meshes_and_placements_do_not_mix(world: World) -> None:
    other = DeviceMesh(world.comm, axis_names=("other",))
    whole = torch.ones(4, 2)
    here, there = (shardrt.distribute_tensor(whole, mesh, [Shard(0)]) for mesh in (world.mesh, other))
    across = shardrt.distribute_tensor(whole, world.mesh, [Shard(1)])
    for mix in (lambda a, b: a + b, torch.equal, lambda a, b: torch._foreach_add([a], [b]), lambda a, b: a.copy_(b)):
        with pytest.raises(ValueError, match=r"on different meshes: .*other=2.*dp=2"):
            mix(here, there)
    for mix in (lambda a, b: a + b, torch.equal, lambda a, b: torch._foreach_add([a], [b])):
        with pytest.raises(ValueError, match=r"with different placements: .*Shard\(dim=1\).* and .*Shard\(dim=0\)"):
            mix(here, across)
    for norm in torch._foreach_norm([here, there, across]):  # each of its own mesh
        assert norm == whole.norm()
    other.close()
