"""Parameters that users register in place of sharded ones, write to through `.data`, or add later."""

import copy
import importlib
import io
from collections.abc import Callable

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks, refused
from shardrt.comm import World
from toys import OddMLP, TiedGPT, batch, check_backward, compare, logged, loss_of, paired, shard_blocks, step_all, tokens

# ---------------------------------------------------------------------- before the first forward


def distributed(value: torch.Tensor, mesh: shardrt.DeviceMesh, dim: int = 0) -> nn.Parameter:
    others = [shardrt.Replicate()] * (len(mesh.shape) - 1)
    return nn.Parameter(shardrt.distribute_tensor(value, mesh, [*others, shardrt.Shard(dim)]))


def replace_all(model: nn.Module, source: nn.Module, mesh: shardrt.DeviceMesh) -> None:
    """Register the values of `source`, each with a placement of the user's choice."""
    for name, value in source.named_parameters():
        module, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(module), attribute, distributed(value.detach(), mesh, dim=-1 if value.dim() else 0))


def train_alike(
    world: World,
    whole: nn.Module,
    sharded: nn.Module,
    optimizer: torch.optim.Optimizer,
    draw: Callable[[int], torch.Tensor] = batch,
) -> None:
    """Compare three steps; `optimizer` was made before the first forward."""
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-2, eps=1e-3)
    for step in range(3):
        check_backward(world, whole, sharded, draw(step))
        step_all(reference, optimizer)


@pytest.mark.parametrize("meta", [False, True])
@on_ranks(2, 3)
def test_registered_before_the_first_forward(world: World, meta: bool) -> None:
    """The model adopts them, whatever their placement, and an optimizer that holds them trains them."""
    whole = OddMLP().double()
    with torch.device("meta" if meta else "cpu"):
        model = OddMLP().double()
    shard_blocks(model)
    replace_all(model, whole, world.mesh)
    ours = list(model.parameters())
    train_alike(world, whole, model, torch.optim.AdamW(ours, lr=1e-2, eps=1e-3))
    assert all(found is param for found, param in zip(model.parameters(), ours, strict=True))


@on_ranks(4)
def test_registered_on_a_mesh_of_two_axes(world: World) -> None:
    mesh = shardrt.DeviceMesh(world.comm, (2, 2), ("replicate", "shard"))
    whole, model = OddMLP().double(), shard_blocks(OddMLP().double(), mesh=mesh)
    replace_all(model, whole, mesh)
    train_alike(world, whole, model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3))
    mesh.close()


@pytest.mark.parametrize("cast", [False, True])
@on_ranks(2)
def test_of_another_dtype(world: World, cast: bool) -> None:
    """The layout follows the dtype; `to()` before the first forward keeps what was registered."""
    model, value = nn.Linear(5, 3), torch.randn(3, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shardrt.fully_shard(model)
    x = batch(0)
    model.weight = replaced = distributed(value, world.mesh)
    model.bias = distributed(torch.zeros(3, dtype=torch.float64), world.mesh)
    if cast:
        model.to(torch.float64)
    assert torch.equal(model(x), nn.functional.linear(x, value))
    model.zero_grad()
    model.reshard()
    assert model.weight is replaced


@on_ranks(2)
def test_ties_before_the_first_forward(world: World) -> None:
    """A tie that is kept is followed; one that is broken or new raises an error."""
    new = distributed(torch.randn(11, 12), world.mesh)
    model = shard_blocks(TiedGPT())
    model.tokens.weight = new
    expected = "'tokens.weight' and 'head.weight' were one when .* two now: register the same nn.Parameter under both names"
    refused(expected, lambda: model(tokens(0)), RuntimeError)
    model.head.weight = new
    model(tokens(0)).sum().backward()
    assert model.head.weight is new
    assert new.grad is not None
    untied = TiedGPT()
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    shard_blocks(untied)
    untied.head.weight = untied.tokens.weight
    refused("'tokens.weight' and 'head.weight' have become one since fully_shard", lambda: untied(tokens(0)), RuntimeError)


@pytest.mark.parametrize("meta", [False, True])
@pytest.mark.parametrize("copies", [False, True])
@on_ranks(2)
def test_assigned_ties_are_one_parameter_again(world: World, copies: bool, meta: bool) -> None:
    """Before the first forward, so that an optimizer that is made now steps once on it; also where each name has a copy."""
    whole, source = paired(TiedGPT().double())
    state = {key: value.clone() if copies else value for key, value in source.state_dict().items()}
    with torch.device("meta" if meta else "cpu"):
        model = TiedGPT().double()
    shard_blocks(model)
    model.load_state_dict(state, assign=True)
    assert model.head.weight is model.tokens.weight
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in whole.named_parameters()]
    train_alike(world, whole, model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), tokens)


@on_ranks(2)
def test_assigned_ties_that_differ_are_refused(world: World) -> None:
    """On all ranks, also where the shards of one rank alone differ, or one name alone was assigned."""
    expected = "'tokens.weight' and 'head.weight' were one when they were sharded and are two now"
    model = shard_blocks(TiedGPT())
    state = {key: value.clone() for key, value in shard_blocks(TiedGPT()).state_dict().items()}
    if world.rank == 1:
        state["head.weight"].to_local().add_(1)
    model.load_state_dict(state, assign=True)
    refused(expected, lambda: model(tokens(0)), RuntimeError)
    del state["head.weight"]
    model = shard_blocks(TiedGPT())
    model.load_state_dict(state, assign=True, strict=False)
    refused(expected, lambda: model(tokens(0)), RuntimeError)


class Marked(torch.Tensor):
    """A subclass that its operations preserve."""


@on_ranks(2, 3)
def test_what_cannot_be_registered(world: World) -> None:
    """The error names it on every rank, also on ranks without the problem; once it is fixed, the model runs."""

    def refused_with(match: str, param: nn.Parameter | None, kind: type[Exception] = RuntimeError) -> None:
        before = model.blocks[1].up.weight
        model.blocks[1].up.weight = param
        refused(match, lambda: model(batch(0).float()), kind)
        model.blocks[1].up.weight = before

    model = shard_blocks(OddMLP())
    shape = model.blocks[1].up.weight.shape
    name = "parameter 'blocks.1.up.weight' was"
    refused_with(rf"{name} replaced after fully_shard by a plain Parameter.*distribute_tensor", nn.Parameter(torch.ones(shape)))
    refused_with(f"{name} removed after fully_shard: remove it before", None)
    refused_with(rf"{name} .* shape \(2, 3\); expected \(40, 13\)", distributed(torch.ones(2, 3), world.mesh), ValueError)
    other = shardrt.DeviceMesh(world.comm, axis_names=("other",))
    refused_with(rf"{name} .* on DeviceMesh\(other=", distributed(torch.ones(shape), other), ValueError)
    inner = nn.Parameter(shardrt.distribute_tensor(torch.ones(shape).as_subclass(Marked), world.mesh, [shardrt.Shard(0)]))
    refused_with(f"{name} .* of Marked parts; expected parts that are a Tensor", inner, ValueError)
    before = model.out.bias
    if world.rank == 1:
        model.out.bias = nn.Parameter(torch.ones(3))
    refused(r"parameter 'out.bias' was replaced .* \(on rank 1\)", lambda: model(batch(0).float()), RuntimeError)
    replaced = distributed(torch.ones(3), world.mesh)
    model.out.bias = replaced if world.rank == 1 else before
    refused(
        "first forward of 'OddMLP': the ranks have different modules.*nothing.*out.bias: replaced by torch.float32",
        lambda: model(batch(0).float()),
    )
    model.out.bias = before
    model(batch(0).float()).sum().backward()
    other.close()


# ---------------------------------------------------------------------- afterwards


@on_ranks(2)
def test_replaced_after_the_first_forward(world: World) -> None:
    """Between steps, or a forward and its backward: the next forward raises an error, and the old parameter remains usable."""
    model, x = shard_blocks(OddMLP()), batch(0).float()
    model(x).sum().backward()
    for holder, name in ((model.blocks[0].down, "blocks.0.down.weight"), (model.inp, "inp.weight")):
        for between in (False, True):
            before = holder.weight
            if between:
                loss = model(x).sum()
            holder.weight = distributed(torch.zeros(before.shape), world.mesh)
            if between:
                loss.backward()
            expected = (
                f"parameter '{name}' of '.*' was replaced after the first forward, found a DTensor of shape .*param.data = new"
            )
            refused(expected, lambda: model(x), RuntimeError)
            holder.weight = before
            model(x).sum().backward()
    del model.inp.bias
    refused(
        "parameter 'inp.bias' of 'OddMLP' was replaced after the first forward, found nothing", lambda: model(x), RuntimeError
    )


@pytest.mark.parametrize("first", [False, True])
@on_ranks(2)
def test_functional_call(world: World, first: bool) -> None:
    """The model's own parameters are accepted; others raise an error with their name and leave the model unchanged."""
    whole, x = OddMLP(), batch(0).float()
    model = shard_blocks(copy.deepcopy(whole))
    if not first:
        model(x)  # leaves the root's parameters gathered
    plain = {name: torch.zeros_like(param) for name, param in whole.named_parameters()}
    other = dict(shard_blocks(OddMLP()).named_parameters())
    for given in (plain, {"out.bias": plain["out.bias"]}, other):
        expected = f"torch.func.functional_call with another '{next(iter(given))}'"
        refused(expected, lambda given=given: torch.func.functional_call(model, given, (x,)), RuntimeError)
    if not first:
        hidden = torch.zeros(2, 13)
        given = {"gate": torch.zeros(1)}
        expected = "torch.func.functional_call with another 'blocks.0.gate'"
        refused(expected, lambda: torch.func.functional_call(model.blocks[0], given, (hidden,)), RuntimeError)
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            assert torch.equal(torch.func.functional_call(model, dict(model.named_parameters()), (x,)), whole(x))
        assert all(torch.equal(value.full_tensor(), whole.state_dict()[key]) for key, value in model.state_dict().items())
    mine = slice(world.rank * 6, world.rank * 6 + 6)
    loss_of(model, x[mine]).backward()
    loss_of(whole, x).backward()
    compare(whole, model, 1e-5, "afterwards")


# ---------------------------------------------------------------------- load_state_dict


@pytest.mark.parametrize("kind", [OddMLP, TiedGPT])
@on_ranks(2, 3)
def test_a_meta_model_takes_a_sharded_state(world: World, kind: type[nn.Module]) -> None:
    """With assign=True; afterwards it shares no memory with the source, and ties are kept."""
    whole, x = kind(), batch(0).float() if kind is OddMLP else tokens(0)
    source = shard_blocks(copy.deepcopy(whole))
    with torch.device("meta"):
        model = kind()
    shard_blocks(model)
    expected = (
        "load_state_dict of '.*weight', which is on the meta device.*: call to_empty.. first, or load DTensors with assign"
    )
    refused(expected, lambda: model.load_state_dict(whole.state_dict()), RuntimeError)
    expected = "assign=True. of '.*weight' with a whole tensor.*distribute_tensor.*or call to_empty.. first, then load"
    refused(expected, lambda: model.load_state_dict(whole.state_dict(), assign=True), RuntimeError)
    some = {key: value for key, value in source.state_dict().items() if not key.endswith("bias")}
    model.load_state_dict(some, assign=True, strict=False)
    refused("has values for some of its parameters, but none for '.*bias'", lambda: model(x), RuntimeError)
    model.load_state_dict(source.state_dict(), assign=True)
    check_backward(world, whole, model, x, 1e-5)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    compare(kind_without_grad(whole), source, 0.0, "the source")
    expected = "assign=True. of '.*weight' after the first forward .*: load with assign=False"
    refused(expected, lambda: model.load_state_dict(source.state_dict(), assign=True), RuntimeError)
    model.load_state_dict(source.state_dict())
    assert torch.equal(next(model.parameters()).full_tensor(), next(whole.parameters()))


def kind_without_grad(whole: nn.Module) -> nn.Module:
    whole.zero_grad()
    return whole


# ---------------------------------------------------------------------- .data


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@on_ranks(2, 3)
def test_data_of_parameters(world: World, dtype: torch.dtype | None) -> None:
    """The next forward uses assigned full tensors, sharded tensors and slices of a vector, while sharded and while gathered."""
    policy = shardrt.MixedPrecisionPolicy(param_dtype=dtype)
    whole, fresh, x = OddMLP(), OddMLP(), batch(0).float()
    model, expected = shard_blocks(copy.deepcopy(whole), mp_policy=policy), shard_blocks(copy.deepcopy(fresh), mp_policy=policy)
    distribute = lambda value: distributed(value, world.mesh).detach()  # noqa: E731
    for forward in (False, True, None):
        for make in (torch.clone, distribute):
            model.load_state_dict(whole.state_dict())
            if forward is None:
                model.unshard()
            elif forward:
                model(x)  # leaves the root's parameters gathered, and those of the last block
                assert not isinstance(model.out.weight, shardrt.DTensor)
            for param, value in zip(model.parameters(), fresh.parameters(), strict=True):
                param.data = make(value.detach())
                assert param.requires_grad
            assert torch.equal(model(x), expected(x))
    torch.nn.utils.vector_to_parameters(torch.nn.utils.parameters_to_vector(whole.parameters()), model.parameters())
    state = model.state_dict()
    assert all(torch.equal(state[key].full_tensor(), value) for key, value in whole.state_dict().items())


@on_ranks(2)
def test_data_that_does_not_fit(world: World) -> None:
    model = shard_blocks(OddMLP())

    def assign(value: torch.Tensor) -> None:
        model.inp.weight.data = value

    for forward in (False, True):
        if forward:
            model(batch(0).float())
        name = ".data of parameter 'inp.weight' .rank .*: expected a tensor of shape .13, 5. and torch.float32"
        refused(rf"{name}.* found \(5, 13\)", lambda: assign(torch.ones(5, 13)))
        refused(f"{name}.* found .* torch.float64", lambda: assign(torch.ones(13, 5).double()))
    with torch.device("meta"):
        model = shardrt.fully_shard(nn.Linear(2, 2))
    refused(
        "parameter 'weight'.* on the meta device; call to_empty",
        lambda: setattr(model.weight, "data", torch.ones(2, 2)),
        RuntimeError,
    )


# ---------------------------------------------------------------------- added


@on_ranks(2)
def test_parameters_added_later(world: World) -> None:
    """A warning names them once; an existing parameter of the model under another name raises an error."""
    ignoring = OddMLP(layers=8)
    model, x = shard_blocks(ignoring, ignored_params=[ignoring.out.bias]), batch(world.rank).float()
    with logged() as messages:
        model(x).sum().backward()
        assert not messages
        model.blocks[0].extra = nn.Parameter(torch.ones(3))
        for block in model.blocks:
            block.adapter = nn.Linear(2, 2)
        model(x).sum().backward()
        model.zero_grad()
        model.double()
        model(x.double()).sum().backward()
    assert len(messages) == (world.rank == 0)
    for message in messages:
        names = "'blocks.0.extra', 'blocks.0.adapter.weight', 'blocks.0.adapter.bias', 'blocks.1.adapter.weight'"
        assert f"registered after fully_shard of 'OddMLP': {names}" in message
        assert "and 12 more; they are not sharded" in message
    model.blocks[1].gate_again = model.blocks[1].gate
    expected = "'blocks.1.gate_again' has become one with 'blocks.1.gate' since fully_shard"
    refused(expected, lambda: model(x.double()), RuntimeError)


@on_ranks(2)
def test_adapters_added_later(world: World) -> None:
    """PEFT's LoRA around a sharded model of transformers: the warning names its parameters; before, all is well."""
    transformers, peft = importlib.import_module("transformers"), importlib.import_module("peft")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"])
    x = tokens(world.rank, rows=2)
    for first in (True, False):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(config)
        adapted = peft.get_peft_model(model, lora) if first else model
        shard_blocks(model, "model.layers")
        with logged() as messages:
            adapted = adapted if first else peft.get_peft_model(model, lora)
            adapted(input_ids=x, labels=x).loss.backward()
        assert len(messages) == (world.rank == 0 and not first)
        assert all("after fully_shard of 'LlamaForCausalLM': 'model.layers.0.self_attn.q_proj.lora_A" in m for m in messages)
        grads = [param.grad for name, param in adapted.named_parameters() if "lora_B" in name]
        assert len(grads) == 2
        assert all(isinstance(grad, shardrt.DTensor) == first for grad in grads)


@on_ranks(2, 3)
def test_writes_to_gathered_parameters_are_kept(world: World) -> None:
    """After a forward without backward the root's parameters are gathered: writes to them reach the shards."""
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    shardrt.fully_shard(model, mp_policy=shardrt.MixedPrecisionPolicy(torch.float32))
    x = torch.randn(2, 5, dtype=torch.float64)
    model(x).sum().backward()
    expected = shardrt.clip_grad_norm_(model.parameters(), 1e9)
    before = model[0].bias.full_tensor().detach()
    model(x)
    gathered = model[0].weight
    assert not isinstance(gathered, shardrt.DTensor)
    assert shardrt.clip_grad_norm_(model.parameters(), 1e9) == expected
    torch.save(dict(model.named_parameters()), io.BytesIO())
    model.zero_grad()
    with torch.no_grad():
        gathered.fill_(2.0)
        model[0].bias[1] = 3.0
    model[1].weight.data[0] = 7.0
    model(x).sum().backward()
    assert torch.equal(model[0].weight.full_tensor(), torch.full((4, 5), 2.0, dtype=torch.float64))
    assert torch.equal(model[0].bias.full_tensor(), before.index_fill(0, torch.tensor([1]), 3.0))  # others bitwise equal
    assert torch.equal(model[1].weight.full_tensor()[0], torch.full((4,), 7.0, dtype=torch.float64))
    once = model[1].bias.grad.full_tensor().clone()
    model(x)
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(model[1].bias.grad.full_tensor(), once)


@on_ranks(2)
def test_replacements_are_checked_before_a_move(world: World) -> None:
    model = shardrt.fully_shard(nn.Linear(4, 4).double())
    other = shardrt.fully_shard(nn.Linear(4, 4).double())
    x = torch.randn(2, 4, dtype=torch.float64)
    other(x).sum().backward()
    model.weight = other.weight
    with pytest.raises(
        RuntimeError, match="'weight' was replaced after fully_shard by one of 'Linear', which has another root"
    ):
        model(x)
    model.weight = nn.Parameter(torch.ones(4, 4))
    refused("'weight' was replaced after fully_shard by a plain Parameter", model.float, RuntimeError)
    mine = nn.Parameter(shardrt.distribute_tensor(torch.ones(4, 4), world.mesh, [shardrt.Shard(0)]))
    model.weight = mine
    assert torch.equal(copy.deepcopy(model).weight.full_tensor(), torch.ones(4, 4))
    model.float()
    model(x.float()).sum().backward()
    assert model.weight is mine
    assert mine.grad is not None
    model.weight = nn.Parameter(torch.ones(4, 4))
    refused(r"'weight' of .* was replaced after the first forward", model.double, RuntimeError)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.LBFGS])
@on_ranks(1, 2)
def test_an_optimizer_of_parameters_that_were_replaced(world: World, kind: Callable[..., torch.optim.Optimizer]) -> None:
    """It would update tensors that no module reads: its step is refused, whenever they were replaced."""
    model = OddMLP().double()

    def closure() -> torch.Tensor:
        loss = loss_of(model, batch(0))
        loss.backward()
        return loss

    before = kind(model.parameters())
    before.step(closure)
    shard_blocks(model)
    with pytest.raises(RuntimeError, match=rf"{kind.__name__}.step.*Parameter of shape .*rank {world.rank}.*after fully_shard"):
        before.step(closure)
    of_doubles = kind(model.parameters())
    of_doubles.step(closure)
    model.float()
    refused(r"'inp.weight' \(RaggedShard.*rank .*another dtype", of_doubles.step, RuntimeError)
    model.double()
    of_first = kind(model.parameters())
    parallel = nn.Linear(4, 4)
    mesh = shardrt.init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("tp",))
    of_whole = torch.optim.SGD(parallel.parameters())
    shardrt.parallel.parallelize_module(parallel, mesh, shardrt.parallel.ColwiseParallel())
    refused("parallelize_module", of_whole.step, RuntimeError)
    of_first.step(closure)  # other replacements do not concern it


@on_ranks(1, 2)
def test_an_optimizer_of_gathered_parameters(world: World) -> None:
    """Between a forward and its backward a model has gathered parameters, which get no gradients in the end."""
    model = shard_blocks(OddMLP().double())
    loss = loss_of(model, batch(0))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss.backward()
    refused(r"the gathered form of 'inp.weight'.*while the model is sharded", optimizer.step, RuntimeError)
    torch.optim.SGD(model.parameters(), 0.1).step()


@on_ranks(2)
def test_an_optimizer_of_a_sharded_parameter_that_was_replaced(world: World) -> None:
    model = shard_blocks(OddMLP().double())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    loss_of(model, batch(0)).backward()
    refused("not in the model any more", optimizer.step, RuntimeError)
