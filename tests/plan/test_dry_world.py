"""A dry world: simulated clocks, one rank of many, and what was there before is there again."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import shardrt
from ranks import on_ranks
from shardrt.comm import ReduceOp, World
from shardrt.comm.core.calls import CollectiveCall
from shardrt.comm.core.streams import current_stream
from shardrt.comm.startup.dry import dry_world

META = torch.device("meta")


def seconds(calls: Sequence[CollectiveCall]) -> float:
    """A second for each byte that a rank sends."""
    return float(sum(call.inp.nbytes for call in calls if call.inp is not None))


def tensor(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=META)


def test_streams_overlap_and_wait_on_simulated_clocks() -> None:
    with dry_world(4, rank=2, costs=seconds) as world:
        compute, gather = world.compute, world.stream_for("gather")
        comm = world.mesh.communicator("gather")
        first = comm.all_gather(tensor(40), tensor(10), stream=gather)
        second = comm.all_gather(tensor(20), tensor(5), stream=gather)
        compute.run(3.0)
        first.wait(compute)  # the second is still under way
        assert (compute.now(), compute.waited, gather.now()) == (10.0, 7.0, 15.0)
        compute.run(8.0)
        second.wait(compute)
        assert (compute.now(), compute.waited, compute.busy, gather.waited) == (18.0, 7.0, 11.0, 15.0)
        assert world.host.seconds == 0.0  # it only enqueues
        assert not second.is_done()
        second.synchronize()
        assert (world.host.seconds, second.is_done()) == (15.0, True)


def test_collectives_of_the_compute_stream_are_no_computation() -> None:
    with dry_world(2, costs=seconds) as world:
        world.compute.run(3.0)
        world.comm.all_reduce(tensor(4), tensor(4), ReduceOp.SUM, stream=world.compute)
        assert (world.compute.now(), world.compute.waited, world.compute.busy) == (7.0, 4.0, 3.0)


def test_waiting_for_the_host_is_not_waiting_for_communication() -> None:
    with dry_world(2, costs=seconds) as world:
        gathered = [world.comm.all_gather(tensor(20), tensor(10), stream=world.stream_for("gather")) for _ in range(2)]
        world.host.seconds = 8.0
        gathered[0].wait(world.compute)
        assert (world.compute.now(), world.compute.waited) == (10.0, 2.0)
        world.host.seconds = 30.0
        gathered[1].wait(world.compute)
        assert (world.compute.now(), world.compute.waited) == (20.0, 2.0)


def test_calls_on_two_streams_run_one_after_the_other() -> None:
    with dry_world(2, costs=seconds) as world:
        one, two = world.stream_for("gather"), world.stream_for("reduce")
        world.comm.all_gather(tensor(20), tensor(10), stream=one)
        world.comm.all_gather(tensor(6), tensor(3), stream=two)
        assert (one.now(), two.now()) == (10.0, 13.0)


def test_inline_streams_are_the_callers_thread() -> None:
    with dry_world(2, inline=True, costs=seconds) as world:
        world.comm.all_gather(tensor(20), tensor(10), stream=world.stream_for("gather"))
        world.compute.run(1.0)
        assert world.stream_for("reduce").now() == world.compute.now() == world.host.seconds == 11.0


def test_the_recorder_shows_simulated_times() -> None:
    with dry_world(2, costs=seconds) as world:
        world.comm.all_gather(tensor(20), tensor(10), stream=world.stream_for("gather"))
        world.compute.run(4.0)
        world.recorder.note("computed")
        world.comm.all_reduce(tensor(2), tensor(2), ReduceOp.SUM, stream=world.stream_for("reduce"))
        calls = [(call["what"], call["called"], call["started"], call["ended"]) for call in world.recorder.calls()]
        assert calls == [("all_gather uint8 10", 0.0, 0.0, 10.0), ("all_reduce uint8 2 sum", 4.0, 10.0, 12.0)]
        assert world.recorder.notes(since=3.0) == ["computed"]


def test_submitted_work_runs_on_its_stream() -> None:
    with dry_world(2) as world:
        seen = []
        world.stream_for("reduce").submit(lambda: seen.append(current_stream(META)))
        assert seen == [world.stream_for("reduce")]
        assert current_stream(META) is world.compute


def test_parts_of_a_mesh_have_the_ranks_of_this_one() -> None:
    with dry_world(24, rank=13, ranks_per_node=8) as world:
        assert (world.rank, world.local_rank, world.nodes) == (13, 5, 3)
        mesh = world.mesh.unflatten((6, 4), ("dp", "tp"))
        within, across = mesh["tp"].communicator("gather"), mesh["dp"].communicator("gather")
        assert (within.rank, tuple(within.ranks)) == (1, (12, 13, 14, 15))
        assert (across.rank, tuple(across.ranks)) == (3, (1, 5, 9, 13, 17, 21))


@pytest.mark.parametrize(
    "given",
    [
        {"ranks": 0},
        {"ranks": 4, "rank": 4},
        {"ranks": 4, "rank": -1},
        {"ranks": 2, "ranks_per_node": -1},
        {"ranks": 2, "ranks_per_node": 0},
    ],
)
def test_ranks_that_do_not_exist_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected 0 <= rank < ranks"), dry_world(**given):
        pass


def test_code_for_a_device_runs_unchanged() -> None:
    with dry_world(6, rank=3) as world:
        assert shardrt.init("cuda") is shardrt.init() is world
        mesh = shardrt.init_device_mesh("cuda", (2, 3), mesh_dim_names=("dp", "tp"))
        assert (mesh.coordinates, mesh.device_type) == ((1, 0), "meta")


def test_errors_of_many_ranks_are_short() -> None:
    with dry_world(4096), pytest.raises(ValueError, match=r"\(on ranks 0 to 4095\)"):
        shardrt.fully_shard(torch.nn.ModuleList())


def fail_in_a_dry_world() -> None:
    with dry_world(1000, rank=7) as dry, dry.comm.agree():
        assert shardrt.world() is dry
        raise RuntimeError("of the dry world")


@on_ranks(1, 2)
def test_the_world_is_there_again(world: World) -> None:
    """A failure in the dry world does not reach the ranks that exist."""
    with pytest.raises(RuntimeError, match="of the dry world"):
        fail_in_a_dry_world()
    assert shardrt.world() is world
    assert current_stream(META).device == torch.device("cpu")
    with world.comm.agree():
        assert world.sum(1).item() == world.size


def test_a_model_trains_in_a_dry_world_of_any_size() -> None:
    for ranks in (1, 3, 4096):
        with dry_world(ranks, rank=ranks // 2), META:
            model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
            for block in model:
                shardrt.fully_shard(block)
            shardrt.fully_shard(model)
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                model(torch.empty(8, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            memory = model.param_group.runtime.memory
            most = max(group.layout.nbytes for group in model.param_group.with_descendants())
            assert most >= 4 * 64 * 65
            assert memory.peak >= most if ranks > 1 else memory.peak == 0  # alone, it computes with its shards
            assert memory.in_use == 0
