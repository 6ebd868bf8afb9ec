"""Sharded tensors: every torch optimizer steps on them as on whole ones; reductions are those of the whole tensor."""

import copy
import pickle

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks
from shardrt.comm import World
from shardrt.placement import FlatShard, RaggedShard
from toys import OddMLP, batch, compare, loss_of, shard_blocks, without_scalars

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
@on_ranks(2, 3)
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
    """The optimizers that work on whole matrices and whole vectors: on sharded tensors they gather."""
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
                # The whole batch on every rank: LBFGS needs the loss of all of it, not this rank's share.
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
def test_reductions_are_those_of_the_whole(world: World) -> None:
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
def test_values_come_in_and_go_out(world: World) -> None:
    whole = nn.Linear(7, 5)
    sharded = shardrt.fully_shard(copy.deepcopy(whole))
    for param in sharded.parameters():
        values = torch.randn(param.shape, generator=torch.Generator().manual_seed(6))
        with torch.no_grad():
            param.copy_(values)
        assert torch.equal(param.full_tensor(), values)
        assert torch.equal(param.spec.local_part(values), param.to_local())
        assert torch.equal((param.detach() * values).full_tensor(), values * values)
        plain = torch.zeros_like(values)
        plain.copy_(param.detach())
        assert torch.equal(plain, values)
        assert param.detach().bfloat16().dtype == torch.bfloat16


@on_ranks(2)
def test_what_is_not_defined_is_refused_by_name(world: World) -> None:
    sharded = shardrt.fully_shard(nn.Linear(7, 5))
    weight, bias = (param.detach() for param in sharded.parameters())
    with pytest.raises(NotImplementedError, match=r"aten.sort.*shapes \[\(5, 7\)\].*full_tensor"):
        weight.sort()
    with pytest.raises(ValueError, match="lie differently"):
        weight + bias
    with pytest.raises(ValueError, match="with a sharded one of shape"):
        weight + torch.ones(7)
    with pytest.raises(RuntimeError, match="cannot be pickled"):
        pickle.dumps(weight)


@on_ranks(2, 3, 4)
def test_placements(world: World) -> None:
    """Rows where rows go together, elements where they do not; either way every rank's part is where it says."""
    if world.size != 3:
        flat = shardrt.fully_shard(nn.Linear(64, 64)).weight  # rows would pad more than 1 %
        assert isinstance(flat.placement, FlatShard)
        assert sum(flat.placement.numels) == 64 * 64
        assert flat.to_local().shape == (flat.placement.numels[world.rank],)
    rows = shardrt.fully_shard(nn.Linear(4, 50 * world.size, bias=False)).weight
    assert rows.placement == RaggedShard(0, (50,) * world.size)
    assert rows.to_local().shape == (50, 4)


@on_ranks(1, 2, 3)
def test_state_dict_in_memory(world: World) -> None:
    """What a sharded state dict saved, loading restores; whole tensors load as well. No communication."""
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
        whole, sharded = OddMLP().double(), OddMLP().double()
        sharded.load_state_dict(whole.state_dict())
        shard_blocks(sharded)
        loss_of(whole, batch(0)).backward()
        loss_of(sharded, batch(0).chunk(world.size)[world.rank]).backward()
        extra = nn.Parameter(torch.ones(3, dtype=torch.float64))  # a plain parameter, the same everywhere, counts once
        extra.grad = torch.full((3,), 0.7, dtype=torch.float64)
        other = nn.Parameter(extra.detach().clone())
        other.grad = extra.grad.clone()
        expected = nn.utils.clip_grad_norm_([*whole.parameters(), extra], max_norm, norm_type)
        found = shardrt.clip_grad_norm_([*sharded.parameters(), other], max_norm, norm_type)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
        torch.testing.assert_close(other.grad, extra.grad, rtol=1e-12, atol=0)
        compare(whole, sharded, 1e-12, "clipped")
    with pytest.raises(ValueError, match="norm_type=0"):
        shardrt.clip_grad_norm_(sharded.parameters(), 1.0, 0)
