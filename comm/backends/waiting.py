"""How a rank waits for something that it has to look for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from time import monotonic, sleep

_LOOKS = 1000  # 0.5 ms
_AWAKE_S, _NAP_S = 0.05, 0.0002


def looks() -> Iterator[None]:
    """One item for each look, without an end; between them, others may have the core."""
    asleep_from = monotonic() + _AWAKE_S
    for turn in count():
        yield
        if turn > _LOOKS:  # Cost: on a busy machine, milliseconds until this rank runs again
            os.sched_yield()
            if monotonic() > asleep_from:  # Cost: a long wait ends so much later; meanwhile the core and the GIL are free
                sleep(_NAP_S)
