"""`parallelize_module`: the language of plans, what is refused, and models of others."""

import copy
import inspect

import pytest
import torch
from torch import nn
from torch.distributed.tensor import parallel as torch_parallel

import shardrt
from ranks import on_ranks, refused, settings_of
from shardrt import DTensor, Replicate, Shard, fully_shard
from shardrt.comm import DeviceMesh, World
from shardrt.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from subclasses import PadsItself
from toys import shard_blocks, step_all
from toys_tp import Transformer, compare, full, loss_of, plain_plan, sequence_plan, tokens_of

R, S0, S1 = Replicate(), Shard(0), Shard(1)


class Named(ParallelStyle):
    """A style of a user's own: notes where it was applied."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.applied = (*getattr(module, "applied", ()), self.src_data_rank)
        return module


class Replacing(ParallelStyle):
    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return nn.Identity()


def applied(model: nn.Module) -> set[str]:
    return {name for name, module in model.named_modules() if hasattr(module, "applied")}


@on_ranks(2)
def test_the_language_of_plans(world: World) -> None:
    for key, expected in {
        "": {""},
        "head": {"head"},
        "layers.*": {"layers.0", "layers.1"},
        "layers.0.norm?": {"layers.0.norm1", "layers.0.norm2"},
        "layers.[1-9].attention.[qk]": {"layers.1.attention.q", "layers.1.attention.k"},
        "*.*.up": {"layers.0.up", "layers.1.up"},
        "n*": {"norm"},
    }.items():
        model = parallelize_module(Transformer(), world.mesh, {key: Named()}, src_data_rank=1)
        assert applied(model) == expected
    model = parallelize_module(Transformer(), world.mesh, {"layers": {"0": {"up": Named()}, "1": Named()}})
    assert applied(model) == {"layers.0.up", "layers.1"}
    style = Named()
    style.function, style.object = lambda x: x, object()  # at other addresses on other ranks
    model = parallelize_module(Transformer(), world.mesh, style)
    assert applied(model) == {""}
    model = parallelize_module(Transformer(), world.mesh, {"layers.*.attention": Replacing()})
    assert type(model.layers[1].attention) is nn.Identity
    with pytest.warns(UserWarning, match="does nothing"):
        parallelize_module(model, world.mesh)


@on_ranks(2)
def test_a_key_that_matches_nothing(world: World) -> None:
    with pytest.raises(ValueError, match=r"'layers.*.attn.q' matches no module of the Transformer; near names: .*attention"):
        parallelize_module(Transformer(), world.mesh, {"layers.*.attn.q": ColwiseParallel()})
    with pytest.warns(UserWarning, match="matches no module"):
        parallelize_module(Transformer(), world.mesh, {"layer.*": Named()}, strict=False)


@on_ranks(2)
def test_what_is_refused(world: World) -> None:
    """On every rank, before anything is changed."""
    mesh, plane = world.mesh, DeviceMesh(world.comm, (1, 2), ("dp", "tp"))
    sharded = fully_shard(Transformer())
    inner = Transformer()
    fully_shard(inner)
    twice = parallelize_module(Transformer(), mesh, {"layers.*.up": ColwiseParallel()})
    other = DeviceMesh(world.comm, (2,), ("other",))  # of the same ranks
    bad = Transformer()
    nn.utils.parametrizations.weight_norm(bad.head)
    extended = Transformer(tied=False)
    extended.head.weight = nn.Parameter(PadsItself(extended.head.weight.detach()))
    limited = nn.Embedding(4, 4, max_norm=1.0)
    for model, on, plan, error, match in (
        (Transformer(), plane, plain_plan(), ValueError, "expected a mesh of one axis"),
        (Transformer(), None, plain_plan(), ValueError, "give device_mesh"),
        (Transformer(), mesh, 3, TypeError, "found a int"),
        (Transformer(), mesh, {"norm": ColwiseParallel()}, NotImplementedError, "ColwiseParallel of 'norm', a LayerNorm"),
        (Transformer(), mesh, {"layers": RowwiseParallel()}, NotImplementedError, "a ModuleList"),
        (sharded, mesh, plain_plan(), ValueError, "is sharded already"),
        (inner.layers[0], mesh, {"up": ColwiseParallel()}, ValueError, "is sharded already"),
        (twice, mesh, {"layers.0.up": ColwiseParallel()}, ValueError, "'layers.0.up' is parallelized already"),
        (twice, other, {"layers.*.down": RowwiseParallel()}, ValueError, "'tokens.weight' is parallelized .* over .*other"),
        (twice.layers[1].up, other, {"": Named()}, ValueError, "'weight' is parallelized already, over .*other"),
        (Transformer(), mesh, {"head": ColwiseParallel(), "hea*": ColwiseParallel()}, ValueError, "parallelized already"),
        (bad, mesh, {"head": ColwiseParallel()}, NotImplementedError, "weight is not a parameter"),
        (extended, mesh, {"head": ColwiseParallel()}, NotImplementedError, "'head.weight', a PadsItself, defines what is"),
        (limited, mesh, ColwiseParallel(), NotImplementedError, "max_norm"),
        (nn.Embedding(4, 4, sparse=True), mesh, RowwiseParallel(), NotImplementedError, "sparse=True"),
        (nn.Embedding(4, 4, scale_grad_by_freq=True), mesh, RowwiseParallel(), NotImplementedError, "scale_grad_by_freq=True"),
    ):
        with pytest.raises(error, match=match):
            parallelize_module(model, on, plan)
    refused("src_data_rank=2", lambda: parallelize_module(Transformer(), mesh, plain_plan(), src_data_rank=2))
    tied = Transformer()
    with pytest.raises(ValueError, match="is shared with another module"):
        parallelize_module(tied, mesh, {"tokens": ColwiseParallel(), "head": ColwiseParallel()})
    assert not any(isinstance(param, DTensor) for param in tied.parameters())
    parallelize_module(tied, mesh, {"tokens": RowwiseParallel(input_layouts=R)})
    for call in (lambda: tied(tokens_of(0)), lambda: fully_shard(tied, mesh=mesh), lambda: fully_shard(tied.head, mesh=mesh)):
        refused(r"'(head\.)?weight' is shared with a module whose style splits it", call)
    refused("is shared with another module", lambda: parallelize_module(tied.head, mesh, RowwiseParallel()))


@on_ranks(2, 4)
def test_tied_weights_in_several_calls(world: World) -> None:
    """As in torch's examples: the root's plan, then the layers', then the head's, and the tie set once more. Also in 2-D."""
    plane = DeviceMesh(world.comm, (world.size // 2, 2), ("dp", "tp"))
    mesh, plan = plane["tp"], sequence_plan()
    torch.manual_seed(1)
    whole = Transformer().double()
    for sharded in (False, True):
        first, model = copy.deepcopy(whole), copy.deepcopy(whole)
        parallelize_module(model, mesh, {key: plan[key] for key in ("tokens", "norm")})
        assert model.head.weight is model.tokens.weight
        inner = {key: style for key, style in plan.items() if key.startswith("layers.")}
        parallelize_module(model, mesh, inner)
        parallelize_module(model.head, mesh, plan["head"])
        model.head.weight = model.tokens.weight
        assert isinstance(model.head.weight, DTensor)
        assert model.head.weight.placements == (S0,)
        if sharded:
            shard_blocks(model, "layers", mesh=plane["dp"])
            assert model.head.weight is model.tokens.weight
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (first, model)]
        for step in range(3):
            tokens = tokens_of(step, rows=4)
            loss_of(first, tokens).backward()
            loss_of(model, tokens.chunk(plane["dp"].size)[plane["dp"].rank] if sharded else tokens).backward()
            compare(first, model)
            step_all(*optimizers)


@on_ranks(2)
def test_ranks_that_differ(world: World) -> None:
    """One rank has another plan, another model, or a problem: an error that says so on all."""
    up, norm = {"layers.0.up": ColwiseParallel()}, {"norm": SequenceParallel()}
    for model, plan, match in (
        (Transformer(), up if world.rank else norm, "rank 1 has .*layers.0.up"),
        (Transformer(hidden=17 + world.rank), up, r"rank 1 has .*18"),
        (Transformer(), up if world.rank else {"upp": ColwiseParallel()}, "'upp' matches no module"),
    ):
        with pytest.raises(ValueError, match=match):
            parallelize_module(model, world.mesh, plan)


class Projections(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = heads, kv_heads
        self.q_proj, self.wk, self.value = nn.Linear(8, heads * 4), nn.Linear(8, kv_heads * 4), nn.Linear(8, kv_heads * 4)


@on_ranks(2, 3)
def test_heads_that_cannot_be_split(world: World) -> None:
    plan = {"*": ColwiseParallel()}
    parallelize_module(Projections(6, 6), world.mesh, plan)
    for heads, kv_heads, name in ((5, 6, "q_proj"), (6, 1, "wk")):
        with pytest.raises(ValueError, match=f"'{name}' has {5 if name == 'q_proj' else 1} heads of 4 features"):
            parallelize_module(Projections(heads, kv_heads), world.mesh, plan)


@on_ranks(3)
def test_values_of_a_source_rank(world: World) -> None:
    """Of every parameter, styled or not; None keeps each rank's own. Parts are split by Shard's rule."""
    for source in (0, 2, None):
        torch.manual_seed(world.rank)
        model = Transformer(tied=False)
        own = [param.detach().clone() for param in model.parameters()]
        every = world.comm.exchange(own)
        parallelize_module(model, world.mesh, {"": Named(), **sequence_plan()}, src_data_rank=source)
        for index, param in enumerate(model.parameters()):
            expected = every[world.rank if source is None else source][index]
            if isinstance(param, DTensor):
                shard = param.spec.local_shard(expected)
                assert torch.equal(param.to_local(), shard)
            else:
                assert torch.equal(param, expected)


@on_ranks(2)
def test_parameters_that_others_replace(world: World) -> None:
    """From the meta device, by `to_empty()` or assigned `DTensor`s, or copied: gradients are as on one process."""
    whole = Transformer().double()
    plane = DeviceMesh(world.comm, (1, 2), ("dp", "tp"))
    source = parallelize_module(copy.deepcopy(whole), plane["tp"], sequence_plan())
    loss_of(whole, tokens_of(0)).backward()
    for how in ("to_empty", "assign", "copy"):
        for sharded in (False, True):
            with torch.device("meta"):
                model = Transformer().double()
            parallelize_module(model, plane["tp"], sequence_plan())
            assert model.layers[0].up.weight.is_meta
            assert model.layers[0].up.weight.shape == (17, 12)
            assert model.head.weight is model.tokens.weight
            if how == "to_empty":
                model.to_empty(device="cpu")
                model.load_state_dict(whole.state_dict())
            elif how == "assign":
                model.load_state_dict(copy.deepcopy(source.state_dict()), assign=True)
            else:
                model = copy.deepcopy(source)
            model.head.weight = model.tokens.weight  # torch's to_empty() and load_state_dict() do not keep ties
            if sharded:
                fully_shard(model, mesh=plane["dp"])
                meshes = {param.device_mesh for param in model.parameters()}
                assert len(meshes) == 1, meshes
            loss_of(model, tokens_of(0)).backward()
            compare(whole, model)


@on_ranks(2)
def test_whole_tensors_in_the_place_of_parts(world: World) -> None:
    for plan, child, x in (
        (plain_plan(), "up", torch.ones(2, 12)),
        (plain_plan(), "down", torch.ones(2, 17)),
        ({"layers.*.up": RowwiseParallel(input_layouts=R)}, "up", torch.ones(2, 12)),
        ({"tokens": RowwiseParallel(input_layouts=R), "head": ColwiseParallel()}, "tokens", tokens_of(0)),
        ({"tokens": ColwiseParallel()}, "tokens", tokens_of(0)),
    ):
        model = Transformer(tied=child == "tokens" and "head" in plan)
        whole = copy.deepcopy(model.state_dict())
        parallelize_module(model, world.mesh, plan)
        with pytest.raises(RuntimeError, match=r"assign=True\) of '[a-z0-9.]+' with a whole tensor"):
            model.load_state_dict(whole, assign=True)
        layer = model.tokens if child == "tokens" else getattr(model.layers[0], child)
        layer.weight = nn.Parameter(full(layer.weight))
        with pytest.raises(ValueError, match=r"the weight of '[a-z0-9.]+' on .* is not this rank's part"):
            layer(x)


@on_ranks(2)
def test_batches_that_differ(world: World) -> None:
    """Found in the first forward, before a collective, whichever module gets the data; off by a variable."""
    tokens, x = tokens_of(0) if world.rank else tokens_of(2), torch.randn(2, 12) + world.rank
    model, other = Transformer(tied=False), nn.Linear(12, 4)
    parallelize_module(model, world.mesh, plain_plan())
    parallelize_module(other, world.mesh, ColwiseParallel())
    refused(r"differs between the ranks .*other values.*SHARDRT_CHECK_BATCHES=0", lambda: model(tokens))
    refused(r"differs between the ranks .*shapes and dtypes", lambda: model(tokens[: world.rank + 1]))
    with pytest.raises(ValueError, match=r"argument 'mask' of .*dtypes: no tensor, torch.bool"):
        model(tokens_of(0), mask=tokens_of(0) > 0 if world.rank else None)
    model(tokens_of(0))
    model(tokens)  # a later one is not compared
    with pytest.raises(ValueError, match="the input of 'Linear' differs"):
        other(x)  # the first one of another model
    layer = parallelize_module(nn.Linear(12, 4), world.mesh, ColwiseParallel())
    refused("the input of 'Linear' differs", lambda: layer(x))
    with settings_of(world, check_batches=False):
        layer(x)
    sharded = parallelize_module(nn.Linear(12, 4), world.mesh, ColwiseParallel(input_layouts=Shard(0)))
    sharded(x)


@on_ranks(2)
def test_a_container_and_its_slices(world: World) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)).double()
    whole = copy.deepcopy(model)
    parallelize_module(model, world.mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = torch.ones(3, 4, dtype=torch.float64)
    for m, expected in ((model, whole), (model[:3], whole), (copy.deepcopy(model), whole)):
        torch.testing.assert_close(m(x), expected(x), msg=lambda text: text)
    assert isinstance(model[0], nn.Linear)
    assert model.state_dict()["0.weight"].shape == (6, 4)


def llama(tied: bool) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=16,
        intermediate_size=27,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).double()


def llama_plan(sequence: bool) -> dict[str, ParallelStyle]:
    """torchtitan's plan, by transformers' names."""
    inner = {
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
    }
    if not sequence:
        return {
            "model.embed_tokens": RowwiseParallel(input_layouts=R),
            **inner,
            "model.layers.*.self_attn.o_proj": RowwiseParallel(),
            "model.layers.*.mlp.down_proj": RowwiseParallel(),
            "lm_head": ColwiseParallel(output_layouts=R),
        }
    gathered = {"input_layouts": S1, "desired_input_layouts": R}
    by_name = {"input_kwarg_layouts": {"hidden_states": S1}, "desired_input_kwarg_layouts": {"hidden_states": R}}
    return {
        "model.embed_tokens": RowwiseParallel(input_layouts=R, output_layouts=S1),
        "model.layers.*.*layernorm": SequenceParallel(use_local_output=True),
        "model.layers.*.self_attn": PrepareModuleInput(**by_name, use_local_output=True),
        "model.layers.*.mlp": PrepareModuleInput(**gathered, use_local_output=True),
        **inner,
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=S1),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=S1),
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": ColwiseParallel(input_layouts=S1, output_layouts=R),
    }


@pytest.mark.parametrize("sequence", [False, True])
@on_ranks(2)
def test_llama_of_transformers(world: World, sequence: bool) -> None:
    for tied in (False, True):
        whole = llama(tied)
        model = parallelize_module(copy.deepcopy(whole), world.mesh, llama_plan(sequence))
        tokens = torch.randint(0, 37, (2, 9), generator=torch.Generator().manual_seed(1))
        positions = torch.arange(9)[None]
        for m in (whole, model):
            m(input_ids=tokens, labels=tokens, position_ids=positions, use_cache=False).loss.backward()
        compare(whole, model)


class Masked(nn.Module):
    """Dropout on an argument that is passed by name."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.layer = nn.Dropout(0.5), nn.Linear(8, 8)

    def forward(self, *, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.drop(x))


@on_ranks(2)
def test_dropout_of_a_prepared_keyword_argument(world: World) -> None:
    """A gathered argument is replicated: every rank draws the same mask."""
    model = nn.Sequential()
    model.norm, model.masked = nn.LayerNorm(8), Masked()
    plan = {
        "norm": SequenceParallel(use_local_output=True),
        "masked": PrepareModuleInput(
            input_kwarg_layouts={"x": S1}, desired_input_kwarg_layouts={"x": R}, use_local_output=True
        ),
    }
    model.forward = lambda x: model.masked(x=model.norm(x))
    parallelize_module(model, world.mesh, plan)
    out = model(torch.ones(2, 3, 8) * torch.arange(8))
    assert all(torch.equal(other, out) for other in world.comm.exchange(out.detach()))


@on_ranks(2)
def test_compiled_blocks(world: World) -> None:
    """A graph ends before each boundary, and results are right."""
    whole = Transformer().double()
    model = parallelize_module(copy.deepcopy(whole), world.mesh, sequence_plan())
    for layer in model.layers:
        layer.compile(backend="eager")
    for step in range(2):
        loss_of(whole, tokens_of(step)).backward()
        loss_of(model, tokens_of(step)).backward()
    compare(whole, model)


@pytest.mark.parametrize("name", sorted({*shardrt.parallel.__all__} & {*torch_parallel.__all__}))
def test_arguments_are_those_of_torch(name: str) -> None:
    """Names, order, kinds and defaults; a further one is named and has a default."""
    mine, torchs = (
        {key: (each.kind, each.default) for key, each in inspect.signature(getattr(owner, name)).parameters.items()}
        for owner in (shardrt.parallel, torch_parallel)
    )
    assert [key for key in mine if key in torchs] == list(torchs)
    for key, (kind, default) in mine.items():
        if key in torchs:
            assert (kind, default) == torchs[key], key
        else:
            assert key in ("async_tp", "strict")
            assert kind is inspect.Parameter.KEYWORD_ONLY
            assert default is not inspect.Parameter.empty


def test_layouts_by_default_are_those_of_torch() -> None:
    for mine, torchs in (
        (ColwiseParallel(), torch_parallel.ColwiseParallel()),
        (RowwiseParallel(), torch_parallel.RowwiseParallel()),
    ):
        assert [repr((mine.input_layouts,)), repr((mine.output_layouts,))] == [
            repr(torchs.input_layouts),
            repr(torchs.output_layouts),
        ]
    assert repr((Shard(SequenceParallel().sequence_dim),)) == repr(torch_parallel.SequenceParallel().sequence_sharding)


@on_ranks(2)
def test_the_names_are_public(world: World) -> None:
    assert shardrt.parallel.parallelize_module is parallelize_module
    assert full(torch.ones(1)).item() == 1.0
    assert repr(ColwiseParallel(input_layouts=S1)) == (
        "ColwiseParallel(input_layouts=Shard(dim=1), output_layouts=Shard(dim=-1), use_local_output=True, async_tp=False)"
    )
