"""What torch asks of a process group beside calls: names, its store, whether it can be split."""

from __future__ import annotations

from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import ProcessGroup, Store

BACKEND = "shardrt"


class NamedGroup(ProcessGroup):
    """A process group of the backend "shardrt"."""

    def __init__(self, store: Store, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form with a store is for torch's own groups
        self._store, self._name, self._desc = store, name, "undefined"
        self.caller_of_ops = ProcessGroup(rank, size)  # type: ignore[call-arg]

    def getBackendName(self) -> str:
        """The name that torch knows the backend by."""
        return BACKEND

    def _get_backend_name(self) -> str:
        return BACKEND

    def name(self) -> str:
        """The name that torch knows the backend by."""
        return BACKEND

    def getGroupName(self) -> str:
        """The name by which torch finds the group."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the name by which torch finds the group."""
        self._name = name

    def getGroupDesc(self) -> str:
        """What its maker calls the group."""
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        """Set what its maker calls the group."""
        self._desc = desc

    def get_group_store(self) -> Store:
        """The store of the group's ranks."""
        return self._store

    @property
    def supports_splitting(self) -> bool:
        """Whether `split_group` works."""
        return True

    @property
    def supports_coalescing(self) -> bool:
        """Messages are launched together anyway."""
        return False

    @property
    def options(self) -> None:
        """None: `torch.distributed.split_group` copies what is here."""

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: communicators number their calls."""

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: the watchdog has one limit for all calls, SHARDRT_TIMEOUT."""

    _set_default_timeout = set_timeout

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: the ranks are connected."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks that are not in the new group take no part in making it."""
