"""The private names of torch that shardrt uses, each with a fallback for a torch that lacks it, or a clear error at use.

One more is in `kernels/cuda.py`, which imports nothing of shardrt: `TensorGuards`, with a fallback of its own.

| function                         | private name                                   | without it                           |
|----------------------------------|------------------------------------------------|--------------------------------------|
| `current_backward`               | `torch._C._current_graph_task_id`              | the stack is searched, slowly        |
| `queue_backward_callback`        | `Variable._execution_engine`                   | RuntimeError at the first backward   |
| `wanted`                         | `torch._C._will_engine_execute_node`           | always `Wanted.RETURNED`             |
| `may_be_kept`                    | `Tensor._backward_hooks`                       | always                               |
| `grad_hooks`                     | `Tensor._backward_hooks`                       | hooks are not called, with a warning |
| `post_accumulate_grad_hooks`     | `Tensor._post_accumulate_grad_hooks`           | hooks are not called, with a warning |
| `current_transform`              | `torch._C._functorch.peek_interpreter_stack`   | always: outputs are searched         |
| `unwrap_transform`               | `get_unwrapped`, `is_functorch_wrapped_tensor` | torch's public, slower function      |
| `outside_transforms`             | `torch._functorch.pyfunctorch`                 | RuntimeError inside a transform      |
| `forward_mode_is_active`         | `torch.autograd.forward_ad._current_level`     | always                               |
| `disabled_torch_function`        | `torch._C._disabled_torch_function_impl`       | torch's public default               |
| `as_plain_tensors`               | `torch._C.DisableTorchFunctionSubclass`        | None                                 |
| `preserve_version`               | `_unsafe_preserve_version_counter`             | RuntimeError where it is needed      |
| `same_storage`                   | `torch.UntypedStorage._cdata`                  | addresses are compared               |
| `swap_memory`                    | `torch.UntypedStorage._swap_data_ptr_`         | buffers are malloc's blocks          |
| `hide_from_compiler`             | `torch._dynamo.trace_rules`                    | a warning; torch.compile may fail    |
| `compiler_in_use`                | `torch._dynamo.eval_frame.cached_backends`     | always                               |
| `compiling`                      | `torch._C._dynamo.eval_frame`                  | wherever the compiler is in use      |
| `init_group`                     | `torch.optim.Adam._init_group`                 | steps on `DTensor`s                  |
| `clip_lists_of`                  | `torch.utils._foreach_utils`                   | torch clips one gradient at a time   |
| `profiler_state`                 | `torch.autograd.profiler._is_profiler_enabled` | ranges are always recorded           |
| `OpOverload`, `OpOverloadPacket` | `torch._ops`, for type checkers only           | the types of two operators           |
| `tree_map` and two others        | `torch.utils._pytree`                          | tuples, lists and dicts              |
| `aten_operator`                  | operators with an underscore, as fused ones    | None                                 |
| `TorchDispatchMode`              | `torch.utils._python_dispatch`                 | RuntimeError when one is made        |

Importing this file looks private names up with a default only, so it cannot fail for lack of one. This file leaves out names
that have an underscore but are in general use by subclasses of tensors and modules: `_foreach_*`, `_make_wrapper_subclass`,
`_version`, an operator's `_schema`, and a module's `_parameters`, `_buffers`, `_non_persistent_buffers_set` and `_apply`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from operator import attrgetter
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import Node

if TYPE_CHECKING:
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    OpOverload, OpOverloadPacket = type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)

_log = logging.getLogger("shardrt")


def find(path: str) -> Any:
    """The object at `path`, such as `torch._C._functorch.peek_interpreter_stack`; None if this torch lacks it."""
    module, _, name = path.rpartition(".")
    owner: Any = None
    try:
        owner = importlib.import_module(module)
    except ImportError:  # not a module, but perhaps an attribute of one
        owner = find(module) if "." in module else owner
    try:
        return getattr(owner, name, None)
    except ImportError:  # from a module that torch imports at the first access
        return None


def aten_operator(name: str) -> OpOverloadPacket | None:
    """The operator `torch.ops.aten.<name>`; None if this torch lacks it."""
    operator: OpOverloadPacket | None = getattr(torch.ops.aten, name, None)
    return operator


def _missing(path: str, purpose: str) -> RuntimeError:
    return RuntimeError(f"torch {torch.__version__} has no {path}, which {purpose} needs: install a tested version")


class NoDispatchMode:
    """Replaces `TorchDispatchMode` where it cannot be found."""

    def __init__(self) -> None:
        raise _missing("torch.utils._python_dispatch.TorchDispatchMode", "a forecast")


if not TYPE_CHECKING:
    TorchDispatchMode = find("torch.utils._python_dispatch.TorchDispatchMode") or NoDispatchMode

# ---------------------------------------------------------------------- autograd


def backward_is_on_the_stack() -> bool:
    """True if a backward is running in this thread, judged by the functions on its stack."""
    if threading.current_thread().name.startswith("Dummy"):  # autograd's own threads, which run hooks of CUDA nodes
        return True
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False


def _make_current_backward() -> Callable[[], int]:
    current: Callable[[], int] | None = getattr(torch._C, "_current_graph_task_id", None)
    return current or (lambda: 0 if backward_is_on_the_stack() else -1)


# The number of the backward that runs in this thread, each another one; -1 outside.
current_backward = _make_current_backward()


def in_backward() -> bool:
    """True if a backward runs in this thread."""
    return current_backward() != -1


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward. Raises RuntimeError if this torch cannot."""
    engine = getattr(torch.autograd.Variable, "_execution_engine", None)
    if engine is None:
        raise _missing("torch.autograd.Variable._execution_engine", "the backward of a sharded module")
    engine.queue_callback(callback)


def hooks_are_unknown(tensor: torch.Tensor) -> None:
    """Replaces `grad_hooks` and `post_accumulate_grad_hooks` where hooks cannot be read: no hooks, and a warning."""
    _warn_of_hooks()


@functools.cache
def _warn_of_hooks() -> None:
    _log.warning(
        "torch %s does not show the hooks of register_hook and register_post_accumulate_grad_hook: those on sharded parameters "
        "are not called (logged once)",
        torch.__version__,
    )


_HookGetter = Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], torch.Tensor | None]] | None]

# A tensor's hooks, or None. Cost: called for each parameter in each step, so they are functions in C.
grad_hooks: _HookGetter = attrgetter("_backward_hooks") if hasattr(torch.Tensor, "_backward_hooks") else hooks_are_unknown
post_accumulate_grad_hooks: _HookGetter = (
    attrgetter("_post_accumulate_grad_hooks") if hasattr(torch.Tensor, "_post_accumulate_grad_hooks") else hooks_are_unknown
)


def no_preserve_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Stands in for `preserve_version`: RuntimeError."""
    raise _missing("torch.autograd.grad_mode._unsafe_preserve_version_counter", "a parameter with an all-gather extension")


# Inside, writes to a tensor do not count as modifications.
preserve_version: Callable[[torch.Tensor], AbstractContextManager[None]] = (
    find("torch.autograd.grad_mode._unsafe_preserve_version_counter") or no_preserve_version
)


class Wanted(Enum):
    """What the running backward does with the gradient of a node's output."""

    NO = auto()  # nothing: it is not computed
    RETURNED = auto()  # `torch.autograd.grad` returns it, or nobody knows
    ACCUMULATED = auto()  # it goes on through the node; that of a leaf adds it to `.grad`


def wanted(node: Node) -> Wanted:
    """What the running backward does with the gradient that `node` is given."""
    executes = getattr(torch._C, "_will_engine_execute_node", None)
    if executes is None:
        return Wanted.RETURNED
    try:
        return Wanted.ACCUMULATED if executes(node) else Wanted.NO
    except RuntimeError:  # of a leaf for `torch.autograd.grad`, about which torch does not answer
        return Wanted.RETURNED


def may_be_kept(tensor: torch.Tensor) -> bool:
    """Hooks of the user's see the gradients of a leaf, and may keep them."""
    return bool(getattr(tensor, "_backward_hooks", True))


# ---------------------------------------------------------------------- torch.func's transforms, forward-mode AD


def unknown_transform() -> object:
    """Stands in for `current_transform`: there may be one."""
    return unknown_transform


# The innermost transform that is active, or None. Cost: called for each module in each forward, so it is a function in C.
current_transform: Callable[[], object | None] = find("torch._C._functorch.peek_interpreter_stack") or unknown_transform


def _make_unwrap_transform() -> Callable[[torch.Tensor], torch.Tensor]:
    is_wrapped = find("torch._C._functorch.is_functorch_wrapped_tensor")
    unwrap = find("torch._C._functorch.get_unwrapped")
    if is_wrapped is None or unwrap is None:
        return functools.partial(torch.func.debug_unwrap, recurse=False)
    return lambda tensor: unwrap(tensor) if is_wrapped(tensor) else tensor


# What one transform has wrapped in a tensor; the tensor itself if none has.
unwrap_transform = _make_unwrap_transform()


_NOTHING = nullcontext()


def outside_transforms() -> AbstractContextManager[object]:
    """Inside, the active transforms of `torch.func` do not apply. Cost: 0.15 us if there are none."""
    if current_transform() is None:
        return _NOTHING
    clear = find("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack")
    return check_no_transform() if clear is None else clear()


@contextmanager
def check_no_transform() -> Iterator[None]:
    """Replaces `outside_transforms`: raises RuntimeError inside a transform that wraps new tensors."""
    made = torch.zeros(()).clone()
    if unwrap_transform(made) is not made:
        path = "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack"
        raise _missing(path, "a forward of a sharded module inside a transform of torch.func")
    yield


def forward_mode_is_active() -> bool:
    """Some tensors may have tangents."""
    return bool(getattr(forward_ad, "_current_level", 0) >= 0)


# ---------------------------------------------------------------------- subclasses of tensors, storages


@classmethod  # type: ignore[misc]
def public_torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Replaces `disabled_torch_function`: the behaviour of plain tensors, which does not convert outputs."""
    return torch.Tensor.__torch_function__(func, (), args, kwargs or {})


def disabled_torch_function() -> Any:
    """The `__torch_function__` of subclasses that only take part in `__torch_dispatch__`."""
    return getattr(torch._C, "_disabled_torch_function_impl", None) or public_torch_function


# Inside, the `__torch_function__` of subclasses is not called.
as_plain_tensors: Callable[[], AbstractContextManager[None]] | None = getattr(torch._C, "DisableTorchFunctionSubclass", None)


def same_address(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Stands in for `same_storage`: two storages without memory are the same only as one object."""
    return one is other or one.data_ptr() == other.data_ptr() != 0


def _make_same_storage() -> Callable[[torch.UntypedStorage, torch.UntypedStorage], bool]:
    if not hasattr(torch.UntypedStorage, "_cdata"):
        return same_address
    return lambda one, other: one._cdata == other._cdata


# Two Python objects stand for one storage.
same_storage = _make_same_storage()


def no_swap_memory(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Stands in for `swap_memory`: RuntimeError."""
    raise _missing("torch.UntypedStorage._swap_data_ptr_", "a buffer in pages outside of malloc's heap")


# Exchanges the memory of two storages, of which one has none; views of both follow.
swap_memory: Callable[[torch.UntypedStorage, torch.UntypedStorage], object] = getattr(
    torch.UntypedStorage, "_swap_data_ptr_", no_swap_memory
)


# ---------------------------------------------------------------------- compiler, profiler


def hide_from_compiler(packages: Sequence[str]) -> None:
    """Exclude the files of these packages from torch.compile: a graph ends before a call into them, and a new one begins there.

    Cost: importing the compiler takes seconds and 70 MB, once; torch's optimizers import it as well. The public function,
    `torch.compiler.disable`, costs some microseconds per hook, and drops the hooks in a backward.
    """
    add = find("torch._dynamo.trace_rules.add")
    if add is None:
        _log.warning("torch %s has no torch._dynamo.trace_rules: torch.compile of sharded modules may fail", torch.__version__)
        return
    for package in packages:
        add(package)


@functools.cache
def hide_package_from_compiler() -> None:
    """Exclude the files of shardrt from torch.compile, once."""
    hide_from_compiler(("shardrt", "shardrt.comm", "shardrt.kernels"))


def compiler_in_use() -> bool:
    """Something in this process was given to torch.compile."""
    if (module := sys.modules.get("torch._dynamo.eval_frame")) is None:
        return False
    backends = getattr(module, "cached_backends", None)
    return backends is None or any(backend is not None for backend in backends.values())  # torch.compiler.disable has None


def _make_compiling() -> Callable[[], bool]:
    callback = find("torch._C._dynamo.eval_frame.get_eval_frame_callback")
    if callback is None:
        return lambda: torch.compiler.is_compiling() or compiler_in_use()
    return lambda: torch.compiler.is_compiling() or callback() is not None


# A function given to torch.compile is traced, or runs and has called this one, be that by a graph break.
compiling = _make_compiling()


def init_group(kind: type) -> Callable[..., Any] | None:
    """The method of an optimizer's class that fills the lists of its step; None if it does not take them by position."""
    found: Callable[..., Any] | None = getattr(kind, "_init_group", None)
    if found is None:
        return None
    kinds = {parameter.kind for parameter in inspect.signature(found).parameters.values()}
    return None if inspect.Parameter.KEYWORD_ONLY in kinds else found


def clip_lists_of(kind: type[torch.Tensor]) -> None:
    """Have torch's gradient clipping treat all tensors of this class at once, as it does plain ones.

    Cost: without it, a collective for each gradient.
    """
    kinds = find("torch.utils._foreach_utils._foreach_supported_types")
    if kinds is not None and kind not in kinds:
        kinds.append(kind)


def _make_profiler_state() -> Any:
    from torch.autograd import profiler

    return profiler if hasattr(profiler, "_is_profiler_enabled") else SimpleNamespace(_is_profiler_enabled=True)


profiler_state = _make_profiler_state()  # `_is_profiler_enabled` changes when a profiler starts or stops


# ---------------------------------------------------------------------- nested containers


def plain_tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Replaces `tree_map`: traverses tuples, lists and dicts."""
    if isinstance(tree, dict):
        items = {key: plain_tree_map(fn, value) for key, value in tree.items()}
        return items if type(tree) is dict else type(tree)(items)
    if isinstance(tree, (tuple, list)):
        values = [plain_tree_map(fn, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return fn(tree)


def plain_tree_map_only(kind: type, fn: Callable[[Any], Any], tree: Any) -> Any:
    """Replaces `tree_map_only`."""
    return plain_tree_map(lambda value: fn(value) if isinstance(value, kind) else value, tree)


def plain_tree_leaves(tree: Any) -> list[Any]:
    """Replaces `tree_leaves`."""
    leaves: list[Any] = []
    plain_tree_map(leaves.append, tree)
    return leaves


tree_map: Callable[..., Any] = find("torch.utils._pytree.tree_map") or plain_tree_map
tree_map_only: Callable[..., Any] = find("torch.utils._pytree.tree_map_only") or plain_tree_map_only
tree_leaves: Callable[..., list[Any]] = find("torch.utils._pytree.tree_leaves") or plain_tree_leaves
