"""Bad input raises the same error on every rank, with the name of the object, before any communication."""

import copy
import inspect
import mmap
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pytest
import torch
from mpi4py import MPI
from torch import nn

import shardrt
from ranks import on_ranks, refused, settings_of
from shardrt import checkpoint
from shardrt.comm import ReduceOp, World
from shardrt.comm.backends.mpi import MpiBackend
from shardrt.comm.backends.node.node_algorithms import NodeAlgorithms
from shardrt.comm.backends.node.shared_memory import _warn_of_no_space, reserve
from shardrt.fsdp.gather.gather import FlatGather
from shardrt.fsdp.reduce.reduce import GradientReduction
from shardrt.parallel import ColwiseParallel, RowwiseParallel
from toys import OddMLP, TiedGPT, batch, loss_of, paired, shard_blocks, step_all, tokens


@on_ranks(1, 2, 3)
def test_modules_that_cannot_be_sharded(world: World) -> None:
    several: list[nn.Module] = [nn.Linear(2, 2), 3]
    refused("fully_shard takes an nn.Module or several, found int", lambda: shardrt.fully_shard(several), TypeError)
    inner = nn.Linear(2, 2)
    refused("'Linear' is inside 'Sequential', which is in the same", lambda: shardrt.fully_shard([nn.Sequential(inner), inner]))
    refused("'Linear' is in the list twice", lambda: shardrt.fully_shard([inner, inner]))
    refused("expected a module, found an empty list", lambda: shardrt.fully_shard([]))
    refused("'ModuleList' has no forward", lambda: shardrt.fully_shard(nn.ModuleList([nn.Linear(2, 2)])))
    once = shardrt.fully_shard(nn.Linear(2, 2))
    refused("'FSDPLinear' is sharded already", lambda: shardrt.fully_shard(once))
    on_meta = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    refused("several devices .*'0.bias' on cpu, '1.bias' on meta", lambda: shardrt.fully_shard(on_meta))
    wrong_dim = lambda param: shardrt.Shard(1)  # noqa: E731
    refused(
        "'bias': Shard.dim=1. of a parameter of shape",
        lambda: shardrt.fully_shard(nn.Linear(2, 2), shard_placement_fn=wrong_dim),
    )


@on_ranks(2)
def test_modules_without_shapes(world: World) -> None:
    """The error says what to do first; after it, the module can be sharded."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(4), nn.LazyBatchNorm1d(affine=False))
    refused("'1.weight' of a LazyLinear has no shape yet: run a forward", lambda: shardrt.fully_shard(model))
    refused("'running_mean' of a LazyBatchNorm1d has no shape yet", lambda: shardrt.fully_shard(model[2]))
    model(torch.ones(2, 3))
    assert shardrt.fully_shard(model)(torch.ones(2, 3)).shape == (2, 4)


@on_ranks(2)
def test_another_shape_comes_before_sharding(world: World) -> None:
    embedding = shardrt.fully_shard(nn.Embedding(10, 3))
    refused(
        r"'weight' .*shape \(10, 3\).*found \(12, 3\).*resize_token_embeddings\(\), change before sharding",
        lambda: setattr(embedding.weight, "data", torch.zeros(12, 3)),
    )


@on_ranks(2, 3)
def test_parameter_shared_across_groups(world: World) -> None:
    model = TiedGPT()
    shardrt.fully_shard(model.tokens)
    refused(
        "parameter 'head.weight' is shared with 'Embedding', which is sharded already",
        lambda: shardrt.fully_shard(model),
    )
    shared_module = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3)))
    shared_module[1].append(shared_module[0])
    shardrt.fully_shard(shared_module[1])
    refused("parameter '0.weight' is shared with 'Sequential'", lambda: shardrt.fully_shard(shared_module))


@on_ranks(2)
def test_a_block_after_the_module_that_contains_it(world: World) -> None:
    model = OddMLP()
    shardrt.fully_shard(model)
    expected = "'OddBlock' is inside 'OddMLP', which is sharded already, parameter 'gate' with it: call fully_shard bottom-up"
    refused(expected, lambda: shardrt.fully_shard(model.blocks[0]))


@on_ranks(2)
def test_a_parameter_that_is_sharded_otherwise(world: World) -> None:
    """A DTensor on the same mesh is accepted; on another mesh it would lose its sharding."""
    meshes = [shardrt.DeviceMesh(world.comm, (world.size,), (name,)) for name in ("tp", "dp")]
    for mesh in meshes:
        model = nn.Linear(4, 6)
        whole = model.weight.detach().clone()
        model.weight = nn.Parameter(shardrt.distribute_tensor(whole, mesh, [shardrt.Shard(1)]))
        if mesh is meshes[1]:
            shardrt.fully_shard(model, mesh=mesh)
            assert torch.equal(model.weight.full_tensor(), whole)
        else:
            expected = r"parameter 'weight' is a DTensor.*DeviceMesh\(tp=2.*over DeviceMesh\(dp=2.*overlap in this rank alone"
            refused(expected, lambda model=model: shardrt.fully_shard(model, mesh=meshes[1]))
        mesh.close()


@on_ranks(2, 4)
def test_one_rank_is_wrong(world: World) -> None:
    """The other ranks raise as well, and their message names the rank."""
    last = world.size - 1
    module = nn.ModuleList() if world.rank == last else nn.Linear(2, 2)
    refused(rf"'ModuleList' has no forward .* \(on rank {last}\)", lambda: shardrt.fully_shard(module))
    world.barrier()


class Elsewhere(torch.Tensor):
    """A tensor without values that claims to be on a GPU, on any machine."""

    @staticmethod
    def __new__(cls, *shape: int) -> "Elsewhere":
        return torch.Tensor._make_wrapper_subclass(cls, shape, device="cuda:0")

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: tuple[Any, ...] = (), kwargs: object = None
    ) -> torch.Tensor:
        assert func is torch.ops.aten.detach.default
        return Elsewhere(*args[0].shape)

    __torch_function__ = torch._C._disabled_torch_function_impl


@on_ranks(1, 2)
def test_parameters_on_other_devices(world: World) -> None:
    model = nn.Linear(2, 2)
    if world.rank == world.size - 1:
        model.bias = nn.Parameter(Elsewhere(2))
    expected = rf"parameter 'bias' is on cuda:0; expected the CPU or the mesh's device, cpu \(on rank {world.size - 1}\)"
    refused(expected, lambda: shardrt.fully_shard(model))
    mesh = shardrt.DeviceMesh(world.comm)
    mesh.device = torch.device("cuda:0")
    expected = "'Linear' has parameters on several devices .'weight' on cpu, 'bias' on cuda.; move the module to one"
    refused(expected, lambda: shardrt.fully_shard(model, mesh=mesh))
    world.barrier()


@on_ranks(2, 3)
def test_ranks_with_different_models(world: World) -> None:
    expected = r"the ranks have different modules; the first difference is rank 0: weight: \(2, 4\).*rank 1: weight: \(2, 5\)"
    refused(expected, lambda: shardrt.fully_shard(nn.Linear(4 + (world.rank == 1), 2)))
    names = nn.Linear(2, 2, bias=world.rank == 0)
    refused("rank 0: bias: .*rank 1: nothing", lambda: shardrt.fully_shard(names))
    dtype = torch.float64 if world.rank == 1 else torch.float32
    refused("torch.float32.*rank 1: weight: .2, 2. torch.float64", lambda: shardrt.fully_shard(nn.Linear(2, 2, dtype=dtype)))
    world.barrier()


@on_ranks(1, 2, 3)
def test_meshes_that_do_not_match(world: World) -> None:
    refused("has 5 ranks and does not match", lambda: shardrt.DeviceMesh(world.comm, (5,)))
    cube = shardrt.DeviceMesh(world.comm, (world.size, 1, 1), ("pp", "dp", "tp"))
    refused("expected one axis to shard over, or two.*mesh.'tp'.", lambda: shardrt.fully_shard(nn.Linear(2, 2), mesh=cube))
    refused("expected one axis; name it, as in mesh.'tp'.", lambda: shardrt.replicate(nn.Linear(2, 2), mesh=cube))
    too_many = world.size + 1
    refused("=0.: expected a divisor", lambda: shardrt.fully_shard(nn.Linear(2, 2), reshard_after_forward=0))
    refused("expected a divisor of the", lambda: shardrt.fully_shard(nn.Linear(2, 2), reshard_after_forward=too_many))
    refused("expected a DeviceMesh", lambda: shardrt.fully_shard(nn.Linear(2, 2), mesh=4), TypeError)


@on_ranks(1, 2)
def test_forward_of_a_child_before_the_root(world: World) -> None:
    model = shard_blocks(OddMLP())
    hidden = torch.zeros(2, 13)
    refused("forward of 'OddBlock' before that of its root .*'OddMLP'", lambda: model.blocks[0](hidden), RuntimeError)
    model(batch(0).float())
    model.blocks[0](hidden)


@on_ranks(1, 2)
def test_policy(world: World) -> None:
    refused("param_dtype=torch.int32", lambda: shardrt.MixedPrecisionPolicy(param_dtype=torch.int32))


@on_ranks(1, 2, 3)
def test_exception_in_forward_and_in_backward(world: World) -> None:
    """Every forward raises an error until the reset; afterwards training continues, bitwise as without the exception."""

    class Explodes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("backward went wrong")

    def run(fail: bool) -> list[torch.Tensor]:
        torch.manual_seed(2)
        model = shard_blocks(OddMLP())
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            if fail and step == 1:
                refused("mat1 and mat2 shapes", lambda: model(torch.zeros(2, 7)), RuntimeError)
                refused("cannot go from FORWARD to FORWARD", lambda: model(batch(0).float()), RuntimeError)
                model.reset_iter_state()
                handle = model.blocks[1].register_forward_hook(lambda module, args, out: Explodes.apply(out))
                refused("went wrong", lambda: model(batch(0).float()).sum().backward(), ArithmeticError)
                refused("did not end", lambda: model(batch(0).float()), RuntimeError)
                handle.remove()
                model.reset_iter_state()
                optimizer.zero_grad()  # blocks whose backward came before the exception have gradients
            model(batch(step).float().chunk(world.size)[world.rank]).square().mean().backward()
            step_all(optimizer)
        return [param.full_tensor() for param in model.parameters()]

    for one, other in zip(run(fail=False), run(fail=True), strict=True):
        assert torch.equal(one, other)


@on_ranks(1, 2)
def test_exception_at_the_end_of_a_backward(world: World) -> None:
    """No group is in its backward any more, when the last ones are reduced; the next forward refuses all the same."""

    def fail(gradients: torch.Tensor) -> None:
        raise ArithmeticError("in the hook")

    torch.manual_seed(2)
    whole, model = paired(OddMLP().double())
    x = batch(0).requires_grad_()
    model.set_all_reduce_hook(fail)
    loss = loss_of(model, x)
    refused("in the hook", lambda: loss.backward(retain_graph=True), ArithmeticError)
    refused("the last backward through 'OddMLP' did not end", lambda: loss_of(model, x), RuntimeError)
    refused("the last backward through 'OddMLP' did not end", lambda: loss.backward(), RuntimeError)
    model.set_all_reduce_hook(lambda gradients: None)
    model.reset_iter_state()
    loss_of(model, x).backward()
    loss_of(whole, x).backward()
    for mine, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(mine.grad.full_tensor(), expected.grad, atol=1e-12)


@pytest.mark.parametrize("place", ["buffers", "reductions", "a reduction of thawed parameters"])
@on_ranks(1, 2)
def test_what_cannot_be_made_is_made_by_the_next_forward(world: World, place: str) -> None:
    """As after an error of memory, of which the program gets hold of some."""
    torch.manual_seed(2)
    whole, model = paired(OddMLP().double())
    if "thawed" in place:
        model.blocks[1].requires_grad_(False)
        loss_of(model, batch(0)).backward()
        model.blocks[1].requires_grad_(True)
        model.zero_grad()
    kind, name = (FlatGather, "_make_unsharded") if place == "buffers" else (GradientReduction, "__init__")
    make, made = getattr(kind, name), list[Any]()

    def fail(self: object, *args: Any) -> None:
        made.append(self)
        if "thawed" in place or len(made) == 2:
            raise MemoryError("on purpose")
        make(self, *args)

    with mock.patch.object(kind, name, fail):
        refused("on purpose", lambda: model(batch(0)), MemoryError)
    if place == "buffers" and world.size > 1 and not world.settings.node_memory:
        assert [gather.full.storage.nbytes() for gather in made] == [0, 0]
    if "thawed" in place:
        model.blocks[1].requires_grad_(False)
        loss_of(model, batch(1)).backward()
        model.blocks[1].requires_grad_(True)
        model.zero_grad()
    loss_of(model, batch(0)).backward()
    loss_of(whole, batch(0)).backward()
    for mine, expected in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.allclose(mine.grad.full_tensor(), expected.grad, atol=1e-12)


class Box:
    """Holds a tensor that a traversal of the outputs cannot find."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


@on_ranks(1, 2)
def test_unsupported_outputs_and_roots(world: World) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].register_forward_hook(lambda module, args, out: Box(out))
    shard_blocks(model, "")
    refused("'1' returns a Box, in which tensors cannot be found", lambda: model(torch.zeros(2, 5)), RuntimeError)
    block = nn.Linear(3, 3)
    shardrt.fully_shard(block)
    first, second = nn.Sequential(block, nn.Linear(3, 3)), nn.Sequential(block, nn.Linear(3, 3))
    shardrt.fully_shard(first)
    shardrt.fully_shard(second)
    alone = "'0' in 'Sequential' is part of 'Sequential' already.*a module around both"
    refused(alone, lambda: second(torch.zeros(2, 3)), RuntimeError)
    refused("set_reshard_after_forward.2.: expected a bool", lambda: first.set_reshard_after_forward(2), TypeError)
    refused("set_post_optim_event.*expected a shardrt.comm.Event", lambda: first.set_post_optim_event(3), TypeError)
    refused("never share a communicator", lambda: first.set_separate_reduce_scatter_group(False))


# By parameter name, an argument of each method of a communicator.
ARGUMENTS: dict[str, Callable[[World], object]] = {
    "out": lambda world: torch.zeros(2),
    "inp": lambda world: torch.zeros(2),
    "op": lambda world: ReduceOp.SUM,
    "root": lambda world: 0,
    "to": lambda world: 1 - world.rank,
    "source": lambda world: 1 - world.rank,
    "stream": lambda world: world.stream,
    "value": lambda world: 1,
    "fingerprint": lambda world: 1,
    "describe": lambda world: str,
    "color": lambda world: 0,
    "key": lambda world: 0,
    "name": lambda world: "name",
    "numel": lambda world: 4,
    "nbytes": lambda world: 4,
    "dtype": lambda world: torch.float32,
    "numbers": lambda world: [1, 2],
    "ranks": lambda world: [world.rank],
}


@pytest.mark.mpi
@on_ranks(2)
def test_every_method_of_a_closed_communicator(world: World) -> None:
    """Each raises the same error, whatever else is wrong with the call. A new method needs its arguments in ARGUMENTS.

    But `async_error`, which the watchdog's thread asks at any time, and `wait_for_readers`: there are none.
    """
    comm = world.comm.split(0, world.rank, "closed")
    assert comm is not None
    pool, decorated = comm.pool(), comm.agree()(lambda: None)
    comm.close()
    comm.close()
    assert comm.async_error() is None
    tried = set()
    public = {name for name in dir(comm) if not name.startswith("_") and callable(getattr(comm, name))}
    for name in sorted(public - {"close", "async_error", "wait_for_readers"}):
        method = getattr(comm, name)
        parameters = inspect.signature(method).parameters.values()
        given = {
            p.name: ARGUMENTS[p.name](world) for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL
        }

        def call(method: Callable[..., object] = method, given: dict[str, object] = given) -> None:
            result = method(**given)
            if isinstance(result, AbstractContextManager):
                with result:
                    pass

        refused(r" on Communicator\('closed', rank \d of 2, cpu\): the communicator is closed", call, RuntimeError)
        tried.add(name)
    assert {"all_gather", "barrier", "group", "exchange", "compare", "pool", "agree", "leave", "split"} <= tried
    assert pool is None
    refused("the communicator is closed", decorated, RuntimeError)
    open_group = world.comm.split(0, world.rank, "closed")
    assert open_group is not None

    def close_in_group() -> None:
        with open_group.group():
            open_group.barrier(stream=world.stream)
            open_group.close()

    refused(r"group on Communicator.*: the communicator is closed", close_in_group, RuntimeError)


@pytest.mark.mpi
@on_ranks(2, 3)
def test_too_many_communicators(world: World) -> None:
    """Every rank raises when one cannot make its part; what was made is freed, and the others go on."""
    comm, odd = world.comm, world.rank == world.size - 1

    def fail(windows: object, nbytes: int) -> None:
        raise MPI.Exception(MPI.ERR_OTHER)

    before = MpiBackend._open_count
    for parts in ({0, 1}, {0}):
        with pytest.MonkeyPatch.context() as patch:
            if len(parts) == 1 or odd:
                patch.setattr("shardrt.comm.backends.node.shared_memory.NodeWindows.allocate", fail)
                patch.setattr("shardrt.comm.backends.mpi.NodeAlgorithms.__init__", lambda *_: fail(None, 0))
            color = int(odd) if len(parts) == 2 else 0
            failed = rf"ranks? {world.size - 1}: " if len(parts) == 2 else "ranks 0, 1"
            expected = (
                f"split of .*'world'.* into 'more': MPI makes no more communicators .{failed}.*; {before} are open in this"
            )
            refused(expected, lambda color=color: comm.split(color, world.rank, "more"), RuntimeError)
        assert MpiBackend._open_count == before
    part = comm.split(0, world.rank, "more")
    assert part is not None
    part.barrier(stream=world.stream).synchronize()
    part.close()


@on_ranks(2)
def test_no_communicators_are_left(world: World) -> None:
    """MPICH has 2048 contexts in a process, of which a communicator takes several; what MPI says of it is in the message."""
    taken = []
    for _ in range(2100):
        try:
            taken.append(MPI.COMM_WORLD.Dup())
        except MPI.Exception:
            break
    try:
        if len(taken) < 2100:
            # which of the two MPICH says depends on how many each rank has left
            expected = r"MPI makes no more communicators \(ranks 0, 1: .*(Too many communicators|Cannot allocate context ID)"
            for _ in range(2):
                refused(expected, lambda: world.comm.split(0, world.rank, "more"), RuntimeError)
                taken.pop().Free()
    finally:
        for comm in taken:
            comm.Free()
    world.barrier()


def test_no_communicator_is_left_for_the_ranks_of_other_nodes() -> None:
    """What has been made is freed."""
    local = mock.Mock(**{"Get_rank.return_value": 0})
    comm = mock.Mock(
        **{
            "Get_rank.return_value": 0,
            "Get_size.return_value": 2,
            "allgather.return_value": [0, 1],
            "Split.side_effect": [local, MPI.Exception(MPI.ERR_OTHER)],
        }
    )
    with pytest.raises(MPI.Exception):
        NodeAlgorithms(comm, 0)
    local.Free.assert_called_once()


@pytest.mark.mpi
@on_ranks(2, 3)
def test_too_little_shared_memory(world: World) -> None:
    """If one rank gets none, all ranks of the node use memory of their own, with one warning; results are the same."""
    records: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardrt.comm.backends.node.shared_memory.reserve", lambda *_: world.rank != 1)
        patch.setattr("shardrt.comm.backends.node.shared_memory._log.warning", lambda *text: records.append(text[0] % text[1:]))
        _warn_of_no_space.cache_clear()
        comm = world.comm.split(0, world.rank, "plain")
        assert comm is not None
        buffers = [comm.empty(100_000, torch.float32) for _ in range(2)]
        assert isinstance(comm.backend, MpiBackend)
        assert comm.backend._shared_memory is None
        assert not comm.backend._algorithms.windows
    for numel in (100, 100_000):
        total = buffers[0][:numel].fill_(world.rank)
        comm.all_reduce(total, total, ReduceOp.SUM, stream=world.stream).synchronize()
        assert total.unique().tolist() == [sum(range(world.size))]
    comm.close()
    assert len(records) == (world.rank == 0)
    assert all("has too little memory for what its ranks share" in record for record in records)


def test_memory_that_cannot_be_reserved() -> None:
    """Touching a page that has none kills the process; here, one beyond the end of its file."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, 2 * mmap.PAGESIZE)
    with mmap.mmap(fd, 2 * mmap.PAGESIZE) as memory:
        os.ftruncate(fd, mmap.PAGESIZE)
        with memoryview(memory) as mapping:
            assert reserve(mapping[8 : mmap.PAGESIZE])
            assert not reserve(mapping[8 : mmap.PAGESIZE + 1])
    os.close(fd)


@on_ranks(2)
def test_evaluation_leaves_nothing_gathered(world: World) -> None:
    model = shard_blocks(TiedGPT())
    with torch.no_grad():
        first = model(tokens(0))
        second = model(tokens(0))
    assert torch.equal(first, second)
    assert not any(group.state.gathered for group in model.param_group.with_descendants())
    assert model.param_group.runtime.memory.in_use == 0


class Positions(nn.Embedding):
    """Returns a view of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight[: x.shape[0]]


@on_ranks(1, 2)
def test_a_parameter_must_not_leave_its_module(world: World) -> None:
    model = shardrt.fully_shard(nn.Sequential(shardrt.fully_shard(Positions(8, 5))))
    refused("'0' returns a parameter or a view of one", lambda: model(torch.zeros(2, 5)), RuntimeError)


@on_ranks(2)
def test_a_placement_function_that_fails_on_one_rank(world: World) -> None:
    def placement(param: nn.Parameter) -> shardrt.Shard | None:
        return {}["missing"] if world.rank == 1 else None

    expected = r"'missing' \(on rank 1\)"
    refused(expected, lambda: shardrt.fully_shard(nn.Linear(2, 2), shard_placement_fn=placement), RuntimeError)
    bf16 = shardrt.MixedPrecisionPolicy(torch.bfloat16 if world.rank else None)
    refused("different modules", lambda: shardrt.fully_shard(nn.Linear(2, 2), mp_policy=bf16))


@on_ranks(1, 2)
def test_weights_changed_after_a_forward_without_backward(world: World) -> None:
    """Groups that stayed gathered are gathered again if their shards have changed."""
    for reshard in (None, False):
        model = shard_blocks(OddMLP().double(), reshard_after_forward=reshard)
        model(batch(0))
        with torch.no_grad():
            for param in model.param_group.with_descendants():
                for one in param.params:
                    one.sharded.mul_(2)
        fresh = OddMLP().double()
        found = model(batch(0))
        model.param_group.runtime.reset()
        for param, value in zip(fresh.parameters(), model.parameters(), strict=True):
            with torch.no_grad():
                param.copy_(value.full_tensor())
        torch.testing.assert_close(found.detach(), fresh(batch(0)).detach(), rtol=1e-12, atol=1e-12)


def drawn_alone(world: World, seed: int | None = None) -> nn.Sequential:
    """A model whose weights each rank has drawn by a seed of its own, or all by one."""
    with torch.random.fork_rng():
        torch.manual_seed(100 + world.rank if seed is None else seed)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).double()


@on_ranks(1, 2, 3, 4)
def test_ranks_that_have_sharded_other_weights(world: World) -> None:
    def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
        shardrt.fully_shard(model[0], **options)
        return shardrt.fully_shard(model, **options)

    def run(model: nn.Module) -> None:
        model(torch.full((2, 8), world.rank, dtype=torch.float64)).sum().backward()

    def is_refused(model: nn.Module, name: str) -> None:
        if world.size == 1:
            run(model)
        else:
            said = (
                rf"first forward of 'Sequential': '{name}'.* had other values on rank 1 than on rank 0 when fully_shard took .*"
            )
            refused(said + r"torch.manual_seed.*SHARDRT_CHECK_WEIGHTS=0", lambda: run(model))

    run(shard(drawn_alone(world, seed=3)))
    is_refused(shard(drawn_alone(world)), "2.weight")
    replicas = shardrt.DeviceMesh(world.comm).unflatten((world.size, 1), ("replicate", "shard"))
    is_refused(shard(drawn_alone(world), mesh=replicas), "2.weight")
    partly = drawn_alone(world, seed=3)
    partly[0].weight = drawn_alone(world)[0].weight
    is_refused(shard(partly), "0.weight")
    with settings_of(world, check_weights=False):
        run(shard(drawn_alone(world)))

    # Weights that are written before the first forward, by whatever way, and from whatever values.
    whole = drawn_alone(world)
    state = whole.state_dict() if world.rank == 0 else {}
    options = checkpoint.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    loaded = shard(copy.deepcopy(whole))
    checkpoint.set_model_state_dict(loaded, state, options=options)
    run(loaded)
    for name, value in loaded.state_dict().items():
        assert torch.equal(value.full_tensor(), world.comm.exchange(whole.state_dict()[name])[0])
    behind = shard(drawn_alone(world))
    for param in behind.parameters():
        param.data.to_local().fill_(0.5)
    run(behind)
    empty = shard(drawn_alone(world).to("meta"))
    empty.to_empty(device=world.device)
    for param in empty.parameters():
        nn.init.uniform_(param)
    run(empty)


@on_ranks(4)
def test_tensor_parallel_ranks_that_have_sharded_other_weights(world: World) -> None:
    mesh = shardrt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    for seed in (3, None):
        model = shardrt.parallel.parallelize_module(drawn_alone(world, seed), mesh["tp"], plan)
        shardrt.fully_shard(model, mesh=mesh["dp"])
        run = lambda model=model: model(torch.ones(2, 8, dtype=torch.float64)).sum().backward()  # noqa: E731
        if seed is None:
            refused("'0.weight'.* had other values on rank [23] than on rank [01]", run)
        else:
            run()
