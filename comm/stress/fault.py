"""Run jobs with a fault, some at once, judge how they end, and report the table."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from .faults.faults import ENDED, FAULTS, SRUN, STAND_IN, WATCHDOG, Fault, When
from .faults.jobs import END_S, Ending, Installation, Way, run_job
from .faults.report import PRINT, FaultTable
from .options import StressOptions

AT_ONCE = 2  # jobs run at once
SHOWN = 3000  # characters of the output of a job that did not end as expected


def run(options: StressOptions) -> int:
    """Run the faults of the command line; returns 0 if every job ended as expected."""
    victim = options.number - 1 if options.fault_rank is None else options.fault_rank
    if not 0 <= victim < options.number:
        sys.exit(f"--fault-rank {victim} is not one of {options.number} ranks")
    table = FaultTable({}, []) if options.report in (None, PRINT) else FaultTable.read(options.report)
    site, held = Installation.find(), True
    ways = [Way.LAUNCH] if options.report is None else list(Way)
    groups = _share_jobs([FAULTS[name] for name in options.faults])
    jobs = [(faults, way) for faults in groups for way in ways if way is Way.LAUNCH or not faults[0].is_unread]
    with ThreadPoolExecutor(AT_ONCE, "fault") as pool:
        running = [pool.submit(_run_job, site, way, faults, victim, options) for faults, way in jobs]
        for (faults, way), ending in zip(jobs, running, strict=True):
            for fault in faults:
                part = _of_call(ending.result(), fault) if fault.when is When.CALL else ending.result()
                complaints = judge(fault, site.column, way, victim, options.number, part)
                _print(f"{fault.name} on rank {victim} of {options.number}, {way.value}", part, complaints)
                table.add(fault, site.column, way, part, holds=not complaints)
                held &= not complaints
    if options.report is not None:
        table.write(options.report)
    return 0 if held else 1


def _share_jobs(faults: Sequence[Fault]) -> list[list[Fault]]:
    """The faults of each job: calls of one program that raise on every rank share one."""
    calls: dict[str, list[Fault]] = defaultdict(list)
    for fault in faults:
        if fault.when is When.CALL:
            calls[fault.program].append(fault)
    return [*([fault] for fault in faults if fault.when is not When.CALL), *calls.values()]


def _run_job(site: Installation, way: Way, faults: list[Fault], victim: int, options: StressOptions) -> Ending:
    names = ",".join(fault.name for fault in faults)
    flags = ["--inject", "--fault", names, "--fault-rank", str(victim), "--fault-after", str(options.fault_after)]
    return run_job([*site.command(way, faults[0].program, options.number), *flags], faults[0], options.number)


def _of_call(ending: Ending, fault: Fault) -> Ending:
    """The part of a job with several faults that is about this one: all of it, if the job has not come so far."""
    injected = re.findall(rf"^rank \d+ injects {fault.name} at ([\d.]+)$", ending.output, re.MULTILINE)
    raised = re.findall(rf"^rank \d+ raised in {fault.name} at ([\d.]+)", ending.output, re.MULTILINE)
    if not injected or not raised:
        return replace(ending, seconds=None)
    lines = [line for line in ending.output.splitlines(keepends=True) if f" {fault.name} at " in line]
    return replace(ending, output="".join(lines), seconds=max(map(float, raised)) - min(map(float, injected)))


def judge(fault: Fault, column: str, way: Way, victim: int, ranks: int, ending: Ending) -> list[str]:
    """What was expected and did not happen, in words. column: of the table."""
    says, codes = _says(fault, column, victim), _codes(fault, column, way)
    if fault.when is When.CALL:
        # Hazard: where one rank raises and others wait, the job has no line of theirs.
        silent = [rank for rank in range(ranks) if not re.search(_raised(rank, fault, says), ending.output, re.MULTILINE)]
        said, codes = not silent, (0,)
    else:
        # Hazard: on a signal, Open MPI's mpirun kills its ranks before they can report.
        is_killed = way is Way.BARE and fault.when is When.LAUNCHER and ending.code not in fault.codes
        said = is_killed or re.search(says, ending.output) is not None
    failed = ending.code not in (None, 0)
    expected = " or ".join(map(str, codes)) or "another exit code than 0"
    checks = {
        "the fault was not injected": ending.seconds is None,
        f"the job had not ended {END_S:g} s after the fault": ending.code is None or (ending.seconds or 0) > END_S,
        f"processes outlived the job: {', '.join(ending.survivors)}": ending.survivors,
        f"expected {expected}": not (ending.code in codes if codes else failed),
        f"expected {says!r} in the output" if fault.when is not When.CALL else f"expected {says!r} on every rank": not said,
    }
    return [text for text, is_so in checks.items() if is_so]


def _says(fault: Fault, column: str, victim: int) -> str:
    says = fault.says.replace("VICTIM", str(victim))
    if fault.guard_says and column == "MPICH":
        says += f".*{fault.guard_says}"
    if fault.when is When.LAUNCHER and column == "srun":
        says += f"|{STAND_IN}"
    return says


def _codes(fault: Fault, column: str, way: Way) -> tuple[int, ...]:
    codes = fault.codes if way is Way.LAUNCH or fault.bare is None else fault.bare
    if not codes or 0 in codes:
        return codes
    if column == "Open MPI" and fault.guard_says:
        return codes + ENDED
    fails_alone = fault.when is When.BEFORE and fault.bare is not None and fault.codes[0] not in WATCHDOG
    return codes + SRUN if column == "srun" and (way is Way.BARE or fails_alone) else codes


def _raised(rank: int, fault: Fault, says: str) -> str:
    return rf"^rank {rank} raised in {fault.name} at [\d.]+ (?!nothing$).*{says}"


def _print(title: str, ending: Ending, complaints: list[str]) -> None:
    when = "" if ending.seconds is None else f", {ending.seconds:.1f} s after the fault"
    print(f"{title}: exit code {ending.code}{when}")
    for line in re.findall("^call .*", ending.output, re.MULTILINE) + [f"FAILED: {text}" for text in complaints]:
        print(line)
    if complaints:
        print("".join(f"    {line}\n" for line in ending.output[:SHOWN].splitlines()))
    sys.stdout.flush()
