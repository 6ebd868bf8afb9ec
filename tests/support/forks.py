"""Programs in forks of a process that has imported torch and shardrt: for a rank that trains, the imports take 4 s of a core.

python forks.py ADDRESS serves requests of ask_forks.py at the socket ADDRESS until its input ends. For each job it forks a
launcher, which forks the ranks. They find what hydra, MPICH's launcher, gives them: variables, a session each, and PMI-1, the
wire protocol of the process manager. The launcher passes on what they write. It kills all ranks when one is killed, or ends
without having left MPI, and drops what is written after an abort; the job has the exit code that it has under mpirun.

Unlike those of an mpirun, the ranks have one seed of hashes, modules that the program has not imported itself, and our frames
at the bottom of their stacks.
"""

from __future__ import annotations

import array
import atexit
import ctypes
import functools
import gc
import importlib
import json
import operator
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

PADDING = {"SHARDRT_TEST_PADDING": "x" * 32768}  # room where /proc shows the environment: that of a rank may be longer
# What training brings.
IMPORTED = ("shardrt.exports", "torch._dynamo.trace_rules", "torch.distributed.tensor", "numpy.random")


@dataclass(frozen=True)
class Request:
    """A program: the arguments of Python, and what its processes inherit. No ranks: one process, without a launcher."""

    ranks: int
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    streams: list[int]  # the descriptors of standard input, output and error


def read_request(client: socket.socket) -> Request:
    """Read what ask_forks.py sends."""
    length, ancillary, _, _ = client.recvmsg(4, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    text = b""
    while len(text) < int.from_bytes(length, "little"):
        text += client.recv(65536)
    ranks, arguments, environment, folder = json.loads(text)
    return Request(ranks, arguments, environment, folder, list(array.array("i", ancillary[0][2])))


def serve(address: str) -> Callable[[], object] | None:
    """Fork a launcher for each request. Returns in each rank: its program; and in the server, when its input ends: None."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while True:
            ready, _, _ = select.select([0, listener.fileno()], [], [])
            _reap()
            if 0 in ready:
                return None
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                return launch(client)
            client.close()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


# ---------------------------------------------------------------------- the launcher


@dataclass
class Rank:
    """A rank as its launcher sees it."""

    pid: int
    process: int  # a descriptor of it
    socket: socket.socket  # for PMI-1
    outputs: dict[int, int]  # pipes from it, and where what they have goes
    pending: bytes = b""  # the beginning of a call
    is_in_mpi: bool = False
    is_at_barrier: bool = False
    code: int | None = None  # of its exit; negative for a signal

    def close(self) -> None:
        """In another process: close the descriptors."""
        self.socket.close()
        for descriptor in (self.process, *self.outputs):
            os.close(descriptor)


def launch(client: socket.socket) -> Callable[[], object]:
    """The process of a job's launcher, which ends here. Returns in each rank: its program."""
    os.setsid()
    name_process("mpirun")  # by which shardrt knows a launcher
    request = read_request(client)
    ranks: list[Rank] = []
    for number in range(max(1, request.ranks)):
        ours, theirs = socket.socketpair()
        pipes = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            client.close()
            ours.close()
            for rank in ranks:
                rank.close()
            standard_input = os.open(os.devnull, os.O_RDONLY) if number else os.dup(request.streams[0])
            for stream, own in enumerate((standard_input, pipes[0][1], pipes[1][1])):
                os.dup2(own, stream)
            for descriptor in (*request.streams, standard_input, *pipes[0], *pipes[1]):
                os.close(descriptor)
            become(request, number, theirs)
            return program_of(request.arguments)
        theirs.close()
        for _, writer in pipes:
            os.close(writer)
        outputs = {pipes[0][0]: request.streams[1], pipes[1][0]: request.streams[2]}
        ranks.append(Rank(pid, os.pidfd_open(pid), ours, outputs))
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2, request.streams[0]):
        os.dup2(nothing, stream)
    code = Launcher(client, ranks).run()
    if request.ranks:
        code = abs(code)
    client.sendall(str(code).encode())
    os._exit(0)


class Launcher:
    """Follows the ranks of a job until all have ended, and answers their calls."""

    def __init__(self, client: socket.socket, ranks: list[Rank]) -> None:
        self._client, self._ranks = client, ranks
        self._values = {"PMI_process_mapping": f"(vector,(0,1,{len(ranks)}))"}
        self._aborted: int | None = None  # with this exit code
        self._lost: Rank | None = None  # the rank for whose end the others were killed
        self._pipes = {pipe for rank in ranks for pipe in rank.outputs}  # that have not ended

    def run(self) -> int:
        """Returns: the exit code of the job; negative for a signal that ended its only rank."""
        by_descriptor: dict[int, Rank | None] = {self._client.fileno(): None}
        for rank in self._ranks:
            by_descriptor |= dict.fromkeys((rank.socket.fileno(), rank.process, *rank.outputs), rank)
        self._follow(by_descriptor)
        for rank in self._ranks:
            for descriptor in (*(self._pipes & rank.outputs.keys()), rank.socket.fileno()):
                while select.select([descriptor], [], [], 0)[0] and self._take(descriptor, rank):
                    pass
            os.waitpid(rank.pid, 0)
        if self._aborted is not None:
            return self._aborted
        return functools.reduce(operator.or_, (rank.code or 0 for rank in ([self._lost] if self._lost else self._ranks)))

    def _follow(self, by_descriptor: Mapping[int, Rank | None]) -> None:
        """Take what the descriptors have, until all ranks have ended, and, but for an abort, all that has their output."""
        poll = select.poll()
        for descriptor in by_descriptor:
            poll.register(descriptor, select.POLLIN)
        while any(rank.code is None for rank in self._ranks) or (self._pipes and self._aborted is None):
            for descriptor, _ in poll.poll():
                if not self._take(descriptor, by_descriptor[descriptor]):
                    poll.unregister(descriptor)

    def _take(self, descriptor: int, rank: Rank | None) -> bool:
        """Take what a descriptor has; False if there will be no more."""
        if rank is None:  # the client has been killed
            self._abort(1)
            return False
        if descriptor in rank.outputs:
            if pass_on(descriptor, rank.outputs[descriptor]):
                return True
            self._pipes.remove(descriptor)
        elif descriptor == rank.process:
            # The process stays, as a zombie, for guards that ask how it ended.
            ended = os.waitid(os.P_PIDFD, rank.process, os.WEXITED | os.WNOWAIT)
            assert ended is not None
            rank.code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        else:
            return self._answer_calls(rank)
        # As hydra does, which sees the end of a rank by that of its output: the rank's guard may still write.
        if (rank.code or 0) < 0 and self._pipes.isdisjoint(rank.outputs):
            self._lose(rank)
        return False

    def _answer_calls(self, rank: Rank) -> bool:
        try:
            data = rank.socket.recv(65536)
        except ConnectionResetError:  # said once, before what the rank has sent last
            return True
        if not data and rank.is_in_mpi:
            self._lose(rank)
        *lines, rank.pending = (rank.pending + data).split(b"\n")
        for line in lines:
            words = dict(word.split("=", 1) for word in line.decode().split(" ") if "=" in word)
            answer = self._answer(rank, words.pop("cmd"), words)
            if answer is not None:
                _send(rank, answer)
        return bool(data)

    def _answer(self, rank: Rank, call: str, words: dict[str, str]) -> str | None:
        if call in ("init", "finalize"):
            rank.is_in_mpi = call == "init"
        elif call == "abort":
            self._abort(int(words["exitcode"]))
            return None
        elif call == "barrier_in":
            self._enter_barrier(rank)
            return None
        elif call == "put":
            self._values[words["key"]] = words["value"]
        elif call == "get" and words["key"] in self._values:
            return f"cmd=get_result rc=0 msg=success value={self._values[words['key']]}"
        return {
            "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
            "get_maxes": "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024",
            "get_appnum": "cmd=appnum appnum=0",
            "get_my_kvsname": f"cmd=my_kvsname kvsname=forks_{os.getpid()}",
            "get_universe_size": f"cmd=universe_size size={len(self._ranks)}",
            "put": "cmd=put_result rc=0 msg=success",
            "get": "cmd=get_result rc=-1 msg=not_found value=unknown",
            "finalize": "cmd=finalize_ack",
        }[call]

    def _enter_barrier(self, rank: Rank) -> None:
        rank.is_at_barrier = True
        if all(each.is_at_barrier for each in self._ranks):
            for each in self._ranks:
                each.is_at_barrier = False
                _send(each, "cmd=barrier_out")

    def _abort(self, code: int) -> None:
        if self._aborted is None:
            self._aborted = code
            self._kill()

    def _lose(self, rank: Rank) -> None:
        if self._lost is None:
            self._lost = rank
            self._kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            if rank.code is None:
                os.killpg(rank.pid, signal.SIGKILL)


def pass_on(pipe: int, target: int) -> bool:
    """Write what a pipe has, if somebody reads it; False at its end."""
    data = left = os.read(pipe, 65536)
    try:
        while left:
            left = left[os.write(target, left) :]
    except BrokenPipeError:
        pass
    return bool(data)


def _send(rank: Rank, line: str) -> None:
    try:
        rank.socket.sendall(f"{line}\n".encode())
    except (BrokenPipeError, ConnectionResetError):
        return


# ---------------------------------------------------------------------- a rank


def become(request: Request, number: int, manager: socket.socket) -> None:
    """Make this process rank `number` of a job. manager: of processes, which speaks PMI-1."""
    os.setsid()
    name_process("python")
    os.chdir(request.folder)
    os.environ.clear()  # before the memory is overwritten that it lies in
    os.environ.update(request.environment)
    if request.ranks:
        os.set_inheritable(manager.fileno(), True)
        os.environ.update(
            MPI_LOCALNRANKS=str(request.ranks),
            MPI_LOCALRANKID=str(number),
            PMI_FD=str(manager.detach()),
            PMI_RANK=str(number),
            PMI_SIZE=str(request.ranks),
        )
    else:
        manager.close()
    show_environment()


def name_process(name: str) -> None:
    ctypes.CDLL(None).prctl(15, name.encode())  # PR_SET_NAME


def show_environment() -> None:
    """Put the environment where /proc/PID/environ reads it: shardrt knows a rank by its variables there."""
    with open("/proc/self/stat") as file:
        first, last = map(int, file.read().rpartition(")")[2].split()[47:49])
    data = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in os.environ.items())
    assert len(data) <= last - first, "the environment of a rank needs more PADDING"
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, data, len(data))


def program_of(arguments: list[str]) -> Callable[[], object]:
    """The program that Python runs by these arguments."""
    first, *rest = arguments
    names: dict[str, Any] = {"__name__": "__main__"}
    if first == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        return lambda: exec(compile(rest[0], "<string>", "exec"), names)
    if first == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        return lambda: runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(first))
    return lambda: runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    for module in IMPORTED:
        importlib.import_module(module)
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        signal.signal(number, handler)  # which a shell has a program in the background ignore
    gc.freeze()  # otherwise the first collection of each fork copies all memory
    if "triton" in sys.modules:  # beside a CUDA build of torch; triton 3.9 reports what is frozen when a fork ends as leaked
        atexit.register(gc.unfreeze)
    program = serve(sys.argv[1])
    if program is not None:
        importlib.import_module("numpy.random").seed()  # Python's own numbers are seeded anew in each fork
        program()
