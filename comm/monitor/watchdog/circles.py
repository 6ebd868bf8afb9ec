"""Whether ranks wait for each other in a circle, as when one rank alone calls a sharded model and the others are in a barrier.

Each rank writes into its row how long the chain of waits is that begins at it: 0 if it does not wait, else one more than the
longest of the ranks that it waits for. A chain that ends has as many ranks as there are, at most. In a circle it grows with
each look, on one node in some tenths of a second, between nodes once for each exchange of the side channel.

A rank counts as waiting only where nothing in its process can go on: each operation under way has waited for some seconds for a
rank that has not come, and each thread that may call is in a call. So overlapped streams, a thread that computes or sleeps, and
a message that is being transferred give a chain of 0, and SHARDRT_TIMEOUT takes over.
"""

from __future__ import annotations

import concurrent.futures.thread
import queue
import sys
import threading
from pathlib import Path
from types import FrameType

from ...ending.status_table import StatusTable

ADVICE = (
    "every rank has to make the same calls in the same order: what calls a sharded model, such as an evaluation, or saves it, "
    "runs on every rank, not under `if rank == 0:`; what only uses the results may (docs/from_ddp.md)"
)
_COMM = str(Path(__file__).parents[2])
_WAITING = {threading.__file__, queue.__file__}  # by whose functions a caller waits
_RESTING = concurrent.futures.thread.__file__


class Callers(set[int]):
    """The threads of this rank that have made calls."""

    def wait(self) -> bool:
        """True if each of them, and each other thread but daemons, is in a call or has nothing to do. Cost: 20 us."""
        counted = self | {thread.ident for thread in threading.enumerate() if not thread.daemon}
        return all(_is_in_call(frame) for thread, frame in sys._current_frames().items() if thread in counted)


def _is_in_call(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename in _WAITING:
        frame = frame.f_back
    return frame is not None and (frame.f_code.co_filename.startswith(_COMM) or frame.f_code.co_filename == _RESTING)


def chain_of(table: StatusTable, missing: list[int]) -> int:
    """How many ranks wait for each other, from one that waits for `missing`; 0 if it waits for none, and may come through."""
    return 1 + max(map(table.chain, missing)) if missing else 0
