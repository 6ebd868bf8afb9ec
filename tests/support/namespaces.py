"""Machines that are network namespaces of this one, on one switch. Each has an address, a host name and shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

_ENTER = 'hostname {name}; mount -t tmpfs none /dev/shm; {prepare}; exec "$@"'


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def machines(count: int) -> Iterator[list[str]]:
    """The names of so many machines, which have the addresses 10.77.0.1 and so on, at `cable`. Skips the test without root."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces take root, and the commands ip and unshare")
    switch, *names = [f"shardrt{os.getpid()}-{number}" for number in range(count + 1)]
    with ExitStack() as made:
        try:
            for name in (switch, *names):
                _ip("netns", "add", name)
                made.callback(_ip, "netns", "del", name)
            _ip("-n", switch, "link", "add", "switch", "type", "bridge")
            _ip("-n", switch, "link", "set", "switch", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine permits no network namespaces: {error.stderr}")
        for number, name in enumerate(names, 1):
            _ip("-n", switch, "link", "add", f"port{number}", "type", "veth", "peer", "name", "cable", "netns", name)
            _ip("-n", switch, "link", "set", f"port{number}", "master", "switch", "up")
            _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "cable")
            for device in ("cable", "lo"):
                _ip("-n", name, "link", "set", device, "up")
            _ip("-n", name, "route", "add", "default", "dev", "cable")
        yield names


def on_machine(name: str, prepare: str = "true") -> list[str]:
    """What a command line begins with that is to run on a machine: this process becomes that of the command.

    prepare: a command of the shell before it, such as a mount, which this machine alone sees.
    """
    enter = _ENTER.format(name=name, prepare=prepare)
    return ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", enter, "sh"]
