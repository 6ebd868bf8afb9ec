"""DistributedDataParallel's built-in hooks over shardrt's groups.

Those in C++ want a future of a list of C++, which Python code cannot complete: that for float16 is replaced by torch's own in
Python, which computes the same. The other works as it is.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.distributed import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from .group import ProcessGroupShardrt

_register_in_cpp: Any = DistributedDataParallel._register_builtin_comm_hook


@functools.wraps(_register_in_cpp)
def _register(self: DistributedDataParallel, comm_hook_type: BuiltinCommHookType) -> None:
    is_ours = isinstance(self.process_group, ProcessGroupShardrt)
    if is_ours and comm_hook_type == BuiltinCommHookType.FP16_COMPRESS:
        self.register_comm_hook(self.process_group, fp16_compress_hook)
    else:
        _register_in_cpp(self, comm_hook_type)


def install() -> None:
    """Let DistributedDataParallel choose the hook by its group; idempotent."""
    DistributedDataParallel._register_builtin_comm_hook = _register  # type: ignore[method-assign]
