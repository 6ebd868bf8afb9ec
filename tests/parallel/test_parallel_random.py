"""Random numbers under tensor parallelism: equal where activations are replicated, different where they are sharded."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import ref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks, refused
from shardrt import Shard
from shardrt.comm import DeviceMesh, World
from shardrt.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SequenceParallel, parallelize_module
from shardrt.parallel.boundaries.axis import axis_of
from shardrt.parallel.boundaries.random import RandomRegions, random_attributes

DROPOUTS = {p: nn.Dropout(p) for p in (0.0, 0.5)}


def regions_of(mesh: DeviceMesh, p: float = 0.5) -> RandomRegions:
    regions = RandomRegions(mesh)
    regions.watch(DROPOUTS[p])
    regions.begin(training=True)
    return regions


def numbers() -> list[int]:
    return torch.randint(2**40, (3,)).tolist()


def all_equal(world: World, value: object) -> bool:
    values = world.mesh.exchange(value)
    return all(other == values[0] for other in values)


def all_different(world: World, value: object) -> bool:
    values = world.mesh.exchange(value)
    return all(one != other for one, other in itertools.combinations(values, 2))


@on_ranks(2, 3)
def test_regions(world: World) -> None:
    """However many numbers a rank draws in a sharded region, the ranks agree after it; no region repeats another."""
    shardrt.manual_seed(3)
    regions, seen = regions_of(world.mesh), set[tuple[int, ...]]()
    for _ in range(50):
        before = numbers()
        assert all_equal(world, before)
        regions.enter_sharded()
        regions.enter_sharded()
        own = numbers()
        torch.rand(world.rank)
        assert all_different(world, own)
        regions.enter_replicated()
        regions.enter_replicated()
        seen |= {tuple(before), tuple(own)}
    assert len(seen) == 100
    shardrt.manual_seed(3)
    assert tuple(numbers()) in seen
    regions.enter_sharded()
    assert tuple(numbers()) in seen


@on_ranks(2, 3)
def test_what_one_rank_drew_by_itself_ends_with_the_next_forward(world: World) -> None:
    shardrt.manual_seed(3)
    regions = regions_of(world.mesh)
    for place in ("replicated", "sharded"):
        regions.enter_sharded()
        if place == "replicated":
            regions.enter_replicated()
        numbers() if world.rank else None
        regions.begin(training=True)
        assert all_equal(world, regions.fingerprint())
        assert all_equal(world, numbers()), place
    numbers() if world.rank else None
    assert not all_equal(world, regions.fingerprint())


@on_ranks(1, 2)
def test_without_anything_random_the_generator_is_left_alone(world: World) -> None:
    shardrt.manual_seed(3)
    state = torch.get_rng_state()
    regions = regions_of(world.mesh, 0.0 if world.size > 1 else 0.5)
    regions.enter_sharded()
    regions.enter_replicated()
    regions.fingerprint()
    assert not regions.enabled
    assert torch.equal(torch.get_rng_state(), state)


@on_ranks(2)
def test_evaluation_draws_nothing_and_probabilities_may_change(world: World) -> None:
    regions, dropout = RandomRegions(world.mesh), nn.Dropout(0.0)
    regions.watch(nn.Sequential(dropout, nn.Linear(1, 1)))
    regions.watch(dropout)
    enabled = []
    for dropout.p in (0.0, 0.1):
        regions.begin(training=True)
        enabled.append(regions.enabled)
    assert enabled == [False, True]
    regions.enter_sharded()
    regions.enter_replicated()
    state = torch.get_rng_state()
    regions.begin(training=False)
    assert regions.enabled
    assert torch.equal(torch.get_rng_state(), state)


def test_what_looks_random() -> None:
    class Attention(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.attention_dropout = p
            self.use_dropout = True

    class StochasticDepth(nn.Module):
        def __init__(self, p: float) -> None:
            super().__init__()
            self.p = p

    never = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0), Attention(0.0), StochasticDepth(0))
    assert [getattr(owner, name) for owner, name in random_attributes(never)] == [0, 0, 0]
    for module in (
        nn.Dropout1d(0.1),
        nn.AlphaDropout(0.1),
        Attention(0.1),
        StochasticDepth(0.1),
        nn.LSTM(2, 2, 2, dropout=0.1),
    ):
        found = random_attributes(nn.Sequential(nn.Linear(2, 2), module))
        assert [getattr(owner, name) for owner, name in found] == [0.1], module
    assert [name for _, name in random_attributes(nn.Sequential(Attention(0.0), nn.Dropout()))] == ["attention_dropout", "p"]


@on_ranks(4)
def test_manual_seed(world: World) -> None:
    mesh = DeviceMesh(world.comm, (2, 2), ("dp", "tp"))
    shardrt.manual_seed(5)
    state, expected = torch.get_rng_state(), torch.manual_seed(5).get_state()
    assert torch.equal(state, expected)
    shardrt.manual_seed(5, differ_over=mesh["dp"])
    drawn = world.mesh.exchange(numbers())
    assert drawn[0] == drawn[1] != drawn[2] == drawn[3]
    for bad in (2**64, -(2**63) - 1, 0.5, True):
        with pytest.raises(ValueError, match=r"manual_seed\(.*\): expected an integer from -2\^63 to 2\^64 - 1"):
            shardrt.manual_seed(bad)
    mesh.close()


# ---------------------------------------------------------------------- checkpoints


class Block(nn.Module):
    """Draws in both regions, as a parallelized block does, and ends in the sharded one."""

    def __init__(self, regions: RandomRegions) -> None:
        super().__init__()
        self.regions = regions
        self.masks: list[list[bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.masks.clear()
        for enter in (self.regions.enter_replicated, self.regions.enter_sharded, self.regions.enter_replicated):
            enter()
            x = self.drop(torch.cos(x))
        self.regions.enter_sharded()
        return self.drop(torch.cos(x))

    def drop(self, x: torch.Tensor) -> torch.Tensor:
        out = F.dropout(x, 0.5)
        self.masks.append((out != 0).tolist())
        return out


@on_ranks(2, 3)
def test_recomputation_draws_the_same_masks(world: World) -> None:
    """Between forward and backward come another forward and draws of one rank; the recomputation stops early or not."""
    x = torch.linspace(0.5, 1.5, 40, dtype=torch.float64)
    found = []
    for reentrant in (None, True, False):
        shardrt.manual_seed(4)
        regions = regions_of(world.mesh)
        blocks, leaf = [Block(regions) for _ in range(3)], x.clone().requires_grad_()
        out = leaf
        for block in blocks:
            out = block(out) if reentrant is None else checkpoint(block, out, use_reentrant=reentrant)
        masks = [list(block.masks) for block in blocks]
        for layer in masks:
            assert [all_equal(world, mask) for mask in layer] == [True, False, True, False]
        regions.enter_replicated()
        state = torch.get_rng_state()
        regions.begin(training=True)
        numbers() if world.rank else None
        torch.set_rng_state(state)
        out.sum().backward()
        assert torch.equal(torch.get_rng_state(), state)
        assert leaf.grad is not None
        found.append((out.detach(), leaf.grad, masks))
    for out, grad, masks in found[1:]:
        assert torch.equal(out, found[0][0])
        assert torch.equal(grad, found[0][1])
        assert masks == found[0][2]


@on_ranks(2)
def test_a_recomputation_that_fails_or_keeps_no_state(world: World) -> None:
    shardrt.manual_seed(4)
    regions = regions_of(world.mesh)

    def fails(x: torch.Tensor) -> torch.Tensor:
        regions.enter_sharded()
        x = F.dropout(x, 0.5)
        if torch.is_grad_enabled() and fails.__dict__.setdefault("ran", False):
            raise KeyError("recomputation")
        fails.__dict__["ran"] = True
        return torch.cos(x)

    out = checkpoint(fails, torch.ones(4, requires_grad=True), use_reentrant=False, preserve_rng_state=False)
    refused("recomputation", out.sum().backward, KeyError)
    regions.begin(training=True)
    assert all_equal(world, numbers())


# ---------------------------------------------------------------------- with styles


class Layer(nn.Module):
    """A transformer layer with dropout on the heads, in the MLP, and on the residual stream."""

    def __init__(self, width: int = 12, heads: int = 6, p: float = 0.3) -> None:
        super().__init__()
        self.width, self.heads = width, heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_drop, self.mlp_drop, self.drop1, self.drop2 = (nn.Dropout(p) for _ in range(4))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        size = self.width // self.heads
        q, k, v = (linear(x) for linear in self.qkv)
        q, k, v = (part.unflatten(-1, (-1, size)).transpose(1, 2) for part in (q, k, v))
        weights = self.head_drop((q @ k.transpose(-1, -2) / size**0.5).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop1(self.attention(self.norm1(x)))
        return x + self.drop2(self.down(self.mlp_drop(F.gelu(self.up(self.norm2(x))))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(11, 12), nn.Dropout(0.3)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 11)
        self.reentrant: bool | None = None

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.embed(tokens))
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


def parallel(mesh: DeviceMesh, sequence: bool) -> Model:
    torch.manual_seed(1)
    model = Model().double()
    part = Shard(1)
    plan: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=shardrt.Replicate()),
        "head": ColwiseParallel(output_layouts=shardrt.Replicate()),
        "layers.*.qkv.*": ColwiseParallel(),
        "layers.*.up": ColwiseParallel(),
        "layers.*.out": RowwiseParallel(),
        "layers.*.down": RowwiseParallel(),
    }
    if sequence:
        plan |= {
            "embed": RowwiseParallel(input_layouts=shardrt.Replicate(), output_layouts=part),
            "head": ColwiseParallel(input_layouts=part, output_layouts=shardrt.Replicate()),
            "norm": SequenceParallel(use_local_output=True),
            "layers.*.norm1": SequenceParallel(use_local_output=True),
            "layers.*.norm2": SequenceParallel(use_local_output=True),
            "layers.*.qkv.*": ColwiseParallel(input_layouts=part),
            "layers.*.up": ColwiseParallel(input_layouts=part),
            "layers.*.out": RowwiseParallel(output_layouts=part),
            "layers.*.down": RowwiseParallel(output_layouts=part),
        }
    parallelize_module(model, mesh, plan)
    return model


@contextmanager
def masks(model: nn.Module) -> Iterator[dict[str, list[list[bool]]]]:
    """What each dropout kept, at each of its calls; without the entries that are zero before."""
    found: dict[str, list[list[bool]]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):

            def keep(_: nn.Module, args: tuple[torch.Tensor], out: torch.Tensor, name: str = name) -> None:
                found.setdefault(name, []).append((out != 0).flatten().tolist())

            handles.append(module.register_forward_hook(keep))
    yield found
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2, 3)
def test_masks_of_a_parallelized_model(world: World, sequence: bool) -> None:
    """Equal on the residual stream unless it is sharded; different on heads and in the MLP; a recomputation repeats them."""
    tokens, grads = torch.arange(24).view(2, 12) % 11, []
    for reentrant in (None, True, False):
        model = parallel(world.mesh, sequence)
        model.reentrant = reentrant
        shardrt.manual_seed(6)
        with masks(model) as found:
            loss = model(tokens).square().mean()
            forward = {name: list(lists) for name, lists in found.items()}
            loss.backward()
        assert len(forward) == 1 + 2 * 4
        for name, (mask, *others) in forward.items():
            assert others == []
            replicated = not sequence and ("drop1" in name or "drop2" in name or name == "drop")
            assert (all_equal if replicated else all_different)(world, mask), name
            assert all(again == mask for again in found[name])
        assert all_equal(world, numbers())
        grads.append({name: param.grad for name, param in model.named_parameters()})
    for other in grads[1:]:
        for name, grad in other.items():
            first = grads[0][name]
            assert isinstance(grad, torch.Tensor)
            assert isinstance(first, torch.Tensor)
            assert torch.equal(grad, first), name


@on_ranks(4)
def test_ranks_that_are_seeded_differently(world: World) -> None:
    """Tensor parallel ranks take the first one's numbers, in the first forward and after each seeding; others keep theirs."""
    mesh, tokens = DeviceMesh(world.comm, (2, 2), ("dp", "tp")), torch.arange(24).view(2, 12) % 11
    exchanged = []
    for seeds in (lambda rank: rank, lambda rank: 8):
        model = parallel(mesh["tp"], False)
        for reseed in (True, False, True):
            if reseed:
                torch.manual_seed(seeds(world.rank))
                torch.rand(world.rank)
            with masks(model) as found:
                model(tokens)
            drops = world.mesh.exchange([found["drop"], found["layers.1.drop2"]])
            heads = world.mesh.exchange(found["layers.0.head_drop"])
            assert drops[0] == drops[1] != drops[2] == drops[3]
            assert all(one != other for one, other in itertools.combinations(heads, 2))
            exchanged.append(drops[0])
    assert all(one != other for one, other in itertools.combinations(exchanged[:2] + exchanged[3:5], 2))
    regions = regions_of(mesh["tp"])
    with pytest.MonkeyPatch.context() as patch:
        regions.end(training=True)
        patch.setattr(DeviceMesh, "exchange", None)  # a generator that all have agreed upon is not compared again
        regions.begin(training=True)
    mesh.close()


@on_ranks(2)
def test_a_model_that_runs_by_another_method(world: World) -> None:
    """Its masks differ on shards too, and the checks of the first iteration end with it."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.mid_drop, self.down, self.drop = nn.Linear(4, 64), nn.Dropout(), nn.Linear(64, 64), nn.Dropout()

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(self.down(self.mid_drop(self.up(x))))

    model = Encoder()
    parallelize_module(model, world.mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    torch.manual_seed(world.rank)
    for _ in range(3):
        with masks(model) as found:
            model.encode(torch.ones(2, 4)).sum().backward()
        assert all_different(world, found["mid_drop"])
        assert all_equal(world, found["drop"])
    assert not axis_of(world.mesh).first
    state = torch.get_rng_state()
    model.eval()
    model.encode(torch.ones(2, 4))
    assert torch.equal(torch.get_rng_state(), state)


@on_ranks(2)
def test_models_that_are_freed_or_copied(world: World) -> None:
    """A parallelized model is freed with its last reference; a copy has probabilities of its own."""
    model, tokens = parallel(world.mesh, False), torch.arange(24).view(2, 12) % 11
    regions, twin, freed = axis_of(world.mesh).regions, copy.deepcopy(model), ref(model)
    del model
    gc.collect()
    assert freed() is None
    with masks(twin) as found:
        twin(tokens)
    enabled = [regions.enabled]
    assert all_different(world, found["layers.0.mlp_drop"])
    del twin
    gc.collect()
    layer = parallelize_module(nn.Linear(2, 2), world.mesh, ColwiseParallel())
    state = torch.get_rng_state()
    layer(torch.ones(1, 2))
    assert [*enabled, regions.enabled] == [True, False]
    assert torch.equal(torch.get_rng_state(), state)


@on_ranks(2)
def test_evaluation_and_exceptions_of_a_parallelized_model(world: World) -> None:
    model, tokens = parallel(world.mesh, False), torch.arange(24).view(2, 12) % 11
    shardrt.manual_seed(6)
    model(tokens)
    state = torch.get_rng_state()
    with torch.no_grad():
        model.eval()(tokens)
    assert torch.equal(torch.get_rng_state(), state)

    def fail(*args: object) -> None:
        raise KeyError

    handle = model.train().layers[1].get_submodule("mlp_drop").register_forward_hook(fail)  # in a sharded region
    with pytest.raises(KeyError):
        model(tokens)
    handle.remove()
    with masks(model) as found:
        model(tokens)
    assert all_equal(world, found["drop"])


class Cut(nn.Module):
    """Cuts the sequence by its own code before a norm and a dropout, and has a dropout on the whole before that."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.first, self.drop, self.norm, self.last = nn.Dropout(), nn.Dropout(), nn.LayerNorm(4), nn.Dropout()
        self.mesh = mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.first(x).chunk(self.mesh.size, 1)[self.mesh.rank]
        return self.last(self.norm(self.drop(part)))


@pytest.mark.parametrize("called", ["forward", "another method"])
@on_ranks(2)
def test_a_sequence_that_the_user_has_cut(world: World, called: str) -> None:
    """No boundary comes before the module that is sequence parallel, which may be the root."""
    style, x = SequenceParallel(use_local_output=True), torch.ones(2, 64, 4)
    for seeds in (lambda rank: 5, lambda rank: rank):
        model = parallelize_module(Cut(world.mesh), world.mesh, {"drop": style, "norm": style})
        root = parallelize_module(nn.Sequential(nn.Dropout()), world.mesh, style)
        run = model if called == "forward" else model.forward
        torch.manual_seed(seeds(world.rank))
        seen = []
        for _ in range(2):
            with masks(model) as found:
                run(x)
            assert all_different(world, found["drop"])
            assert all_different(world, found["last"])
            assert all_equal(world, found["first"]) or called != "forward"
            assert found not in seen
            seen.append(found)
            part = root(x[:, :32]) if called == "forward" else root.forward(x[:, :32])
            assert all_different(world, (part != 0).flatten().tolist())
        state = torch.get_rng_state()
        model.eval()
        run(x)
        assert torch.equal(torch.get_rng_state(), state)


class Noisy(nn.Module):
    """Random functions whose probabilities are no attributes, on what each rank has a part of, and on what all have."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down, self.kind, self.seen = nn.Linear(4, 64), nn.Linear(64, 64), kind, list[list[float]]()

    def random(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "none":
            return x
        if self.kind == "dropout":
            y = F.dropout(torch.ones_like(x), 0.5, self.training)
        elif self.kind == "gumbel":
            y = F.gumbel_softmax(torch.zeros_like(x))
        else:
            y = torch.randn_like(x)
        self.seen.append(y.flatten().tolist())
        return x * y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.clear()
        return self.random(self.down(self.random(self.up(x))))


@on_ranks(2)
def test_random_functions_without_an_attribute(world: World) -> None:
    """From the first forward in training on, also if one in evaluation came before; recomputation repeats the numbers."""
    for kind in ("dropout", "gumbel", "noise", "none"):
        model = Noisy(kind)
        parallelize_module(model, world.mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        axis_of(world.mesh).regions.draws = False
        torch.manual_seed(3)
        state = torch.get_rng_state()
        model.eval()
        model.kind = "none"
        model(torch.ones(2, 4))
        model.kind = kind
        model.train()
        for step in range(3):
            out = checkpoint(model, torch.ones(2, 4), use_reentrant=False) if step == 1 else model(torch.ones(2, 4))
            sharded, replicated = list(model.seen) or ([float(world.rank)], [0.0])
            assert all_different(world, sharded), kind
            assert all_equal(world, replicated), kind
            assert all_equal(world, out.tolist()), kind
            out.sum().backward()
            assert model.seen in ([sharded, replicated], []), kind
        assert torch.equal(torch.get_rng_state(), state) is (kind == "none")


@on_ranks(2)
def test_randomness_that_begins_late_is_told(world: World) -> None:
    model = Noisy("none")
    parallelize_module(model, world.mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    axis_of(world.mesh).regions.draws = False
    model(torch.ones(2, 4))
    model.kind = "dropout"
    with pytest.warns(UserWarning, match="drew no random numbers in its first forward"):
        model(torch.ones(2, 4))
