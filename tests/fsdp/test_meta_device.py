"""Models built on the meta device: sharded without values, materialised shard by shard, the same values on any world."""

import copy
import ctypes
from pathlib import Path

import pytest
import torch
from torch import nn

import shardrt
from ranks import on_ranks, refused
from shardrt.comm import World
from toys import OddBlock, OddMLP, TiedGPT, batch, check_backward, compare, logged, loss_of, shard_blocks, tokens

GIB = 1 << 30


def on_meta(kind: type[nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return kind()


@on_ranks(1, 2, 3)
def test_from_a_state_dict(world: World) -> None:
    """Shard on meta, then load another model's shards: ties are kept, and training equals that of the other model."""
    for kind, x in ((OddMLP, batch(0).float()), (TiedGPT, tokens(0))):
        whole = kind()
        source, model = shard_blocks(copy.deepcopy(whole)), shard_blocks(on_meta(kind))
        assert all(param.is_meta and isinstance(param, shardrt.DTensor) for param in model.parameters())
        with pytest.raises(RuntimeError, match="'OddMLP'.*on the meta device.*call to_empty" if kind is OddMLP else "meta"):
            model(x)
        model.to_empty(device=world.device)
        model.load_state_dict(source.state_dict())
        compare(whole, model, 0.0, "loaded")
        check_backward(world, whole, model, x, 1e-5)
    assert model.head.weight is model.tokens.weight


class Buffered(OddMLP):
    """Buffers that are saved, and one that is computed."""

    def __init__(self, dtype: torch.dtype = torch.float32, persistent: bool = False, rows: int = 3) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(3, dtype=dtype), persistent=persistent)
        self.blocks[0].register_buffer("saved", torch.ones(rows))


@on_ranks(2, 3)
def test_what_has_values_on_some_ranks_only(world: World) -> None:
    """Named with the ranks by rank 0, which has nothing to tell; refused on every rank alike while it is on meta."""
    last, x = world.size - 1, batch(world.rank).float()
    model = shard_blocks(on_meta(Buffered) if world.rank == last else Buffered())
    refused(rf"' runs while .* on the meta device .*\(on rank {last}\)", lambda: model(x), RuntimeError)
    model._apply(lambda tensor: torch.empty_like(tensor, device=world.device) if tensor.is_meta else tensor)
    with torch.no_grad():
        for param in (*model.blocks.parameters(), *model.out.parameters()):
            param.fill_(0.5)
    with logged() as lines:
        model(x)
        model(x)
    names = ", ".join(f"'{name}' (rank {last})" for name in ("table", "inp.weight", "inp.bias", "blocks.0.saved"))
    assert [line.partition(": to_empty")[0] for line in lines] == [f"without values: {names}"] * (world.rank == 0)


@on_ranks(2, 3)
def test_buffers_that_are_others_on_some_ranks(world: World) -> None:
    last, x = world.size - 1, batch(world.rank).float()
    options = {"dtype": torch.float64}, {"persistent": True}, {"rows": 4}
    texts = "table.*torch.float64", "table.*of shape.*, persistent", "blocks.0.saved.*of shape"
    for others, text in zip(options, texts, strict=True):
        model = shard_blocks(Buffered(**(others if world.rank == last else {})))
        with pytest.raises(ValueError, match=rf"first forward of 'Buffered': buffer '{text}.* on rank {last}"):
            model(x)
    model = shard_blocks(Buffered())
    if world.rank == last:
        model.table = model.table.to("meta")
    refused(rf"buffer 'table' .*on the meta device on rank {last}", lambda: model(x))
    model.table = torch.ones(3 + world.rank)  # a buffer that is not saved may have the size of the rank's batch
    model(x).sum().backward()


@on_ranks(1, 2)
def test_a_list_of_modules(world: World) -> None:
    """The group is materialised when the last of its modules is."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    shardrt.fully_shard([model[0], model[1]])
    model[2].to_empty(device=world.device)
    model[1].to_empty(device=world.device)
    shardrt.fully_shard(model)
    with pytest.raises(RuntimeError, match=r"'0, 1' has values for some of its parameters, but none for '0.weight'"):
        model(batch(0).float())
    model[0].to_empty(device=world.device)
    for module in model:
        module.reset_parameters()
    model(batch(0).float()).sum().backward()
    assert torch.equal(model[1].weight.full_tensor(), torch.ones(7))
    assert all(param.grad is not None for param in model.parameters())


class Initialised(OddMLP):
    def reset(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.LayerNorm):
                module.reset_parameters()
            if isinstance(module, OddBlock):
                nn.init.trunc_normal_(module.gate)
                nn.init.constant_(module.scale, 0.5)


@on_ranks(1, 2, 3, 4)
def test_initialised_alike_on_any_world(world: World) -> None:
    """A mesh of all ranks and a mesh of one rank initialise the same full tensors."""
    alone = world.comm.split(world.rank, 0, "alone")
    made = []
    for mesh in (world.mesh, shardrt.DeviceMesh(alone)):
        torch.manual_seed(7)
        model = shard_blocks(on_meta(Initialised), mesh=mesh)
        model.to_empty(device=world.device)
        model.reset()
        made.append(model)
    for one, other in zip(made[0].parameters(), made[1].parameters(), strict=True):
        assert torch.equal(one.full_tensor(), other.full_tensor())
    assert made[0].blocks[0].up.weight.full_tensor().std() > 0.1
    assert not torch.equal(made[0].blocks[0].up.weight.full_tensor(), made[0].blocks[1].up.weight.full_tensor())
    assert loss_of(made[0], batch(0).float()).isfinite()
    made[1].param_group.device_mesh.close()
    alone.close()


class Wide(nn.Module):
    """16 square blocks, never whole anywhere."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(16))


def sharded_on_meta(width: int) -> nn.Module:
    with torch.device("meta"):
        model = Wide(width).bfloat16()
    return shard_blocks(model)


def reset_peak() -> int:
    """Give back what earlier tests have freed, and let the peak of the process's memory begin there: in bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> int:
    """The peak of the process's resident memory, in bytes."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


@pytest.mark.parametrize(
    ("width", "billions"), [(2795, 0.12), pytest.param(11180, 2.0, marks=pytest.mark.all)], ids=["125 million", "2 billion"]
)
@on_ranks(4)
def test_two_billion_parameters(world: World, width: int, billions: float) -> None:
    """bfloat16 shards of a quarter, and little beside them while they are made.

    Of two billion parameters the whole model is 4 GB, and a rank has 1 GB.
    """
    sharded_on_meta(8).to_empty(device=world.device)  # imports what the first one does
    before = reset_peak()
    model = sharded_on_meta(width)
    numel = sum(param.numel() for param in model.parameters())
    assert numel > billions * 1e9
    assert peak() < before + GIB // 16
    model.to_empty(device=world.device)
    for block in model.blocks:
        nn.init.normal_(block.weight, std=0.02)
        nn.init.zeros_(block.bias)
    taken = peak() - before
    mine = numel * 2 // 4
    assert taken < 1.5 * mine, f"{taken / mine:.2f} times the shards"
    assert abs(model.blocks[3].weight.to_local().float().std() - 0.02) < 1e-3
