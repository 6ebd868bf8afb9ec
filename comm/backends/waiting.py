"""How a rank waits for something that it has to look for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from time import monotonic, sleep

from ..core.members import check_lost

_AWAKE_S, _NAP_S = 0.05, 0.0002
_looks_alone = 1000  # 0.5 ms; written by share_cores()


def share_cores() -> None:
    """From now on, let others have the core almost at once: the node has more ranks than cores, and one may wait for it.

    On 3 ranks and 2 cores, steps of small models take a tenth less time.
    """
    global _looks_alone
    _looks_alone = 10


def looks() -> Iterator[None]:
    """One item for each look, without an end; between them, others may have the core. Raises: RankLost."""
    asleep_from = monotonic() + _AWAKE_S
    for turn in count():
        yield
        check_lost()
        if turn > _looks_alone:  # Cost: on a busy machine, milliseconds until this rank runs again
            os.sched_yield()
            if monotonic() > asleep_from:  # Cost: a long wait ends so much later; meanwhile the core and the GIL are free
                sleep(_NAP_S)
