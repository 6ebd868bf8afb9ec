"""Parameters that the plan does not name, used on activations that are split: gradients beside one process, in float64."""

import copy
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import shardrt
from ranks import on_ranks, refused, settings_of
from shardrt import Replicate
from shardrt.comm import DeviceMesh, World
from shardrt.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, SummedGradients, parallelize_module
from toys import shard_blocks, step_all
from toys_tp import Transformer, compare, counted, sequence_plan, tokens_of
from toys_tp import loss_of as loss_of_tokens

WIDTH, HEADS, SIZE, VOCAB = 16, 4, 4, 11


class Twice(torch.autograd.Function):
    """A function of which nothing is known."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Attention(nn.Module):
    """Norms of queries and keys, and parameters of its own: for each head, for each feature of a head, and for all."""

    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = (nn.Linear(WIDTH, SIZE * key_heads) for _ in range(2))
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE), nn.LayerNorm(SIZE)
        self.per_head, self.bias = nn.Parameter(torch.randn(HEADS, 1)), nn.Parameter(torch.randn(SIZE))
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.first = 0  # of the heads that this rank has
        self.between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, SIZE)) for project in (self.q, self.k, self.v))
        q = self.q_norm(q) * self.per_head[self.first : self.first + q.shape[2]] + self.bias
        k = self.k_norm(k) * self.temperature.exp()
        repeated = (each.repeat_interleave(q.shape[2] // k.shape[2], 2).transpose(1, 2) for each in (k, v))
        y = F.scaled_dot_product_attention(self.between(q).transpose(1, 2), *repeated, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp_norm = nn.LayerNorm(WIDTH), Attention(key_heads), nn.RMSNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.slope, self.gain = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x)) * self.gain
        return x + self.down(torch.tanh(self.up(self.mlp_norm(x)) * self.slope))


class Model(nn.Module):
    def __init__(self, key_heads: int = HEADS) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer(key_heads) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.tokens.weight  # named by no plan
        self.depth = 2

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for layer in list(self.layers)[: self.depth]:
            x = layer(x)
        return self.head(self.norm(x))


def made(key_heads: int = HEADS) -> Model:
    torch.manual_seed(0)
    return Model(key_heads).double()


def plan() -> dict[str, ParallelStyle]:
    return {
        "layers.*.attention.[qkv]": ColwiseParallel(),
        "layers.*.attention.out": RowwiseParallel(),
        "layers.*.up": ColwiseParallel(),
        "layers.*.down": RowwiseParallel(),
    }


def cut(whole: nn.Module, mesh: DeviceMesh, sharded: bool, styles: dict[str, ParallelStyle] | None = None) -> Any:
    """A copy over the axes (dp, tp) of a mesh, which knows its heads."""
    model = parallelize_module(copy.deepcopy(whole), mesh["tp"], plan() if styles is None else styles)
    for module in model.modules():
        if isinstance(module, Attention):
            module.first = mesh["tp"].rank * HEADS // mesh["tp"].size
    return shard_blocks(model, "layers", mesh=mesh["dp"]) if sharded else model


def grid(world: World, tp: int) -> DeviceMesh:
    return DeviceMesh(world.comm, (world.size // tp, tp), ("dp", "tp"))


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, 6), generator=torch.Generator().manual_seed(step))


def rows(tokens: torch.Tensor, mesh: DeviceMesh, sharded: bool) -> torch.Tensor:
    return tokens[mesh["dp"].rank :: mesh["dp"].size] if sharded else tokens


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(1, 1).flatten())


def recompute(layer: nn.Module) -> None:
    forward = layer.forward
    layer.forward = lambda x: checkpoint(forward, x, use_reentrant=False)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@on_ranks(1, 2, 4)
def test_a_model_trains_as_on_one_process(world: World, key_heads: int, sharded: bool) -> None:
    """Accumulation, recomputation, evaluation in between and before, and frozen parameters, which are trained later."""
    for tp in [size for size in (2, 4) if size <= min(world.size, key_heads)] or [1]:
        mesh, whole = grid(world, tp), made(key_heads)
        whole.layers[1].attention.q_norm.requires_grad_(False)
        model = cut(whole, mesh, sharded)
        # Not Adam: the gradients of what is added to keys are zero but for rounding, which it would make large.
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (whole, model)]
        for step in range(4):
            for m in (whole, model):
                m.layers[1].attention.q_norm.requires_grad_(step > 1)
                with torch.no_grad():
                    m.eval()(batch(9))
                if step == 1:
                    recompute(m.layers[0])
            for micro in range(2):
                tokens = batch(2 * step + micro)
                if sharded:
                    model.set_requires_gradient_sync(micro == 1)
                loss_of(whole.train(), tokens).backward()
                loss_of(model.train(), rows(tokens, mesh, sharded)).backward()
            compare(whole, model)
            step_all(*optimizers)
        compare(whole, model)
        shardrt.check_replicas(model, optimizers[1])


@on_ranks(2)
def test_one_sum_for_all(world: World) -> None:
    """The first backward compares gradients; later ones have one all-reduce more, and none for parameters that are whole."""
    mesh = grid(world, 2)
    model = cut(made(), mesh, False)
    with counted(mesh["tp"], ("tp_partial",)) as counts:
        for expected in (0, 1, 1):
            counts.clear()
            loss_of(model, batch(0)).backward()
            assert counts["all_reduce"] == expected
    model.requires_grad_(False)
    model.layers[0].attention.q.requires_grad_()
    with counted(mesh["tp"], ("tp_partial",)) as counts:
        loss_of(model, batch(0)).backward()
    assert not counts
    model = cut(made(), mesh, True)
    with counted(mesh["tp"], ("terms",)) as counts:
        for _ in range(3):
            counts.clear()
            loss_of(model, batch(0)).backward()
            assert counts == {"all_reduce": 2}  # layers


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2, 4)
def test_what_the_user_adds(world: World, sharded: bool) -> None:
    """A gradient that comes from outside of the model is whole already; a penalty of gradients goes through the sums."""
    mesh = grid(world, 2)
    named = {"layers.*": SummedGradients("slope")}
    named |= {f"layers.*.attention{name}": SummedGradients() for name in ("", ".?_norm")}
    for graph in (False, True):
        whole = made()
        model = cut(whole, mesh, sharded, plan() | named if graph else None)
        for step in range(3):
            tokens = batch(step)
            for m, part in ((whole, tokens), (model, rows(tokens, mesh, sharded))):
                weights = [m.layers[0].attention.q_norm.weight, m.layers[0].norm.weight]
                with sdpa_kernel(SDPBackend.MATH):  # which has second derivatives
                    loss = loss_of(m, part)
                if graph and not sharded:
                    loss = loss + torch.autograd.grad(loss, weights, create_graph=True)[0].square().sum()
                elif not graph:
                    loss = loss + sum(weight.square().sum() for weight in weights)
                loss.backward()
            compare(whole, model, 1e-10)


@on_ranks(2)
def test_copies(world: World) -> None:
    """Copies from before the first forward and from after it, and sharding after a forward."""
    mesh, whole = grid(world, 2), made()
    model = cut(whole, mesh, False)
    early = copy.deepcopy(model)
    for m in (whole, model, early):
        loss_of(m, batch(0)).backward()
    compare(whole, early)
    late = copy.deepcopy(model)
    later = [copy.deepcopy(whole), model, late, shard_blocks(copy.deepcopy(model), "layers", mesh=mesh["dp"])]
    for m in later:
        m.zero_grad()
        loss_of(m, batch(1)).backward()
    for m in later[1:]:
        compare(later[0], m)


@on_ranks(2, 3)
def test_norms_that_a_sequence_parallel_plan_leaves_out(world: World) -> None:
    whole = Transformer(tied=False).double()
    styles = {key: style for key, style in sequence_plan().items() if "norm" not in key}
    model = parallelize_module(copy.deepcopy(whole), world.mesh, styles)
    for step in range(3):
        for m in (whole, model):
            loss_of_tokens(m, tokens_of(step)).backward()
    compare(whole, model)


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2, 4)
def test_parameters_with_both_uses(world: World, sharded: bool) -> None:
    """Where a gradient is whole in part, nothing is summed, and all ranks hear of it."""
    mesh, whole = grid(world, 2), made()
    whole.layers[0].attention.k_norm.weight = whole.layers[0].attention.q_norm.weight
    whole.layers[0].gain = whole.layers[0].attention.temperature
    model = cut(whole, mesh, sharded)
    match = r"'layers\.0\.gain'.* differ between the ranks .*\('layers\.0\.attention': SummedGradients\('temperature'\)\)"
    with pytest.raises(ValueError, match=match) as found:
        loss_of(model, rows(batch(0), mesh, sharded)).backward()
    assert "norm" not in str(found.value)


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_parts_that_the_first_forward_left_out(world: World, sharded: bool) -> None:
    mesh, whole = grid(world, 2), made()
    model = cut(whole, mesh, sharded)
    for depth in (1, 2, 2):
        for m in (whole, model):
            m.depth = depth
            loss_of(m, batch(depth)).backward()
        compare(whole, model)


@on_ranks(2)
def test_a_part_that_is_called_by_itself(world: World) -> None:
    for styles in (plan(), plan() | {"layers.*.attention.q_norm": SummedGradients()}):
        model = cut(made(), grid(world, 2), False, styles)
        x = torch.randn(2, 3, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            model.layers[0](x)
        with pytest.raises(ValueError, match=r"'layers\.0\.attention\.q_norm\.weight'.*not a part of it by itself"):
            model.layers[0](x).square().sum().backward()


@on_ranks(2)
def test_without_the_check(world: World) -> None:
    mesh, whole = grid(world, 2), made()
    whole.layers[0].gain = whole.layers[0].attention.temperature
    with settings_of(world, check_batches=False):
        loss_of(cut(whole, mesh, False), batch(0)).backward()


@pytest.mark.parametrize("style", [None, "gathered"])
@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_keys_that_are_not_split(world: World, sharded: bool, style: str | None) -> None:
    """One head of keys for all ranks: the gradient of what it is computed from is a term, which no parameter's sum mends."""
    styles: dict[str, ParallelStyle] = {key.replace("[qkv]", "q"): value for key, value in plan().items()}
    if style is not None:
        styles["layers.*.attention.[kv]"] = ColwiseParallel(output_layouts=Replicate())
    model = cut(made(1), grid(world, 2), sharded, styles)
    what = r"'layers\.0\.down' \(style \d+\)" if style is None else r"'layers\.1\.attention\.k' \(style \d+\)"
    refused(f"the gradients of .*the output of {what}.* differ between the ranks", loss_of(model, batch(0)).backward)


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_functions_of_others(world: World, sharded: bool) -> None:
    """Behind an autograd.Function that may communicate nothing is known: the plan has to say it."""
    mesh, whole = grid(world, 2), made()
    for layer in whole.layers:
        layer.attention.between = Twice.apply
    with pytest.raises(ValueError, match=r"'layers\.0\.attention\.per_head'.*'layers\.1\.attention\.q_norm\.weight'") as found:
        loss_of(cut(whole, mesh, sharded), batch(0)).backward()
    assert "k_norm" not in str(found.value)
    named = {"layers.*.attention": SummedGradients(), "layers.*.attention.q_norm": SummedGradients()}
    model = cut(whole, mesh, sharded, plan() | named)
    for step in range(2):
        for m in (whole, model):
            loss_of(m, batch(step)).backward()
    compare(whole, model)
    refused(r"parallelized already", lambda: cut(made(), mesh, sharded, plan() | {"layers.*.attention.?": SummedGradients()}))
    with pytest.raises(ValueError, match=r"SummedGradients\(names=\('up',\)\) of 'layers\.0'.*it has \['slope', 'gain'\]"):
        cut(made(), mesh, sharded, {"layers.*": SummedGradients("up")})


@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(2)
def test_recomputation_that_hides_its_graph(world: World, sharded: bool) -> None:
    """checkpoint(use_reentrant=True): the forward shows nothing of the graph, so gradients are compared only."""
    mesh, whole = grid(world, 2), made()
    model = cut(whole, mesh, sharded)
    forward = model.layers[0].forward
    model.layers[0].forward = lambda x: checkpoint(forward, x, use_reentrant=True)
    with pytest.raises(ValueError, match=r"'layers\.0\.attention\.bias'") as found:
        loss_of(model, batch(0)).backward()
    assert "layers.1" not in str(found.value)


@on_ranks(2)
def test_compiled_layers(world: World) -> None:
    mesh, whole = grid(world, 2), made()
    model = cut(whole, mesh, False)
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    for step in range(3):
        for m in (whole, model):
            loss_of(m, batch(step)).backward()
    compare(whole, model)


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(1, 2, 4)
def test_adapters_of_peft(world: World, sharded: bool) -> None:
    """LoRA on layers that are cut: the second factor of a Colwise layer and the first of a Rowwise one are cut alike."""
    from peft import LoraConfig, inject_adapter_in_model

    mesh = grid(world, world.size)
    whole = made()
    inject_adapter_in_model(LoraConfig(r=3, target_modules=["q", "v", "out", "up", "down"], init_lora_weights=False), whole)
    whole.double()
    colwise, rowwise = ["attention.[qv]", "up"], ["attention.out", "down"]
    styles: dict[str, ParallelStyle] = {
        "layers.*.attention.k": ColwiseParallel(),
        **{f"layers.*.{name}.{part}": ColwiseParallel() for name in colwise for part in ("base_layer", "lora_B.default")},
        **{f"layers.*.{name}.{part}": RowwiseParallel() for name in rowwise for part in ("base_layer", "lora_A.default")},
    }
    model = cut(whole, mesh, sharded, styles)
    for step in range(3):
        for m in (whole, model):
            loss_of(m, batch(step)).backward()
    compare(whole, model)
    shardrt.check_replicas(model)


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize("sharded", [False, True])
@on_ranks(1, 2, 4)
def test_qwen3_of_transformers(world: World, sharded: bool) -> None:
    import transformers

    tp = min(2, world.size)
    mesh = grid(world, tp)
    sizes: dict[str, Any] = dict(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=27,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=6,
        max_position_embeddings=32,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    whole = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).double()
    styles: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    model: Any = parallelize_module(copy.deepcopy(whole), mesh["tp"], styles)
    if sharded:
        shard_blocks(model, "model.layers", mesh=mesh["dp"])
    for step in range(3):
        tokens = torch.randint(0, 37, (4, 9), generator=torch.Generator().manual_seed(step))
        for m, part in ((whole, tokens), (model, rows(tokens, mesh, sharded))):
            m(input_ids=part, labels=part, use_cache=False).loss.backward()
        compare(whole, model, 1e-5 if step else 1e-6)
