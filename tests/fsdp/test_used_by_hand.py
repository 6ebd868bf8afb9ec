"""Parameters of sharded modules in code that is no forward of these: gathered ones by hand, shards in custom functions."""

import copy
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks, refused, settings_of
from shardrt import Partial
from shardrt.comm import World
from toys import batch, compare, shard_blocks

Block = Callable[[], AbstractContextManager[Any]]  # `unsharded(model)`; for a plain model nothing


class Mul(torch.autograd.Function):
    """x (n, in) @ weight (out, in)^T."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


mul = Mul.apply  # before anything is sharded


class FusedLoss(torch.autograd.Function):
    """Computes its gradients in its forward, into a tensor like the weight, as fused losses do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, rows: int) -> torch.Tensor:
        grad_weight, grad_bias, grad_x, total = torch.zeros_like(weight), torch.zeros_like(bias), [], x.new_zeros(())
        for part in x.split(rows):
            out = torch.addmm(bias, part, weight.t())
            total = total + out.square().sum()
            grad_weight += 2 * out.t() @ part
            grad_bias += 2 * out.sum(0)
            grad_x.append(2 * out @ weight)
        ctx.save_for_backward(grad_weight, grad_bias, torch.cat(grad_x))
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        grad_weight, grad_bias, grad_x = ctx.saved_tensors
        return grad_x * grad, grad_weight * grad, grad_bias * grad, None


class LowRank(torch.autograd.Function):
    """x @ up^T @ down, of weights (3, 13); its forward calls another function."""

    @staticmethod
    def forward(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return Mul.apply(x, up) @ down * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:3])
        ctx.scale = inputs[3]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, up, down = ctx.saved_tensors
        grad = grad * ctx.scale
        inner = grad @ down.t()
        return inner @ up, inner.t() @ x, (x @ up.t()).t() @ grad, None


@torch.library.custom_op("shardrt_test::scaled_rows", mutates_args=())
def scaled_rows(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    return x * weights[0] + weights[1]


scaled_rows.register_autograd(
    lambda ctx, grad: (grad * ctx.first, [(grad * ctx.x).sum(0), grad.sum(0)]),
    setup_context=lambda ctx, inputs, output: vars(ctx).update(x=inputs[0], first=inputs[1][0]),
)


class Net(nn.Module):
    """Its forward gives parameters of modules that do not run to custom functions."""

    def __init__(self, case: str = "") -> None:
        super().__init__()
        self.case = case
        self.inp, self.mid, self.out = nn.Linear(5, 13), nn.Linear(13, 13), nn.Linear(13, 3)
        self.low = nn.Linear(13, 3, bias=False)
        self.norm = nn.LayerNorm(13)
        self.extra = nn.Parameter(torch.randn(13, 5))  # of the root's own group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        last = {"": lambda net, x: net.out(x), "by hand": read_by_hand, **CASES}[self.case]
        return last(self, self.mid(torch.tanh(self.inp(x) + x @ self.extra.t())))


CASES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "function": lambda net, x: Mul.apply(x, net.out.weight),
    "bound before": lambda net, x: mul(x, net.out.weight) + net.out(x),
    "no gradient of the input": lambda net, x: Mul.apply(x.detach(), net.out.weight) + x.sum(),
    "fused loss": lambda net, x: FusedLoss.apply(x, net.out.weight, net.out.bias, 2).expand(1, 3),
    "of two modules": lambda net, x: LowRank.apply(x, net.out.weight, net.low.weight, 0.5)[:, :3],
    "one twice": lambda net, x: LowRank.apply(x, net.out.weight, net.out.weight)[:, :3] + Mul.apply(x, net.mid.weight)[:, :3],
    "reentrant checkpoint": lambda net, x: checkpoint(linear, x, net.out.weight, net.out.bias, use_reentrant=True),
    "operator": lambda net, x: scaled_rows(x, [net.norm.weight, net.norm.bias])[:, :3],
    "operation on what is derived": lambda net, x: x @ (net.out.weight * 2).t(),
    "function of what is derived": lambda net, x: Mul.apply(x, net.out.weight * 2),
    "saved on the host": lambda net, x: saved(Mul.apply, x, net.out.weight),
    "checkpoint": lambda net, x: checkpoint(lambda x: Mul.apply(x, net.out.weight), x, use_reentrant=False),
    "full_tensor": lambda net, x: x @ full(net.out.weight).t(),
}


def saved(call: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return call(*args)


def full(param: Any) -> torch.Tensor:
    return param.full_tensor([Partial("avg")] * param.spec.mesh.ndim) if isinstance(param, shardrt.DTensor) else param


def shard(model: Any, **options: Any) -> Any:
    for module in (*model.children(), model):
        shardrt.fully_shard(module, **options)
    return model


def mean_of(world: World, whole: nn.Module, run: Callable[[nn.Module, torch.Tensor, float], None], step: int = 0) -> None:
    """Run the plain model on the rows of each rank: its gradients are the means over the ranks."""
    for rows in batch(step, 4 * world.size).chunk(world.size):
        run(whole, rows, 1 / world.size)


@pytest.mark.parametrize("node_memory", [True, False])
@pytest.mark.parametrize("case", CASES)
@on_ranks(3, more=(1, 2))
def test_functions_on_shards(world: World, case: str, node_memory: bool) -> None:
    """Gradients are averaged, in the first iteration as in others, and added to earlier ones."""
    whole = Net(case).double()

    def run(model: nn.Module, x: torch.Tensor, factor: float) -> None:
        model(x).square().mean().mul(factor).backward()

    with settings_of(world, node_memory=node_memory):
        model = shard(copy.deepcopy(whole))
        for step in range(3):
            run(model, batch(step, 4 * world.size).chunk(world.size)[world.rank], 1.0)
            mean_of(world, whole, run, step)
            compare(whole, model, 1e-12, f"{case}, step {step}")


# ---------------------------------------------------------------------- gathered parameters


def in_block(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    for _ in range(2):
        with block():
            for rows in x.chunk(2):
                (rows @ net.inp.weight.t()).square().sum().mul(factor).backward()


def after_block(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    with block():
        loss = (x @ net.inp.weight.t()).square().sum()
    loss.mul(factor).backward()


def views(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    """One that is made without gradients, a detached one, several of one operation; 3-D inputs, whose results are views."""
    with block():
        with torch.no_grad():
            row = net.inp.weight[0]
        first, second = net.inp.weight.unsqueeze(0).chunk(2, 1)
        out = linear(x.view(2, -1, 5) * row, torch.cat([first[0], second[0].exp()]), net.inp.bias).mul_(2)
        hidden = out @ net.mid.weight.detach().view(13, 13) @ net.mid.weight.data.t()
    hidden.square().mean().mul(factor).backward()


def forward_by_hand(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    with block():
        net.case = "by hand"
        losses = [net(x).square().mean(), net(x).mean()]
        losses[0].mul(factor).backward()
    losses[1].mul(factor).backward()


def penalty(net: Any) -> Any:
    return sum(param.square().sum() for param in net.parameters())


def with_penalty(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    (net(x).square().mean() + penalty(net)).mul(factor).backward()


def penalty_alone(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    net(x)
    penalty(net).mul(factor).backward()
    net(x).sum().mul(factor).backward()


def penalty_later(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    """Its graph refers to what the first backward has freed; it depends on the rank's rows where parameters are gathered."""
    out = net(x)
    more = penalty(net) + (x @ full(net.extra).t()).square().sum()
    out.sum().mul(factor).backward()
    more.mul(factor).backward()


def function_after_forward(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    loss = FusedLoss.apply(net(x) @ full(net.out.weight).detach(), net.out.weight, net.out.bias, 2)
    (loss + Mul.apply(x, net.extra).square().mean()).mul(factor).backward()


def unshard(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    for reshards in (False, True):
        if is_sharded := isinstance(net, shardrt.FSDPModule):
            net.inp.unshard()
        loss = (x @ net.inp.weight.t()).square().sum()
        if reshards and is_sharded:
            net.inp.reshard()
        loss.mul(factor).backward()


def accumulated(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    for sync in (False, True):
        if isinstance(net, shardrt.FSDPModule):
            net.set_requires_gradient_sync(sync)
        with block():
            (linear(x, net.inp.weight) @ net.mid.weight).square().mean().mul(factor).backward()
    net(x).mean().mul(factor).backward()


def functions(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    with block():
        hidden = Mul.apply(x, net.inp.weight) + Mul.apply(x, net.inp.weight.flip(0).view(13, 5).exp())
        loss = FusedLoss.apply(hidden, net.out.weight, net.out.bias, 2) + Mul.apply(hidden, net.mid.weight[:3]).mean()
    loss.mul(factor).backward()


def mixed(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    """By hand before and after forwards, in one backward."""
    with block():
        before = (x @ net.inp.weight.t()).exp()
        out = net(before @ net.inp.weight)
        between = (out @ net.out.weight).square()
        (net(x).mean() + between.mean() + (x @ net.inp.weight.t()).mean()).mul(factor).backward()


def frozen(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    """And then trained again, without a forward in between."""
    for wants_grad in (False, True):
        net.inp.weight.requires_grad_(wants_grad)
        x = x.detach().requires_grad_()
        with block():
            loss = ((x @ net.inp.weight.t()) @ net.mid.weight).square().mean()
        loss.mul(factor).backward()
    assert x.grad is not None


def second_order(net: Any, x: torch.Tensor, factor: float, block: Block) -> None:
    x = x.detach().requires_grad_()
    with block():
        out = torch.tanh(x @ net.inp.weight.t()).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        slope.square().sum().mul(factor).backward()


def read_by_hand(net: Any, x: torch.Tensor) -> torch.Tensor:
    return (x @ net.mid.weight @ net.out.weight.t()) + net.out(x) + x @ net.out.weight.detach().t()


BY_HAND = (
    in_block, after_block, function_after_forward, views, forward_by_hand, with_penalty, penalty_alone, penalty_later, unshard,
    accumulated, functions, mixed, frozen, second_order,
)  # fmt: skip


@pytest.mark.parametrize("keeps", [None, True, False, "memory of its own"])
@pytest.mark.parametrize("use", BY_HAND)
@on_ranks(3, more=(1, 2))
def test_by_hand(world: World, use: Callable[..., None], keeps: Any) -> None:
    whole = Net().double()
    with settings_of(world, node_memory=keeps != "memory of its own"):
        model = shard(copy.deepcopy(whole), reshard_after_forward=None if isinstance(keeps, str) else keeps)
        for step in range(2):
            use(model, batch(step, 4 * world.size).chunk(world.size)[world.rank], 1.0, lambda: shardrt.unsharded(model))
            mean_of(world, whole, lambda net, x, factor: use(net, x, factor, nullcontext), step)
            model.reshard()
            compare(whole, model, 1e-12, f"{use.__name__}, step {step}")


@on_ranks(2, 3)
def test_other_parameters_on_each_rank(world: World) -> None:
    """Inside of `unsharded`, gradients are alike on all ranks, also where ranks have used different parameters, or forwards."""
    whole = Net().double()
    model = shard(copy.deepcopy(whole))

    def run(net: Any, x: torch.Tensor, factor: float, rank: int) -> None:
        used = [net.mid.bias, net.inp.weight, net.extra][rank]
        (net(x).square().mean() + used.exp().sum()).mul(factor).backward()
        (used * (rank + 1)).sum().mul(factor).backward()

    for step in range(2):
        with shardrt.unsharded(model):
            rows = batch(step, 4 * world.size).chunk(world.size)
            run(model, rows[world.rank], 1.0, world.rank)
            if world.rank == 0:  # what accumulates nothing communicates nothing
                torch.autograd.grad(model.inp(rows[0]).sum() + model.inp.weight.sum(), model.inp.weight)
        for rank in range(world.size):
            run(whole, rows[rank], 1 / world.size, rank)
        compare(whole, model, 1e-12, f"step {step}")


@pytest.mark.parametrize("function", [True, False])
@on_ranks(4)
def test_settings_of_the_group_hold(world: World, function: bool) -> None:
    """With replicas, dtypes for compute and reduction, and another factor: what a forward of the module makes, to the bit."""
    mesh = shardrt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    made = nn.Sequential(nn.Linear(5, 13), nn.Linear(13, 3, bias=False))
    models = [copy.deepcopy(made) for _ in range(2)]
    x = batch(0, 16).float().chunk(4)[world.rank]
    for model in models:
        policy = shardrt.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        shard_blocks(model, "", mesh=mesh, mp_policy=policy)
        model[1].set_gradient_divide_factor(2.0)
        hidden = model(x)  # makes the runtime
        hidden = model[0](x)
        if model is models[0]:
            out = model[1](hidden)
        elif function:
            out = Mul.apply(hidden, model[1].weight)
        else:
            with shardrt.unsharded(model):
                out = linear(hidden, model[1].weight)
        assert out.dtype == torch.bfloat16
        out.float().square().sum().backward()
    for expected, found in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(expected.grad.to_local(), found.grad.to_local())


@on_ranks(2)
def test_hooks_of_sharded_parameters(world: World) -> None:
    """They see reduced gradients of what was used by hand. One that waits for several gradients is refused, by name."""
    model: Any = shard(Net().double())
    seen: list[Any] = []
    model.inp.weight.register_hook(lambda grad: seen.append(grad.full_tensor()))
    model.inp.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.full_tensor()))
    torch.autograd.graph.register_multi_grad_hook([model.inp.weight, model.mid.weight], seen.append, mode="any")
    with shardrt.unsharded(model):
        (model.inp.weight * (world.rank + 1)).sum().backward()
    assert len(seen) == 3
    assert all(torch.equal(each, torch.full((13, 5), 1.5).double()) for each in (seen[0], seen[2]))
    with pytest.raises(RuntimeError, match=rf"register_multi_grad_hook on parameter 'extra'.*\(rank {world.rank}\)"):
        torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), print)
    own = shardrt.distribute_tensor(torch.ones(4), world.mesh).requires_grad_()
    torch.autograd.graph.register_multi_grad_hook([own], seen.append)
    own.sum().backward()
    assert len(seen) == 4


@on_ranks(2)
def test_functions_that_cannot_be_given_a_shard(world: World) -> None:
    """Before the first forward, in transforms, with tensor-parallel parameters: an error names the module or the parameter."""
    model: Any = shard(Net().double())
    refused("'Linear' before that of its root", lambda: Mul.apply(torch.ones(2, 13).double(), model.out.weight), RuntimeError)
    model(batch(0))
    with pytest.raises(NotImplementedError, match=r"mm.* on parameter 'low.weight' of the sharded module 'low'"):
        torch.func.grad(lambda x: LowRank.apply(x, model.out.weight, model.low.weight).sum())(torch.ones(2, 13).double())
    with torch.no_grad():
        Mul.apply(torch.ones(2, 13).double(), model.out.weight)
    mesh = shardrt.init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    two: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    shardrt.parallel.parallelize_module(
        two, mesh["tp"], {"0": shardrt.parallel.ColwiseParallel(), "1": shardrt.parallel.RowwiseParallel()}
    )
    shard_blocks(two, "", mesh=mesh["dp"])
    two(torch.ones(2, 4))
    with pytest.raises(NotImplementedError, match=r"Mul.*'0.weight' of the sharded module '0' .* tensor-parallel"):
        Mul.apply(torch.ones(2, 4), two[0].weight)


@on_ranks(2)
def test_copies_of_what_is_gathered(world: World) -> None:
    """Copies and pickles of gathered parameters and of views of them are plain; so are results for other classes."""
    model: Any = shard(Net().double())
    with shardrt.unsharded(model):
        view = model.inp.weight.detach().t()
        for made in (copy.deepcopy(view), pickle.loads(pickle.dumps(view)), model.inp.weight.clone()):
            assert type(made) is torch.Tensor
            assert torch.equal(made, view if made.shape == view.shape else view.t())
        assert isinstance(copy.deepcopy(model.inp.weight), nn.Parameter)
        assert type(pickle.loads(pickle.dumps(model.inp.weight))) is nn.Parameter
        other = torch.ones(5).double().as_subclass(Other)
        assert type(model.inp.weight @ other) is Other
        assert isinstance(model.inp.weight, nn.Parameter)
        compiled = torch.compile(lambda x, weight: (x @ weight.t()).sin().sum(), backend="eager")
        compiled(batch(0), model.inp.weight).backward()
    weight = model.inp.weight.full_tensor().detach().requires_grad_()
    (batch(0) @ weight.t()).sin().sum().backward()
    torch.testing.assert_close(model.inp.weight.grad.full_tensor(), weight.grad)


class Other(torch.Tensor):
    """A class with torch's own `__torch_function__`."""


@on_ranks(3)
def test_what_stays_gathered_may_be_used_on_one_rank(world: World) -> None:
    """Between a forward and its backward: nothing is sent for it alone."""
    whole = Net().double()
    model = shard(copy.deepcopy(whole), reshard_after_forward=False)

    def run(net: Any, x: torch.Tensor, factor: float, rank: int) -> None:
        loss = net(x).square().mean()
        if rank == 1:
            loss = loss + net.mid.weight.square().sum() + (x @ net.inp.weight.t()).exp().mean()
        loss.mul(factor).backward()

    for step in range(2):
        rows = batch(step, 4 * world.size).chunk(world.size)
        run(model, rows[world.rank], 1.0, world.rank)
        for rank in range(world.size):
            run(whole, rows[rank], 1 / world.size, rank)
        compare(whole, model, 1e-12, f"step {step}")
