"""Uses of a sharded model besides training: transforms of torch.func, `to()`, generation, checkpoint helpers."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import shardrt
from checkpoints import shared_folder
from ranks import on_ranks, refused
from shardrt import QuantizationPolicy
from shardrt.comm import Communicator, Op, Stream, Work, World
from toys import OddMLP, batch, check_backward, compare, logged, loss_of, paired, shard_blocks, step_all, tokens

needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")


def tiny_llama() -> Any:
    """Two layers over the vocabulary of `tokens`, with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=11, **sizes, bos_token_id=0, eos_token_id=None))


def tiny_t5() -> Any:
    """Its generate() calls the encoder, not the model."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: Any = {"d_model": 16, "d_kv": 8, "d_ff": 20, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return T5ForConditionalGeneration(T5Config(vocab_size=11, **sizes, pad_token_id=0, eos_token_id=None))


def shard_lists(model: nn.Module) -> Any:
    """A group for each module of an outermost ModuleList, and one for the rest."""
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for name, modules in lists:
        if not any(name.startswith(f"{other}.") for other, _ in lists):
            for module in modules:
                shardrt.fully_shard(module)
    return shardrt.fully_shard(model)


def dual_level(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    with forward_ad.dual_level():
        out, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(batch(0), batch(1))))
    return out, tangent


TRANSFORMS: dict[str, Callable[[nn.Module], Any]] = {
    "dual_level": dual_level,
    "jvp": lambda model: torch.func.jvp(model, (batch(0),), (batch(1),)),
    "vmap": lambda model: torch.func.vmap(model)(batch(0)),
    "grad": lambda model: torch.func.grad(lambda x: model(x).square().sum())(batch(0)),
    "hessian": lambda model: torch.func.hessian(lambda x: model(x).square().sum())(batch(0)[:1]),
}


@on_ranks(2, 3)
def test_the_first_forward_inside_a_transform(world: World) -> None:
    """Its values equal a plain model's, as do the gradients of a backward through its result and of a step after it."""
    whole = OddMLP(layers=1).double()
    for name, transform in TRANSFORMS.items():
        model, plain = shard_blocks(copy.deepcopy(whole)), copy.deepcopy(whole)
        results, expected = transform(model), transform(plain)
        torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12)
        if name in ("dual_level", "jvp", "vmap"):
            for result in (results, expected):
                sum(tensor.square().sum() for tensor in ([result] if name == "vmap" else result)).backward()
            compare(plain, model, 1e-12, f"backward through {name}")
            model.zero_grad()
            plain.zero_grad()
        check_backward(world, plain, model, batch(0))


@pytest.mark.parametrize("case", ["large", "a part is kept", "codes"])
@on_ranks(2)
def test_gathers_inside_transforms(world: World, case: str) -> None:
    """In the first iteration, and in the next, which gathers ahead."""

    def results(call: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        return [torch.func.grad(lambda x: call(x).square().sum())(x), *torch.func.jvp(call, (x,), (x,))]

    whole, x = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3))), torch.ones(2, 512)
    model: Any = copy.deepcopy(whole)
    policy = QuantizationPolicy(gather=torch.int8) if case == "codes" else None
    shard_blocks(model, "", quantization_policy=policy, reshard_after_forward=1 if case == "a part is kept" else True)
    found = [results(model) for _ in range(2)]
    with shardrt.unsharded(model):
        values = {name: param.detach().clone() for name, param in model.named_parameters()}
    torch.testing.assert_close(found, [results(lambda x: torch.func.functional_call(whole, values, (x,)))] * 2)


@pytest.mark.parametrize("how", ["reshard_after_forward", "reshard_after_backward", "unsharded", "unshard", "written"])
@on_ranks(2, more=(1, 3))
def test_transforms_of_what_stays_gathered(world: World, how: str) -> None:
    """A copy that a rank takes, or what was written to gathered parameters and goes to shards, is no part of a transform."""
    whole = OddMLP(layers=1).double()
    for transform in TRANSFORMS.values():
        plain = copy.deepcopy(whole)
        model: Any = shard_blocks(copy.deepcopy(whole), reshard_after_forward=False if how == "reshard_after_forward" else None)
        model.set_reshard_after_backward(how != "reshard_after_backward")
        for _ in range(2):
            if how in ("unshard", "written"):
                model.unshard()
            if how == "written":
                with torch.no_grad():
                    for each in (plain, model):
                        each.inp.weight.mul_(1.5)
            with shardrt.unsharded(model) if how == "unsharded" else nullcontext():
                torch.testing.assert_close(transform(model), transform(plain), rtol=1e-12, atol=1e-12)
        check_backward(world, plain, model, batch(0))


class FailingReduceScatter:
    """A custom reduce-scatter that raises."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def __call__(self, out: torch.Tensor, inp: torch.Tensor, op: Op, comm: Communicator, stream: Stream) -> Work:
        raise OSError("the reduction failed")


@on_ranks(2)
def test_a_move_after_a_failed_reduction(world: World) -> None:
    """Gradients that a failed reduction has packed are not dropped in silence."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shard_blocks(model, "")
    for layer in model:
        layer.set_custom_reduce_scatter(FailingReduceScatter())
    refused("the reduction failed", model(torch.ones(2, 8, requires_grad=True)).sum().backward, OSError)
    refused("has accumulated gradients that are not reduced", model.double, RuntimeError)
    model.reset_iter_state()
    assert all(param.dtype == torch.float64 for param in model.double().parameters())


def train(models: list[nn.Module], step: int, world: World, dtype: torch.dtype = torch.float64) -> None:
    """The first model is unsharded, the others are sharded."""
    x = batch(step).to(dtype)
    for number, model in enumerate(models):
        loss_of(model, x if number == 0 else x.chunk(world.size)[world.rank]).backward()


@on_ranks(2, 3)
def test_a_move_that_changes_nothing(world: World) -> None:
    """It keeps parameter objects, gradients, unreduced gradients, and a running iteration."""
    whole, model = paired(OddMLP().double())

    def is_left_alone() -> None:
        params = list(model.parameters())
        grads = [param.grad for param in params]
        runtime = model.param_group.runtime
        assert model.cpu().to(torch.float64).double().to("cpu") is model
        assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
        assert all(one is param.grad for one, param in zip(grads, params, strict=True))
        assert model.param_group.runtime is runtime

    is_left_alone()
    train([whole, model], 0, world)
    is_left_alone()
    model.set_requires_gradient_sync(False)
    train([whole, model], 1, world)
    is_left_alone()
    refused(r"accumulated gradients that are not reduced.*set_requires_gradient_sync", model.float, RuntimeError)
    model.set_requires_gradient_sync(True)
    loss = loss_of(model, batch(2).chunk(world.size)[world.rank])
    is_left_alone()
    loss.backward()
    loss_of(whole, batch(2)).backward()
    compare(whole, model, 1e-12, "trained")


@on_ranks(2, 3)
def test_gradients_move_with_parameters(world: World) -> None:
    """To other dtypes with another layout, for some groups only, and back; the next backward adds to the gradients."""
    whole = OddMLP().double()
    models = [whole, shard_blocks(copy.deepcopy(whole)), shard_blocks(copy.deepcopy(whole))]
    models[1].set_is_last_backward(False)
    for step, dtype in enumerate((torch.float32, torch.float64, torch.float32)):
        train(models, step, world, models[0].inp.weight.dtype)
        for model in models:
            model.blocks[1].to(dtype)  # its runtime is the root's
            model.to(dtype)
        for model in models[1:]:
            compare(whole, model, 1e-6 if step else 1e-7, f"to {dtype}")


@on_ranks(2)
def test_torch_swaps_what_is_not_sharded(world: World) -> None:
    """torch moves the unsharded parameters, with its swap flag or without, and the flag is unchanged."""
    for flag in (True, False):
        torch.__future__.set_swap_module_params_on_conversion(flag)
        try:
            model = OddMLP()
            ignored = model.out.weight
            shard_blocks(model, ignored_params=[ignored])
            model.double()
            assert torch.__future__.get_swap_module_params_on_conversion() is flag
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert model.out.weight is ignored
        assert {param.dtype for param in model.parameters()} == {torch.float64}
        model(batch(0)).sum().backward()
        assert model.inp.weight.grad is not None


class Recurrent(nn.Module):
    """Keeps a list of its weights, one of which is 5-D."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)
        self.conv3d = nn.Conv3d(1, 2, 1)
        self.rnn = nn.GRU(5, 4, batch_first=True)
        self.register_buffer("image", torch.ones(1, 3, 2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.conv3d(self.conv(x)[:, None]).sum(1).flatten(2).transpose(1, 2)
        return self.rnn(features)[0]


@on_ranks(2, 3)
def test_a_memory_format(world: World) -> None:
    """It applies to buffers; parameters keep the planned layout, their values, gradients and identity."""
    whole = Recurrent().double()
    model = shardrt.fully_shard(copy.deepcopy(whole))
    images = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    params = list(model.parameters())
    for step in range(2):
        model.to(memory_format=torch.channels_last)
        for one in (whole, model):
            one(images).square().mean().backward()
        assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
        compare(whole, model, 1e-12, f"step {step}")
    assert model.image.is_contiguous(memory_format=torch.channels_last)
    model.float()
    whole.float()
    compare(whole, model, 1e-6, "cast")
    torch.testing.assert_close(model(images.float()), whole(images.float()), rtol=1e-5, atol=1e-6)


class Rotary(OddMLP):
    """Has computed buffers that are not saved, in a sharded block and outside."""

    def __init__(self) -> None:
        super().__init__()
        for module in (self, self.blocks[0].norm, self.blocks[1]):
            module.register_buffer("table", torch.ones(3), persistent=False)
        self.register_buffer("saved", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.table


def rotary_on_meta() -> Any:
    with torch.device("meta"):
        model = Rotary()
    return shard_blocks(model)


@on_ranks(1, 2)
def test_buffers_without_values_after_a_load_are_named(world: World) -> None:
    """A load gives memory to all of a model that was built on meta, and values to what it has stored."""
    saved = shard_blocks(Rotary())
    model = rotary_on_meta()
    with shared_folder(world) as folder, logged() as lines:
        shardrt.checkpoint.save(folder / "saved", {"model": saved})
        shardrt.checkpoint.load(folder / "saved", {"model": model})
        model(batch(world.rank).float())
    tables = ", ".join(f"'{name}'" for name, _ in model.named_buffers() if name.endswith("table"))
    assert [line.partition(": to_empty")[0] for line in lines] == [f"without values: {tables}"] * (world.rank == 0)


@on_ranks(1, 2)
def test_buffers_without_values_are_named(world: World) -> None:
    """The first forward after to_empty() logs their names once, without written, replaced or persistent buffers."""
    model = rotary_on_meta()
    model.to_empty(device=world.device)
    model.load_state_dict(Rotary().state_dict())
    model.blocks[1].table = torch.ones(3)
    with logged() as lines:
        model(batch(world.rank).float())
        model.to_empty(device=world.device)
        model(batch(world.rank).float())
    assert len(lines) == (world.rank == 0)
    assert all("without values: 'table', 'blocks.0.norm.table': to_empty" in line for line in lines)
    model = rotary_on_meta()
    model.to_empty(device=world.device)
    with torch.no_grad(), logged() as lines:
        for name, buffer in model.named_buffers():
            if name != "saved":
                buffer.fill_(1.0)
        model(batch(world.rank).float())
    assert not lines


@needs_transformers
@on_ranks(2)
def test_rotary_tables_of_a_model_on_meta(world: World) -> None:
    """to_empty() and load_state_dict() leave them uninitialised; the model's own initialisation writes them."""
    whole = tiny_llama()
    with torch.device("meta"):
        model = tiny_llama()
    shard_lists(model)
    for initialises in (False, True):
        model.to_empty(device=world.device)
        if initialises:
            model.to("meta").to_empty(device=world.device)
            model.init_weights()
        model.load_state_dict(whole.state_dict())
        with logged() as lines:
            logits = model(tokens(world.rank)).logits
        named = "'model.rotary_emb.inv_freq', 'model.rotary_emb.original_inv_freq'"
        assert [line for line in lines if named in line] == lines
        assert len(lines) == (world.rank == 0 and not initialises)
    torch.testing.assert_close(logits, whole(tokens(world.rank)).logits)


@needs_transformers
@on_ranks(2)
def test_save_pretrained_is_refused(world: World) -> None:
    """It would write shards; what gathers is named."""
    model = shard_lists(tiny_llama())
    with pytest.raises(RuntimeError, match=rf"save_pretrained of the sharded 'L.*\(rank {world.rank}\).*save_safetensors"):
        model.save_pretrained("never-made", is_main_process=False)


@needs_transformers
@on_ranks(2)
def test_generation(world: World) -> None:
    """It equals a plain model's, with generate() registered, or in `unsharded`, where ranks may stop at different lengths."""
    prompt = tokens(0, rows=1)[:, :4]
    for make in (tiny_llama, tiny_t5):
        torch.manual_seed(0)
        whole = make().eval()
        for param in whole.parameters():
            nn.init.normal_(param)
        expected = whole.generate(prompt, do_sample=False, max_new_tokens=3 + world.rank * 4)
        model = shard_lists(copy.deepcopy(whole))
        if make is tiny_t5:
            with pytest.raises(RuntimeError, match=r"'T5Block' before that of its root.*register_fsdp_forward_method"):
                model.generate(prompt, do_sample=False, max_new_tokens=3)
        for _ in range(2):
            with shardrt.unsharded(model):
                assert torch.equal(model.generate(prompt, do_sample=False, max_new_tokens=3 + world.rank * 4), expected)
            assert model.param_group.runtime.memory.in_use == 0
            model(input_ids=prompt, labels=prompt).loss.backward()
            model.zero_grad()
        if make is tiny_t5:  # it runs its encoder beside the root's forward
            with pytest.raises(NotImplementedError, match=r"of the sharded module 'T5For.*register_fsdp_forward_method"):
                model.generate(prompt, do_sample=False, max_new_tokens=3)
        shardrt.register_fsdp_forward_method(model, "generate")
        out = model.generate(prompt, do_sample=False, max_new_tokens=3)
        assert torch.equal(out, expected[:, : out.shape[1]])


class Features(OddMLP):
    """Methods beside forward: one uses parameters of the root and a block, one runs the forward up to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5)

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](self.inp(self.norm(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.forward_features(x))


@on_ranks(2, 3)
def test_methods_beside_forward(world: World) -> None:
    """They raise an error with the parameter's name, also where gradients would not be reduced; once registered, they work."""
    whole, model = paired(Features().double())
    mine = batch(0).chunk(world.size)[world.rank]
    cure = rf"of the sharded module 'Features' \(rank {world.rank}\).*outside of the module.*register_fsdp_forward_method"
    refused(f"native_layer_norm.* on parameter 'norm.weight' {cure}", lambda: model.forward_features(mine), NotImplementedError)
    refused(f"addmm.* on parameter 'inp.bias' {cure}", lambda: model.inp(mine), NotImplementedError)
    with torch.no_grad():
        torch.testing.assert_close(model.inp(mine), whole.inp(mine), rtol=1e-12, atol=1e-12)
    shardrt.register_fsdp_forward_method(model, "forward_features")
    model.forward_features(mine).square().mean().backward()
    whole.forward_features(batch(0)).square().mean().backward()
    compare(whole, model, 1e-12, "features")
    refused(f"on parameter 'norm.weight' {cure}", lambda: model.norm(mine), NotImplementedError)
    with shardrt.unsharded(nn.Sequential(model)), torch.no_grad():
        assert torch.equal(model.norm(mine), whole.norm(mine))
        for _ in range(world.rank):
            model(mine)
    with pytest.raises(ValueError, match=r"'Linear'.: no module in it is sharded"), shardrt.unsharded(nn.Linear(2, 2)):
        pass


@on_ranks(2)
def test_checkpoint_helpers_of_torch(world: World) -> None:
    """They load sharded and full state dicts of model and optimizer and return sharded ones; full ones raise an error."""
    from torch.distributed.checkpoint import state_dict as dcp

    whole = OddMLP().double()
    model, other = shard_blocks(copy.deepcopy(whole)), shard_blocks(OddMLP().double())
    train([whole, model], 0, world)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (whole, model, other)]
    for optimizer in optimizers[:2]:
        optimizer.step()
    for options in (dcp.StateDictOptions(full_state_dict=True), dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)):
        for outer in (model, nn.Sequential(model)):
            message = rf"full_state_dict=True.*'OddMLP' \(rank {world.rank}\).*shardrt.checkpoint.get_"
            with pytest.raises(RuntimeError, match=f"get_model_state_dict.{message}"):
                dcp.get_model_state_dict(outer, options=options)
            with pytest.raises(RuntimeError, match=f"get_optimizer_state_dict.{message}"):
                dcp.get_optimizer_state_dict(outer, optimizers[1], options=options)
    broadcast = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with pytest.raises(RuntimeError, match=r"broadcast_from_rank0=True.*'OddMLP'.*process group"):
        dcp.set_model_state_dict(model, whole.state_dict(), options=broadcast)
    options = dcp.StateDictOptions(cpu_offload=True)
    state, optimizer_state = dcp.get_state_dict(model, optimizers[1], options=options)
    assert all(isinstance(value, shardrt.DTensor) for value in state.values())
    dcp.set_state_dict(other, optimizers[2], model_state_dict=state, optim_state_dict=optimizer_state)
    whole.zero_grad()
    compare(whole, other, 1e-12, "sharded")
    train([whole, other], 1, world)
    for optimizer in (optimizers[0], optimizers[2]):
        step_all(optimizer)
    compare(whole, other, 1e-9, "a step on")
    dcp.set_model_state_dict(model, whole.state_dict(), options=dcp.StateDictOptions(full_state_dict=True))
    model.zero_grad()
    compare(whole, model, 0.0, "whole")
