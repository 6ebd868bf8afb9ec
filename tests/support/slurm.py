"""A Slurm of two small nodes, both this machine: started and stopped by the tests, as root, without systemd.

All that it writes is in one temporary folder, but for a link beside libpmix that it makes where Debian has none. MPI jobs go on
the first node, which has the machine's name: two that share /dev/shm and a host name are no cluster to an MPI. A requeued job
starts again after cred_expire seconds, not after Slurm's two minutes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from ranks import rank_environment

PACKAGES = ("slurm-wlm", "munge", "libpmix2")
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "setpriv")
START_DEADLINE_S = 60.0

CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_interval=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
MailProg=/bin/true
KillWait=5
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
NodeName=second NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=4
PartitionName=tests Nodes=ALL Default=YES OverSubscribe=FORCE:4
"""


def install() -> str | None:
    """Have Slurm: install it in CI, where that may be. Returns why it cannot be had, or None."""
    if os.geteuid() != 0:
        return "munged and slurmd want root"
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if not missing:
        return None
    if "CI" not in os.environ or shutil.which("apt-get") is None:
        return f"no {', '.join(missing)}: apt-get install {' '.join(PACKAGES)}, or set CI to have the tests do so"
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    apt = ["apt-get", "-o", "DPkg::Lock::Timeout=240"]  # a new machine may be at its own updates
    for command in ([*apt, "update"], [*apt, "install", "--yes", "--no-install-recommends", *PACKAGES]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode != 0:
            return f"{' '.join(command)} failed: {done.stderr[-500:]}"
    return None


class Slurm:
    """The running daemons; `with` ends them, and whatever they started."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.node = socket.gethostname().split(".")[0]
        self.environment = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._link = _link_pmix()

    def __enter__(self) -> Slurm:
        try:
            self._configure()
            munge = [f"--{option}-file={self.folder}/munge/{option}" for option in ("key", "pid", "log", "seed")]
            self._start("munged", "--foreground", f"--socket={self.folder}/munge/socket", *munge, user="munge")
            self._start("slurmctld", "-D")
            self._start("slurmd", "-D", "-N", self.node)
            self._start("slurmd", "-D", "-N", "second")
            self._wait_until_idle()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()
        # Steps and their tasks have left slurmd's process group; all have the configuration's path in their environment.
        mark = f"SLURM_CONF={self.folder}/".encode()
        for environ in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in environ.read_bytes():
                    os.kill(int(environ.parent.name), signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)  # a step that was killed may still write
        if self._link is not None:
            self._link.unlink()

    def logs(self) -> str:
        """What the daemons wrote."""
        return "\n".join(f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.log")))

    def _configure(self) -> None:
        self.folder.chmod(0o755)  # munged is another user
        key = self.folder / "munge" / "key"
        key.parent.mkdir()
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        for path in (key.parent, key):
            shutil.chown(path, "munge")
        text = CONFIGURATION.format(host=self.node, folder=self.folder, ports=_free_ports(3))
        (self.folder / "slurm.conf").write_text(text)

    def _start(self, *command: str, user: str | None = None) -> None:
        with open(self.folder / f"{len(self._daemons)}-{command[0]}.log", "wb") as log:
            daemon = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", *command],  # should the tests be killed
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                user=user,
                group=user,
                extra_groups=None if user is None else [],
                start_new_session=True,
            )
        self._daemons.append(daemon)

    def _wait_until_idle(self) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        command = ["sinfo", "--noheader", "--Node", "--format=%T"]
        while time.monotonic() < deadline and all(daemon.poll() is None for daemon in self._daemons):
            asked = subprocess.run(command, env=os.environ | self.environment, capture_output=True, text=True, check=False)
            if asked.stdout.split() == ["idle", "idle"]:
                return
            time.sleep(0.2)
        raise RuntimeError(f"Slurm did not start within {START_DEADLINE_S} s\n{self.logs()}")


def _link_pmix() -> Path | None:
    """Slurm's plugin opens libpmix.so, which Debian has in its packages for developers only. Returns the link if made."""
    for library in Path("/usr/lib").glob("*/pmix2/lib/libpmix.so.2"):
        link = library.with_suffix("")
        if not link.exists():
            link.symlink_to(library.name)
            return link
    return None


def _free_ports(count: int) -> list[int]:
    """Below those that the system gives to connections, which might take them before the daemons do."""
    ports: list[int] = []
    while len(ports) < count:
        port = secrets.choice(range(20_000, 32_000))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            ports.append(port)
    return ports


BATCH_FILE = Path(__file__).resolve().parents[2] / "scripts" / "slurm" / "train.sbatch"


def slurm_environment(slurm: Slurm) -> dict[str, str]:
    environment = {**rank_environment(), **slurm.environment}
    del environment["OMP_NUM_THREADS"]
    return environment


def copy_batch_file(folder: Path, programs: Path) -> Path:
    """The batch file, with a folder first on PATH instead of an environment's own."""
    batch_file = folder / "train.sbatch"
    activate = "source .venv/bin/activate  "
    assert activate in BATCH_FILE.read_text()
    batch_file.write_text(BATCH_FILE.read_text().replace(activate, f"export PATH={programs}:$PATH  "))
    return batch_file
