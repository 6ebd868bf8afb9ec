"""Forks in the place of an mpirun's ranks: the same variables, output and exit codes, so that tests of ranks may use them."""

from __future__ import annotations

import pytest

import ranks
from ranks import run_job, site
from shardrt.launch import Mpi

RANK = 'import os, sys, time; rank = int(os.environ["PMI_RANK"]); size = os.environ["PMI_SIZE"]; '
SHOW = """
with open("/proc/self/environ") as file:
    shown = dict(pair.split("=", 1) for pair in file.read().split("\\0") if "=" in pair)
own = {name: value for name, value in os.environ.items() if name in shown}
assert own == shown, "as other processes see them"
wanted = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS", "GIVEN")
found = [os.environ[name] for name in wanted], sys.argv, os.getcwd(), os.getsid(0) == os.getpid()
os.write(1, f"{rank} {found}\\n".encode())  # at once: mpirun may mix what several ranks write
"""
FROM_MPI = "from mpi4py import MPI; MPI.COMM_WORLD.Barrier(); "


@pytest.fixture(autouse=True)
def with_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "may_fork", True)


@pytest.mark.parametrize(
    ("program", "code"),
    [
        (SHOW, 0),
        ("sys.exit((5, 2)[rank])", 7),
        ("sys.exit('no') if rank else time.sleep(0.5)", 1),
        ("os.kill(os.getpid(), 9) if rank else time.sleep(600)", 9),
        (f"{FROM_MPI} os.write(1, b'%d %d %a\\n' % (rank, MPI.COMM_WORLD.allreduce(rank), size))", 0),
        (f"{FROM_MPI} MPI.COMM_WORLD.Abort(23) if rank else time.sleep(600)", 23),
        (f"{FROM_MPI} os._exit(3) if rank else time.sleep(600)", 3),
    ],
    ids=["environment", "codes", "one code", "kill", "messages", "abort", "exit"],
)
def test_forks_end_as_the_ranks_of_an_mpirun(program: str, code: int) -> None:
    if site().mpi is not Mpi.MPICH:
        pytest.skip("only the ranks of MPICH are forks")
    found = [run_job(["-c", RANK + program, "argument"], 2, fresh, GIVEN="yes") for fresh in (True, False)]
    assert [done.returncode for done in found] == [code, code], [done.stderr for done in found]
    own, forks = (sorted(line for line in done.stdout.splitlines() if line.startswith(("0 ", "1 "))) for done in found)
    assert forks == own
    assert len(own) == (2 if code == 0 else 0)
    assert "forks.py" in str(found[1].args)


def test_a_fork_without_a_launcher_ends_as_a_process_does() -> None:
    for program in ("print('it')", "import sys; sys.exit(5)", "import os; os.kill(os.getpid(), 15)", "1 / 0"):
        alone, fork = (run_job(["-c", program], 0, fresh) for fresh in (True, False))
        assert (fork.returncode, fork.stdout) == (alone.returncode, alone.stdout), fork.stderr
        assert fork.stderr.splitlines()[-1:] == alone.stderr.splitlines()[-1:]
