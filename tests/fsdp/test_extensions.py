"""All-gather extensions: FSDP2's scenarios, and unmodified tensor subclasses of other packages."""

import copy
import importlib
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import shardrt
from ranks import on_ranks, refused
from shardrt.comm import Communicator, World
from shardrt.comm.startup.dry import dry_world
from shardrt.fsdp.gather import extension
from subclasses import PadsItself, Parts, set_on_locals
from toys import Elsewhere, shard_blocks, step_all


def pre_of_one(self: Any, mesh: shardrt.DeviceMesh) -> tuple[Parts, None]:
    return (self.a, self.b), None


def pre_of_five(
    self: Any, mesh: shardrt.DeviceMesh, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: object
) -> tuple[Parts, None]:
    assert isinstance(module, nn.Linear), "the module that owns the parameter, not the sharded one around it"
    assert (module.out_features, module.in_features) == tuple(size)
    assert stride == (size[1], 1)
    return (self.a, self.b), None


def post_of_two(
    self: Any, outputs: Parts, metadata: None, param_dtype: torch.dtype, *, out: TwoTensor | None = None
) -> tuple[torch.Tensor, Parts] | None:
    a, b = outputs
    for tensor in outputs:
        assert tensor.storage_offset() == 0
    assert a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()
    if out is None:
        return TwoTensor(a, b).to(param_dtype), (a, b)
    if a.dtype == param_dtype:
        assert [t.untyped_storage().data_ptr() for t in (out.a, out.b)] == [t.untyped_storage().data_ptr() for t in outputs]
    else:
        out.a.copy_(a)
        out.b.copy_(b)
    return None


@contextmanager
def two_tensors_gather_both(pre: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TwoTensor, "fsdp_pre_all_gather", pre, raising=False)
        patch.setattr(TwoTensor, "fsdp_post_all_gather", post_of_two, raising=False)
        yield


def two_tensor_mlp(width: int, device: str = "cpu") -> nn.Sequential:
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in ((5, width), (width, 3 * width), (3 * width, 3))))
    for linear in model:
        linear.weight = nn.Parameter(TwoTensor(linear.weight.detach(), linear.weight.detach().clone()))
    return model


def inputs(rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, 5, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("pre", [pre_of_one, pre_of_five], ids=["mesh", "everything"])
@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2, 3)
def test_two_tensors_train_as_one(world: World, reshard: bool, pre: Any) -> None:
    """Both tensors of every weight are gathered; training equals the plain model's, for even and uneven rows."""
    with two_tensors_gather_both(pre):
        model = two_tensor_mlp(width=4, device=str(world.device))
        whole = nn.Sequential(nn.Linear(5, 4, bias=False), nn.Linear(4, 12, bias=False), nn.Linear(12, 3, bias=False))
        for linear, twin in zip(whole, model, strict=True):
            linear.weight.data = twin.weight.detach().a.clone()
        for linear in model:
            shardrt.fully_shard(linear, reshard_after_forward=reshard)
        shardrt.fully_shard(model)
        for linear, twin in zip(whole, model, strict=True):
            rows = -(-linear.out_features // world.size)
            expected = linear.weight.detach().split(rows)[world.rank : world.rank + 1]
            local = twin.weight._local_tensor
            assert type(local) is TwoTensor
            assert torch.equal(local.a, expected[0] if expected else linear.weight.detach()[:0])
        optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2, foreach=True) for m in (whole, model)]
        for _ in range(3):
            losses = [m(inputs()).square().sum() for m in (whole, model)]
            torch.testing.assert_close(losses[1].a if isinstance(losses[1], TwoTensor) else losses[1], losses[0])
            for loss in losses:
                loss.backward()
            step_all(*optimizers)
        for linear, twin in zip(whole, model, strict=True):
            rows = -(-linear.out_features // world.size)
            mine = linear.weight.detach()[rows * world.rank : rows * (world.rank + 1)]
            torch.testing.assert_close(twin.weight._local_tensor.a, mine)
            torch.testing.assert_close(twin.weight._local_tensor.b, mine)


@pytest.mark.parametrize("rank", [0, 66_667, 99_999])
def test_ranks_that_agree_send_no_values(rank: int) -> None:
    with dry_world(100_000, rank=rank), torch.device("meta"), mock.patch.object(Communicator, "exchange", None):
        linear = shardrt.fully_shard(nn.Linear(2, 200_003, bias=False))
        set_on_locals(linear)
        linear(torch.ones(1, 2)).sum().backward()
    assert linear.weight.grad.shape == (200_003, 2)


def rounded(model: nn.Module) -> nn.Module:
    """The model with the values that are gathered."""
    made = copy.deepcopy(model)
    for name, param in made.named_parameters():
        if "weight" in name:
            param.data = param.data.bfloat16().float()
    return made


@pytest.mark.parametrize("reshard", [True, False, 1])
@on_ranks(1, 2, 3)
def test_methods_of_local_tensors(world: World, reshard: bool | int) -> None:
    """Methods set after fully_shard on plain tensors, with an existing optimizer; also on a hybrid mesh."""
    torch.manual_seed(2)
    whole = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
    mesh = shardrt.DeviceMesh(world.comm, (1, world.size), ("replicate", "shard"))
    shardrt.fully_shard(model[0], mesh=mesh, reshard_after_forward=reshard)
    shardrt.fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.load_state_dict(whole.state_dict())
    params = list(model.parameters())
    optimizer, plain = torch.optim.SGD(params, lr=0.1), torch.optim.SGD(whole.parameters(), lr=0.1)
    set_on_locals(model)
    hooked = [param._local_tensor for param in params]
    for _ in range(3):
        seen = rounded(whole)
        out = model(inputs())
        torch.testing.assert_close(out, seen(inputs()), rtol=1e-6, atol=1e-6)
        out.square().sum().backward()
        seen(inputs()).square().sum().backward()
        for param, twin in zip(whole.parameters(), seen.parameters(), strict=True):
            param.grad = twin.grad
        state = model.state_dict()
        for name, param in whole.named_parameters():
            torch.testing.assert_close(
                state[name].grad.full_tensor() if state[name].grad is not None else param.grad, param.grad
            )
        optimizer.step()
        plain.step()
        optimizer.zero_grad()
        for (name, param), twin in zip(whole.named_parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(twin.full_tensor(), param.detach(), msg=lambda text, name=name: f"{name}: {text}")
    assert all(param is twin for param, twin in zip(params, model.parameters(), strict=True))
    assert [len(module.param_groups) for module in (model[0], model)] == [2, 2]
    weight = model[0].weight
    assert weight._local_tensor is hooked[0], "the methods are bound to it"
    assert weight._local_tensor.shape[0] == min(7, -(-7 // world.size) * (world.rank + 1)) - -(-7 // world.size) * world.rank


@on_ranks(2, 3)
def test_rows_that_the_user_pads(world: World) -> None:
    """Fewer rows than ranks, uneven rows: the gathered parameter has no padding."""
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 1))
    model = copy.deepcopy(whole)
    for linear in model:
        linear.weight = nn.Parameter(PadsItself(linear.weight.detach()))
        shardrt.fully_shard(linear)
    shardrt.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(2):
        model(inputs()).sum().backward()
        step_all(optimizer)
    model.load_state_dict(whole.state_dict())
    torch.testing.assert_close(model(inputs()), rounded(whole)(inputs()))


def train_beside(world: World, whole: nn.Module, model: Any, scales: Callable[[nn.Module], object] | None) -> None:
    """Compare three steps with those of one process on the same batch, bit by bit but for the order of sums."""
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, model)]
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))
    for _ in range(3):
        if scales is not None:
            scales(model)
        losses = [m(x).square().mean() for m in (whole, model)]
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
        for loss in losses:
            loss.backward()
        step_all(*optimizers)


def sharded_linears(model: nn.Module, **options: Any) -> Any:
    return shard_blocks(model, "", **options)


@pytest.mark.parametrize("scales", [None, "shardrt.integrations.torchao", "torchao.float8", "offloaded"])
@on_ranks(2, more=(3, 4))
def test_float8_weights_of_torchao(world: World, scales: str | None) -> None:
    """torchao's own linear and weight, gathered as float8 with the scale of the whole weight, computed ahead or not.

    torchao's function computes none, since it looks for torch's DTensors; each gather does.
    """
    float8 = importlib.import_module("torchao.float8")
    torch.manual_seed(4)
    config = float8.Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True)
    whole = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 16, bias=False))
    model: Any = float8.convert_to_float8_training(copy.deepcopy(whole), config=config)
    float8.convert_to_float8_training(whole, config=float8.Float8LinearConfig(emulate=True))
    offload = Elsewhere(pin_memory=False) if scales == "offloaded" else None
    sharded_linears(model, offload_policy=offload)
    name = {None: None, "offloaded": "shardrt.integrations.torchao"}.get(scales, scales)
    precompute = None if name is None else importlib.import_module(name).precompute_float8_dynamic_scale_for_fsdp
    train_beside(world, whole, model, precompute)
    assert type(model[0].weight._local_tensor).__name__ == "WeightWithDynamicFloat8CastTensor"
    gather = model[0].param_groups[1].gather
    assert gather._outputs[0].dtype == torch.float8_e4m3fn
    assert gather.joint == (name == "shardrt.integrations.torchao")
    given = gather._scale.given_to(gather._inner, gather._inner)
    assert given._precomputed_scale is not None
    assert given._tensor is gather._inner._tensor
    assert gather._scale.lacking(gather._inner) != gather.joint, "a gather changes nothing that ranks decide by"
    for linear, twin in zip(whole, model, strict=True):
        rows = -(-linear.out_features // world.size)
        mine = linear.weight.detach()[rows * world.rank : rows * (world.rank + 1)]
        torch.testing.assert_close(twin.weight._local_tensor._tensor, mine, rtol=1e-4, atol=1e-5)


@on_ranks(2)
def test_scales_of_weights_that_belong_to_no_group(world: World) -> None:
    """As tensor-parallel ones may: they stay as they are."""
    utils = importlib.import_module("torchao.float8.fsdp_utils")
    precompute = importlib.import_module("shardrt.integrations.torchao").precompute_float8_dynamic_scale_for_fsdp
    weight = utils.WeightWithDynamicFloat8CastTensor(torch.ones(4, 2), None, torch.float8_e4m3fn)
    model = nn.Linear(2, 4, bias=False)
    model.weight = nn.Parameter(shardrt.distribute_tensor(weight, shardrt.DeviceMesh(world.comm), [shardrt.Shard(0)]))
    precompute(model)
    assert model.weight._local_tensor._precomputed_scale is None


@pytest.mark.parametrize(
    "kind",
    [
        "bitnet_training",
        pytest.param("int8_mixed_precision_training", marks=pytest.mark.all),
        pytest.param("int8_weight_only_quantized_training", marks=pytest.mark.all),
    ],
)
@on_ranks(2, more=(4,))
def test_quantised_training_of_torchao(world: World, kind: str) -> None:
    """Prototypes of torchao: weights of int8 products, of 2 bits with a scale of all rows, and kept as int8."""
    training = importlib.import_module("torchao.prototype.quantized_training")
    quantize_ = importlib.import_module("torchao.quantization").quantize_
    torch.manual_seed(4)
    whole = nn.Sequential(nn.Linear(32, 48, bias=False), nn.Linear(48, 16, bias=False))
    quantize_(whole, getattr(training, kind)())
    model = copy.deepcopy(whole)
    sharded_linears(model)
    if kind == "int8_weight_only_quantized_training":  # it rounds its updates at random, so only the first step is alike
        x = torch.randn(16, 32, generator=torch.Generator().manual_seed(5))
        torch.testing.assert_close(model(x), whole(x))
    else:
        train_beside(world, whole, model, None)
        train_beside(
            world, whole, model, importlib.import_module("shardrt.integrations.torchao").precompute_bitnet_scale_for_fsdp
        )


def adapted(kind: str) -> Any:
    """A base of two quantised layers, with adapters of PEFT; the same each time."""
    torch.manual_seed(6)
    base = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64), nn.LayerNorm(64))
    package, bits = kind.split()
    if package == "torchao":
        quantization = importlib.import_module("torchao.quantization")
        int8 = bits == "8"
        quantization.quantize_(
            base, quantization.Int8WeightOnlyConfig() if int8 else quantization.IntxWeightOnlyConfig(torch.int4)
        )
    else:
        kinds = importlib.import_module("bitsandbytes").nn
        for index in (0, 2):
            sizes = base[index].in_features, base[index].out_features
            made = (
                kinds.Linear8bitLt(*sizes, has_fp16_weights=False)
                if bits == "8"
                else kinds.Linear4bit(*sizes, quant_type="nf4")
            )
            made.load_state_dict(base[index].state_dict())
            base[index] = made.to("cpu")  # which quantises
    peft = importlib.import_module("peft")
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False))


@pytest.mark.parametrize("kind", ["torchao 8", "torchao 4", "bitsandbytes 8", "bitsandbytes 4"])
@on_ranks(2)
def test_adapters_of_a_quantised_base(world: World, kind: str) -> None:
    """Its weights cannot be sharded, which is said with their name; ignored, they stay, and the rest trains sharded."""
    whole, model = adapted(kind), adapted(kind)
    quantised = {name: param for name, param in model.named_parameters() if type(param) is not nn.Parameter}
    assert [name.rpartition("model.")[2] for name in quantised] == ["0.base_layer.weight", "2.base_layer.weight"]
    for _ in range(2):
        expected = rf"parameter '0.base_layer.weight' is a \w+ of {kind.split()[0]}, .* ignored_params=\[p for p in model.par"
        refused(expected, lambda: shardrt.fully_shard(model.base_model.model), TypeError)
    for module in (*(model.base_model.model[index] for index in (0, 2)), model):
        shardrt.fully_shard(module, ignored_params=quantised.values())
    optimizers = [torch.optim.AdamW([p for p in each.parameters() if p.requires_grad], lr=1e-2) for each in (whole, model)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "MatMul8bitLt: inputs will be cast")
        for step in range(3):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            whole(x).sin().square().mean().backward()
            model(x.chunk(world.size)[world.rank]).sin().square().mean().backward()
            step_all(*optimizers)
    for (name, value), param in zip(whole.named_parameters(), model.parameters(), strict=True):
        if name in quantised:
            assert param is quantised[name]
        else:
            torch.testing.assert_close(param.full_tensor(), value.detach(), rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "pre",
    [lambda mesh: 1, lambda mesh, size, stride, module, mp_policy: 5, lambda *given: 1, lambda mesh, size=None, **rest: 1],
)
def test_how_many_arguments_a_method_takes(pre: Callable[..., int]) -> None:
    """One parameter, or none that five arguments fit: `mesh`; all five otherwise."""
    tensor: Any = torch.zeros(1)
    tensor.fsdp_pre_all_gather, tensor.fsdp_post_all_gather = pre, lambda *given: None
    count = extension._arguments(tensor)
    assert pre(*range(count)) == count
    extension.check_methods("w", tensor)
    tensor.fsdp_pre_all_gather = lambda mesh, size: 2
    with pytest.raises(TypeError, match=r"of parameter 'w' takes \(mesh, size\); expected \(mesh\) or"):
        extension.check_methods("w", tensor)


@on_ranks(2)
def test_gathers_in_a_profile(world: World) -> None:
    """The first forward has the range of one gather more: that from which the full parameter is made."""
    with two_tensors_gather_both(pre_of_one):
        model = two_tensor_mlp(4)
        shardrt.fully_shard(model[0])
        shardrt.fully_shard(model)
        counts = []
        for _ in range(2):
            with torch.autograd.profiler.profile() as profile, torch.no_grad():
                model(inputs())
            counts.append(sum(event.name == "FSDP::all_gather (0)" for event in profile.function_events))
            model[0].reshard()
    assert counts == [2, 1]


@on_ranks(2)
def test_extensions_that_are_refused(world: World) -> None:
    def linear(set_up: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(5, 7))
        shardrt.fully_shard(model)
        set_up(model)
        return model

    with pytest.raises(TypeError, match=r"parameter '0.weight' has fsdp_pre_all_gather alone"):
        linear(lambda model: set_on_locals(model, post=None))(inputs())
    with pytest.raises(RuntimeError, match=r"not the same on all ranks; found rank 0: \['0.weight: .*'\]; rank 1: none"):
        linear(lambda model: set_on_locals(model, "weight" if world.rank == 0 else "nothing"))(inputs())

    def post_of_rows(self: Any, outputs: Parts, *_: Any, **__: Any) -> Any:
        return outputs[0][1:], outputs

    with pytest.raises(
        ValueError, match=r"fsdp_post_all_gather of '0.weight' .* shape \(7, 5\) .* found one of shape \(6, 5\)"
    ):
        linear(lambda model: set_on_locals(model, post=post_of_rows))(inputs())

    def cut(self: Any, mesh: Any) -> Any:
        return (self[: 1 + world.rank],), None

    def other_rows(model: nn.Module) -> None:
        set_on_locals(model)
        model[0].weight._local_tensor.fsdp_pre_all_gather = cut.__get__(model[0].weight._local_tensor)

    with pytest.raises(ValueError, match=r"fsdp_pre_all_gather of '0.weight': .* of \(4, 3\) rows, padded to 4 or not; found"):
        linear(other_rows)(inputs())

    def no_tensors(model: nn.Module) -> None:
        set_on_locals(model)
        model[0].weight._local_tensor.fsdp_pre_all_gather = lambda mesh: ((), None)

    refusal = r"fsdp_pre_all_gather of '0.weight': expected a tuple of tensors, found an empty one"
    refused(refusal, lambda: linear(no_tensors)(inputs()), (TypeError, RuntimeError))

    def own_metadata(model: nn.Module) -> None:
        set_on_locals(model)
        local = model[0].weight._local_tensor
        local.fsdp_pre_all_gather = lambda mesh: ((local.bfloat16(),), torch.tensor([world.rank]))

    with mock.patch.object(extension._log, "warning") as warn, pytest.raises(AssertionError):
        linear(own_metadata)(inputs())
    messages = [str(call.args[0]) for call in warn.call_args_list]
    assert len(messages) == (world.rank == 0)
    assert all("fsdp_pre_all_gather of '0.weight' returns other metadata on each rank" in text for text in messages)

    model = linear(set_on_locals)
    model(inputs())
    model.double()
    with pytest.raises(RuntimeError, match=r"'0.weight' of .* has lost fsdp_pre_all_gather and fsdp_post_all_gather"):
        model(inputs().double())


@on_ranks(2)
def test_two_tensors_from_the_meta_device(world: World) -> None:
    """Parameters from the meta device; compute and outputs in bfloat16."""
    with two_tensors_gather_both(pre_of_one):
        model = two_tensor_mlp(width=4, device="meta")
        shard_blocks(model, "", mp_policy=shardrt.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        model.to_empty(device=world.device)
        for param in model.parameters():
            nn.init.normal_(param)
            param._local_tensor.b.copy_(param._local_tensor.a)  # initialised separately
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        losses = []
        for _ in range(3):
            out = model(inputs())
            assert out.dtype == torch.bfloat16
            loss = out.float().square().mean()
            loss.backward()
            losses.append(float(loss.a if isinstance(loss, TwoTensor) else loss))
            step_all(optimizer)
        assert losses[2] < losses[0]
