"""The private names of torch that shardrt uses. At import, those that this torch lacks are logged, with what fails for it.

Left out is what has an underscore but is in general use by subclasses of tensors and modules: `_foreach_*`,
`_make_wrapper_subclass`, `_version`, an operator's `_schema`, and a module's `_parameters`, `_buffers`,
`_non_persistent_buffers_set` and `_apply`.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .comm.ending.guard.node import is_first_rank
from .comm.program.version import TESTED_TORCH, __version__, release

_log = logging.getLogger("shardrt")

_IMPORT = "the import of shardrt"
_RUN = "sharded modules"
_TRAIN = "training of sharded modules"
_TRANSFORMS = "transforms of torch.func over sharded modules"
_MODES = "sharded modules under a TorchDispatchMode, such as those of selective activation checkpoints"
_COMPILE = "torch.compile of sharded modules"
_CONTEXT = "context parallelism"
_TENSOR_PARALLEL = "training under parallelize_module"
_BRIDGE = "shardrt.integrations.torch_distributed"

# What each name is for, and what fails without. `torch_internals.py` uses them, but for the last rows: `kernels/` and `comm/`
# import nothing of shardrt, and what stands in for torch's own groups is in `integrations/torch_distributed`.
FAILS_WITHOUT = {
    "torch._C._current_graph_task_id": _RUN,
    "torch.autograd.Variable._execution_engine": _TRAIN,
    "torch._C._autograd._get_sequence_nr": _RUN,
    "torch.autograd.Function._backward_cls._forward_cls": _TENSOR_PARALLEL,
    "torch._C._functions.AccumulateGrad": _TENSOR_PARALLEL,
    "torch._C._will_engine_execute_node": _TRAIN,
    "torch.autograd.function._SingleLevelFunction": "sharded parameters as arguments of a torch.autograd.Function",
    "torch.Tensor._backward_hooks": _TRAIN,
    "torch.Tensor._post_accumulate_grad_hooks": _TRAIN,
    "torch._C._functorch.peek_interpreter_stack": _RUN,
    "torch._C._functorch.get_unwrapped": _TRANSFORMS,
    "torch._C._functorch.is_functorch_wrapped_tensor": _TRANSFORMS,
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack": _TRANSFORMS,
    "torch._C._len_torch_dispatch_stack": _RUN,
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": _MODES,
    "torch.utils._python_dispatch._pop_mode": _MODES,
    "torch.utils._python_dispatch._push_mode": _MODES,
    "torch._subclasses.fake_tensor.FakeTensor._mode_key": "sharded modules with fake tensors",
    "torch.autograd.forward_ad._current_level": _TRAIN,
    "torch._C._disabled_torch_function_impl": _IMPORT,
    "torch._C.DisableTorchFunctionSubclass": _RUN,
    "torch._C.DisableTorchFunction": _CONTEXT,
    "torch.overrides._get_current_function_mode_stack": f"flex_attention in {_CONTEXT}",
    "torch.overrides._pop_mode": f"flex_attention in {_CONTEXT}",
    "torch.overrides._push_mode": f"flex_attention in {_CONTEXT}",
    "torch._C._nn.scaled_dot_product_attention": f"{_CONTEXT}, where a library has replaced torch's attention",
    "torch._is_zerotensor": "changes of a DTensor's placements",
    "torch.autograd.grad_mode._unsafe_preserve_version_counter": "fsdp_post_all_gather of parameters",
    "torch.UntypedStorage._cdata": _RUN,
    "torch.UntypedStorage._swap_data_ptr_": "one copy of the parameters per node, and large buffers that keep their memory",
    "torch._dynamo.trace_rules.add": _COMPILE,
    "torch._dynamo.eval_frame.cached_backends": _COMPILE,
    "torch._C._dynamo.eval_frame.get_eval_frame_callback": "torch.compile of functions that step an optimizer",
    "torch._C.DispatchKey": "forecasts of attention",
    "torch.ops.aten._fused_sdp_choice": "forecasts of attention",
    "torch.optim.Adam._init_group": "steps of torch's optimizers on plain shards: they take longer",
    "torch.utils._foreach_utils._foreach_supported_types": "clip_grad_norm_ of torch: it takes a collective per gradient",
    "torch.amp.GradScaler._unscale_grads_": "a loss scale in pipelines",
    "torch.autograd.profiler._is_profiler_enabled": "names of modules in profiles",
    "torch._ops.OpOverload": _IMPORT,
    "torch._ops.OpOverloadPacket": _IMPORT,
    "torch.utils._pytree.tree_leaves": _IMPORT,
    "torch.utils._pytree.tree_map": _IMPORT,
    "torch.utils._pytree.tree_map_only": _IMPORT,
    "torch.utils._python_dispatch.TorchDispatchMode": _IMPORT,
    "torch._C._cuda_getCurrentRawStream": "CUDA",
    "torch._C._dynamo.guards.TensorGuards": "CUDA",
    "torch.nn.parallel.DistributedDataParallel._register_builtin_comm_hook": _BRIDGE,
    "torch._C.DispatchKeySet": _BRIDGE,
    "torch._C._ExcludeDispatchKeyGuard": _BRIDGE,
    "torch._C._IncludeDispatchKeyGuard": _BRIDGE,
    "torch._C._autograd._profiler_enabled": _BRIDGE,
    "torch._C._disabled_torch_dispatch_impl": _BRIDGE,
    "torch._C._parse_dispatch_key": _BRIDGE,
    "torch._subclasses.fake_tensor.FakeTensor": _BRIDGE,
}
_ADVICE = f"install a torch that shardrt {__version__} was tested with: {', '.join(TESTED_TORCH)}"


def of_torch(name: str, instead: Callable[..., Any] | None = None) -> Any:
    """What torch has under a private name; if it is gone, `instead`, or what raises RuntimeError when it is called."""

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError(f"torch {torch.__version__} has no {name}, without which this does not work: {_ADVICE}")

    found: Any = torch
    for part in name.split(".")[1:]:
        if not hasattr(found, part):
            return instead or fail
        found = getattr(found, part)
    return found


def lacking() -> list[str]:
    """The names that are gone from this torch. Cost: 2 ms."""
    elsewhere = {"torch._C._cuda_getCurrentRawStream"} if torch.version.cuda is None else set()
    if release(torch.__version__) < (2, 13):
        elsewhere.add("torch.UntypedStorage._swap_data_ptr_")  # it came later
    return [name for name in FAILS_WITHOUT if name not in elsewhere and not _is_there(name)]


def _is_there(name: str) -> bool:
    if name.startswith("torch._dynamo."):  # Cost: its import takes seconds, so its source is searched
        *folders, file, last = name.split(".")[1:]
        path = Path(torch.__path__[0], *folders, f"{file}.py")
        return path.exists() and re.search(rf"^(def )?{last}\b", path.read_text(), re.MULTILINE) is not None
    return of_torch(name, _is_there) is not _is_there


def _report() -> None:
    """Log what is lacking, on the first rank, as the launcher numbers them: the world is not made yet."""
    if is_first_rank(os.environ) and (names := lacking()):
        lines = [f"{name}, for {FAILS_WITHOUT[name]}" for name in names]
        first = f"torch {torch.__version__} lacks private names, and shardrt what they are for; {_ADVICE}"
        _log.warning("\n  ".join([first, *lines]))


_report()
