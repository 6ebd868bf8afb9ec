"""Expert parallelism: a model whose experts are divided trains as one process does on all ranks' batches."""

import copy
import functools
import shutil
import tempfile
from typing import cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks, refused
from shardrt import Replicate, Shard
from shardrt import checkpoint as checkpoint_io
from shardrt.comm import DeviceMesh, World
from shardrt.comm.startup.dry import dry_world
from shardrt.parallel import (
    ColwiseParallel,
    ExpertParallel,
    ParallelStyle,
    expert_load,
    parallelize_module,
    update_expert_bias,
)
from toys_ep import (
    WIDTH,
    MoEModel,
    RoutedExperts,
    SortedExperts,
    batch_of,
    compare,
    divide,
    full_of,
    loss_of,
    mesh_of,
    train_beside_one_process,
)
from toys_tp import counted


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sorted_rows", [False, True])
def test_training_on_any_mesh(world: World, sorted_rows: bool) -> None:
    """dp x ep of 1 x N, of N x 1, and of 2 x 2."""
    for ep in [size for size in range(1, world.size + 1) if world.size % size == 0]:
        torch.manual_seed(0)
        mesh, whole = mesh_of(world, ep), MoEModel(12, sorted_rows=sorted_rows).double()
        train_beside_one_process(world, mesh, whole, lambda model, m=mesh: divide(model, m, sorted_rows=sorted_rows), clip=0.05)


@on_ranks(3, 4)
def test_fewer_experts_than_ranks(world: World) -> None:
    """Each has one or two, and shares them with others by rows of the second dim, as with FSDP2, or as it comes."""
    mesh, few = mesh_of(world, 2 - world.size % 2), (None, lambda param: Shard(1) if param.dim() == 3 else None)
    for placement_fn in few:
        torch.manual_seed(0)
        model = train_beside_one_process(
            world, mesh, MoEModel(2).double(), lambda model, fn=placement_fn: divide(model, mesh, shard_placement_fn=fn)
        )
        dims = {each.dim for each in model.layers[0].experts.up.placements}
        assert placement_fn is None or dims == {0, 1}


@on_ranks(2, 3, 4)
@pytest.mark.parametrize("sorted_rows", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_ranks_and_experts_without_rows(world: World, sorted_rows: bool, recompute: bool) -> None:
    """All tokens choose the experts of the first rank, and the last rank has no tokens: nobody waits, no gradient lacks."""

    def no_rows_on_the_last(step: int, rank: int) -> torch.Tensor:
        return batch_of(step, rank)[: 0 if rank == world.size - 1 else None]

    def summed(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")

    def divided(model: nn.Module) -> nn.Module:
        if recompute:
            for layer in model.layers:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        return divide(model, mesh, sorted_rows=sorted_rows)

    mesh, whole = mesh_of(world, world.size), MoEModel(12, sorted_rows=sorted_rows).double()
    for layer in whole.layers:
        layer.bias[: 12 // world.size].fill_(9.0)
    model = train_beside_one_process(world, mesh, whole, divided, loss=summed, batch=no_rows_on_the_last)
    summed(model, batch_of(0, 0)).backward()
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2, 3)
@pytest.mark.parametrize("sorted_rows", [False, True])
@pytest.mark.parametrize("frozen", ["rows", "experts", None])
def test_a_checkpoint_of_the_experts_alone(world: World, sorted_rows: bool, frozen: str | None) -> None:
    """All ranks compute again, also those to which no row comes."""
    whole = (SortedExperts(6) if sorted_rows else RoutedExperts(6)).double().requires_grad_(frozen != "experts")
    inputs = [torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=frozen != "rows") for _ in range(world.size)]
    weights = torch.rand(4, 2, dtype=torch.float64)
    choices = (torch.tensor([4, 0, 0, 0, 0, 0]),) if sorted_rows else (torch.tensor([[0, 1]] * 4), weights)
    whole_losses = [whole(rows, *choices).square().sum() for rows in inputs]
    torch.stack(whole_losses).mean().backward()
    model = parallelize_module(copy.deepcopy(whole), world.mesh, ExpertParallel(sorted_rows=sorted_rows))
    rows = inputs[world.rank].detach().requires_grad_(frozen != "rows")
    checkpoint(model, rows, *choices, use_reentrant=False).square().sum().backward()
    if rows.requires_grad:
        torch.testing.assert_close(rows.grad, world.size * inputs[world.rank].grad, rtol=1e-12, atol=1e-12)
    compare(model, whole, 1e-12)
    assert all((param.grad is None) == (frozen == "experts") for param in model.parameters())


@on_ranks(2, 4)
def test_without_fully_shard_over_the_experts(world: World) -> None:
    """Their gradients are assigned when the backward ends; the others are reduced as ever. A plan for one module."""
    mesh, whole = world.mesh, MoEModel(4).double()

    def divided(model: nn.Module) -> nn.Module:
        for layer in model.layers:
            parallelize_module(layer.experts, mesh, ExpertParallel())
        experts = [param for layer in model.layers for param in layer.experts.parameters()]
        return shardrt.fully_shard(model, ignored_params=experts)

    model = train_beside_one_process(world, mesh, whole, divided, clip=0.05)
    assert all(
        param.spec.placements == (Shard(0),) and param.device_mesh is mesh for param in model.layers[0].experts.parameters()
    )


@on_ranks(4)
def test_beside_tensor_parallelism(world: World) -> None:
    """Of other modules, over another axis, by a call for each: the ranks of "tp" have one batch."""
    mesh, whole = DeviceMesh(world.comm, (2, 2), ("ep", "tp")), MoEModel(4).double()
    model = copy.deepcopy(whole)
    parallelize_module(model.head, mesh["tp"], ColwiseParallel(output_layouts=Replicate()))
    with pytest.raises(ValueError, match=r"'head.weight' is parallelized already, over"):
        parallelize_module(model, mesh["ep"], {"layers.*.experts": ExpertParallel()})
    for layer in model.layers:
        parallelize_module(layer.experts, mesh["ep"], ExpertParallel())
    experts = [param for layer in model.layers for param in layer.experts.parameters()]
    shardrt.fully_shard(model, mesh=mesh["ep"], ignored_params=experts)
    torch.stack([loss_of(whole, batch_of(0, rank)) for rank in range(2)]).mean().backward()
    loss_of(model, batch_of(0, world.rank // 2)).backward()
    compare(model, whole, 1e-12)


@on_ranks(4)
def test_replicas_of_experts(world: World) -> None:
    """Hybrid: experts are replicated over the first axis, and sharded over the second; the rest over the last two."""
    mesh, whole = DeviceMesh(world.comm, (2, 1, 2), ("replicate", "dp", "ep")), MoEModel(4).double()

    def divided(model: nn.Module) -> nn.Module:
        parallelize_module(model, mesh["ep"], {"layers.*.experts": ExpertParallel()})
        for layer in model.layers:
            shardrt.fully_shard(layer.experts, mesh=mesh["replicate", "dp"])
        return shardrt.fully_shard(model, mesh=mesh.unflatten((2, 2), ("replicate", "shard")))

    train_beside_one_process(world, mesh, whole, divided, clip=0.05)


@on_ranks(2)
def test_accumulation_and_evaluation(world: World) -> None:
    """Gradients of two backwards add up; an evaluation gives what one process does, and changes nothing."""
    mesh, whole = mesh_of(world, 2), MoEModel(4).double()
    model = divide(copy.deepcopy(whole), mesh)
    for microbatch in range(2):
        torch.stack([loss_of(whole, batch_of(microbatch, rank)) for rank in range(2)]).mean().backward()
        loss_of(model, batch_of(microbatch, world.rank)).backward()
        with torch.no_grad():
            outs = [each.eval()(batch_of(9, world.rank)) for each in (whole, model)]
        torch.testing.assert_close(outs[1], outs[0], rtol=1e-12, atol=1e-12)
        for each in (whole, model):
            each.train()
    compare(model, whole, 1e-12)
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("frozen", [False, True])
def test_one_choice_and_frozen_experts(world: World, frozen: bool) -> None:
    """Frozen: the first layer's rows need no gradients, nor do its experts; the router does."""
    mesh, whole = mesh_of(world, 2), MoEModel(4, top_k=1).double()
    for module in (whole.tokens, *(layer.experts for layer in whole.layers)):
        module.requires_grad_(not frozen)
    train_beside_one_process(world, mesh, whole, lambda model: divide(model, mesh))
    assert whole.layers[0].gate.weight.requires_grad


@on_ranks(2, 4)
def test_gradient_divide_factors(world: World) -> None:
    """Where others get a factor, experts get it over the ranks of "ep", by which exchanges have divided."""
    mesh, whole = mesh_of(world, 2), MoEModel(4).double()
    model = divide(copy.deepcopy(whole), mesh)
    model.set_gradient_divide_factor(3.0)
    for layer in model.layers:
        layer.experts.set_gradient_divide_factor(3.0 / 2)
    (torch.stack([loss_of(whole, batch_of(0, rank)) for rank in range(world.size)]).sum() / 3.0).backward()
    loss_of(model, batch_of(0, world.rank)).backward()
    compare(model, whole, 1e-12)


@on_ranks(2)
def test_bfloat16_and_a_copy(world: World) -> None:
    """Rows travel in the dtype of the compute; a deep copy exchanges as well, and counts for itself."""
    mesh, whole = mesh_of(world, 2), MoEModel(4)
    model = parallelize_module(copy.deepcopy(whole).bfloat16(), mesh["ep"], {"layers.*.experts": ExpertParallel()})
    twin = copy.deepcopy(model)
    tokens = batch_of(0, world.rank)
    outs = [each(tokens) for each in (whole.bfloat16(), model, twin)]
    assert outs[1].dtype is torch.bfloat16
    torch.testing.assert_close(outs[1], outs[0], rtol=0.05, atol=0.05)
    assert torch.equal(outs[1], outs[2])
    twin(tokens)
    loads = [expert_load(each)["layers.1.experts"] for each in (twin, model)]
    assert torch.equal(loads[0], 2 * loads[1])


@on_ranks(2)
def test_mixed_precision(world: World) -> None:
    """`fully_shard` casts what the experts get; parameters and gradients stay in float32, near those of one process."""
    mesh, whole = mesh_of(world, 2), MoEModel(4)
    policy = shardrt.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = divide(copy.deepcopy(whole), mesh, mp_policy=policy)
    expected = [loss_of(whole, batch_of(0, rank)) for rank in range(2)]
    torch.stack(expected).mean().backward()
    found = loss_of(model, batch_of(0, world.rank))
    found.backward()
    torch.testing.assert_close(found.float(), expected[world.rank], rtol=0.05, atol=0.05)
    for (name, param), one in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert param.grad.dtype is torch.float32
        assert (full_of(param.grad) - one.grad).norm() < 0.1 * one.grad.norm(), name


@on_ranks(4)
@pytest.mark.parametrize("ep", [2, 4])
def test_from_the_meta_device(world: World, ep: int) -> None:
    """No rank ever has all experts: divided and sharded without memory, then loaded."""
    whole = MoEModel(4)
    with torch.device("meta"):
        model = MoEModel(4)
    divide(model, mesh_of(world, ep)).to_empty(device=world.device)
    held = sum(param.to_local().numel() for param in model.layers[0].experts.parameters())
    assert held < 1.3 * sum(param.numel() for param in whole.layers[0].experts.parameters()) / world.size  # with padding
    model.load_state_dict(whole.state_dict())
    out = [each(batch_of(0, world.rank)) for each in (whole, model)]
    torch.testing.assert_close(out[1], out[0])


@on_ranks(2)
def test_what_is_sent(world: World) -> None:
    """Of each layer: counts and two exchanges forward, two backward; a recomputation sends what a forward sends."""
    mesh, tokens = mesh_of(world, 2), batch_of(0, world.rank)
    for layers, recompute in ((1, False), (3, False), (2, True)):
        model = divide(MoEModel(4, layers=layers), mesh)
        for layer in model.layers if recompute else ():
            layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        with counted(mesh["ep"], ("experts",)) as forward:
            loss = loss_of(model, tokens)
        with counted(mesh["ep"], ("experts",)) as backward:
            loss.backward()
        assert forward == {"all_to_all": 3 * layers}
        assert backward == {"all_to_all": (5 if recompute else 2) * layers}


@on_ranks(2, 3)
@pytest.mark.parametrize("sorted_rows", [False, True])
@pytest.mark.parametrize("one_expert", [False, True])
def test_gradients_of_gradients(world: World, sorted_rows: bool, one_expert: bool) -> None:
    """Of the norm of the gradient at the experts' input, also where no row comes: of activations, and of parameters."""
    whole = (SortedExperts(6) if sorted_rows else RoutedExperts(6)).double()
    inputs = [torch.randn(5, WIDTH, dtype=torch.float64) for _ in range(world.size)]
    chosen = [torch.randint(1 if one_expert else 6, (5, 2)) for _ in range(world.size)]
    counts = [torch.bincount(each[:, 0], minlength=6) for each in chosen]
    weights = torch.rand(5, 2, dtype=torch.float64)

    def second(experts: nn.Module, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The penalty, and its gradient."""
        x = inputs[rank].clone().requires_grad_()
        made = experts(x, counts[rank]) if sorted_rows else experts(x, chosen[rank], weights)
        (first,) = torch.autograd.grad(made.square().sum(), x, create_graph=True)
        penalty = first.square().sum()
        return penalty, torch.autograd.grad(penalty, x, retain_graph=True)[0]

    found = [second(whole, rank) for rank in range(world.size)]
    torch.stack([penalty for penalty, _ in found]).mean().backward()
    divided = parallelize_module(copy.deepcopy(whole), world.mesh, ExpertParallel(sorted_rows=sorted_rows))
    penalty, made = second(divided, world.rank)
    penalty.backward()
    torch.testing.assert_close(made, found[world.rank][1], rtol=1e-12, atol=1e-12)
    compare(divided, whole, 1e-12)
    if not sorted_rows:
        assert all(param.grad is not None for name, param in divided.named_parameters() if name != "bias")


@on_ranks(4)
def test_a_checkpoint_of_other_degrees(world: World) -> None:
    """Saved with two expert parallel ranks of four; loaded with one and with four; training goes on as it would have."""
    folder = world.comm.exchange(tempfile.mkdtemp() if world.rank == 0 else None)[0]
    start, models = MoEModel(4).double(), {}
    for ep in (2, 1, 4):
        model = divide(copy.deepcopy(start), mesh_of(world, ep))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        state = {"model": model, "optimizer": optimizer}
        if ep == 2:
            step_of(model, optimizer, batch_of(0, world.rank))
            checkpoint_io.save(folder, state)
        else:
            checkpoint_io.load(folder, state)
        step_of(model, optimizer, batch_of(1, world.rank))
        models[ep] = {name: full_of(param.detach()) for name, param in model.named_parameters()}
    for ep in (1, 4):
        for name, expected in models[2].items():
            torch.testing.assert_close(models[ep][name], expected, rtol=1e-12, atol=1e-12, msg=name)
    if world.rank == 0:
        shutil.rmtree(folder)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> None:
    loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(1, 3)
def test_loads_and_the_bias(world: World) -> None:
    """Loads are those of all ranks, without recomputation and evaluation; the bias follows the rule of DeepSeek-V3."""
    mesh, whole = mesh_of(world, world.size), MoEModel(6).double()
    layer = whole.layers[0]
    expected = torch.zeros(6, dtype=torch.int64)
    for rank in range(world.size):
        rows = whole.tokens(batch_of(0, rank)[:, :-1]).reshape(-1, WIDTH)
        expected += torch.bincount(layer.gate(rows).sigmoid().topk(2).indices.reshape(-1), minlength=6)
    model = divide(copy.deepcopy(whole), mesh)
    for each in model.layers:
        each.forward = functools.partial(checkpoint, each.forward, use_reentrant=False)
    loss_of(model, batch_of(0, world.rank)).backward()
    model.eval()(batch_of(0, world.rank))
    loads = expert_load(model)
    assert list(loads) == ["layers.0.experts", "layers.1.experts"]
    assert torch.equal(loads["layers.0.experts"], expected)
    assert all(load.sum() == 0 for load in expert_load(model).values())
    assert expert_load(whole) == {}
    update_expert_bias(layer.bias, expected, rate=0.25)
    signs = [0.25 if 6 * n < expected.sum() else -0.25 if 6 * n > expected.sum() else 0.0 for n in expected.tolist()]
    assert layer.bias.tolist() == signs
    refused(r"a bias of shape \(6,\), a load of shape \(5,\)", lambda: update_expert_bias(layer.bias, expected[:5]))


@on_ranks(2, 3)
def test_modules_and_plans_that_are_refused(world: World) -> None:
    """On every rank, before anything is changed."""
    mesh = world.mesh
    other, wrong_number = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3)), RoutedExperts(6)
    wrong_number.num_experts = 3
    buffered, hidden_forward, tied = MoEModel(6), MoEModel(6), MoEModel(6)
    tied.layers[0].experts.up = tied.layers[1].experts.up
    buffered.layers[0].experts.register_buffer("scale", torch.ones(6))
    hidden_forward.layers[0].experts.forward = functools.partial(checkpoint, hidden_forward.layers[0].experts.forward)
    mixed = {"layers.0.experts": ExpertParallel(), "head": ColwiseParallel()}
    divided = parallelize_module(MoEModel(6), mesh, {"layers.*.experts": ExpertParallel()})
    for model, plan, error, match in (
        (
            MoEModel(7),
            {"layers.0.experts": ExpertParallel()},
            ValueError,
            r"'layers.0.experts', .* 7 experts are not divisible by",
        ),
        (
            other,
            ExpertParallel(),
            NotImplementedError,
            r"expected parameters of shapes \(experts, ...\).*'0.weight' of \(2, 2\)",
        ),
        (nn.ReLU(), ExpertParallel(), NotImplementedError, "found none"),
        (wrong_number, ExpertParallel(), NotImplementedError, "num_experts is 3, its parameters have 6 experts"),
        (buffered, {"layers.0.experts": ExpertParallel()}, NotImplementedError, "its buffers 'scale' have a value for each of"),
        (hidden_forward, {"layers.0.experts": ExpertParallel()}, ValueError, "set it after parallelize_module"),
        (tied, {"layers.1.experts": ExpertParallel()}, ValueError, "'layers.0.experts.up' is shared .* in the same plan"),
        (MoEModel(6), mixed, ValueError, "ExpertParallel for 'layers.0.experts', whose ranks have batches of their own"),
        (divided, {"layers.*.experts": ExpertParallel()}, ValueError, "'layers.0.experts' is parallelized already"),
    ):
        before = dict(model.named_parameters())
        with pytest.raises(error, match=match):
            parallelize_module(model, mesh, plan)
        assert all(param is before[name] for name, param in model.named_parameters())
    refused(r"experts.* is a DTensor on, .* cannot be sharded over", lambda: shardrt.fully_shard(divided))


class NotingMesh(ParallelStyle):
    """A style of a user's own, whose check reads the mesh; its text is the same on every rank."""

    def check(self, module: nn.Module) -> None:
        self.ranks = self.mesh.size

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


@on_ranks(2)
def test_a_style_knows_its_mesh(world: World) -> None:
    style = NotingMesh()
    parallelize_module(nn.ReLU(), world.mesh, style)
    assert style.mesh is world.mesh
    assert repr(style) == "NotingMesh(ranks=2)"


@on_ranks(1, 2)
def test_the_module_after_an_exception(world: World) -> None:
    """Of its own forward: parameters are what they were, and the number of experts is the rank's, as in a copy."""
    experts = RoutedExperts(4)
    given = torch.randn(3, WIDTH), torch.tensor([[0, 3]] * 3), torch.rand(3, 2)
    expected = experts(*given)
    parallelize_module(experts, world.mesh, ExpertParallel())
    before = dict(experts.named_parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "index_add", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            experts(*given)
    assert all(param is before[name] for name, param in experts.named_parameters())
    twin = copy.deepcopy(experts)
    twin.load_state_dict(experts.state_dict())
    assert experts.num_experts == twin.num_experts == 4 // world.size
    for each in (experts, twin):
        torch.testing.assert_close(each(*given), expected)


class CountingExperts(RoutedExperts):
    """Makes something of its rows without a look at the choices, and keeps how many there were."""

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.came = len(hidden)
        return hidden @ (self.down @ self.down.mT).sum(0) * weights


@pytest.mark.parametrize(("rank", "came"), [(0, 21), (2, 18)])
def test_in_a_dry_world_choices_are_even(rank: int, came: int) -> None:
    """Ten tokens choose two experts each: a rank of three sends 7, 7 and 6 rows."""
    with dry_world(3, rank=rank) as world, torch.device("meta"):
        experts = parallelize_module(CountingExperts(6), world.mesh, ExpertParallel())
        hidden = torch.randn(10, WIDTH, requires_grad=True)
        made = experts(hidden, torch.zeros(10, 2, dtype=torch.int64), torch.rand(10, 2))
        made.sum().backward()
        assert hidden.grad is not None
        assert made.shape == hidden.grad.shape == hidden.shape
        assert cast(CountingExperts, experts).came == came


@on_ranks(1, 2, 3)
def test_rows_that_are_refused(world: World) -> None:
    """On every rank alike, also if one has them; afterwards the exchange goes on."""
    last = world.size - 1
    routed = parallelize_module(RoutedExperts(6), world.mesh, ExpertParallel())
    by_count = parallelize_module(SortedExperts(6), world.mesh, ExpertParallel(sorted_rows=True))
    x, chosen, weights, counts = (
        torch.randn(4, WIDTH),
        torch.arange(8).view(4, 2) % 6,
        torch.rand(4, 2),
        torch.tensor([4, 0, 0, 0, 0, 0]),
    )
    wide = torch.randn(4, WIDTH + 1)
    for experts, good, bad, match in (
        (
            routed,
            (x, chosen, weights),
            (x, chosen + 3, weights),
            f"rank {last} of it has a top_k_index from 3 to 8: expected 0 to 5",
        ),
        (routed, (x, chosen, weights), (x, chosen - 1, weights), f"rank {last} of it has a top_k_index from -1 to 4"),
        (routed, (x, chosen, weights), (x, chosen[:3], weights), rf"rank {last} of it has hidden_states of .*int64 \(3, 2\)"),
        (routed, (x, chosen, weights), (x, chosen.float(), weights), rf"rank {last} of it has hidden_states of .* integers"),
        (by_count, (x, counts), (x, counts + 1), rf"rank {last} of it has num_tokens_per_expert of \[5, .*a sum of 4"),
        (by_count, (x, counts), (x, counts - counts.flip(0)), rf"rank {last} of it has num_tokens_per_expert of \[4, .*-4\]"),
        (by_count, (x, counts), (x, counts[:4]), rf"rank {last} of it has x of .*expected \(tokens, width\), and \(6,\)"),
        (routed, (x, chosen, weights), (x, chosen, None), rf"rank {last} of it has a call with \(.*NoneType\): expected 3 ten"),
        (by_count, (x, counts), (x,), rf"rank {last} of it has a call with \(Tensor\): expected 2 tensors"),
        (routed, (x, chosen, weights), (wide, chosen, weights), rf"rows of torch.float32, {WIDTH} wide.* {WIDTH + 1} wide"),
        (by_count, (x, counts), (x.clone().requires_grad_(), counts), "with gradients, also of the rows; expected the same"),
    ):
        if world.size > 1 or "rank 0" in match:
            with pytest.raises(ValueError, match=match):
                experts(*(bad if world.rank == last else good))
        assert experts(*good).shape == x.shape
    with pytest.raises(ValueError, match=r"rank 0 of it has arguments that its forward does not take: .*'chosen'"):
        routed(x, index=chosen, weights=weights)
    twin = parallelize_module(RoutedExperts(6), world.mesh, ExpertParallel())
    if world.size > 1:  # on the last rank another module of the same name
        with pytest.raises(ValueError, match=r"'RoutedExperts', number \d+ .*'RoutedExperts', number \d+ .*the same on every"):
            (twin if world.rank == last else routed)(x, chosen, weights)
    named = routed(hidden=x, weights=weights, chosen=chosen)
    assert torch.equal(named, routed(x, chosen, weights))
