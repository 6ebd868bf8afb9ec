"""Loading of checkpoints: every world size, mesh, placement, dtype and order of parameters that wrote one, in every other."""

from __future__ import annotations

import copy
import functools
import importlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import shardrt
import toys_2d
from checkpoints import flip, reading
from ranks import job, on_ranks, refused
from shardrt import DTensor, Shard
from shardrt.checkpoint import CheckpointError, StateDictOptions, get_optimizer_state_dict, load, save
from shardrt.checkpoint.formats.dcp.metadata_reader import read_stored
from shardrt.comm import World
from toys import OddMLP, shard_blocks, step_all

SIZES = (1, 2, 3, 4)
Made = tuple[nn.Module, torch.optim.Optimizer]


class Model(OddMLP):
    """Rows, elements, columns, one element, a scalar, and buffers; it is never run."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.wide = nn.Linear(1013, 3, bias=False)
        self.tied = nn.Linear(13, 5, bias=False)
        self.tied.weight = self.inp.weight
        self.inp.weight = nn.Parameter(torch.randn(5, 13))
        self.tied.weight = self.inp.weight
        self.register_buffer("mean", torch.arange(7.0))
        self.register_buffer("count", torch.tensor(3))


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, amsgrad=True, **options)


@functools.cache
def reference(make: Callable[[Any], torch.optim.Optimizer] = adamw, kind: type[nn.Module] = Model) -> Made:
    """A whole model, the same on every rank, whose optimizer has made two steps on random gradients."""
    torch.manual_seed(1)
    model = kind()
    optimizer = make(model.parameters())
    for _ in range(2):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def sharded(whole: Made, shard: Callable[[nn.Module], nn.Module], make: Callable[[Any], torch.optim.Optimizer] = adamw) -> Made:
    """The same values, sharded."""
    model = shard(copy.deepcopy(whole[0]))
    optimizer = make(model.parameters())
    optimizer.load_state_dict(copy.deepcopy(whole[1].state_dict()))
    shardrt.shard_optimizer_state(optimizer)
    return model, optimizer


def check_equal(found: Any, expected: torch.Tensor, name: str) -> None:
    """This rank's shard of a tensor has the bits of the whole one, converted to its dtype. No communication."""
    local = found
    if isinstance(found, DTensor):
        local, expected = found.to_local(), found.spec.local_shard(expected)
    assert torch.equal(local, expected.to(local.dtype)), name


def check_same(whole: Made, loaded: Made, dtype: torch.dtype = torch.float32) -> None:
    """Parameters, buffers and optimizer state are the same bits, after the conversion of dtypes."""
    params, tensors = dict(whole[0].named_parameters()), loaded[0].state_dict()
    for name, value in whole[0].state_dict().items():
        check_equal(tensors[name], value, name)
    for name, param in loaded[0].named_parameters():
        expected = whole[1].state[params[name]]
        assert loaded[1].state[param].keys() == expected.keys(), name
        for key, value in expected.items():
            found = loaded[1].state[param][key]
            assert found.dtype == (value.dtype if key == "step" else dtype), (name, key)
            check_equal(found, value, f"{name} {key}")


def state_of(made: Made) -> dict[str, Any]:
    return {"model": made[0], "optimizer": made[1]}


# ---------------------------------------------------------------------- written on one world, read on another


@on_ranks(*SIZES)
def write(world: World, folder: Path) -> None:
    """The reference, as this many ranks save it."""
    made = sharded(reference(), shard_blocks)
    scheduler = torch.optim.lr_scheduler.StepLR(made[1], 3, 0.5)
    save(folder / f"{world.size}", {**state_of(made), "scheduler": scheduler, "step": 7, "data": {"seen": [1, 2], "rate": 0.5}})
    if world.size % 2 == 0:
        dp, tp = toys_2d.meshes(world, 2)
        whole = reference(adamw, toys_2d.Toy)
        save(
            folder / f"tp {world.size}",
            state_of(sharded(whole, lambda model: toys_2d.shard(toys_2d.parallelize(model, tp), dp))),
        )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint from each number of ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for size in SIZES:
        job(size).run(__name__, "write", {"folder": folder})
    return folder


def by_columns(model: nn.Module) -> nn.Module:
    return shard_blocks(model, shard_placement_fn=lambda param: Shard(1) if param.dim() == 2 else None)


def hybrid(model: nn.Module) -> nn.Module:
    world = shardrt.world()
    shape = (2, world.size // 2) if world.size % 2 == 0 else (1, world.size)
    return shard_blocks(model, mesh=shardrt.DeviceMesh(world.comm, shape, ("replicate", "shard")))


def by_layers(model: nn.Module) -> nn.Module:
    for module in list(model.modules()):
        if isinstance(module, nn.Linear | nn.LayerNorm) and module is not model.tied and module is not model.inp:
            shardrt.fully_shard(module)
    return shardrt.fully_shard(model)


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "blocks": shard_blocks,
    "columns": by_columns,
    "hybrid": hybrid,
    "layers": by_layers,
    "one group": shardrt.fully_shard,
    "offloaded": lambda model: shard_blocks(model, offload_policy=shardrt.CPUOffloadPolicy(pin_memory=False)),
    "whole": lambda model: model,
}


@pytest.mark.parametrize("kind", WRAPPINGS)
@on_ranks(*SIZES)
def test_of_any_world_in_any_wrapping(world: World, written: Path, kind: str) -> None:
    whole = reference()
    for size in SIZES:
        model = WRAPPINGS[kind](Model())
        made = model, adamw(model.parameters())
        load(written / f"{size}", state_of(made))
        check_same(whole, made)
        assert model.tied.weight is model.inp.weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@on_ranks(1, 3)
def test_another_dtype(world: World, written: Path, dtype: torch.dtype) -> None:
    """Parameters are converted; so is state that had the parameter's dtype. The columns are gathered from rows."""
    model = by_columns(Model().to(dtype))
    made = model, adamw(model.parameters())
    load(written / "2", state_of(made))
    check_same(reference(), made, dtype)


@on_ranks(1, 2, 4)
def test_onto_a_meta_model(world: World, written: Path) -> None:
    """It gets memory, and the optimizer that was made before gets its new parameters; the next steps are those of the saved."""
    with torch.device("meta"):
        model = Model()
    shard_blocks(model)
    made = model, adamw(model.parameters())
    load(written / "3", state_of(made))
    whole = reference()
    check_same(whole, made)
    check_same(stepped(*copy.deepcopy(whole)), stepped(*made))


@on_ranks(2, 3)
def test_into_state_that_exists(world: World, written: Path) -> None:
    """State is overwritten in place; a gathered model is gathered again; values and schedulers are replaced."""
    made = sharded(reference(), shard_blocks)
    with torch.no_grad():
        for param in made[0].parameters():
            param.zero_()
            made[1].state[param]["exp_avg"].zero_()
    made[0].unshard()
    before = {id(value) for state in made[1].state.values() for value in state.values()}
    scheduler = torch.optim.lr_scheduler.StepLR(made[1], 4, 0.25)
    state = {**state_of(made), "scheduler": scheduler, "step": 0, "data": {"seen": [], "rate": 0}}
    load(written / "4", state)
    check_same(reference(), made)
    assert {id(value) for state in made[1].state.values() for value in state.values()} == before
    assert (state["step"], state["data"]) == (7, {"seen": [1, 2], "rate": 0.5})
    assert (scheduler.step_size, scheduler.gamma) == (3, 0.5)


@on_ranks(2, 3)
def test_other_groups_of_parameters(world: World, written: Path) -> None:
    """State follows the names; so do hyperparameters, where all parameters of a group come from one."""
    model = shard_blocks(Model())
    params = list(model.parameters())[::-1]
    optimizer = adamw([{"params": params[3:], "lr": 1.0}, {"params": params[:3], "weight_decay": 0.5}])
    load(written / "2", state_of((model, optimizer)))
    check_same(reference(), (model, optimizer))
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [1e-2, 1e-2]
    assert [param for group in optimizer.param_groups for param in group["params"]] == params[3:] + params[:3]


@on_ranks(1, 2)
def test_groups_that_do_not_fit_keep_their_own(world: World, tmp_path: Path) -> None:
    """In one group, parameters of groups with different hyperparameters."""
    model = Model()
    names = list(model.parameters())
    folder = tmp_path
    save(folder / "two", state_of((model, adamw([{"params": names[:2], "lr": 1.0}, {"params": names[2:], "lr": 2.0}]))))
    one = adamw(model.parameters())
    one.param_groups[0]["lr"] = 3.0
    load(folder / "two", state_of((model, one)))
    assert one.param_groups[0]["lr"] == 3.0


@on_ranks(1)
def test_tensors_among_hyperparameters(world: World, tmp_path: Path) -> None:
    """Compared by value, from groups and by parameter, and loaded where they are; state of no parameter is loaded as well."""
    model = nn.Linear(3, 3)
    each = [{"params": [param], "lr": torch.tensor(0.5)} for param in model.parameters()]
    saved = stepped(model, torch.optim.Adam(each, foreach=False))[1]
    saved.state[cast(Any, "shared")] = {"mean": torch.tensor(7.0), "count": 2}
    flat = get_optimizer_state_dict(model, saved, options=StateDictOptions(flatten_optimizer_state_dict=True))
    for name, value in (("groups", saved), ("flat", {key: value for key, value in flat.items() if "shared" not in key})):
        save(tmp_path / name, {"model": model, "optimizer": value})
        optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
        lr = optimizer.param_groups[0]["lr"]
        load(tmp_path / name, state_of((model, optimizer)))
        assert optimizer.param_groups[0]["lr"] is lr
        assert lr.item() == 0.5
        assert optimizer.state.get(cast(Any, "shared"), {}) == (
            {"mean": torch.tensor(7.0), "count": 2} if name == "groups" else {}
        )


@pytest.mark.parametrize("tp", [1, 2, 4])
@on_ranks(2, 4)
def test_another_degree_of_tensor_parallelism(world: World, written: Path, tp: int) -> None:
    """Shards of shards: from 1 x 2 and 2 x 2 ranks; columns may be cut in different places."""
    if world.size % tp:
        return
    dp, mesh = toys_2d.meshes(world, tp)
    for size in (2, 4):
        model = toys_2d.shard(toys_2d.parallelize(toys_2d.Toy(), mesh), dp)
        made = model, adamw(model.parameters())
        load(written / f"tp {size}", state_of(made))
        check_same(reference(adamw, toys_2d.Toy), made)


# ---------------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "plain sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), fused=True),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
}


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> Made:
    """One step on gradients that do not depend on the number of ranks."""
    for index, param in enumerate(model.parameters()):
        grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(index))
        param.grad = DTensor(param.spec.local_shard(grad).clone(), param.spec) if isinstance(param, DTensor) else grad
    step_all(optimizer)
    return model, optimizer


def values(made: Made) -> Iterator[tuple[str, Any]]:
    """This rank's shards of all parameters and all state."""
    for name, param in made[0].named_parameters():
        for key, value in sorted({"": param, **made[1].state[param]}.items()):
            local = value.to_local().detach() if isinstance(value, DTensor) else torch.as_tensor(value)
            yield f"{name} {key}", local if type(local) is torch.Tensor else local.dequantize()


def check_values(found: Made, expected: Made) -> None:
    for (name, value), (other, loaded) in zip(values(expected), values(found), strict=True):
        assert name == other
        assert torch.equal(loaded, value), name


@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(3, more=(2,))
def test_optimizers_go_on(world: World, tmp_path: Path, kind: str) -> None:
    """A fresh optimizer makes the step that the saved one makes, bitwise."""
    folder = tmp_path / "saved"
    model = shard_blocks(OddMLP(layers=1))
    made = stepped(model, OPTIMIZERS[kind](model.parameters()))
    save(folder, state_of(made))
    other = shard_blocks(OddMLP(layers=1))
    again = other, OPTIMIZERS[kind](other.parameters())
    load(folder, state_of(again))
    check_values(stepped(*again), stepped(*made))
    assert made[1].state_dict()["param_groups"] == again[1].state_dict()["param_groups"]


# ---------------------------------------------------------------------- optimizers that step on local shards


class Wide(nn.Module):
    """Enough elements for state in 8 bits, one parameter that has none on some ranks, and one small one."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.Linear(96, 512, bias=False)
        self.small = nn.Linear(3, 1)


def local_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    module, kind = name.split(":")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: torch.optim.Optimizer = getattr(importlib.import_module(module), kind)(model.parameters(), lr=0.1)
    return made


LOCAL = [
    pytest.param("torchao.optim:AdamW8bit", marks=pytest.mark.all),
    "bitsandbytes.optim:AdamW8bit",
    "bitsandbytes.optim:AdamW32bit",
]


@pytest.mark.parametrize("kind", LOCAL)
@on_ranks(2)
def test_local_optimizers(world: World, tmp_path: Path, kind: str) -> None:
    """On as many ranks all state is the same; on others what is in blocks is refused by name, and the rest is cut again."""
    model = shardrt.fully_shard(Wide())
    made = stepped(model, local_optimizer(kind, model))
    save(tmp_path / "saved", state_of(made))
    stepped_before, fresh = shardrt.fully_shard(Wide()), shardrt.fully_shard(Wide())
    for loaded in (stepped(stepped_before, local_optimizer(kind, stepped_before)), (fresh, local_optimizer(kind, fresh))):
        load(tmp_path / "saved", state_of(loaded))
        check_values(loaded, made)
    check_values(stepped(*loaded), stepped(*made))
    alone = shardrt.fully_shard(Wide(), mesh=shardrt.DeviceMesh(world.comm, (2, 1), ("replicate", "shard")))
    other = alone, local_optimizer(kind, alone)
    if kind.endswith("8bit"):
        with pytest.raises(CheckpointError, match=r"of parameter 'large.weight' was saved for the shards of 2 ranks.*rank0of1"):
            load(tmp_path / "saved", state_of(other))
        return
    save(tmp_path / "saved", state_of(made))  # after another step
    load(tmp_path / "saved", state_of(other))
    for param, whole in zip(alone.parameters(), model.parameters(), strict=True):
        check_equal(param, whole.full_tensor(), "parameter")
    parts = world.comm.exchange(made[1].state[model.large.weight]["state1"])
    assert torch.equal(other[1].state[alone.large.weight]["state1"], torch.cat(parts))


# ---------------------------------------------------------------------- what is read


class Large(nn.Module):
    """100 MiB of matrices and some vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Linear(size, 2048, device="meta").to_empty(device="cpu") for size in (2048, 2048, 2048, 2048, 2047, 2053)
        )


@on_ranks(3)
def test_bytes_that_are_read_for_parts(world: World, tmp_path: Path) -> None:
    """With the blocks that are completed to verify them, at most a twentieth more than 33 MiB for each rank."""
    model = Large()
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.fill_(index)[-1] = 100.0
    save(tmp_path / "saved", {"model": model})
    whole = shardrt.fully_shard(Large())
    by_block = shard_blocks(Large(), shard_placement_fn=lambda param: Shard(0))
    for loaded in (whole, by_block):
        with reading() as read:
            load(tmp_path / "saved", {"model": loaded})
        for (name, found), expected in zip(loaded.named_parameters(), model.parameters(), strict=True):
            check_equal(found, expected, name)
        assert 1.0 <= read[0][0] / read[0][1] <= 1.05


class Square(nn.Module):
    """1 MiB in each of two layers, 4 KiB in two biases."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 512) for _ in range(2))


@on_ranks(3)
def test_bytes_that_are_read(world: World, tmp_path: Path) -> None:
    """At most a twentieth more than what a rank needs; as much again, to verify it, where it reads many short runs."""
    whole = reference(adamw, Square)
    for name, shard in (("rows", shard_blocks), ("columns", by_columns)):
        save(tmp_path / name, state_of(sharded(whole, shard)))
    mesh = shardrt.DeviceMesh(world.comm, (3,), ("dp",))

    def by_elements(model: nn.Module) -> nn.Module:
        return shardrt.fully_shard(model, mesh=mesh)

    for name in ("rows", "columns"):
        for shard in (shard_blocks, by_columns, lambda model: model, by_elements):
            model = shard(Square())
            made = model, adamw(model.parameters())
            with reading() as read:
                load(tmp_path / name, state_of(made))
            check_same(whole, made)
            across = (by_columns,) if name == "rows" else (shard_blocks, by_elements)
            assert 1.0 <= read[0][0] / read[0][1] <= (2.05 if shard in across else 1.05), (name, shard)


def flip_element(folder: Path, tensor: str, element: int) -> str:
    """Change a bit of an element of float32 in the chunk that begins the tensor; returns the name of the file."""
    chunk = next(chunk for chunk in read_stored(folder).tensors[tensor].chunks if not any(chunk.box.offsets))
    flip(folder, chunk, 4 * element)
    return chunk.file


@on_ranks(1, 2)
def test_a_flipped_byte(world: World, tmp_path: Path) -> None:
    """Named with file and tensor: in a small item, in one that is read whole, and in one that is read by parts."""
    made = sharded(reference(adamw, Square), shard_blocks)
    whole = Square()
    for name, element, model in (
        ("model.blocks.0.bias", 100, made[0]),
        ("optimizer.state.blocks.1.weight.exp_avg", 70_000, made[0]),
        ("model.blocks.1.weight", 70_000, whole),
    ):
        folder = tmp_path / name
        save(folder, state_of(made))
        file = flip_element(folder, name, element) if world.rank == 0 else None
        file = world.comm.exchange(file)[0]
        with pytest.raises(CheckpointError, match=rf"'{folder}/{file}', tensor '{name}' is damaged: the checksum"):
            load(folder, state_of((model, adamw(model.parameters()))))


@on_ranks(1)
def test_zeroed_pages_and_tails(world: World, tmp_path: Path) -> None:
    """Small items of ours, in any order of dims: what is zero on the disk is refused, or is what was saved."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(n,) for n in range(100, 4100, 400)] + [(17, 11, 13)]
    saved = {f"t{i}": torch.randn(shape, generator=generator) for i, shape in enumerate(shapes)}
    saved["permuted"] = torch.randn(7, 5, 9, generator=generator).permute(2, 1, 0)
    save(tmp_path / "saved", saved)
    file = tmp_path / "saved" / "__0_0.distcp"
    whole = file.read_bytes()

    found_out = 0
    pages = [(start, start + 512) for start in range(0, len(whole), 512)]
    for start, stop in pages + [(start, len(whole)) for start in range(256, len(whole), 997)]:
        file.write_bytes(whole[:start] + bytes(min(stop, len(whole)) - start) + whole[stop:])
        found = {name: torch.full_like(tensor, 7.0) for name, tensor in saved.items()}
        try:
            load(tmp_path / "saved", found)
        except CheckpointError:
            found_out += 1
        else:
            assert all(torch.equal(found[name], tensor) for name, tensor in saved.items()), (start, stop)
    assert found_out > 100


@pytest.mark.parametrize(("name", "element"), [("blocks.0.bias", 300), ("blocks.1.weight", 171 * 512), ("small", 57)])
@on_ranks(2, 3)
def test_a_flipped_byte_in_a_part(world: World, tmp_path: Path, name: str, element: int) -> None:
    """In what was saved whole and is read by parts: in small tensors, one of them by columns, and where two parts meet."""
    whole = Square()
    whole.small = nn.Parameter(torch.randn(40, 50))
    save(tmp_path / "saved", {"model": whole})
    if world.rank == 0:
        flip_element(tmp_path / "saved", f"model.{name}", element)
    world.comm.exchange(None)
    model = shardrt.fully_shard(whole, shard_placement_fn=lambda param: Shard(1) if len(param) == 40 else None)
    with pytest.raises(CheckpointError, match=rf"tensor 'model.{name}' is damaged: the checksum"):
        load(tmp_path / "saved", {"model": model})


@on_ranks(2)
def test_a_flipped_byte_in_what_others_wrote(world: World, tmp_path: Path) -> None:
    """One checksum for an item of 1 MiB, of which each rank reads a half."""
    model = shard_blocks(Square())
    if world.rank == 0:
        stock_save(tmp_path / "saved", {"model": Square().state_dict()})
        flip_element(tmp_path / "saved", "model.blocks.0.weight", 70_000)
    world.comm.exchange(None)
    load(tmp_path / "saved", {"model": model})  # one half does not tell
    with pytest.raises(CheckpointError, match=r"tensor 'model.blocks.0.weight' is damaged"):
        load(tmp_path / "saved", {"model": Square()})


@on_ranks(2)
def test_a_flipped_byte_in_an_object(world: World, tmp_path: Path) -> None:
    save(tmp_path / "saved", {"text": "a" * 1000})
    if world.rank == 0:
        stored = read_stored(tmp_path / "saved").objects["text"]
        data = bytearray((tmp_path / "saved" / stored.file).read_bytes())
        data[stored.offset + data[stored.offset :].index(b"aaaa")] ^= 1
        (tmp_path / "saved" / stored.file).write_bytes(data)
    world.comm.exchange(None)
    refused(r"__0_0.distcp', object 'text' is damaged", lambda: load(tmp_path / "saved", {"text": ""}), CheckpointError)


# ---------------------------------------------------------------------- what torch's own functions wrote


def stock_save(folder: Path, state: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.checkpoint.state_dict_saver import save as stock

        stock(state, checkpoint_id=folder, no_dist=True)


def stock_state(whole: Made, flat: bool) -> Any:
    from torch.distributed.checkpoint import state_dict as stock

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return stock.get_state_dict(*whole, options=stock.StateDictOptions(flatten_optimizer_state_dict=flat))


@pytest.mark.parametrize("flat", [False, True], ids=["nested", "flat"])
@on_ranks(1, 2)
def test_what_torch_saved(world: World, tmp_path: Path, flat: bool) -> None:
    """Also in the form in which torchtitan saves optimizers, and with several parameters in one storage."""
    whole = reference()
    if world.rank == 0:
        model, optimizer = stock_state(whole, flat)
        model["blocks.0.norm.bias"] = torch.cat([torch.zeros(5), model["blocks.0.norm.bias"]])[5:]
        model["wide.weight"] = model["wide.weight"].t().contiguous().t()
        stock_save(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    world.comm.exchange(None)
    shard = shard_blocks(Model())
    made = shard, adamw([{"params": [param], "lr": 5.0} for param in shard.parameters()])
    load(tmp_path / "saved", state_of(made))
    check_same(whole, made)
    assert {group["lr"] for group in made[1].param_groups} == {1e-2}


@on_ranks(2)
def test_the_layout_of_torchtitan(world: World, tmp_path: Path) -> None:
    """A model without a key of its own, an optimizer that is flat: read, and written again with the same names."""
    whole = reference()
    if world.rank == 0:
        model, optimizer = stock_state(whole, True)
        stock_save(tmp_path / "saved", {**model, "optimizer": optimizer})
        stock_save(tmp_path / "flat", {**model, **{f"optimizer.{key}": value for key, value in optimizer.items()}})
    world.comm.exchange(None)
    for name in ("saved", "flat"):
        shard = shard_blocks(Model())
        made = shard, adamw(shard.parameters())
        load(tmp_path / name, {"": made[0], "optimizer": made[1]})
        check_same(whole, made)
    save(tmp_path / "again", {"": made[0], "optimizer": made[1]})
    again, saved = (read_stored(tmp_path / name) for name in ("again", "saved"))
    assert set(again.tensors) == set(saved.tensors)
    assert {name: path for name, path in again.paths.items() if "optimizer" not in name} == {
        name: path for name, path in saved.paths.items() if "optimizer" not in name
    }
    with pytest.raises(CheckpointError, match="two values of the state have the name 'mean'"):
        save(tmp_path / "never", {"": made[0], "mean": 1})


# ---------------------------------------------------------------------- what cannot be loaded


@on_ranks(2)
def test_what_ranks_give_that_does_not_fit(world: World, tmp_path: Path) -> None:
    """Another folder on each rank; quantised tensors; a file that is cut off."""
    for name in ("1", "2"):
        save(tmp_path / name, {"w": torch.ones(70_000)})
    with pytest.raises(CheckpointError, match=rf"rank 0 '{tmp_path}/1' .*, rank 1 '{tmp_path}/2' "):
        load(tmp_path / f"{world.rank + 1}", {"w": torch.ones(70_000)})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.ones(5), 0.1, 3, torch.qint8)
    refused(r"tensor 'w' .* is quantised", lambda: save(tmp_path / "never", {"w": quantised}), CheckpointError)
    refused(r"tensor 'w' .* is of 65 dims", lambda: save(tmp_path / "never", {"w": torch.ones([1] * 65)}), CheckpointError)
    if world.rank == 0:
        os.truncate(tmp_path / "1" / "__0_0.distcp", 200_000)
    world.comm.exchange(None)
    with pytest.raises(CheckpointError, match=rf"'{tmp_path}/1/__0_0.distcp' ends without the mark of a save.*was cut off"):
        load(tmp_path / "1", {"w": torch.ones(70_000)})


@on_ranks(1)
def test_conjugates(world: World, tmp_path: Path) -> None:
    """A view that conjugates is another tensor than the one in the same memory, and takes values as they are."""
    whole = torch.randn(10_000, dtype=torch.complex64)
    state = {"a": whole, "b": whole.conj(), "c": whole.imag, "d": whole.conj().imag}
    save(tmp_path / "saved", state)
    loaded = {
        "a": torch.zeros_like(whole),
        "b": torch.zeros_like(whole).conj(),
        "c": torch.zeros(10_000),
        "d": torch.zeros_like(whole).conj().imag,
    }
    load(tmp_path / "saved", loaded)
    for name, value in state.items():
        assert torch.equal(loaded[name], value), name


@on_ranks(1, 2)
def test_what_is_missing_or_does_not_fit(world: World, tmp_path: Path) -> None:
    """One error that lists all of it, on every rank."""
    model = shard_blocks(OddMLP(layers=1))
    save(tmp_path / "saved", {"model": model, "step": 1, "object": {"a": torch.ones(2)}})
    other = OddMLP(layers=2)
    other.out = nn.Linear(13, 4)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path / "saved", {"model": shard_blocks(other), "steps": 2, "object": {"a": torch.ones(3)}})
    message = str(caught.value).splitlines()[0]
    assert "the checkpoint lacks 'model.blocks.1." in message
    assert "'steps'" in message
    assert "'model.out.weight': expected shape (4, 13), found (3, 13)" in message
    assert "'object.a': expected shape (3,), found (2,)" in message
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match=r"the checkpoint lacks 'optimizer.state.inp.weight'"):
        load(tmp_path / "saved", {"model": model, "optimizer": optimizer})
    with pytest.raises(CheckpointError, match="a folder is a checkpoint once its save has ended"):
        load(tmp_path / "nothing", {"model": model})
