"""Timelines: what a step shows as, clocks that agree, files that Perfetto takes, and the forecast in the same format."""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import matplotlib
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardrt
import toys
from checkpoints import shared_folder
from ranks import on_ranks, refused, settings_of, with_copies
from shardrt import World
from shardrt.comm import Communicator, DeviceMesh, RemoteError, Work
from shardrt.comm.core.calls import CallList, CollectiveCall
from shardrt.comm.core.streams import INLINE, CudaStream, InlineStream, Stream
from shardrt.comm.startup.dry import dry_world
from shardrt.fsdp.base import events
from shardrt.fsdp.base.events import Step
from shardrt.timeline.__main__ import main
from shardrt.timeline.assembly import assemble
from shardrt.timeline.chrome import VERSION, TimelineProcess, chrome_events, write
from shardrt.timeline.clocks import AlignedClock, Anchor, Offset, Round
from shardrt.timeline.events import ALL_REDUCE, BY_GROUP, BY_KIND, COMPUTE, GATHER, REDUCE, Arrow, Counter, Events, Span
from shardrt.timeline.picture import Stack, draw_memory
from shardrt.timeline.recording import Recording

# ---------------------------------------------------------------------- what Perfetto takes

Json = dict[str, Any]


def nanoseconds(microseconds: object) -> int:
    """As Perfetto's importer reads a time."""
    assert type(microseconds) in (int, float)
    assert math.isfinite(cast("float", microseconds))
    return int(cast("float", microseconds) * 1000)


def check_trace(content: Json) -> None:
    """The rules of the trace-event format whose breach makes Perfetto drop an event, or show it in a wrong place."""
    names: dict[tuple[int, int], str] = {}
    stacks: dict[tuple[int, int], list[int]] = defaultdict(list)  # the ends of the spans that are open
    begun, ended = set[int](), set[int]()
    for event in sorted(content["traceEvents"], key=lambda event: event.get("ts", 0)):  # stable, as Perfetto's sorter
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        assert isinstance(event["name"], str)
        assert 0 <= event["pid"] < 1 << 32
        thread, stack = (event["pid"], event["tid"]), stacks[event["pid"], event["tid"]]
        if event["ph"] == "M":
            if event["name"].endswith("_name"):
                assert isinstance(event["args"]["name"], str)
            names[thread] = event["name"]
            continue
        at = nanoseconds(event["ts"])
        while stack and stack[-1] <= at:
            stack.pop()
        match event["ph"]:
            case "X":
                end = at + nanoseconds(event["dur"])
                assert thread in names
                assert not stack or end <= stack[-1], f"dropped: {event}"
                stack.append(end)
            case "C":
                assert event["args"]
                assert all(type(value) in (int, float) for value in event["args"].values())
            case "s" | "f":
                assert type(event["id"]) is int
                assert 0 <= event["id"] < 1 << 53, "JavaScript's numbers end there"
                assert {"cat", "name"} <= event.keys()
                assert stack, f"binds to no span: {event}"
                (begun if event["ph"] == "s" else ended).add(event["id"])
                assert event["ph"] == "s" or (event["bp"] == "e" and event["id"] in begun)
            case other:
                raise AssertionError(other)
    assert begun == ended


def read(path: Path) -> Json:
    content = json.loads(path.read_text())
    check_trace(content)
    return cast("Json", content)


# ---------------------------------------------------------------------- steps

STEP = {
    COMPUTE: [
        ("wait", "OddMLP"),
        ("forward", "OddMLP"),
        ("wait", "blocks.0"),
        ("forward", "blocks.0"),
        ("wait", "blocks.1"),
        ("forward", "blocks.1"),
        ("backward", "OddMLP"),
        ("backward", "blocks.1"),
        ("pack", "blocks.1"),
        ("wait", "blocks.0"),
        ("backward", "blocks.0"),
        ("pack", "blocks.0"),
        ("pack", "OddMLP"),
        ("optimizer", "AdamW"),
    ],
    GATHER: [("all_gather", "OddMLP"), ("all_gather", "blocks.0, blocks.1"), ("all_gather", "blocks.0")],
    REDUCE: [("reduce_scatter", "blocks.1"), ("reduce_scatter", "blocks.0"), ("reduce_scatter", "OddMLP")],
}


class Training:
    """Steps of a small model, each group a bucket."""

    def __init__(self, model: nn.Module, x: torch.Tensor) -> None:
        self.model, self.x = model, x
        self.optimizer = torch.optim.AdamW(model.parameters())

    def step(self) -> None:
        with toys.buckets_of(0):
            toys.loss_of(self.model, self.x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def training(world: World, **options: object) -> Training:
    x = torch.ones(4, 5, dtype=torch.float64, device=world.device)
    with torch.device(world.device):
        model = toys.OddMLP(layers=2).double()
    made = Training(toys.shard_blocks(model, **options), x)
    for _ in range(2):  # afterwards the order is known, and the buffers are there
        made.step()
    return made


def last_values(counters: Sequence[Counter]) -> dict[str, dict[str, float]]:
    """The values of all series at the end, by counter."""
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for counter in counters:
        values[counter.name].update(counter.values)
    return values


@on_ranks(2, more=(3,))
@toys.overlapping()
@with_copies
def test_a_step_shows_groups_streams_memory_and_arrows(world: World) -> None:
    with shared_folder(world) as folder:
        made = training(world)
        with shardrt.Timeline(folder) as timeline:
            made.step()
        events = timeline.events
        assert {track: events.order(track) for track in STEP} == STEP
        assert all(arrow.source.track == GATHER and arrow.source.end <= arrow.target.start for arrow in events.arrows)
        used = {(arrow.source.subject, arrow.target.name, arrow.target.subject) for arrow in events.arrows}
        assert used == {
            ("OddMLP", "forward", "OddMLP"),
            ("blocks.0, blocks.1", "forward", "blocks.0"),
            ("blocks.0, blocks.1", "forward", "blocks.1"),
            ("blocks.0", "backward", "blocks.0"),
        }
        held, memory = last_values(events.counters[:2]), last_values(events.counters)  # of other tests' models as well
        for series in ("gathered", "packed"):
            assert memory[BY_KIND].get(series, 0) == held[BY_KIND].get(series, 0)
        assert max(counter.values.get("gathered", 0) for counter in events.counters) > held[BY_KIND].get("gathered", 0)
        assert max(counter.values.get("gradients", 0) for counter in events.counters) > 0 == memory[BY_KIND]["gradients"]
        assert sum(memory[BY_GROUP].values()) == sum(memory[BY_KIND].values())
        read(folder / f"rank-{world.rank}.json")
        world.barrier()
        if world.rank == 0:
            merged = folder / "merged.json"
            assert main(["merge", str(folder), "-o", str(merged)]) == 0
            assert {event["pid"] for event in read(merged)["traceEvents"]} == set(range(world.size))
        with pytest.raises(RuntimeError, match="is being recorded"), shardrt.Timeline(), shardrt.Timeline():
            pass


@on_ranks(2)
def test_a_gather_takes_as_long_as_its_caller_waits_for_a_late_rank(world: World) -> None:
    made = training(world)
    with shardrt.Timeline() as timeline:
        if world.rank == 1:
            sleep(0.1)
        made.step()
    first = next(span for span in timeline.events.spans if span.track == GATHER)
    assert world.rank == 1 or first.end - first.start > 0.02


@on_ranks(2)
@with_copies
def test_gathers_run_beside_compute_on_threaded_streams(world: World) -> None:
    with settings_of(world, host_streams="threaded"):
        made = training(world)
        with shardrt.Timeline() as timeline:
            made.step()
    assert {track: timeline.events.order(track) for track in STEP} == STEP
    assert all(arrow.source.end <= arrow.target.start for arrow in timeline.events.arrows)


@on_ranks(4)
def test_replicas_are_reduced_on_a_track_of_their_own(world: World) -> None:
    mesh = shardrt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    made = training(world, mesh=mesh)
    with shardrt.Timeline() as timeline:
        made.step()
    assert timeline.events.order(ALL_REDUCE) == [("all_reduce", subject) for _, subject in STEP[REDUCE]]


@on_ranks(1)
def test_what_is_left_open_ends_with_what_is_around_it(world: World) -> None:
    """Recomputations end early; a module whose inputs want no gradient ends with the backward; exceptions end a forward."""
    model = toys.OddMLP(layers=2).double()
    for block in model.blocks:
        assert isinstance(block, toys.OddBlock)
        shardrt.fully_shard(block.up)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    shardrt.fully_shard(model.inp)
    made = Training(shardrt.fully_shard(model), torch.ones(4, 5, dtype=torch.float64))
    made.step()
    with shardrt.Timeline() as timeline:
        made.step()
    spans = [span for span in timeline.events.spans if span.track == COMPUTE]
    around = next(span for span in spans if (span.name, span.subject) == ("backward", "OddMLP"))
    inner = [span for span in spans if span.name == "backward" and span is not around]
    assert [span.subject for span in inner] == ["blocks.1.up", "blocks.0.up", "inp"]
    assert inner[-1].end == around.end
    recomputed = [span for span in spans if span.name == "recompute"]
    assert [span.subject for span in recomputed] == ["blocks.1.up", "blocks.0.up"]
    assert all(around.start <= span.start <= span.end <= around.end for span in recomputed)
    check_trace({"traceEvents": list(chrome_events(timeline.events, process(0)))})


class Silent:
    """A custom all-gather that does not call its communicator, and gathers what its own rank has."""

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=device)

    def __call__(self, out: torch.Tensor, inp: torch.Tensor, comm: Communicator, stream: Stream) -> Work:
        stream.submit(lambda: out.view(comm.size, -1).copy_(inp))
        return Work(stream.record())


@on_ranks(2)
def test_a_collective_that_is_not_seen_gives_its_name_to_no_other(world: World) -> None:
    model = cast("Any", toys.shard_blocks(toys.OddMLP(layers=3).double()))
    model.blocks[0].set_custom_all_gather(Silent())
    made = Training(model, torch.ones(4, 5, dtype=torch.float64))
    made.step()
    with shardrt.Timeline() as timeline:
        made.step()
        made.step()
    gathered = {name for _, names in timeline.events.order(GATHER) for name in names.split(", ")}
    assert gathered == {"OddMLP", "blocks.1", "blocks.2"}
    assert {arrow.target.subject for arrow in timeline.events.arrows} == gathered


@on_ranks(2)
def test_a_gather_without_a_collective_gives_its_name_to_no_other(world: World) -> None:
    """Replicated blocks are cast on their rank alone, the parameters around them are gathered."""
    policy = shardrt.MixedPrecisionPolicy(torch.bfloat16)
    model = cast("Any", toys.OddMLP(layers=3))
    for block in model.blocks:
        shardrt.fully_shard(block, mesh=DeviceMesh(world.comm, (2, 1), ("replicate", "shard")), mp_policy=policy)
    shardrt.fully_shard(model, mp_policy=policy)
    made = Training(model, torch.ones(4, 5))
    with shardrt.Timeline() as timeline:
        made.step()
        made.step()
    assert {names for _, names in timeline.events.order(GATHER)} == {"OddMLP"}


@on_ranks(1)
def test_a_forward_after_a_failed_backward_is_no_recomputation(world: World) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("in the backward")

    made = training(world)
    model = cast("Any", made.model)
    hook = model.blocks[1].register_forward_hook(lambda module, inputs, output: output.register_hook(fail) and None)
    with shardrt.Timeline() as timeline:
        refused("in the backward", made.step)
        hook.remove()
        model.reset_iter_state()
        made.step()
    names = [name for name, _ in timeline.events.order(COMPUTE)]
    assert (names.count("forward"), names.count("recompute")) == (6, 0)


@on_ranks(1, 2)
def test_a_dry_run_has_the_events_of_the_real_one(world: World) -> None:
    made = training(world)
    with shardrt.Timeline() as real:
        made.step()
    with shared_folder(world) as folder, dry_world(world.size, rank=world.rank, inline=True) as dry:
        simulated = training(dry)
        with shardrt.Timeline(folder) as forecast:
            simulated.step()
        content = read(folder / f"rank-{world.rank}-forecast.json")
    found = [plain(span) for span in real.events.spans if span.name != "wait_to_write"]  # which depends on the moment
    assert [plain(span) for span in forecast.events.spans] == found
    assert changes(forecast.events) == changes(real.events)
    assert content["otherData"]["processes"][0]["forecast"]


def changes(events: Events) -> list[tuple[str, str, float]]:
    """How each series changes, in order: counter, series, bytes. What was there before may be of other tests' models."""
    values, found = defaultdict[tuple[str, str], float](float), []
    for counter in events.counters:
        for series, value in counter.values.items():
            found.append((counter.name, series, value - values[counter.name, series]))
            values[counter.name, series] = value
    return found[sum(len(counter.values) for counter in events.counters[:2]) :]


def plain(span: Span) -> tuple[object, ...]:
    """What a span is, without its times and without numbers that count all calls since the start."""
    return (span.track, span.name, span.subject, {key: value for key, value in span.arguments.items() if key != "number"})


@on_ranks(1)
def test_nothing_is_recorded_or_kept_after_the_block(world: World) -> None:
    """By the hooks of communicators and optimizers, the observers or the timeline; nor if the block raises."""
    made, timeline = training(world), shardrt.Timeline()
    for error in (None, ValueError("of the block")):
        kept = world.comm.hooks
        with nullcontext() if error is None else pytest.raises(ValueError, match="of the block"), timeline:
            recording = ref(next(hook for hook in world.comm.hooks if isinstance(hook, Recording)))
            made.step()
            if error is not None:
                raise error
        del error  # its traceback has frames of the timeline
        assert world.comm.hooks == kept
        assert recording() is None


class Failing(InlineStream):
    def synchronize(self) -> None:
        raise ValueError("of the stream")


class Timeless(InlineStream):
    def now(self) -> float:
        return cast("float", FakeEvent(0.0))  # it cannot be placed: the host has no anchors


def record_a_step_on(stream: Stream) -> None:
    with shardrt.Timeline():
        events.begin(Step.FORWARD, Group(), stream=stream)


@on_ranks(2)
def test_what_fails_on_one_rank_at_the_end_is_an_error_on_all(world: World) -> None:
    for stream, error in ((Failing(), "ValueError"), (Timeless(), "IndexError")):
        with pytest.raises(RemoteError, match=f"rank 1 raised {error}"):
            record_a_step_on(stream if world.rank == 1 else world.stream)


@on_ranks(2)
def test_a_folder_that_one_rank_cannot_write_is_an_error_on_all(world: World) -> None:
    with shared_folder(world) as folder:
        file = folder / "file"
        file.touch()
        path = file if world.rank == 1 else folder / "there"
        with pytest.raises(RemoteError, match="rank 1 raised FileExistsError"), shardrt.Timeline(path):
            raise AssertionError("it does not begin")


# ---------------------------------------------------------------------- clocks


@pytest.mark.parametrize("offset", [0.0, 3.0, -0.0004])
def test_offsets_lie_within_their_bounds(offset: float) -> None:
    """Rank 0 and another enter barriers at random; the other's clock is ahead by `offset`."""
    draw = torch.Generator().manual_seed(1)
    mine, root = [], []
    for number in range(8):
        here, there, left, other = (number + torch.rand(4, generator=draw, dtype=torch.float64) * 1e-3).tolist()
        open_at = max(here, there)
        mine.append(Round(here + offset, max(open_at, left) + offset))
        root.append(Round(there, max(open_at, other)))
    found = Offset.between(mine, root)
    assert abs(found.seconds - offset) <= found.error + 1e-12 < 0.002
    assert (found.seconds == 0.0) == (offset == 0.0)


def test_clocks_drift_linearly_between_the_ends() -> None:
    clock = AlignedClock(opened=100.0, offsets=(Offset(102.0, 2.0, 1e-5), Offset(113.0, 3.0, 3e-5)))
    assert [clock.seconds(at) for at in (102.0, 107.5, 113.0)] == [0.0, 5.0, 10.0]
    assert clock.error == 3e-5
    assert clock.drift == 1 / 11


class FakeEvent:
    """A CUDA event that passes at this millisecond of the GPU's clock."""

    def __init__(self, at: float) -> None:
        self.at = at

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


def test_gpu_events_are_placed_between_two_anchors() -> None:
    """The GPU's clock gains 1 ms in 10 s."""
    anchors = [Anchor(cast("torch.cuda.Event", FakeEvent(at)), host) for at, host in ((500.0, 7.0), (10501.0, 17.0))]
    clock = AlignedClock(7.0, (Offset(7.0, 0.0, 0.0), Offset(17.0, 0.0, 0.0)), anchors)
    found = [clock.seconds(cast("torch.cuda.Event", FakeEvent(at))) for at in (500.0, 5500.5, 10501.0)]
    assert found == pytest.approx([0.0, 5.0, 10.0], abs=1e-12)


# ---------------------------------------------------------------------- files


def process(rank: int, *, job: str = "20260101-000000-1", forecast: bool = False) -> TimelineProcess:
    return TimelineProcess(rank, 2, job, "host", forecast)


def test_spans_that_overlap_get_threads_of_their_own_and_arrows_bind() -> None:
    """Also of spans that take no time, and of times that are no binary fractions."""
    outer, inner, across = (
        Span(COMPUTE, "backward", name, *times) for name, times in (("a", (0.1, 0.4)), ("b", (0.1, 0.3)), ("c", (0.2, 0.5)))
    )
    moments = [Span(COMPUTE, "forward", str(number), at := 0.1 * number + 1e-9, at) for number in range(6, 60)]
    gather = Span(GATHER, "all_gather", "a", 0.1, 0.1)
    events = Events(
        [outer, inner, across, gather, *moments], [Counter(BY_KIND, 0.05, {"gathered": 3.0})], [Arrow(gather, outer)]
    )
    made = list(chrome_events(events, process(1)))
    check_trace({"traceEvents": made})
    threads = {event["tid"]: event["args"]["name"] for event in made if event["name"] == "thread_name"}
    of = {event["name"]: threads[event["tid"]] for event in made if event["ph"] == "X"}
    assert [of[f"backward {name}"] for name in "abc"] == ["compute", "compute", "compute (2)"]
    assert {of[f"forward {span.subject}"] for span in moments} == {"compute"}
    assert [nanoseconds(event["ts"]) for event in made if event["name"] == "all_gather a"] == [100_000_000]


def test_merge_takes_the_newest_run_and_its_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = Events([Span(COMPUTE, "forward", "a", 0.0, 1.0)])
    files = {
        "rank-0.json": process(0),
        "rank-0-forecast.json": process(0, job="20250101-000000-1", forecast=True),
        "rank-1.json": process(1),
        "rank-2.json": process(2, job="20251231-235959-9"),
        "also-1.json": process(1),
    }
    for age, (name, each) in enumerate(files.items()):
        write(tmp_path / name, chrome_events(events, each), [each])
        os.utime(tmp_path / name, (1e9 - age,) * 2)
    (tmp_path / "other.json").write_text('{"traceEvents": []}')
    (tmp_path / "broken.json").write_text('{"traceEvents": [')
    merged = tmp_path / "merged.json"
    for _ in range(2):  # the second time over its own result
        assert main(["merge", str(tmp_path), "-o", str(merged)]) == 1
        names = [e["args"]["name"] for e in read(merged)["traceEvents"] if e["name"] == "process_name"]
        assert names == ["rank 0", "rank 1", "rank 0 forecast"]
        said = capsys.readouterr().err
        assert "rank-2.json: left out: of job 20251231-235959-9; the newest is 20260101-000000-1" in said
        assert f"also-1.json: left out: {tmp_path / 'rank-1.json'} is of rank 1 as well" in said
        assert "other.json: left out: not a file of shardrt.Timeline" in said
        assert "broken.json: left out: not JSON" in said


def test_an_earlier_result_gives_way_to_newer_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, each in enumerate((process(0), process(1), process(0, forecast=True))):
        write(tmp_path / f"rank-{number}.json", chrome_events(Events([Span(COMPUTE, "old", "", 0.0, 1.0)]), each), [each])
    assert main(["merge", str(tmp_path), "-o", str(tmp_path / "merged.json")]) == 0
    new = chrome_events(Events([Span(COMPUTE, "new", "", 0.0, 1.0)]), each)
    write(tmp_path / "rank-2.json", new, [each])
    assert main(["merge", str(tmp_path), "-o", str(tmp_path / "all.json")]) == 1
    assert f"merged.json: left out: {tmp_path / 'rank-0.json'} is of rank 0 as well" in capsys.readouterr().err
    events = read(tmp_path / "all.json")["traceEvents"]
    assert [event["name"] for event in events if event["ph"] == "X"] == ["old", "old", "new"]


@pytest.mark.parametrize("wrong", [{"rank": "0"}, {"job": 5}, {"error": None}, {"more": 1}])
def test_fields_of_wrong_types_are_left_out(wrong: Json, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = asdict(process(0)) | wrong
    about = {"shardrt_timeline": VERSION, "processes": [fields]}
    (tmp_path / "wrong.json").write_text(json.dumps({"otherData": about, "traceEvents": []}))
    about = about | {"processes": [asdict(process(0))]}
    (tmp_path / "events.json").write_text(json.dumps({"otherData": about, "traceEvents": [1, None]}))
    write(tmp_path / "good.json", chrome_events(Events([]), process(1)), [process(1)])
    assert main(["merge", str(tmp_path), "-o", str(tmp_path / "merged.json")]) == 1
    said = capsys.readouterr().err
    assert all(f"{name}.json: left out: not a file of shardrt.Timeline" in said for name in ("wrong", "events"))


def test_jobs_are_in_the_order_of_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated clock begins at 0."""
    monkeypatch.setenv("TZ", "XYZ-5")
    time.tzset()
    try:
        with dry_world(1), shardrt.Timeline(tmp_path):
            pass
    finally:
        monkeypatch.undo()
        time.tzset()
    about = json.loads((tmp_path / "rank-0-forecast.json").read_text())["otherData"]
    assert about["processes"][0]["job"] == "19700101-000000-000000"


@pytest.mark.parametrize("paths", [["missing.json"], ["folder"]])
def test_merge_of_nothing_is_refused(paths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "folder").mkdir()
    assert main(["merge", *(str(tmp_path / path) for path in paths), "-o", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err.startswith("shardrt-timeline: ")
    assert not (tmp_path / "out.json").exists()


# ---------------------------------------------------------------------- the picture

COUNTERS = [
    Counter(BY_GROUP, 0.0, {"a": 1.0}),
    Counter(BY_GROUP, 0.2, {"b": 5.0}),
    Counter(BY_KIND, 0.25, {"gathered": 99.0}),
    Counter(BY_GROUP, 0.3, {"a": 4.0}),
    Counter(BY_GROUP, 0.3, {"a": 3.0, "c": 2.0}),  # of one time the last one counts
    Counter(BY_GROUP, 0.5, {"b": 0.0}),
]


def test_series_are_stacked_and_the_peak_is_found() -> None:
    stack = Stack.of(COUNTERS, BY_GROUP)
    assert stack.times == [0.0, 0.2, 0.3, 0.5]
    assert stack.values == {"a": [1.0, 1.0, 3.0, 3.0], "b": [0.0, 5.0, 5.0, 0.0], "c": [0.0, 0.0, 2.0, 2.0]}
    assert (stack.peak, stack.peak_value) == (2, 10.0)
    for counters, name in ((COUNTERS, "other"), ([Counter(BY_GROUP, 0.0, {})], BY_GROUP)):
        with pytest.raises(ValueError, match=f"has no counter '{name}' with values"):
            Stack.of(counters, name)


def test_memory_is_drawn(tmp_path: Path) -> None:
    spans = [Span(COMPUTE, "forward", "a", 0.0, 0.3), Span(COMPUTE, "backward", "a", 0.3, 0.5)]
    many = Counter(BY_GROUP, 0.4, {f"blocks.{number}": float(number << 20) for number in range(20)})
    draw_memory(Events(spans, [*COUNTERS[:-1], many, COUNTERS[-1]]), tmp_path / "memory.png", title="A step")
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")
    matplotlib.use("svg")
    named = [*COUNTERS, Counter(BY_GROUP, 0.3, {"_head": 1.0, r"no $\math$": 1.0})]
    draw_memory(Events(spans, named), tmp_path / "memory.svg")
    assert matplotlib.get_backend() == "svg", "it stays the user's"
    drawn = (tmp_path / "memory.svg").read_text()
    assert "peak 12 B" in drawn
    sizes = (("a", 3), ("b", 5), ("c", 2), ("_head", 1), (r"no $\math$", 1))
    assert all(f"<!-- {series}: {nbytes} B -->" in drawn for series, nbytes in sizes)


# ---------------------------------------------------------------------- a GPU


class Group:
    name = "block"


class FakeCudaStream(CudaStream):
    """A stream whose events pass at the times given."""

    def __init__(self, name: str, *times: float) -> None:
        self.name, self.device, self.handle = name, torch.device("cuda", 0), hash(name)
        self._times = iter(times)

    def timed_event(self) -> torch.cuda.Event:
        return cast("torch.cuda.Event", FakeEvent(next(self._times)))


def test_on_a_gpu_spans_lie_between_events_of_their_streams() -> None:
    """Gather and compute overlap there, whatever the host does meanwhile; what blocks the host has a track of its own."""
    world = SimpleNamespace(device=torch.device("cuda", 0))
    recording, group = Recording(cast("World", world)), Group()
    compute, gather = FakeCudaStream("compute", 4.0, 6.0, 7.0, 9.0), FakeCudaStream("gather", 3.0, 5.0)
    member = cast("Any", SimpleNamespace(name="dp", size=2))
    launched = CallList([CollectiveCall(member, 7, "all_gather", torch.empty(4), torch.empty(2), (), gather)]).describe()
    blocking = CallList([CollectiveCall(member, 8, "exchange", None, None, (), INLINE)]).describe()
    recording.begin(Step.WAIT, [group], compute)
    recording.begin(Step.GATHER, [group], None)
    recording.called(launched, cast("Any", None))
    recording.end(Step.GATHER, [group], None)
    recording.before(launched)
    recording.after(launched)
    recording.end(Step.WAIT, [group], compute)
    recording.before(blocking)
    recording.after(blocking)
    recording.begin(Step.FORWARD, [group], compute)
    recording.end(Step.FORWARD, [group], compute)
    anchors = [Anchor(cast("torch.cuda.Event", FakeEvent(at)), at / 1e3) for at in (0.0, 10.0)]
    events = assemble(recording, AlignedClock(0.0, (Offset(0.0, 0.0, 0.0),), anchors))
    milliseconds = [(span.track, span.name, round(span.start * 1e3, 6), round(span.end * 1e3, 6)) for span in events.spans]
    assert [span for span in milliseconds if span[0] != "host"] == [
        (COMPUTE, "wait", 4.0, 6.0),
        (GATHER, "all_gather", 3.0, 5.0),
        (COMPUTE, "forward", 7.0, 9.0),
    ]
    assert [(arrow.source.subject, arrow.target.name) for arrow in events.arrows] == [("block", "forward")]
    assert events.order("host") == [("exchange", "")]
    assert events.spans[1].arguments["bytes"] == 16
