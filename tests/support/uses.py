"""Random uses of a sharded model, each beside one process that does the work of all ranks, in float64.

A seed draws a model, how it is sharded, and what its user does: forwards and backwards in several orders, without and with
synchronisation; modules that are frozen, skipped, recomputed, gathered by hand, copied; penalties on parameters in the loss, by
functions on shards and by hand; evaluation, generation and transforms in between; weights written by several means. Both sides
run the same code; the plain one for each rank in turn.

    mpirun -n 3 python tests/support/uses.py FIRST COUNT    runs these seeds until one fails
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    sys.path[:0] = [str(root), str(root / "tests" / "support")]

import shardrt
from ranks import settings_of
from shardrt.comm import World
from toys import OddBlock, buckets_of

WIDTHS = (7, 24)  # of small models; a bucket is as large as the second's blocks, or takes them all
TOLERANCE, MIXED_TOLERANCE = 1e-9, 1e-3  # of the elements; of the largest one where modules compute in float32


class Refused(Exception):
    """A use that one process refuses, or that cannot be compared."""


# ---------------------------------------------------------------------- the model


@dataclass
class Record:
    """What blocks add to."""

    tensors: list[torch.Tensor] = field(default_factory=list)
    last: torch.Tensor | None = None


Seen = list[torch.Tensor] | dict[str, torch.Tensor] | Record


def add_to(seen: Seen, tensor: torch.Tensor) -> None:
    """Change a container that a block was given."""
    if isinstance(seen, Record):
        seen.tensors.append(tensor)
        seen.last = tensor
    elif isinstance(seen, dict):
        seen[str(len(seen))] = tensor
    else:
        seen.append(tensor)


def total(seen: Seen) -> Any:
    if isinstance(seen, Record):
        return sum(seen.tensors) + (0 if seen.last is None else seen.last)
    return sum(seen.values() if isinstance(seen, dict) else seen)


class Fused(torch.autograd.Function):
    """A linear layer that computes its own gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.T @ x, grad.sum(0)


class HalfSquare(torch.autograd.Function):
    """Half the sum of squares of a parameter."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(param)
        return param.square().sum() / 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * ctx.saved_tensors[0]


class Residual(nn.Module):
    """One matrix, in some of them used twice."""

    def __init__(self, width: int, uses: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.uses = uses

    def forward(self, x: torch.Tensor, seen: Seen) -> torch.Tensor:
        for _ in range(self.uses):
            x = x + torch.tanh(self.inner(x))
        add_to(seen, x.square().mean())
        return x


class Adapted(nn.Module):
    """A frozen matrix with a trainable addition of low rank, which can be disabled."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(width, width), nn.Linear(width, 2), nn.Linear(2, width)
        self.base.requires_grad_(False)
        self.enabled = True

    def forward(self, x: torch.Tensor, seen: Seen) -> torch.Tensor:
        out = self.base(x)
        return x + torch.tanh(out + self.up(self.down(x)) if self.enabled else out)


class Plain(nn.Module):
    """A module of odd sizes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = OddBlock(width)

    def forward(self, x: torch.Tensor, seen: Seen) -> torch.Tensor:
        return self.inner(x)


BLOCKS: dict[str, Callable[[int], nn.Module]] = {
    "residual": lambda width: Residual(width, 1),
    "used twice": lambda width: Residual(width, 2),
    "adapted": Adapted,
    "odd": Plain,
}


class Net(nn.Module):
    """Blocks that may be skipped or recomputed."""

    def __init__(self, width: int, kinds: Sequence[str], recomputed: Sequence[str], *, container: type, fused: bool) -> None:
        super().__init__()
        self.container, self.fused = container, fused
        self.inp = nn.Linear(5, width)
        self.blocks = nn.ModuleList(BLOCKS[kind](width) for kind in kinds)
        self.out = nn.Linear(width, 3)
        self.recomputed = recomputed
        self.skipped: frozenset[int] = frozenset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, seen = self.inp(x), self.container()
        for position, (block, how) in enumerate(zip(self.blocks, self.recomputed, strict=True)):
            if position not in self.skipped:
                x = RECOMPUTED[how](block, x, seen if how == "not" else [])
        out = Fused.apply(x, self.out.weight, self.out.bias) if self.fused and not transforms() else self.out(x)
        return out + total(seen)

    @torch.no_grad()
    def generate(self, x: torch.Tensor, steps: int) -> torch.Tensor:
        for _ in range(steps):
            x = nn.functional.pad(self(x), (0, 2), value=0.5)
        return x


def transforms() -> bool:
    """Whether a transform of `torch.func` is active, which such functions refuse."""
    return torch._C._functorch.peek_interpreter_stack() is not None


_policy = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
RECOMPUTED: dict[str, Callable[..., torch.Tensor]] = {
    "not": lambda block, x, seen: block(x, seen),
    "all": functools.partial(checkpoint, use_reentrant=False),
    "selected": functools.partial(checkpoint, use_reentrant=False, context_fn=_policy),
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
}


# ---------------------------------------------------------------------- a draw


@dataclass
class Side:
    """One of the two models, and the ranks whose work it does."""

    model: Any
    ranks: Sequence[int]
    own: int
    optimizer: Any = None
    averages: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def sharded(self) -> bool:
        return isinstance(self.model, shardrt.FSDPModule)

    def penalties(self, names: Sequence[str], how: str) -> list[torch.Tensor]:
        """Half the sum of squares of each of these parameters, once for all ranks."""
        if how == "function":
            return [HalfSquare.apply(self.named[name]) for name in names]
        return [full(self.named[name]).square().sum() / 2 for name in names]

    def forward(self, key: int, skips: Sequence[frozenset[int]]) -> list[torch.Tensor]:
        """The outputs of a forward, by rank."""
        outs = []
        for rank in self.ranks:
            self.model.skipped = skips[rank]
            outs.append(self.model(rows(key, rank)))
        self.model.skipped = frozenset()
        return outs

    def backward(self, outs: Sequence[list[torch.Tensor]], penalties: Sequence[torch.Tensor] = ()) -> None:
        """Raises Refused if one process cannot do it."""
        loss: Any = sum(out.square().mean() / len(some) for some in outs for out in some) + sum(penalties)
        try:
            loss.backward()
        except RuntimeError as error:  # such as a recomputation with other parameters frozen
            if self.sharded:
                raise
            raise Refused from error

    @property
    def named(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())


def rows(key: int, rank: int) -> torch.Tensor:
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(97 * key + rank), dtype=torch.float64)


class ByData(torch.optim.Optimizer):
    """Momentum, written through `.data` as many optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("momentum", torch.zeros_like(param.data)).mul_(0.5).add_(param.grad.data)
                    param.data.add_(state["momentum"], alpha=-0.05)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05),
    "adamw": lambda params: torch.optim.AdamW(params, 0.01, eps=1e-3),
    "by data": ByData,
}


class Draw:
    """One seed: a model, its sharding, and a user.   log: what was done, for the report."""

    def __init__(self, world: World, seed: int) -> None:
        self.world, self.random, self.seed = world, Random(seed), seed
        self.log: list[str] = []
        self.key = seed * 1000
        self.open = False  # a forward has recorded a graph that no backward comes back to, so parameters are gathered
        choose, count = self.random.choice, self.random.choice((2, 3, 4))
        kinds = [choose(list(BLOCKS)) for _ in range(count)]
        self.per_rank = choose((False, False, False, True))  # ranks skip different blocks
        ways = ("not", "not", "not", "all", "selected", "reentrant")[: 4 if self.per_rank else 6]
        recomputed = [choose(ways) for _ in range(count)]
        self.width = choose(WIDTHS)
        torch.manual_seed(seed)
        container, fused = choose((list, list, dict, Record)), self.random.random() < 0.3
        self.mixed = self.random.random() < 0.25
        whole = Net(self.width, kinds, recomputed, container=container, fused=fused).double()
        self.plain = Side(whole, range(world.size), world.rank)
        self.ours = Side(copy.deepcopy(whole), [world.rank], world.rank)
        self.log.append(f"{kinds} {recomputed} width {self.width}, skips by rank {self.per_rank}, {container.__name__}")
        self.log.append(f"fused {fused}, mixed {self.mixed}")
        self.shard()
        self.optimizer = choose(list(OPTIMIZERS))
        for side in self.sides:
            side.optimizer = OPTIMIZERS[self.optimizer](side.model.parameters())

    @property
    def tolerance(self) -> float:
        return MIXED_TOLERANCE if self.mixed else TOLERANCE

    @property
    def sides(self) -> tuple[Side, Side]:
        return self.plain, self.ours

    def note(self, text: str) -> None:
        self.log.append(text)
        if "PRINT_USES" in os.environ and self.world.rank == 0:  # for a draw that hangs
            print(" ", text, flush=True)

    def shard(self) -> None:
        choose, model = self.random.choice, self.ours.model
        mesh = self.world.mesh if self.world.size < 4 or choose((True, False)) else replicated()
        shapes: list[Any] = [True, False, None] + [2] * (mesh.shape[-1] == 4)
        policy = shardrt.MixedPrecisionPolicy(torch.float32 if self.mixed else None)
        shard = functools.partial(shardrt.fully_shard, mesh=mesh, mp_policy=policy)
        blocks = list(model.blocks)
        while blocks:
            some = 2 if len(blocks) > 1 and not self.per_rank and self.random.random() < 0.2 else 1
            after = choose(shapes)
            self.note(f"{some} with reshard_after_forward {after}")
            shard(blocks[0] if some == 1 else blocks[:some], reshard_after_forward=after)
            blocks = blocks[some:]
        if choose((True, False)):
            shard(model.out)
        shard(model, reshard_after_forward=choose((None, None, False, True)))
        shardrt.register_fsdp_forward_method(model, "generate")
        if self.per_rank:
            model.set_reduce_scatter_unused_params(True, skipped_modules=True)
        self.prefetch()

    def sharded_modules(self) -> list[Any]:
        return [module for module in self.ours.model.modules() if isinstance(module, shardrt.FSDPModule)]

    # ------------------------------------------------------------------ settings

    def prefetch(self) -> None:
        """Lists of modules to gather ahead, as users write them, or any."""
        choose, blocks = self.random.choice, list(self.ours.model.blocks)
        how = choose(("recorded", "recorded", "next two", "any"))
        self.note(f"prefetch {how}")
        for position, block in enumerate(blocks):
            if how == "next two":
                block.set_modules_to_forward_prefetch(blocks[position + 1 : position + 3])
                block.set_modules_to_backward_prefetch(blocks[max(0, position - 2) : position][::-1])
            elif how == "any":
                block.set_modules_to_forward_prefetch(self.random.sample(blocks, self.random.randint(0, 2)))
                block.set_modules_to_backward_prefetch(self.random.sample(blocks, self.random.randint(0, 2)))

    def set_something(self) -> None:
        module, value = self.random.choice(self.sharded_modules()), self.random.choice((True, False))
        names = ("set_reshard_after_forward", "set_reshard_after_backward", "set_unshard_in_backward")
        name = self.random.choice(names[:2])
        self.note(f"{name} {value} on {type(module).__name__}")
        getattr(module, name)(value)

    # ------------------------------------------------------------------ what runs without gradients

    def compare_outputs(self, outs: Sequence[Any], what: str) -> None:
        close(outs[1], outs[0], f"{what}: the output", self.tolerance)

    def evaluate(self) -> None:
        mode, key = self.random.choice((torch.no_grad, torch.inference_mode)), self.new_key()
        self.note(f"evaluate in {mode.__name__}")
        outs = []
        for side in self.sides:
            with mode():
                outs.append(side.model(rows(key, side.own)).clone())
        self.compare_outputs(outs, "evaluation")

    def generate(self) -> None:
        steps, key = self.random.randint(1, 2), self.new_key()
        self.note(f"generate {steps}")
        outs = [side.model.eval().generate(rows(key, side.own), steps) for side in self.sides]
        for side in self.sides:
            side.model.train()
        self.compare_outputs(outs, "generation")

    def roll_out(self) -> None:
        """Each rank runs its own number of forwards with all parameters gathered."""
        counts, key = [self.random.randint(0, 3) for _ in range(self.world.size)], self.new_key()
        self.note(f"roll out {counts}")
        x, plain = rows(key, self.plain.own), rows(key, self.plain.own)
        with torch.no_grad(), shardrt.unsharded(self.ours.model):
            for _ in range(counts[self.world.rank]):
                x = nn.functional.pad(self.ours.model(x), (0, 2))
        with torch.no_grad():
            for _ in range(counts[self.world.rank]):
                plain = nn.functional.pad(self.plain.model(plain), (0, 2))
        self.compare_outputs([plain, x], "rolling out")

    def look(self) -> None:
        """The parameters of one module, gathered by hand."""
        index = self.random.randrange(len(self.ours.model.blocks))
        self.note(f"unshard block {index}")
        block = self.ours.model.blocks[index]
        handle = block.unshard(async_op=self.random.choice((True, False)))
        if handle is not None:
            handle.wait()
        for (name, param), plain in zip(block.named_parameters(), self.plain.model.blocks[index].parameters(), strict=True):
            close(param.detach(), plain.detach(), f"gathered {name}", self.tolerance)
        block.reshard()

    def transform(self) -> None:
        if self.per_rank:  # its own backward would take turns
            return
        kind, key = self.random.choice(("jvp", "grad", "vmap")), self.new_key()
        self.note(f"transform {kind}")
        outs = []
        self.open |= torch.is_grad_enabled()
        for side in self.sides:
            x, how = rows(key, side.own), side.model.recomputed
            side.model.recomputed = ["not"] * len(how)
            if kind == "jvp":
                outs.append(torch.func.jvp(side.model, (x,), (x + 1,))[1])
            elif kind == "grad":
                outs.append(torch.func.grad(lambda x, model=side.model: model(x).square().sum())(x))
            else:
                outs.append(torch.func.vmap(side.model)(x))
            side.model.recomputed = how
        self.compare_outputs(outs, f"transform {kind}")

    def reference(self) -> None:
        """As a policy's reference: the same weights with adapters disabled and frozen."""
        key = self.new_key()
        self.note("reference without adapters")
        outs = []
        for side in self.sides:
            adapted = [module for module in side.model.modules() if isinstance(module, Adapted)]
            for module in adapted:
                module.enabled = False
            layers = [layer for module in adapted for layer in (module.down, module.up)]
            before = [layer.weight.requires_grad for layer in layers]
            for layer in layers:
                layer.requires_grad_(False)
            with torch.no_grad():
                outs.append(side.model(rows(key, side.own)))
            for layer, wanted in zip(layers, before, strict=True):
                layer.requires_grad_(wanted)
            for module in adapted:
                module.enabled = True
        self.compare_outputs(outs, "the reference")

    # ------------------------------------------------------------------ writes

    def write(self) -> None:
        """Weights written by one of several means, all or one."""
        way = self.random.choice(tuple(WRITES))
        names = sorted(self.plain.named)
        chosen = names if self.random.choice((True, False)) else [self.random.choice(names)]
        self.note(f"write {way} to {len(chosen)}")
        for side in self.sides:
            params = side.named
            with torch.no_grad():
                for name in chosen:
                    WRITES[way](params[name])

    def swap(self) -> None:
        """Exchange the weights with their averages, evaluate, and back."""
        key, outs = self.new_key(), []
        self.note("swap")
        self.reshard()  # what is gathered may have another dtype
        for side in self.sides:
            with torch.no_grad():
                for name, param in side.named.items():
                    side.averages.setdefault(name, param.detach().clone()).mul_(0.5).add_(param.detach(), alpha=0.5)
                for name, param in side.named.items():
                    param.data, side.averages[name] = side.averages[name], param.data
                outs.append(side.model(rows(key, side.own)))
                for name, param in side.named.items():
                    param.data, side.averages[name] = side.averages[name], param.data
        self.compare_outputs(outs, "averages")

    def freeze_some(self) -> None:
        """Freeze or thaw a block, or all."""
        self.train(self.random.randrange(len(self.plain.model.blocks) + 1), self.random.choice((True, False)))

    def train(self, which: int, value: bool) -> None:
        blocks = len(self.plain.model.blocks)
        self.note(f"requires_grad of {which} {value}")
        for side in self.sides:
            module = side.model if which == blocks else side.model.blocks[which]
            for name, param in module.named_parameters():
                if ".base." not in f".{name}":
                    param.requires_grad_(value)

    # ------------------------------------------------------------------ training

    def new_key(self) -> int:
        self.key += 1
        return self.key

    def skips(self) -> list[frozenset[int]]:
        """The blocks that each rank skips in a forward: usually none."""
        size, blocks = self.world.size, range(len(self.plain.model.blocks))

        def some() -> frozenset[int]:
            return frozenset(b for b in blocks if self.random.random() < 0.4)

        if self.per_rank:
            return [some() for _ in range(size)]
        return [some() if self.random.random() < 0.2 else frozenset()] * size

    def between(self, most: int = 1) -> None:
        """Something that a user does between forwards and backwards."""
        choices = [self.evaluate, self.generate, self.reference, self.roll_out, self.transform, self.look]
        choices += [] if self.per_rank else [self.freeze_some]  # only some ranks would hold gradients of it
        for _ in range(self.random.randint(0, most)):
            self.random.choice(choices)()

    def micro_batch(self) -> None:
        """One or two forwards, then one backward of both, or one of each."""
        outs: dict[bool, list[list[torch.Tensor]]] = {True: [], False: []}
        for _ in range(1 if self.per_rank else self.random.choice((1, 1, 2))):
            key, skips = self.new_key(), self.skips()
            self.note(f"forward {key} {[sorted(s) for s in skips]}")
            if self.random.random() < 0.2 and not self.per_rank:
                self.random.choice(list(self.ours.model.blocks)).unshard(async_op=True)
                self.note("one gathered ahead")
            for side in self.sides:
                outs[side.sharded].append(side.forward(key, skips))
            self.compare_outputs([outs[False][-1][self.world.rank], outs[True][-1][0]], "forward")
            self.between()
        together = self.random.choice((True, False))
        order = list(range(len(outs[True])))
        self.random.shuffle(order)
        for backward in [order] if together else [[position] for position in order]:
            self.note(f"backward {backward}")
            how, names = self.penalised()
            for side in self.sides:
                chosen = [outs[side.sharded][position] for position in backward]
                if any(out.requires_grad for some in chosen for out in some):
                    side.backward(chosen, side.penalties(names, how))
            if self.random.random() < 0.2:
                self.between()

    def penalised(self) -> tuple[str, list[str]]:
        """How parameters are part of a loss, and which."""
        if self.per_rank or self.random.random() < 0.8:  # a group has one turn in a backward
            return "not", []
        how, trainable = self.random.choice(("function", "full")), [n for n, p in self.plain.named.items() if p.requires_grad]
        names = sorted(self.random.sample(trainable, min(2, len(trainable))))
        self.note(f"penalty by {how} on {names}")
        return how, names

    def penalise_by_hand(self) -> None:
        """A backward of parameters alone, gathered by hand."""
        trainable = [name for name, param in self.plain.named.items() if param.requires_grad]
        if self.per_rank or not trainable:
            return
        name = self.random.choice(trainable)
        self.note(f"penalty by hand on {name}")
        self.plain.named[name].square().sum().backward()
        with shardrt.unsharded(self.ours.model):
            self.ours.named[name].square().sum().backward()

    def copy(self) -> None:
        """Go on with copies of the models."""
        self.note("deep copies")
        for side in self.sides:
            side.model = copy.deepcopy(side.model)
            side.optimizer = OPTIMIZERS[self.optimizer](side.model.parameters())

    def step(self) -> None:
        micros = self.random.choice((1, 1, 2))
        for micro in range(micros):
            self.ours.model.set_requires_gradient_sync(micro == micros - 1)
            if micro and not any(param.requires_grad for param in self.plain.named.values()):
                self.train(len(self.plain.model.blocks), True)  # no backward would reduce what is held
            self.micro_batch()
        if self.random.random() < 0.1:
            self.penalise_by_hand()
        self.check("after backward")
        self.between()
        for side in self.sides:
            if self.steps:
                side.optimizer.step()
            side.optimizer.zero_grad(set_to_none=self.sets_to_none)
        self.check("after the optimizer")

    def reshard(self) -> None:
        for module in self.sharded_modules() if self.open else ():
            module.reshard()
        self.open = False

    def check(self, when: str) -> None:
        self.reshard()
        if self.mixed and any(p.grad is not None and p.grad.abs().max() > 100 for p in self.plain.named.values()):
            raise Refused("it diverges, and the steps magnify what was rounded")
        for (name, plain), ours in zip(self.plain.named.items(), self.ours.model.parameters(), strict=True):
            assert isinstance(ours, shardrt.DTensor), f"{name} {when}: sees {type(ours).__name__}"
            close(ours.detach().full_tensor(), plain.detach(), f"{name} {when}", self.tolerance)
            if plain.grad is None and self.per_rank and ours.grad is not None:
                plain.grad = torch.zeros_like(plain)  # zeros stand for gradients that other ranks may have
            if plain.grad is None:
                assert ours.grad is None, f"{name} {when}: a gradient on the sharded side only"
            else:
                assert ours.grad is not None, f"{name} {when}: no gradient"
                close(whole(ours.grad), plain.grad, f"gradient of {name} {when}", self.tolerance)

    def run(self) -> None:
        """Some steps, with something in between."""
        others: list[Callable[[], None]] = [
            self.evaluate,
            self.generate,
            self.write,
            self.swap,
            self.freeze_some,
            self.roll_out,
            self.transform,
        ]
        others += [self.set_something, self.prefetch, self.look, self.reference]
        for _ in range(self.random.randint(2, 3)):
            for _ in range(self.random.randint(0, 2)):
                self.random.choice(others)()
            if self.random.random() < 0.1:
                self.copy()
            self.steps, self.sets_to_none = self.random.random() < 0.8, self.random.random() < 0.8
            self.step()


WRITES: dict[str, Callable[[Any], object]] = {
    "p.mul_": lambda p: p.mul_(0.9),
    "p.data.mul_": lambda p: p.data.mul_(0.9),
    "p.data =": lambda p: setattr(p, "data", p.data * 0.9),
    "p.data.copy_": lambda p: p.data.copy_(p.detach() * 0.9),
    "foreach": lambda p: torch._foreach_mul_([p.data], 0.9),
}


def full(param: nn.Parameter) -> torch.Tensor:
    """All of a parameter, of which each rank's gradient counts as its share. It is gathered between forward and backward."""
    if not isinstance(param, shardrt.DTensor):
        return param
    return param.full_tensor(grad_placements=[shardrt.Partial(shardrt.comm.ReduceOp.AVG)] * param.device_mesh.ndim)


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor()
    return found


def close(found: torch.Tensor, expected: torch.Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    if tolerance == MIXED_TOLERANCE and expected.numel():
        assert found.shape == expected.shape
        far, largest = float((found - expected).detach().abs().max()), float(expected.detach().abs().max())
        assert far <= tolerance * (1 + largest), f"{what}: {far} off, of {largest}"
        return
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")


@functools.cache
def replicated() -> Any:
    """Two replicas of two shards."""
    return shardrt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


@contextlib.contextmanager
def surroundings(world: World, random: Random) -> Iterator[str]:
    """One of the sizes of a bucket, and node memory or none."""
    bucket, node_memory = random.choice((0, 3000, 1 << 20)), random.random() < 0.6
    with buckets_of(bucket), settings_of(world, node_memory=node_memory):
        yield f"bucket {bucket}, node memory {node_memory}"


def run(world: World, seed: int) -> bool:
    """One draw. Returns: False if one process refuses it.   Raises AssertionError for whatever went wrong, with the log."""
    draw: Draw | None = None
    with surroundings(world, Random(-1 - seed)) as where:
        try:
            draw = Draw(world, seed)
            draw.run()
        except Exception as error:
            if isinstance(error, Refused):
                return False
            log = "\n  ".join(draw.log if draw else ())
            raise AssertionError(f"seed {seed} on {world.size} ranks, {where}: {error}\n  {log}") from error
    return True


def main(first: int, count: int) -> int:
    world, refused = shardrt.init("cpu"), 0
    torch.set_num_threads(1)
    for seed in range(first, first + count):
        if world.rank == 0:
            print(f"at seed {seed}", flush=True)
        try:
            refused += not run(world, seed)
            failed = False
        except AssertionError as error:
            failed = True  # others may wait in a call, which ends the job
            print(f"{error}\n" + "".join(traceback.format_exception(error.__cause__)[-6:]), flush=True)
        if any(world.comm.exchange(failed)):
            return 1
    if world.rank == 0:
        print(f"{count} draws on {world.size} ranks, {refused} of them refused by one process", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
