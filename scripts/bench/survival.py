"""Lose ranks of jobs at random moments, and time what it costs: shardrt.launch --survive, in an environment with Open MPI.

    python scripts/bench/survival.py proof --jobs 200         # random losses; parameters compared to the bit
    python scripts/bench/survival.py soak --ranks 4           # a kill every 20 s, and replacements; draws the losses
    python scripts/bench/survival.py time --width 5600        # from the kill to the first step, beside --restarts and a new job
    python scripts/bench/survival.py cost --width 5600        # of a step, while nothing is lost

proof: each job has 4 ranks, and loses one or two of them, in one of five ways, some milliseconds after the begin of a random
step: in forward, backward, reduction, optimizer, copy, checkpoint, or, if another is lost at nearly the same time, in the
recovery. With the mesh tp, ranks form two tensor-parallel groups, one of which loses ranks. The parameters at the end have to
be, to the bit, those of jobs that lose nothing: one of as many ranks as there were up to the step from which the others went
on, then one of these, and so on. Some jobs, for root only, have a /dev/shm for each rank, as on nodes of their own, of which
those that follow each other are not lost at once. No end in time, a code other than 0, and the
loss of more ranks than that, are wrong.
soak: every --kill-every seconds a random rank is killed, and replaced (shardrt.launch --replace). The losses of all steps are
drawn over those of a job that loses nothing; the global batch is the same on any number of ranks. The parameters at the end are
compared to the bit, as those of `proof`.
time, cost: medians over the rounds; in each, the kinds of job in turns. The model has --layers matrices of --width squared.
Progress goes to stderr; the last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/

import common.checkout  # noqa: F401
from common.options import Parser, at_least

JOB = Path(__file__).with_name("survival_job.py")
WAYS = ("kill", "stop", "exit", "raise", "segfault")
STEPS, COPIES, CHECKPOINTS = 14, 3, 4
_REPLACED_S = 15.0  # until a lost rank is replaced
Event = dict[str, Any]
Segment = tuple[int, int]  # ranks, and the step from which they go on


@dataclass(frozen=True, slots=True)
class Ended:
    """A job that has ended.   code: None if it has not, in time.   events: of each rank, by its number at the start."""

    code: int | None
    seconds: float
    output: str
    events: list[list[Event]]

    @property
    def digests(self) -> set[str]:
        """The hashes of the parameters, of all ranks that came to the end."""
        return {event["digest"] for rank in self.events for event in rank if "digest" in event}

    def steps(self) -> list[Event]:
        """Those that a rank that came to the end has done, in order."""
        return next(([event for event in rank if "step" in event] for rank in self.events if rank and "digest" in rank[-1]), [])


def run(folder: Path, ranks: int, options: argparse.Namespace, launch: list[str], job: list[str]) -> Ended:
    """Run a job to its end."""
    line = [sys.executable, "-m", "shardrt.launch", *launch, "-n", str(ranks), str(JOB), "--folder", str(folder), *job]
    for old in folder.glob("events-*"):
        old.unlink()
    start = time.time()
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    try:
        limit = options.timeout + (240 * options.minutes if options.what == "soak" else 0)  # its steps take more than the pause
        output, code = process.communicate(timeout=limit)[0], process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()
        output, code = process.communicate()[0], None
    paths = [folder / f"events-{rank}" for rank in range(ranks)]
    events = [list(map(json.loads, path.read_text().splitlines())) if path.exists() else [] for path in paths]
    return Ended(code, time.time() - start, output, events)


# ---------------------------------------------------------------------- proof


def prove(options: argparse.Namespace) -> dict[str, Any]:
    """Run the jobs with losses, and compare each with one without."""
    generator, known = random.Random(options.seed), dict[tuple[str, tuple[Segment, ...]], str]()
    wrong, lost = 0, 0
    for number in range(options.jobs):
        mesh = generator.choice(["flat", "flat", "hsdp", "tp", *(["flat --apart"] if os.geteuid() == 0 else [])])
        among = {"tp": [[0, 1], [2, 3]], "flat --apart": [[0, 2], [1, 3]]}
        faults = random_faults(generator, generator.choice(among.get(mesh, [[0, 1, 2, 3]])))
        with tempfile.TemporaryDirectory(prefix="survival-") as folder:
            job = [
                "--steps",
                str(STEPS),
                "--copies",
                str(COPIES),
                "--every",
                str(CHECKPOINTS),
                "--survive",
                "--mesh",
                *mesh.split(),
            ]
            done = run(Path(folder), 4, options, ["--survive"], [*job, *(f"--fault={fault}" for fault in faults)])
        segments = tuple(segments_of(done.steps()))
        mesh = mesh.split()[0]
        complaint = complaint_of(done, 4 - (2 if mesh == "tp" else len(faults)))
        if complaint is None and (mesh, segments) not in known:
            known[mesh, segments] = undisturbed(mesh, segments, options)
        if complaint is None and done.digests != {known[mesh, segments]}:
            complaint = "other parameters"
        wrong += complaint is not None
        lost += len(segments) > 1
        print(
            f"{number + 1}/{options.jobs} {mesh} {' '.join(faults)}: {segments}, {done.seconds:.0f} s: {complaint or 'ok'}",
            file=sys.stderr,
        )
        if complaint is not None:
            print(done.output, file=sys.stderr)
    return {"jobs": options.jobs, "with losses": lost, "wrong": wrong}


def random_faults(generator: random.Random, among: list[int]) -> list[str]:
    """One or two losses of these ranks: RANK:WAY:STEP:MILLISECONDS. Two are at once, or one after the other."""
    ranks = generator.sample(among, generator.choice([1, 1, 2]))
    step, together = generator.randrange(STEPS - 1), generator.random() < 0.5
    faults = []
    for rank in ranks:
        faults.append(f"{rank}:{generator.choice(WAYS)}:{step}:{generator.uniform(0, 40):.1f}")
        step = step if together else generator.randrange(step, STEPS - 1)
    return faults


def complaint_of(done: Ended, left: int) -> str | None:
    """What is wrong with a job, of which so many ranks were to be left at least."""
    if done.code is None:
        return "no end"
    if done.code != 0:
        return f"exit code {done.code}"
    if len(done.digests) != 1:
        return f"{len(done.digests)} different results"
    found = done.steps()[-1]["ranks"]
    return None if found >= left else f"{found} ranks left, expected {left}"


def segments_of(steps: list[Event]) -> list[Segment]:
    """Which ranks have made the parameters: what was done again counts once."""
    segments: list[Segment] = []
    before: Event | None = None
    for event in steps:
        if before is None or event["ranks"] != before["ranks"] or event["step"] != before["step"] + 1:
            while segments and segments[-1][1] >= event["step"]:
                segments.pop()
            segments.append((event["ranks"], event["step"]))
        before = event
    return segments


def undisturbed(mesh: str, segments: tuple[Segment, ...], options: argparse.Namespace, steps: int = STEPS) -> str:
    """The hash of the parameters of jobs without losses."""
    with tempfile.TemporaryDirectory(prefix="survival-") as folder:
        ends = [step for _, step in segments[1:]] + [steps]
        for (ranks, _), end in zip(segments, ends, strict=True):
            done = run(Path(folder), ranks, options, [], ["--steps", str(end), "--mesh", mesh])
            assert done.code == 0, done.output
        return done.digests.pop()


def soak(options: argparse.Namespace) -> dict[str, Any]:
    """Kill ranks while a job trains and replaces them."""
    generator = random.Random(options.seed)
    seconds = 60 * options.minutes
    steps = int(seconds / options.pause)
    job = ["--steps", str(steps), "--copies", str(COPIES), "--survive", "--pause", str(options.pause)]
    with tempfile.TemporaryDirectory(prefix="survival-") as folder:
        stopping = threading.Event()
        killer = threading.Thread(target=kill_often, args=(Path(folder), generator, options.kill_every, seconds, stopping))
        killer.start()
        done = run(Path(folder), options.ranks, options, ["--replace"], job)
        stopping.set()
        killer.join()
    assert done.code == 0, done.output
    events = sorted((event for rank in done.events for event in rank), key=lambda event: float(event["time"]))
    kept: dict[int, Event] = {}  # what was done again counts once
    for event in events:
        if "step" in event:
            if event["step"] <= max(kept, default=-1):
                kept = {step: old for step, old in kept.items() if step < event["step"]}
            kept[event["step"]] = event
    segments = tuple(segments_of(list(kept.values())))
    losses, digest = undisturbed_losses(steps, options), undisturbed("flat", segments, options, steps)
    difference = max(abs(kept[step]["loss"] - loss) for step, loss in losses.items())
    if options.picture is not None:
        draw(options.picture, losses, kept)
    return {
        "steps": steps,
        "replaced": len([event for event in events if "begun" in event]) - options.ranks,
        "same bits": done.digests == {digest},
        "largest difference of a loss": difference,
    }


def kill_often(folder: Path, generator: random.Random, every_s: float, seconds: float, stopping: threading.Event) -> None:
    """Kill a random rank again and again, but not in the end, so that the last is replaced."""
    while not started(folder):
        if stopping.wait(1.0):
            return
    begin = time.monotonic()
    while not stopping.wait(every_s) and time.monotonic() < begin + seconds - _REPLACED_S:
        alive = [pid for pid in started(folder) if Path(f"/proc/{pid}").exists()]
        if len(alive) > 1:
            victim = generator.choice(alive)
            print(f"{time.monotonic() - begin:.0f} s: killing one of {len(alive)} ranks", file=sys.stderr)
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)


def started(folder: Path) -> list[int]:
    """The processes that have come to their first step."""
    paths = sorted(folder.glob("events-*"))
    return [line["pid"] for path in paths for line in map(json.loads, path.read_text().splitlines()) if "pid" in line]


def undisturbed_losses(steps: int, options: argparse.Namespace) -> dict[int, float]:
    """The losses of a job that loses no rank."""
    with tempfile.TemporaryDirectory(prefix="survival-") as folder:
        done = run(Path(folder), options.ranks, options, [], ["--steps", str(steps)])
        return {event["step"]: event["loss"] for event in done.steps()}


def draw(picture: Path, undisturbed: dict[int, float], disturbed: dict[int, Event]) -> None:
    """The losses of both, and the number of ranks below."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(8, 4), height_ratios=(3, 1))
    above.plot(list(undisturbed), list(undisturbed.values()), linewidth=2.5, color="0.75", label="nothing lost")
    above.plot(
        list(disturbed), [event["loss"] for event in disturbed.values()], linewidth=0.8, label="ranks killed and replaced"
    )
    above.set_ylabel("loss")
    above.legend()
    below.step(list(disturbed), [event["ranks"] for event in disturbed.values()], where="post", linewidth=0.8)
    most = max(event["ranks"] for event in disturbed.values())
    below.set(xlabel="step", ylabel="ranks", ylim=(0, most + 0.5), yticks=range(0, most + 1, 2))
    figure.tight_layout()
    figure.savefig(picture)


# ---------------------------------------------------------------------- times


def time_recovery(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds from a kill to the end of the first step that is done afterwards."""
    found: dict[str, list[float]] = {"survive": [], "restart": [], "new job": []}
    shape, step = shape_of(options), 16
    for _ in range(options.rounds):
        for kind in found:
            with tempfile.TemporaryDirectory(prefix="survival-", dir=options.folder) as folder:
                job = [*shape, "--steps", str(step + 4), *([] if kind == "new job" else [f"--fault=3:kill:{step}:50"])]
                if kind == "survive":
                    done = run(Path(folder), 4, options, ["--survive"], [*job, "--survive", "--copies", "10"])
                else:
                    done = run(Path(folder), 4, options, ["--restarts", "1"], [*job, "--every", "10"])
                assert done.code == 0, done.output
                begin = min((event["time"] for rank in done.events for event in rank if "fault" in event), default=0.0)
                if kind == "new job":
                    begin = time.time() - done.seconds
                steps = [event["time"] for event in done.steps() if event["time"] > begin]
                found[kind].append(steps[0] - begin)
                print(f"{kind}: {found[kind][-1]:.2f} s", file=sys.stderr)
    return {"seconds": {kind: median(times) for kind, times in found.items()}}


def time_steps(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a step while nothing is lost, and what copies take of it."""
    kinds = {
        "ends": ([], []),
        "survives": (["--survive"], ["--survive"]),
        "copies": (["--survive"], ["--survive", "--copies", "10"]),
    }
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind, (launch, job) in kinds.items():
            with tempfile.TemporaryDirectory(prefix="survival-", dir=options.folder) as folder:
                done = run(Path(folder), options.ranks, options, launch, [*shape_of(options), "--steps", "31", *job])
                assert done.code == 0, done.output
                times = [event["time"] for event in done.steps()]
                found[kind].append((times[-1] - times[10]) / 20)  # two copies
                print(f"{kind}: {found[kind][-1]:.4f} s a step", file=sys.stderr)
    ratios = {kind: [ours / plain for ours, plain in zip(times, found["ends"], strict=True)] for kind, times in found.items()}
    return {
        "seconds": {kind: median(times) for kind, times in found.items()},
        "by ends": {k: median(r) for k, r in ratios.items()},
    }


def shape_of(options: argparse.Namespace) -> list[str]:
    return ["--width", str(options.width), "--layers", str(options.layers), "--rows", str(options.rows)]


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("what", choices=("proof", "soak", "time", "cost"))
    parser.add_argument("--jobs", type=at_least(1), default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=at_least(0.1, float), default=10.0, help="of `soak`")
    parser.add_argument("--kill-every", type=at_least(0.1, float), default=20.0, help="seconds, of `soak`")
    parser.add_argument("--pause", type=at_least(0.001, float), default=0.1, help="seconds of a step, about, of `soak`")
    parser.add_argument("--picture", type=Path, help="of `soak`")
    parser.add_argument("--ranks", type=at_least(1), default=2, help="of `soak` and `cost`")
    parser.add_argument("--width", type=at_least(1), default=5600)
    parser.add_argument("--layers", type=at_least(1), default=4)
    parser.add_argument("--rows", type=at_least(1), default=240)
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--folder", help="where checkpoints go; default: among the temporary files")
    parser.add_argument("--timeout", type=at_least(1.0, float), default=300.0, help="seconds for one job")
    options = parser.parse_args()
    result = {"proof": prove, "soak": soak, "time": time_recovery, "cost": time_steps}[options.what](options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
