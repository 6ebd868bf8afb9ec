"""Start and end of a rank: start MPI, find rank and device, start the monitor for failures and hangs, and exit in order.

Rank and size come from MPI alone; the launcher's variables only cross-check them. If launcher and MPI do not match, N ranks
silently become N worlds of one rank each: that is an error.
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, overload

import torch

from ..backends.nccl.cuda_builds import CudaBuildError, check_builds, own_builds
from ..backends.waiting import share_cores
from ..core import members
from ..core.backend import Backend
from ..core.members import Members, check_lost, check_ulfm, current_members
from ..core.nccl_policy import NcclPolicy
from ..core.settings import EnvironmentSettings, Launched, MalformedVariable, SettingsError, agree, launched, read
from ..core.streams import Stream, current_stream, new_stream
from ..ending.guard.node import WORLD_SIZE
from ..ending.report import tell_launcher_of_end, tell_launcher_of_start
from ..groups.communicator import Communicator
from ..groups.control import register
from ..groups.mesh import DeviceMesh, positional_names
from ..groups.totals import Value, reduce_values
from ..monitor.exit_handlers import end_rank
from ..program.version import TESTED_TORCH, __version__, release
from .binding import Location, SharedGpuError, bind_device, locate
from .malloc import keep_freed_memory
from .own_process import OwnProcess
from .recovery import Recovery
from .replacement import Replacement, is_joining, joined, joining

if TYPE_CHECKING:
    from mpi4py import MPI

    from ..backends.mpi import MpiBackend
    from ..monitor.install import Monitor
    from ..recorder.recorder import Recorder


@dataclass(frozen=True, slots=True, eq=False)
class World:
    """The ranks of the job, as seen from this one."""

    rank: int
    size: int
    local_rank: int  # among the ranks of this node
    node: str  # host name
    nodes: int  # how many nodes the job spans
    ranks_per_node: int | None  # if ranks are numbered node by node, equally many on each; else None
    device: torch.device
    comm: Communicator  # over all ranks, for tensors on `device`
    mesh: DeviceMesh  # 1-D, over all ranks
    recorder: Recorder  # keeps this rank's last calls
    settings: EnvironmentSettings  # the variables of the environment, as they were at `init`

    @property
    def machine(self) -> str:
        """The type of the device whose kernels compute: "cpu" or "cuda". A dry world's is that of the machine it stands for."""
        return self.device.type

    @property
    def stream(self) -> Stream:
        """The stream the caller computes on."""
        return current_stream(self.device)

    @property
    def lost(self) -> tuple[int, ...]:
        """The ranks of this world that are lost, as far as this one knows, by their numbers in it."""
        return members.current.ranks if members.current is not None and self is _process.world else ()

    @property
    def is_newcomer(self) -> bool:
        """Whether this rank has taken the place of a lost one, and has done no step of a `Run` yet.

        The other ranks are past what the program does before its `Run`: a rank that is new makes no collective calls there.
        """
        return members.is_newcomer

    def stream_for(self, role: str) -> Stream:
        """The stream for communication of this role, one for the whole process: no communicator is used by two threads.

        On the host it is a worker thread if SHARDRT_HOST_STREAMS=threaded or the job spans several nodes; on one node, where
        ranks compute and communicate on the same cores, it is the caller's thread. On CUDA the streams "gather" and "reduce"
        have the priority -1.
        """
        kind = self.settings.host_streams or ("threaded" if self.nodes > 1 else "inline")
        if kind == "threaded" and self.device.type == "cpu":
            self._check_thread_level()
        streams = _process.streams
        if (role, kind) not in streams:
            priority = _PRIORITIES.get(role, 0)
            streams[role, kind] = new_stream(self.device, role, threaded=kind == "threaded", priority=priority)
        return streams[role, kind]

    def patience(self, seconds: float) -> AbstractContextManager[None]:
        """In the `with` block, let the other ranks wait for this one, and this one for them: `with world.patience(3600): ...`.

        Up to so many seconds, the watchdog ends no job because of operations that this rank is in, or that others are in and
        this one has not reached. It serves what takes long and hardly uses a processor on its rank, such as a download, or
        takes longer than SHARDRT_PATIENCE. Not collective.
        """
        return nullcontext() if _process.monitor is None else _process.monitor.patience(seconds)

    def recover(self) -> World:
        """The world of the ranks that are left, in their old order, when a call has raised `RankLost`. Collective over them.

        Needs `shardrt.launch --survive`. `world()` returns the new world from now on. Communicators, meshes and streams of the
        old one refuse calls; so do modules sharded on its meshes: drop them first, since their memory is needed, and make new
        ones. Ranks and nodes are numbered anew. If more ranks are lost meanwhile, it begins again.
        Raises: RuntimeError if no rank of this world is lost, or it was recovered already.
        Cost: 0.1 to 0.5 s.
        """
        return _recovery.next_world(self)

    def replace(self, hosts: Sequence[str]) -> Replacement:
        """Start processes of this program in the place of lost ranks. Collective; returns at once.

        hosts: where they are to run, one on each; elsewhere, if one of them is gone. When `coming` says on every rank that
        they are there, make a world with them (`grow`). They end with the job, and if more ranks are lost meanwhile.
        """
        return _recovery.replace(hosts, self.settings.start_timeout_s)

    def grow(self, replacement: Replacement) -> World:
        """The world of these ranks and of those that were started in the place of lost ones, after them. Collective over all.

        The new ranks call `shardrt.init()`, which returns the same world. Otherwise as `recover`; if ranks are lost meanwhile,
        the world that is returned is of those that are left, without the new ones.
        """
        return _recovery.next_world(self, replacement)

    def barrier(self) -> None:
        """Block until every rank is here and this rank's device has run the work submitted to it."""
        stream = self.stream
        self.comm.barrier(stream=stream).synchronize()

    @overload
    def mean(self, value: Value, /) -> torch.Tensor: ...

    @overload
    def mean(self, *values: Value) -> tuple[torch.Tensor, ...]: ...

    def mean(self, *values: Value) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The mean over all ranks of a value, or of each of several: `loss = world.mean(loss)`. All ranks have equal weight.

        values: floating-point tensors of any shape, the same on every rank, or Python numbers, which are float64.
        Returns: a tensor without gradient, of the value's shape, dtype and device, on every rank; a tuple for several values.
        float16 and bfloat16 are added in float32, and rounded once.
        Collective. Cost: one all-reduce per dtype of the sums, for any number of values; one copy of the values.
        On a GPU it is enqueued on the current stream, and the host does not wait; reading the result (`item()`) does.
        Raises: ValueError for integer tensors; MismatchError, where calls are compared, if ranks give other sizes or dtypes.
        """
        means = reduce_values(self.comm, values, self.stream, mean=True)
        return means[0] if len(means) == 1 else means

    @overload
    def sum(self, value: Value, /) -> torch.Tensor: ...

    @overload
    def sum(self, *values: Value) -> tuple[torch.Tensor, ...]: ...

    def sum(self, *values: Value) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The sum over all ranks of a value, or of each of several: `correct, seen = world.sum(correct, seen)`.

        It works as `mean` does, and takes integers and bool as well: their sums are int64, as those of `torch.sum`.
        """
        sums = reduce_values(self.comm, values, self.stream, mean=False)
        return sums[0] if len(sums) == 1 else sums

    def _check_thread_level(self) -> None:
        from mpi4py import MPI  # not at import: it starts MPI

        if (level := MPI.Query_thread()) < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                f"threaded streams on rank {self.rank} need MPI_THREAD_MULTIPLE; MPI was initialised with level {level}, "
                f"not {MPI.THREAD_MULTIPLE}. Let shardrt.init() start MPI, or import mpi4py.MPI without another "
                "mpi4py.rc.thread_level; or set SHARDRT_HOST_STREAMS=inline"
            )


WorldKind = TypeVar("WorldKind", bound=World)

_log = logging.getLogger(__name__)
_process = OwnProcess[World]()
_recovery = Recovery(_process, lambda comm, before: _settle(comm, before.settings, bound=before.device))
# Compute waits for these: without priority, their copies and collectives begin only where a GPU busy with compute has a gap.
_PRIORITIES = {"gather": -1, "reduce": -1}


def world() -> World:
    """The world made by `init()`. Raises RuntimeError before it."""
    if (here := _process.world) is None:
        raise RuntimeError("no world yet: call shardrt.init() first, on every rank")
    return here


def note(*what: str) -> None:
    """Keep a note of what the caller does, in words, in the flight recorder. No-op without a world."""
    if (here := _process.world) is not None:
        here.recorder.note(*what)


@contextmanager
def inhabited(make: Callable[[], WorldKind]) -> Iterator[WorldKind]:
    """`world()` returns the world that `make` makes, in the `with` block, and afterwards what it returned before."""
    before = _process.world
    with register.apart():
        _process.world = made = make()
        try:
            yield made
        finally:
            _process.world = before


def init(device: str | torch.device | None = None, *, nccl: NcclPolicy | None = None) -> World:
    """Start MPI if it is not running, bind this rank's device, and return the world. Collective; later calls return the same.

    device: "cpu", "cuda" (a GPU by this rank's number among those of the machine), or None for CUDA where torch has it, else
    the CPU.
    nccl: how NCCL's communicators are made, the same on every rank; None for the defaults. The first call's counts.
    Works without a launcher, as a world of one rank. In a dry world, whose device is the meta device, any device is right.
    Rank 0 logs a warning if torch is newer than those that the tests ran with.
    Raises: RuntimeError when the launcher started N > 1 ranks and MPI sees one, after finalize(), for another device than the
    world's, where ranks of one node are in PID namespaces of their own, where ranks take the same GPU, and where torch, CuPy
    and NCCL are built for different versions of CUDA; ImportError without mpi4py; ValueError on every rank for a variable or a
    device that is malformed on one, and for variables, devices, or versions of torch and shardrt that differ between ranks.
    """
    if (here := _process.world) is None:
        here = _process.world = _start(device, nccl or NcclPolicy())
    requested = torch.device(here.device if device is None or here.device.type == "meta" else device)
    if requested.type != here.device.type or requested.index not in (None, here.device.index):
        raise RuntimeError(f"init(device={str(device)!r}): this world's device is {here.device}, and a process has one world")
    return here


def init_device_mesh(
    device_type: str, mesh_shape: tuple[int, ...], *, mesh_dim_names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """A mesh over all ranks, as torch's function of this name makes it. Calls `init` if there is no world yet.

    device_type: "cpu" or "cuda", the world's.   mesh_shape: the ranks along each axis, their product the world's size; the
    last axis is the fastest.   mesh_dim_names: names of the axes, or None for axes without names.
    The same arguments give the same mesh, derived from `world().mesh`: finalize() closes its communicators.
    Not collective, but for `init`. Raises: ValueError for another device type than the world's, an index in it, and a shape
    or names that do not fit.
    """
    if device_type not in ("cpu", "cuda"):
        raise ValueError(f"init_device_mesh({device_type!r}, ...): expected 'cpu' or 'cuda', without the number of a device")
    here = _process.world or init(device_type)
    if here.device.type not in (device_type, "meta"):
        raise ValueError(
            f"init_device_mesh({device_type!r}, {tuple(mesh_shape)}) on rank {here.rank}: expected {here.device.type!r}, the "
            "device type of this world, which shardrt.init(device) chooses once in a process"
        )
    names = positional_names(len(mesh_shape)) if mesh_dim_names is None else mesh_dim_names
    return here.mesh.unflatten(tuple(mesh_shape), tuple(names))


def at_finalize(end: Callable[[], None], abandon: Callable[[], None]) -> None:
    """Call `end` in finalize(), when all ranks are there and can still communicate; what was registered last comes first.

    abandon: called instead of it by `World.recover()`, when ranks are lost: it neither communicates nor waits.

    It serves what is under way beside the program, and has to end with it. The ranks register the same, in the same order. What
    `end` raises, finalize() raises when it is done.
    """
    _process.ends.append((end, abandon))


def finalize() -> None:
    """End the world's streams, close the communicators in a fixed order, and end MPI, if `init` started it.

    Collective; runs automatically at exit. Does nothing in a forked child.
    """
    here, monitor = _process.world, _process.monitor
    if here is None or monitor is None or monitor.is_forked():
        return
    check_lost()
    try:
        while _process.streams:
            _process.streams.popitem()[1].close()
        if _process.ends:
            monitor.meet(here.comm)
        while _process.ends:
            _process.ends.pop()[0]()
    finally:
        _end(here, monitor)


def _finalize_at_exit() -> None:
    """Let the job fail if its end does: Python ends with the code of the program, whatever an exit handler raises."""
    rank = _process.world.rank if _process.world is not None else 0
    try:
        finalize()
    except BaseException as error:
        end_rank(rank, 1, "uncaught exception in shardrt.finalize()", traceback.format_exception(error))


def _end(world: World, monitor: Monitor) -> None:
    monitor.close(world.comm)
    world.mesh.close()
    world.comm.close()
    _process.world = None
    if members.current is not None:
        tell_launcher_of_end()
        members.current.end()
        members.current = None
    _process.end_mpi()


# ---------------------------------------------------------------------- starting


def _start(requested: str | torch.device | None, policy: NcclPolicy) -> World:
    from ..monitor.watchdog.peers import NamespaceError  # not at import: see `_make_world`

    if _process.monitor is not None:
        raise RuntimeError("shardrt.init() after shardrt.finalize(): a process has one world, made once")
    launcher = launched(os.environ)
    settings, problems = read(os.environ, requested, policy)
    with _process.guard.starting(settings.start_timeout_s, settings.patience_s), joining(settings.start_timeout_s):
        comm = _process.start_mpi()
        _check_launcher(comm.Get_size(), launcher)
        try:
            if settings.survive:
                check_ulfm(comm, has_started_mpi=_process.has_started_mpi)
                tell_launcher_of_start()
            if is_joining():
                comm = joined()
            made = _settle(comm, settings, problems)
            if is_joining() and not current_members().agree(has_made=True):
                raise RuntimeError("more ranks are lost")
        except (SettingsError, NamespaceError, SharedGpuError, CudaBuildError):
            if members.current is not None:
                members.current.stop()
            _process.end_mpi()  # every rank is here, and each leaves with the error
            raise
        keep_freed_memory()
        atexit.register(_finalize_at_exit)
        if made.rank == 0 and release(torch.__version__) > release(TESTED_TORCH[-1]):
            newer = f"torch {torch.__version__} is newer than those that shardrt {__version__} was tested with"
            _log.warning("%s: %s", newer, ", ".join(TESTED_TORCH))
        return made


def _settle(
    comm: MPI.Intracomm,
    settings: EnvironmentSettings,
    problems: Sequence[MalformedVariable] = (),
    bound: torch.device | None = None,
) -> World:
    """Let the ranks of `comm` agree on what they are, and make their world. Collective over them.

    bound: the device that this rank has already.
    """
    from ..monitor.watchdog.peers import check_namespaces  # not at import: see `_make_world`

    if settings.survive:
        members.current = Members(comm)
    agree(comm, settings, problems)
    place = locate(comm, settings.ranks_per_node)
    check_namespaces(comm, place.node)
    device = bind_device(comm, settings.device, place, bound)
    if device.type == "cuda":
        check_builds(comm.allgather(own_builds()))
    return _make_world(comm, settings, place, device)


def _make_world(comm: MPI.Intracomm, settings: EnvironmentSettings, place: Location, device: torch.device) -> World:
    from ..backends.mpi import MpiBackend  # not at import: it starts MPI
    from ..monitor.install import Monitor  # not at import: `python -m shardrt.comm.recorder` is to load that module first

    if not place.has_cores:
        share_cores()
    if members.current is not None:
        members.current.meet()
    monitor = _process.monitor = Monitor(comm, place.node, device, settings, _process.guard)
    if members.current is not None:
        members.current.under_way = monitor.under_way
        if device.type == "cuda":
            members.current.abort = register.abort
    host = MpiBackend(comm.Dup(), "world", place.node, place.has_cores, comm)
    data = Communicator(_backend_for(device, host, settings.nccl), [*register.hooks, *monitor.hooks])
    return World(
        rank=data.rank,
        size=data.size,
        local_rank=place.local_rank,
        node=socket.gethostname(),
        nodes=host.nodes,
        ranks_per_node=host.ranks_per_node,
        device=device,
        comm=data,
        mesh=DeviceMesh(data),
        recorder=monitor.recorder,
        settings=settings,
    )


def _check_launcher(size: int, launcher: Launched | None) -> None:
    if size == 1 and launcher is not None:
        found = f"{launcher.variable}={os.environ[launcher.variable]}"
        fell_apart = (
            f"the launcher started {launcher.ranks} ranks ({found}), but MPI sees a world of 1: launcher and MPI do not match"
        )
        program = shlex.join(sys.argv) if os.path.isfile("".join(sys.argv[:1])) else "train.py"
        use = f"Use `python -m shardrt.launch -n {launcher.ranks} {program}` in its place"
        if launcher.variable == WORLD_SIZE:
            raise RuntimeError(
                f"{fell_apart}. torchrun and others that set {WORLD_SIZE} start processes without MPI, of which each would "
                f"train alone. {use}, once for all ranks; unset {WORLD_SIZE} in a process that is to be alone"
            )
        raise RuntimeError(
            f"{fell_apart}. {use}, or the mpirun that came with this environment's MPI; under Slurm srun --mpi=pmi2 for MPICH, "
            "and srun --mpi=pmix for Open MPI"
        )


def _backend_for(device: torch.device, host: MpiBackend, policy: NcclPolicy) -> Backend:
    if device.type == "cpu":
        return host
    from ..backends.nccl.nccl import NcclBackend  # not at import: they load CUDA
    from ..backends.nccl.nccl_config import Family

    return NcclBackend(host, device, "world", Family(policy))
