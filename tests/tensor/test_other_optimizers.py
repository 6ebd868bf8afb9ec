"""Loading a full optimizer state, and optimizers of other packages on local shards."""

import copy
import importlib
import io
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shardrt
from checkpoints import shared_folder
from ranks import on_ranks, refused
from shardrt import checkpoint
from shardrt.checkpoint import CheckpointError
from shardrt.checkpoint.state_dicts.get import full_optimizer_state
from shardrt.checkpoint.state_dicts.set import load_full_optimizer_state
from shardrt.comm import World
from toys import OddMLP, batch, compare, loss_of, shard_blocks, step_all, without_scalars

Make = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range, world: World | None = None) -> torch.Tensor:
    """Train, on this rank's chunk of each batch if a world is given; returns the last loss."""
    for step in numbers:
        x = batch(step).to(next(model.parameters()).dtype)
        loss = loss_of(model, x if world is None else x.chunk(world.size)[world.rank])
        loss.backward()
        step_all(optimizer)
    return loss.detach()


TORCH: dict[str, Make] = {
    "adamw foreach": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, foreach=True),
    "adamw loop": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, foreach=False, amsgrad=True),
    "adamw fused": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, fused=True),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2, eps=1e-3),
}


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[torch.Tensor, str, torch.Tensor]]:
    for param, state in optimizer.state.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield param, key, value


@on_ranks(2, 3)
@pytest.mark.parametrize("kind", TORCH)
def test_a_full_optimizer_state_is_sharded(world: World, kind: str) -> None:
    """Training goes on as in one process; odd sizes, scalars, rows and elements; in any order of load and step."""
    make = TORCH[kind]
    whole = without_scalars(OddMLP().double()) if kind == "adamw fused" else OddMLP().double()
    optimizer = make(whole.parameters())
    steps(whole, optimizer, range(2))
    model = copy.deepcopy(whole)
    by_columns = lambda param: shardrt.Shard(1) if param.shape == (3, 13) else None  # noqa: E731
    sharded = make(shard_blocks(model, shard_placement_fn=by_columns).parameters())
    sharded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # which casts some of it
    steps(whole, optimizer, range(2, 4))
    steps(model, sharded, range(2, 4), world)
    compare(whole, model, 1e-11, "after the first load")
    for param, key, value in state_tensors(sharded):
        if key in ("step", "mu_product"):
            assert not isinstance(value, shardrt.DTensor)
        else:
            assert isinstance(value, shardrt.DTensor), key
            assert value.spec == param.spec
            assert value.to_local().stride() == param.to_local().stride()
    sharded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert all(isinstance(value, shardrt.DTensor) for _, key, value in state_tensors(sharded) if value.dim())  # at once
    again = make(model.parameters())
    again.load_state_dict(copy.deepcopy(sharded.state_dict()))
    steps(whole, optimizer, range(4, 6))
    steps(model, again, range(4, 6), world)
    compare(whole, model, 1e-11, "after the second load")
    early = make(model.parameters())
    early.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    shardrt.shard_optimizer_state(early)
    assert all(isinstance(value, shardrt.DTensor) for _, key, value in state_tensors(early) if value.dim())


@on_ranks(2, 3)
def test_a_full_state_by_elements_and_by_columns(world: World) -> None:
    """Each rank keeps its elements of a 1-D parameter, of a `FlatShard`, and of rows along another dim."""
    model = nn.ParameterDict()
    model["long"] = nn.Parameter(torch.arange(64.0 * world.size))
    model["tall"] = nn.Parameter(torch.randn(1013, 3))
    shardrt.fully_shard(model, shard_placement_fn=lambda param: shardrt.Shard(1) if param.dim() == 2 else None)
    wide = shardrt.fully_shard(nn.Linear(1013, 2 * world.size - 1, bias=False)).weight
    params = [*model.values(), wide]
    optimizer = torch.optim.SGD(params, lr=1.0, momentum=0.5)
    assert isinstance(wide.placements[0], shardrt.FlatShard)
    torch.manual_seed(0)
    whole = {index: {"momentum_buffer": torch.randn(param.shape)} for index, param in enumerate(params)}
    optimizer.load_state_dict({"state": whole, "param_groups": optimizer.state_dict()["param_groups"]})
    shardrt.shard_optimizer_state(optimizer)
    for index, param in enumerate(params):
        kept = optimizer.state[param]["momentum_buffer"]
        assert kept.to_local().shape == param.to_local().shape
        assert torch.equal(kept.full_tensor(), whole[index]["momentum_buffer"])


# ---------------------------------------------------------------------- operators of users


@torch.library.custom_op("shardrt_tests::decay", mutates_args={"x"})
def decay(name: str, x: torch.Tensor, y: torch.Tensor, table: torch.Tensor, rate: float) -> None:
    """x -= rate * table[0, 0] * y; needs at least one element."""
    x.view(-1)[0].item()
    x.sub_(y, alpha=rate * table[0, 0].item())


@torch.library.custom_op("shardrt_tests::block_maxima", mutates_args=())
def block_maxima(x: torch.Tensor) -> torch.Tensor:
    """Each element's block's maximum, in blocks of four."""
    flat = nn.functional.pad(x.reshape(-1), (0, -x.numel() % 4), value=float("-inf")).view(-1, 4)
    return flat.amax(1, keepdim=True).expand(-1, 4).reshape(-1)[: x.numel()].reshape(x.shape)


@torch.library.custom_op("shardrt_tests::shrink", mutates_args=())
def shrink(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1)[:1].clone()


@on_ranks(2, 3)
def test_registered_operators_run_on_local_shards(world: World) -> None:
    ops = torch.ops.shardrt_tests
    full = torch.arange(12.0).view(4, 3)
    table = torch.full((4, 3), 2.0)  # of the global shape, but passed unchanged
    x, y = (shardrt.distribute_tensor(value, world.mesh, [shardrt.Shard(0)]) for value in (full, full + 1))
    with pytest.raises(NotImplementedError, match=r"shardrt_tests.decay.default is not defined on sharded tensors"):
        ops.decay("one", x, y, table, 0.5)
    shardrt.register_local_op(ops.decay, plain=["table"])
    shardrt.register_local_op(ops.block_maxima.default)
    shardrt.register_local_op(ops.shrink)
    before = x._version
    ops.decay("one", x, y, table, 0.5)
    assert x._version > before
    assert torch.equal(x.full_tensor(), full - (full + 1))
    ops.decay("one", x=x, y=full + 1, rate=0.5, table=table)  # of a plain tensor, this rank's shard
    assert torch.equal(x.full_tensor(), full - 2 * (full + 1))
    maxima = ops.block_maxima(y)
    assert isinstance(maxima, shardrt.DTensor)
    assert maxima.spec == y.spec
    assert torch.equal(maxima.to_local(), ops.block_maxima(y.to_local()))
    other = y.redistribute([shardrt.Shard(1)])
    refused("shardrt_tests::decay on tensors with different placements", lambda: ops.decay("one", x, other, table, 0.5))
    with pytest.raises(
        ValueError, match=r"shardrt_tests::shrink, .* returned a tensor of shape \(1,\) for a local shard of shape"
    ):
        ops.shrink(shardrt.distribute_tensor(full.repeat(world.size, 1), world.mesh, [shardrt.Shard(0)]))
    partial = shardrt.DTensor.from_local(full, world.mesh, [shardrt.Partial()])
    refused("is not defined on sharded tensors", lambda: ops.block_maxima(partial), NotImplementedError)
    refused("expected an operator", lambda: shardrt.register_local_op(torch.add), TypeError)
    with pytest.raises(ValueError, match=r"plain=\['tables'\].*has no such arguments; it has .*'table'"):
        shardrt.register_local_op(ops.decay, plain=["tables"])


# ---------------------------------------------------------------------- optimizers of other packages


class Wide(nn.Module):
    """Parts large enough for 8-bit state, small ones, and one of which most ranks have nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 130)
        self.hidden = nn.Linear(130, 128)
        self.out = nn.Linear(128, 3)
        self.gain = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * self.out(torch.tanh(self.hidden(torch.tanh(self.inp(x)))))


def sharded_wide() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    whole = Wide()
    model = copy.deepcopy(whole)
    by_columns = lambda param: shardrt.Shard(1) if param.shape == (128, 130) else None  # noqa: E731
    shardrt.fully_shard(model, shard_placement_fn=by_columns)
    return whole, model


def local_params_of(model: nn.Module) -> list[nn.Parameter]:
    """Plain parameters with the values of the local shards, as a reference."""
    return [nn.Parameter(contiguous_copy(param)) for param in model.parameters()]


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, shardrt.DTensor)
    return tensor.to_local().detach().clone(memory_format=torch.contiguous_format)


def check_on_local_shards(world: World, make: Make, rounds: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The same bits as a step on plain copies of the local shards, and close to training in one process."""
    whole, model = sharded_wide()
    optimizer, alone = make(model.parameters()), make(whole.parameters())
    parts = local_params_of(model)
    reference = make(part for part in parts if part.numel())
    for step in range(rounds):
        x = batch(step).float()
        loss_of(model, x.chunk(world.size)[world.rank]).backward()
        for part, param in zip(parts, model.parameters(), strict=True):
            part.grad = contiguous_copy(param.grad)
        expected = loss_of(whole, x)
        expected.backward()
        for each in (optimizer, reference, alone):
            step_all(each)
        assert all(param.grad is None for param in model.parameters())
    for (name, param), part in zip(model.named_parameters(), parts, strict=True):
        assert torch.equal(param.to_local().detach(), part.detach()), name
    with torch.no_grad():
        torch.testing.assert_close(loss_of(model, x), loss_of(whole, x), rtol=1e-2, atol=1e-3)
    assert [group["params"] for group in optimizer.param_groups] == [list(model.parameters())]
    assert all(isinstance(param, shardrt.DTensor) for param in optimizer.state)
    return model, optimizer


BITSANDBYTES = ["AdamW", "AdamW8bit", "Lion8bit", "PagedAdamW8bit", "AdEMAMix8bit"]


@on_ranks(2, 3)
def test_bitsandbytes(world: World) -> None:
    optim = importlib.import_module("bitsandbytes").optim
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU")
        for name in BITSANDBYTES:
            model, optimizer = check_on_local_shards(world, lambda params, name=name: getattr(optim, name)(params, lr=1e-3))
            local = model.hidden.weight.to_local()
            state = optimizer.state[model.hidden.weight]
            assert ("absmax1" in state) == (name.endswith("8bit") and local.numel() >= 4096)
            if name == "AdamW":
                check_full_state(world, model, optimizer, lambda params: optim.AdamW(params, lr=1e-3))
            else:
                with pytest.raises(RuntimeError, match="depends on where the shards begin, so it has no full form"):
                    full_optimizer_state(optimizer, keep=True)
            if "absmax1" in state:
                assert state["absmax1"].shape[-1] == -(-local.numel() // 256)  # blocks of the local shard
            check_resume(world, model, optimizer, lambda params, name=name: getattr(optim, name)(params, lr=1e-3))


def check_full_state(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, make: Make) -> None:
    """A lone process can go on from it, and so can other shards."""
    state = full_optimizer_state(optimizer, keep=world.rank == world.size - 1)
    assert bool(state) == (world.rank == world.size - 1)
    state = world.comm.exchange(state)[-1]
    whole, other = sharded_wide()
    for each in (whole, other):
        each.load_state_dict({name: param.full_tensor() for name, param in model.state_dict().items()})
    alone, again = make(whole.parameters()), make(other.parameters())
    alone.load_state_dict(copy.deepcopy(state))
    load_full_optimizer_state(again, state)
    steps(whole, alone, range(5, 7))
    for each, its in ((model, optimizer), (other, again)):
        steps(each, its, range(5, 7), world)
    compare(whole, other, 1e-4, "from a full state")
    assert all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    with pytest.raises(CheckpointError, match=r"has groups of \[\d+\] parameters, expected \[1\]"):
        load_full_optimizer_state(make([next(other.parameters())]), state)


def check_resume(world: World, model: nn.Module, optimizer: torch.optim.Optimizer, make: Make) -> None:
    """A new optimizer with this rank's loaded state computes the same bits."""
    other = copy.deepcopy(model)
    again = make(other.parameters())
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    again.load_state_dict(torch.load(file))
    steps(model, optimizer, range(5, 7), world)
    steps(other, again, range(5, 7), world)
    for param, expected in zip(other.parameters(), model.parameters(), strict=True):
        assert torch.equal(param.to_local(), expected.to_local())


@on_ranks(2)
def test_bitsandbytes_settings_and_full_states(world: World) -> None:
    bitsandbytes = importlib.import_module("bitsandbytes")
    whole, model = sharded_wide()
    manager = bitsandbytes.optim.GlobalOptimManager.get_instance()
    manager.register_module_override(model.hidden, "weight", {"optim_bits": 32})
    optimizer = bitsandbytes.optim.Adam8bit(model.parameters())
    alone = bitsandbytes.optim.Adam8bit(whole.parameters())
    steps(model, optimizer, range(1), world)
    manager.initialize()  # forgets the settings, which are of every optimizer in the process
    steps(whole, alone, range(1))
    assert optimizer.state[model.hidden.weight]["state1"].dtype == torch.float32
    optimizer.load_state_dict(alone.state_dict())
    loss_of(model, batch(0).float()).backward()
    refused(r"state 'state1' of a parameter of shape \(128, 130\) is that of the full parameter", optimizer.step)
    whole, model = sharded_wide()
    optimizer, alone = (bitsandbytes.optim.AdamW32bit(each.parameters()) for each in (model, whole))
    steps(whole, alone, range(2))
    model.load_state_dict(whole.state_dict())
    optimizer.load_state_dict(alone.state_dict())
    steps(whole, alone, range(2, 4))
    steps(model, optimizer, range(2, 4), world)
    compare(whole, model, 1e-4, "after a load")
    assert optimizer.state[model.hidden.weight]["state1"].numel() == model.hidden.weight.to_local().numel()
    with pytest.raises(NotImplementedError, match=r"LAMB.max_unorm=1.0. on sharded parameters"):
        steps(model, bitsandbytes.optim.LAMB(model.parameters()), range(1), world)


@on_ranks(2, 3)
def test_torchao(world: World) -> None:
    optim = importlib.import_module("torchao.optim")
    with torch.compiler.set_stance("force_eager"):
        for name in ("AdamW8bit", "AdamW4bit", "AdamWFp8"):
            make = lambda params, name=name: getattr(optim, name)(params, lr=1e-3)  # noqa: E731
            model, optimizer = check_on_local_shards(world, make)
            local = model.hidden.weight.to_local()
            state = optimizer.state[model.hidden.weight]["exp_avg"]
            assert state.numel() == local.numel()
            assert hasattr(state, "codes") == (local.numel() % state_block(name) == 0)
            check_resume(world, model, optimizer, make)


def state_block(name: str) -> int:
    return 128 if name == "AdamW4bit" else 256


class Signs(torch.optim.Optimizer):
    """Steps by the sign of the momentum, kept in a buffer made by shape; cannot step on `DTensor`s."""

    fails = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else closure()
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                assert not isinstance(param, shardrt.DTensor)
                momentum = self.state[param].setdefault("momentum", torch.zeros(param.numel()))
                momentum.mul_(0.9).add_(param.grad.view(-1))
                param.data = param.data - 0.1 * momentum.sign().view(param.shape)
                assert not self.fails
        return loss


@on_ranks(2, 3)
def test_registered_optimizers_step_on_local_shards(world: World) -> None:
    shardrt.register_local_optimizer(Signs)
    plain = nn.Parameter(torch.ones(3))
    check_on_local_shards(world, Signs)
    _, model = sharded_wide()
    optimizer = Signs([*model.parameters(), plain])
    x = batch(0).float().chunk(world.size)[world.rank]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x) + plain.sum()
        loss.backward()
        return loss

    with torch.no_grad():
        expected = loss_of(model, x) + 3
    assert torch.equal(optimizer.step(closure), expected)
    torch.testing.assert_close(plain, torch.full((3,), 0.9))
    optimizer.fails = True
    with pytest.raises(AssertionError):
        optimizer.step(closure)
    optimizer.fails = False
    refused("the previous step of Signs was interrupted by an exception", lambda: optimizer.step(closure), RuntimeError)
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    optimizer.step(closure)
    refused(r"expected a subclass of torch.optim.Optimizer", lambda: shardrt.register_local_optimizer(nn.Linear), TypeError)


class WithOwnState(torch.optim.Optimizer):
    """Keeps something beside the state of its parameters."""

    def __init__(self, params: Iterator[nn.Parameter], key: Any, value: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.state[key] = value

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in (param for group in self.param_groups for param in group["params"] if param.grad is not None):
            state = self.state[param]
            state.setdefault("sum", torch.zeros_like(param)).add_(param.grad)
            param.add_(state["sum"], alpha=-0.1)


class LocalWithOwnState(WithOwnState):
    """The same on local shards."""


FLAT = checkpoint.StateDictOptions(flatten_optimizer_state_dict=True)
FULL = checkpoint.StateDictOptions(full_state_dict=True)


@pytest.mark.parametrize("kind", [WithOwnState, LocalWithOwnState])
@on_ranks(1, 2)
def test_state_that_is_no_parameters(world: World, kind: type[WithOwnState]) -> None:
    """Under strings, numbers and tuples: an optimizer steps with it, and it goes into state dicts and checkpoints."""
    shardrt.register_local_optimizer(LocalWithOwnState)
    for key, value in (("total", 3), ("inner", {"a": 1, "b": torch.ones(2)}), ("t", torch.arange(3.0)), (("a", 1), 5), (70, 1)):

        def make(key: Any = key, value: Any = value) -> tuple[nn.Module, WithOwnState]:
            model = shard_blocks(OddMLP().double())
            optimizer = kind(model.parameters(), key, value)
            steps(model, optimizer, range(1), world)
            return model, optimizer

        model, optimizer = make()
        with shared_folder(world) as folder:
            offloading = shardrt.offload_state_to_disk(optimizer, folder)
            steps(model, optimizer, range(1, 2), world)
            offloading.remove()
            checkpoint.save(folder / "saved", {"model": model, "optimizer": optimizer})
            for load in ("state_dict", "sharded", "full", "flat", "whole", "files"):
                other_model, other = make(
                    value=torch.zeros(3) if key == "t" else {"b": torch.zeros(2)} if key == "inner" else 0
                )
                if load == "state_dict":
                    other.load_state_dict(optimizer.state_dict())
                elif load == "whole":
                    load_full_optimizer_state(other, full_optimizer_state(optimizer, keep=True))
                elif load == "files":
                    checkpoint.load(folder / "saved", {"model": other_model, "optimizer": other})
                else:
                    options = {"sharded": None, "full": FULL, "flat": FLAT}[load]
                    state = checkpoint.get_optimizer_state_dict(model, optimizer, options=options)
                    checkpoint.set_optimizer_state_dict(other_model, other, state, options=options)
                torch.testing.assert_close(other.state[key], value, msg=f"{key} {load}")
                for param, own in zip(model.parameters(), other_model.parameters(), strict=True):
                    sums = [
                        each.state[of]["sum"] if of in each.state else None for each, of in ((optimizer, param), (other, own))
                    ]
                    assert (sums[0] is None) == (sums[1] is None)
                    if sums[0] is not None:
                        assert torch.equal(*(getattr(each, "_local_tensor", each) for each in sums))


@on_ranks(2)
def test_state_under_the_number_of_a_parameter_is_refused(world: World) -> None:
    model = shard_blocks(OddMLP())
    optimizer = WithOwnState(model.parameters(), 1, 5)
    with pytest.raises(RuntimeError, match=r"WithOwnState\.state has the key 1, under which .* parameter 1"):
        checkpoint.get_optimizer_state_dict(model, optimizer)


@on_ranks(2)
def test_own_state_of_several_optimizers(world: World) -> None:
    """Each gets what it has."""
    model = shard_blocks(OddMLP())
    params = list(model.parameters())

    def make(value: int) -> list[WithOwnState]:
        return [WithOwnState(iter(params[:3]), "first", value), WithOwnState(iter(params[3:]), "second", 2 * value)]

    made, others = make(1), make(7)
    checkpoint.set_optimizer_state_dict(model, others, checkpoint.get_optimizer_state_dict(model, made))
    assert [dict(each.state) for each in others] == [{"first": 1}, {"second": 2}]
