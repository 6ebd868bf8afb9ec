"""Named ranges of the host's time in a profile, NVTX ranges under `torch.autograd.profiler.emit_nvtx`. The names are FSDP2's.

| range                                                 | around                                                   |
|-------------------------------------------------------|----------------------------------------------------------|
| `FSDP::root_pre_forward`                              | the start of an iteration                                |
| `FSDP::pre_forward`, `FSDP::post_forward`, `FSDP::pre_backward` | the hooks of a module                          |
| `FSDP::all_gather`                                    | the launch of a gather                                   |
| `FSDP::forward_prefetch for`, `FSDP::backward_prefetch for` | prefetched gathers, small groups together          |
| `FSDP::all_gather_copy_out`                           | the wait for a gather; here nothing is copied            |
| `FSDP::post_backward_accumulate`                      | packing of gradients                                     |
| `FSDP::post_backward_reshard`                         | freeing of the full parameters                           |
| `FSDP::post_backward_rs_wait`                         | release of the buffers of earlier reductions             |
| `FSDP::post_backward_reduce`                          | the launch of reductions, small groups together          |
| `FSDP::post_backward_publish`                         | assignment of reduced gradients (not in FSDP2)           |
| `FSDP::root_post_backward_callback`                   | the end of the backward                                  |

Groups follow in parentheses, by their modules' full names.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch.autograd import profiler

from ..torch_internals import profiler_state

_NOTHING = nullcontext()


class Named(Protocol):
    """Has a name to show."""

    name: str


def ranged(label: str, *groups: Named) -> AbstractContextManager[object]:
    """A range named `label (names)` around the `with` block, if a profiler runs.

    Cost: 0.15 us without a profiler, where `record_function` itself costs 5.
    """
    if not profiler_state._is_profiler_enabled:
        return _NOTHING
    names = ", ".join(group.name for group in groups)
    if label.endswith(" for"):
        return profiler.record_function(f"{label} {names}")
    return profiler.record_function(f"{label} ({names})" if names else label)
