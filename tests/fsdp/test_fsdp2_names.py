"""FSDP2's other names and features: its older setters, larger meshes, symmetric memory, ranges in a profile."""

import copy
import inspect
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from torch import nn
from torch.autograd import profiler
from torch.distributed import tensor as torchs
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.parallel import parallelize_module

import shardrt
from ranks import on_ranks, refused, with_copies
from shardrt.comm import Communicator, World, new_stream
from shardrt.fsdp.base.events import Step, during
from shardrt.fsdp.memory import buffers, context
from shardrt.fsdp.memory.buffers import CommBuffer
from shardrt.fsdp.schedule import symmetric_windows
from subclasses import Narrow
from toys import (
    Elsewhere,
    OddMLP,
    Skipping,
    batch,
    buckets_of,
    compare,
    loss_of,
    overlapping,
    paired,
    shard_blocks,
    step_all,
    train_side_by_side,
)


def mirrored() -> list[tuple[Any, Any]]:
    """Functions of torch, and those here that have their names."""
    helpers = [name for name in dir(state_dict) if name.startswith(("get_", "set_")) and hasattr(shardrt.checkpoint, name)]
    methods = [name for name in vars(FSDPModule) if not name.startswith("_")]
    return [
        (nn.utils.clip_grad_norm_, shardrt.clip_grad_norm_),
        (fully_shard, shardrt.fully_shard),
        (parallelize_module, shardrt.parallel.parallelize_module),
        (register_fsdp_forward_method, shardrt.register_fsdp_forward_method),
        (torchs.distribute_tensor, shardrt.distribute_tensor),
        *((getattr(state_dict, name), getattr(shardrt.checkpoint, name)) for name in helpers),
        *((getattr(FSDPModule, name), getattr(shardrt.FSDPModule, name)) for name in methods),
        *(
            (getattr(torchs.DTensor, n), getattr(shardrt.DTensor, n))
            for n in ("from_local", "full_tensor", "redistribute", "to_local")
        ),
    ]


def test_arguments_have_torchs_names_and_places() -> None:
    for torchs_own, here in mirrored():
        theirs, ours = (inspect.signature(function).parameters for function in (torchs_own, here))
        placed = [name for name, parameter in theirs.items() if parameter.kind is not inspect.Parameter.KEYWORD_ONLY]
        assert set(theirs) <= set(ours), here
        assert placed == list(ours)[: len(placed)], here


def test_axes_of_a_larger_mesh_are_named() -> None:
    refused(r"name at least one axis", shardrt.DataParallelMeshDims)
    assert shardrt.DataParallelMeshDims("a").shard_names == ("a",)
    assert shardrt.DataParallelMeshDims(replicate=("a", "b")).replicate_names == ("a", "b")


@on_ranks(4)
def test_axes_of_a_larger_mesh(world: World) -> None:
    """Parameters are sharded and replicated over the named axes; along other axes each rank has its own parameters."""
    mesh = shardrt.DeviceMesh(world.comm, (2, 1, 2), ("outer", "one", "inner"))
    dims = shardrt.DataParallelMeshDims
    for axes, shape in (
        (dims(("outer", "one", "inner")), (4,)),
        (dims("inner", "outer"), (2, 2)),
        (dims(("one", "inner"), "outer"), (2, 2)),
        (dims(replicate=("outer", "inner")), (4, 1)),
    ):
        model = train_side_by_side(
            world,
            OddMLP(layers=1).double(),
            map(batch, range(1)),
            shard=lambda m, axes=axes: shard_blocks(m, mesh=mesh, dp_mesh_dims=axes),
        )
        assert model.param_group.device_mesh.shape == shape
    linear = nn.Linear(4, 4)
    shardrt.fully_shard(linear, mesh=mesh, dp_mesh_dims=dims("inner"))
    assert list(linear.param_group.mesh.ranks) == [world.rank - world.rank % 2, world.rank - world.rank % 2 + 1]
    for wrong in (dims("outer", "inner"), dims("tp"), dims(("inner", "outer")), dims("inner", "inner")):
        with pytest.raises(ValueError, match=r"expected axes in the mesh's order, those to replicate over before"):
            shardrt.fully_shard(nn.Linear(4, 4), mesh=mesh, dp_mesh_dims=wrong)


def addresses_of(model: nn.Module) -> list[int]:
    """The addresses of the parameters that each block sees in its forward, which are added while it runs."""
    seen: list[int] = []
    for block in model.get_submodule("blocks").children():
        block.register_forward_pre_hook(lambda block, _: seen.extend(p.data_ptr() for p in block.parameters()))
    return seen


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": 1}, {"offload_policy": Elsewhere(pin_memory=False)}])
@on_ranks(1, 2, 3)
@with_copies
def test_storage_that_stays(world: World, options: dict[str, Any]) -> None:
    """Addresses stay over reshards and steps, whatever is allocated meanwhile; without the setting, a reshard frees it."""
    count, seen, others = 3 * 8, list[int](), list[torch.Tensor]()

    def keep(model: nn.Module) -> nn.Module:
        nonlocal seen
        shard_blocks(model, **options).set_keep_unsharded_storage(True)
        seen = addresses_of(model)
        return model

    def allocate(step: int, model: nn.Module) -> None:
        others.extend(torch.full((numel,), 7.0) for numel in (10**4, 10**5, 10**6))

    whole = OddMLP(width=200).double()
    model: Any = train_side_by_side(world, whole, map(batch, range(3)), shard=keep, before_step=allocate)
    assert seen == 3 * seen[:count]
    assert len(seen) == 3 * count
    memory, groups = model.param_group.runtime.memory, list(model.param_group.with_descendants())
    assert not any(group.state.shown for group in groups)
    nbytes = {group: 0 if group.gather.resident else group.nbytes for group in groups}
    assert memory.in_use == sum(nbytes.values())
    model.set_keep_unsharded_storage(False, recurse=False)
    with torch.no_grad():
        model(batch(9))
    assert memory.in_use == sum(nbytes.values()) - nbytes[model.param_group]
    model.float()
    assert memory.in_use == 0
    with torch.no_grad():
        model(batch(9).float())


@on_ranks(1, 2)
@with_copies
def test_storage_that_stays_of_an_extension(world: World) -> None:
    """So does that of the tensors that it makes."""
    whole = nn.Linear(400, 40, bias=False).double()
    model = copy.deepcopy(whole)
    model.weight = nn.Parameter(Narrow(model.weight.detach()))
    shardrt.fully_shard(model).set_keep_unsharded_storage(True)
    seen: list[int] = []
    model.register_forward_pre_hook(lambda model, _: seen.append(model.weight.data_ptr()))
    x = torch.randn(8, 400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    others = []
    for _ in range(3):
        torch.testing.assert_close(model(x), whole(x), rtol=1e-6, atol=1e-6)
        others += [torch.full((400, 40), 7.0, dtype=torch.float64) for _ in range(3)]
    assert seen == 3 * seen[:1]


def without_gradients(model: nn.Module) -> bool:
    return all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32])
@on_ranks(1, 2, 3)
def test_backwards_that_are_finalized_by_hand(world: World, reduce_dtype: torch.dtype | None, wait: bool) -> None:
    """Nothing is reduced before: not after the last micro-batch, nor at the end of its backward."""
    tolerance = 1e-12 if reduce_dtype is None else 1e-6
    policy = shardrt.MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    whole, model = paired(Skipping().double(), mp_policy=policy)
    model.set_manual_backward_finalization(True)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (whole, model)]
    for step in range(3):
        whole.skip = model.skip = step == 1
        model.set_requires_gradient_sync(False)
        with buckets_of(context.BUCKET_BYTES if step % 2 else 0):
            for micro in range(3):
                x = batch(3 * step + micro)
                loss_of(whole, x).backward()
                loss_of(model, x.chunk(world.size)[world.rank]).backward()
                assert without_gradients(model)
            model.set_requires_gradient_sync(True)
            if wait:
                assert model.finalize_backward() is None
            else:
                model.finalize_backward(async_op=True).wait()
        compare(whole, model, tolerance, f"step {step}")
        model.finalize_backward()  # nothing is left
        compare(whole, model, tolerance, f"once more in step {step}")
        step_all(*optimizers)


@on_ranks(2, 3)
def test_what_is_left_to_finalize_backward(world: World) -> None:
    """Zeros for parameters that some ranks have not used, and groups that lack gradients."""
    whole, model = paired(Skipping().double())
    for m in (whole, model):
        m.inp.requires_grad_(False)
        m.blocks[0].requires_grad_(False)  # from here on, the inputs of blocks[1] require no gradients
    model.set_reduce_scatter_unused_params(True)
    model.set_manual_backward_finalization(True)
    sharded = list(model.parameters())
    for step in range(2):
        for rank in range(world.size):
            whole.skip = rank != 0
            (loss_of(whole, batch(step).chunk(world.size)[rank]) / world.size).backward()
        model.skip = world.rank != 0
        with shardrt.unsharded(model):
            loss_of(model, batch(step).chunk(world.size)[world.rank]).backward()
            assert all(param.grad is None for param in sharded)
            model.finalize_backward()
        compare(whole, model, 1e-12, f"step {step}")
        whole.zero_grad()
        model.zero_grad()


@on_ranks(2, 3)
def test_ranks_with_several_backwards_that_are_finalized_once(world: World) -> None:
    """Inside of `unsharded` ranks run different numbers of backwards; the sum of their gradients is divided by the ranks."""
    whole, model = paired(OddMLP().double())
    model.set_manual_backward_finalization(True)
    with shardrt.unsharded(model):
        for rank in range(world.size):
            for micro in range(rank + 1):
                (loss_of(whole, batch(10 * rank + micro)) / world.size).backward()
        for micro in range(world.rank + 1):
            loss_of(model, batch(10 * world.rank + micro)).backward()
        model.finalize_backward()
    compare(whole, model, 1e-12, "summed")


@on_ranks(2)
def test_finalization_by_hand_over_replicas(world: World) -> None:
    """Without the all-reduce, what is finalized stays within a replica until the next call with it."""
    whole, model = paired(OddMLP().double(), mesh=shardrt.DeviceMesh(world.comm, (2, 1), ("replicate", "shard")))
    model.set_manual_backward_finalization(True)
    for micro in range(2):
        model.set_requires_gradient_sync(False)
        loss_of(whole, batch(micro)).backward()
        loss_of(model, batch(micro).chunk(world.size)[world.rank]).backward()
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(micro == 1)
        model.finalize_backward()
        assert without_gradients(model) == (micro == 0)
    compare(whole, model, 1e-12, "reduced")


@on_ranks(2)
def test_finalization_where_it_is_refused(world: World) -> None:
    model = shard_blocks(OddMLP().double())
    x = batch(0).chunk(world.size)[world.rank]
    expected = r"expected a call after the backward, and set_manual_backward_finalization\(True\) before it"
    model.finalize_backward()  # nothing to do: no forward has run
    loss_of(model, x).backward()
    refused(expected, model.finalize_backward, RuntimeError)
    refused(r"on 'blocks.0'|call it on the root", lambda: model.blocks[0].finalize_backward(), RuntimeError)
    refused(r"call it on the root", lambda: model.blocks[0].set_manual_backward_finalization(True), RuntimeError)
    model.set_manual_backward_finalization(True)
    loss = loss_of(model, x)
    loss.register_hook(lambda grad: refused(expected, model.finalize_backward, RuntimeError))
    loss.backward()
    change = r"before its backward is finalized \(rank [01]\): call it before the first backward, or after"
    refused(change, lambda: model.set_manual_backward_finalization(False), RuntimeError)
    model.set_manual_backward_finalization(True)
    refused(r"not reduced .*, or on the root finalize_backward\(\)", model.float, RuntimeError)
    model.finalize_backward()
    model.set_manual_backward_finalization(False)
    model.set_manual_backward_finalization(True)
    loss_of(model, x).backward()
    model.reset_iter_state()
    model.set_manual_backward_finalization(False)
    assert without_gradients(model)


@on_ranks(2)
def test_the_state_of_a_module(world: World) -> None:
    state: Any = shardrt.fully_shard.state
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    shardrt.fully_shard([model[0], model[1]])
    shardrt.fully_shard(model)
    assert state(model) == (model.param_group,)
    assert state(model[0]) == state(model[1]) != state(model)
    assert state(model[2]) is None


@on_ranks(2)
def test_a_hook_on_a_stream_of_its_own(world: World) -> None:
    """The hook runs on its stream after the reduction, before gradients are published; also with the factor's older name."""
    for threaded in (True, False):
        whole, model = paired(OddMLP(layers=2).double())
        stream = new_stream(world.device, "hook", threaded=threaded)
        seen: list[torch.Tensor] = []

        def third(reduced: torch.Tensor, seen: list[torch.Tensor] = seen) -> None:
            seen.append(reduced.clone())
            reduced.div_(3)

        for module in (model, *model.blocks):
            module.set_all_reduce_hook(third, stream=stream)
            module.set_reduce_scatter_divide_factor(1.0)
        for _ in range(2):
            (loss_of(whole, batch(0)) * world.size / 3).backward()
            loss_of(model, batch(0).chunk(world.size)[world.rank]).backward()
        compare(whole, model, 1e-12, "hooked")
        assert len(seen) == 6
        stream.close()
    with pytest.raises(TypeError, match=r"expected a shardrt.comm.Stream or a torch.cuda.Stream"):
        model.set_all_reduce_hook(third, stream=1)
    hybrid = shardrt.fully_shard(nn.Linear(3, 3), mesh=shardrt.DeviceMesh(world.comm, (2, 1), ("replicate", "shard")))
    with pytest.raises(ValueError, match=r"replicas are reduced on a stream of their own"):
        hybrid.set_all_reduce_hook(third, stream=new_stream(world.device, "hook"))


def parts_of_windows(kind: type[Communicator], patch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """Record every call on a range of a symmetric window: its name, the window's number, the range."""
    windows: list[torch.Tensor] = []
    parts: list[tuple[str, int, int]] = []
    empty, gather, reduce = kind.empty, kind.all_gather, kind.reduce_scatter

    def spy_empty(self: Communicator, numel: int, dtype: torch.dtype, *, symmetric: bool = False) -> torch.Tensor:
        made = empty(self, numel, dtype, symmetric=symmetric)
        windows.extend([made] if symmetric else [])
        return made

    def note(name: str, rank: int, whole: torch.Tensor, own: torch.Tensor) -> None:
        for index, window in enumerate(windows):
            if 0 <= whole.data_ptr() - window.data_ptr() < window.nbytes:
                parts.append((f"{name} {index}", whole.data_ptr() - window.data_ptr(), whole.nbytes))
                assert own.data_ptr() == whole.data_ptr() + rank * own.nbytes, "in place, so both sides are in the window"

    def spy_gather(self: Communicator, out: torch.Tensor, inp: torch.Tensor, **options: Any) -> Any:
        note("all_gather", self.rank, out, inp)
        return gather(self, out, inp, **options)

    def spy_reduce(self: Communicator, out: torch.Tensor, inp: torch.Tensor, *options: Any, **named: Any) -> Any:
        note("reduce_scatter", self.rank, inp, out)
        return reduce(self, out, inp, *options, **named)

    for name, spy in (("empty", spy_empty), ("all_gather", spy_gather), ("reduce_scatter", spy_reduce)):
        patch.setattr(kind, name, spy)
    return parts


@on_ranks(2, 3)
def test_symmetric_windows(world: World) -> None:
    """No effect on the host. As on GPUs, all ranks pass the same range of a window, and training is unchanged."""

    def shard(model: nn.Module) -> nn.Module:
        shard_blocks(model)
        for module in (model, *model.blocks):
            module.set_symm_mem_for_comm()
        return model

    plain = train_side_by_side(world, OddMLP().double(), map(batch, range(1)), shard=shard)
    assert (plain.param_group.gather.custom is None) == (world.device.type == "cpu")
    refused(r"set_symm_mem_for_comm on 'OddMLP'|call it before the first forward", plain.set_symm_mem_for_comm, RuntimeError)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(symmetric_windows, "useful", lambda comm: True)
        patch.setattr("shardrt.fsdp.memory.context.Context.is_large", lambda context, nbytes: True)
        patch.setattr(buffers, "_comm_buffers", WeakKeyDictionary())  # on a GPU, the first model has made windows
        parts = parts_of_windows(type(world.comm), patch)
        model = train_side_by_side(world, OddMLP().double(), map(batch, range(3)), shard=shard)
        assert CommBuffer.of(model.param_group.gather_comm, 1).symmetric
        assert {part[0].split()[0] for part in parts} == {"all_gather", "reduce_scatter"}
        assert len({tuple(each) for each in world.comm.exchange(parts)}) == 1, "the same parts on all ranks"


@on_ranks(2)
def test_symmetric_windows_that_are_refused(world: World) -> None:
    differing = shard_blocks(OddMLP())
    if world.rank == 0:
        differing.blocks[1].set_symm_mem_for_comm()
    with pytest.raises(RuntimeError, match=r"set_symm_mem_for_comm .* found rank 0: \['blocks.1'\]; rank 1: none"):
        differing(batch(0).float())
    refused(r"set_symm_mem_for_comm\('NVSHMEM'\) .* expected 'NCCL'", lambda: differing.set_symm_mem_for_comm("NVSHMEM"))
    both = shardrt.fully_shard(nn.Linear(5, 5))
    both.set_symm_mem_for_comm()
    both.param_group.settings.all_gather = object()
    refused(r"'.*' has both set_symm_mem_for_comm and a custom collective", lambda: both(batch(0).float()), RuntimeError)


def ranges_of(profile: profiler.profile) -> list[tuple[str, float, float]]:
    events = [(e.name, e.time_range.start, e.time_range.end) for e in profile.function_events if e.name.startswith("FSDP::")]
    return sorted(events, key=lambda event: (event[1], -event[2]))


def around(events: Sequence[tuple[str, float, float]], inner: str) -> list[str]:
    """The ranges that contain the first range of this name, outermost first."""
    start, end = next(event[1:] for event in events if event[0] == inner)
    return [name for name, first, last in events if first <= start and end <= last and name != inner]


@on_ranks(2)
@overlapping()
def test_ranges_in_a_profile(world: World) -> None:
    """Ranges have FSDP2's names and nesting. None stays open after an exception, none is made without a profiler."""
    model = shard_blocks(OddMLP(layers=2))
    x = batch(0).float()
    with buckets_of(0):
        loss_of(model, x).backward()
        model.zero_grad()
        with torch.autograd.profiler.profile() as profile:
            loss_of(model, x).backward()
    events = ranges_of(profile)
    names = [event[0] for event in events]
    step = [
        "FSDP::root_pre_forward",
        "FSDP::all_gather (OddMLP)",
        "FSDP::all_gather_copy_out (OddMLP)",
        "FSDP::forward_prefetch for blocks.0, blocks.1",
        "FSDP::pre_forward (blocks.0)",
        "FSDP::all_gather_copy_out (blocks.0)",
        "FSDP::post_forward (blocks.0)",
        "FSDP::pre_forward (blocks.1)",
        "FSDP::post_forward (blocks.1)",
        "FSDP::post_forward (OddMLP)",
        "FSDP::pre_backward (OddMLP)",
        "FSDP::pre_backward (blocks.1)",
        "FSDP::backward_prefetch for blocks.0",
        "FSDP::post_backward_rs_wait (blocks.1)",
        "FSDP::post_backward_accumulate (blocks.1)",
        "FSDP::post_backward_reduce (blocks.1)",
        "FSDP::post_backward_publish (blocks.1)",
        "FSDP::post_backward_reshard (blocks.1)",
        "FSDP::pre_backward (blocks.0)",
        "FSDP::post_backward_reduce (blocks.0)",
        "FSDP::root_post_backward_callback",
    ]
    left = iter(names)
    assert all(name in left for name in step), names
    assert around(events, "FSDP::all_gather (blocks.0)") == [
        "FSDP::pre_forward (OddMLP)",
        "FSDP::forward_prefetch for blocks.0, blocks.1",
    ]
    assert during(Step.GATHER, model.param_group) is during(Step.WAIT)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("stop")

    with torch.autograd.profiler.profile() as profile:
        model.blocks[1].register_forward_pre_hook(lambda module, args: args[0].register_hook(fail) and None)
        refused("stop", loss_of(model, x).backward)
        with profiler.record_function("FSDP::after"):
            torch.ones(1)
    assert around(ranges_of(profile), "FSDP::after") == []
    model.reset_iter_state()


@on_ranks(2)
def test_ranges_around_compiled_blocks(world: World) -> None:
    """The ranges are outside the graphs: a profiler triggers no recompilation."""
    model = shard_blocks(OddMLP(layers=2))
    for block in model.blocks:
        block.compile(backend="eager")
    with buckets_of(0):
        loss_of(model, batch(0).float()).backward()
        with torch.compiler.set_stance("fail_on_recompile"), torch.autograd.profiler.profile() as profile:
            loss_of(model, batch(0).float()).backward()
    names = [name for name, *_ in ranges_of(profile)]
    assert {"FSDP::pre_forward (blocks.1)", "FSDP::post_backward_reduce (blocks.1)"} <= set(names)
