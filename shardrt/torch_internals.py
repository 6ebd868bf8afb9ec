"""What shardrt does with private names of torch. `torch_names.py` has the names, and checks that this torch has them.

Two more are in `kernels/cuda.py` and `comm/core/streams.py`, which import nothing of shardrt: `TensorGuards` and
`_cuda_getCurrentRawStream`, which Triton's launcher takes as well. What only `integrations/torch_distributed` needs, to stand
in for torch's own groups, is there: `comm_hooks.py`, `dispatch.py`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import Enum, auto
from operator import attrgetter
from types import CodeType, FrameType, FunctionType, SimpleNamespace
from typing import Any, cast

import torch
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.autograd import forward_ad, profiler
from torch.autograd.graph import Node as Node
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map
from torch.utils._pytree import tree_map_only as tree_map_only

from .torch_names import of_torch

_get_current_function_mode_stack = of_torch("torch.overrides._get_current_function_mode_stack")
_pop_mode, _push_mode = of_torch("torch.overrides._pop_mode"), of_torch("torch.overrides._push_mode")
_get_current_dispatch_mode_stack = of_torch("torch.utils._python_dispatch._get_current_dispatch_mode_stack")
_pop_dispatch_mode = of_torch("torch.utils._python_dispatch._pop_mode")
_push_dispatch_mode = of_torch("torch.utils._python_dispatch._push_mode")


def aten_operator(name: str) -> OpOverloadPacket | None:
    """The operator `torch.ops.aten.<name>`; None if this torch lacks it."""
    operator: OpOverloadPacket | None = getattr(torch.ops.aten, name, None)
    return operator


def host_fuses_attention(*arguments: object) -> bool:
    """Whether torch runs `scaled_dot_product_attention` of such tensors, on any device, as one kernel on the host.

    arguments: query, key, value, mask, dropout, whether it is causal, and whether heads are grouped.
    """
    *given, enable_gqa = arguments
    host = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    choice: int = torch.ops.aten._fused_sdp_choice.default.redispatch(host, *given, enable_gqa=enable_gqa)
    return choice != 0  # of torch's SDPBackend, MATH


# ---------------------------------------------------------------------- autograd

# The number of the backward that runs in this thread, each another one; -1 outside.
current_backward: Callable[[], int] = of_torch("torch._C._current_graph_task_id")


# How many nodes of graphs this thread has made, but for those of leaves. Cost: 25 ns.
nodes_made: Callable[[], int] = of_torch("torch._C._autograd._get_sequence_nr")

# Whether a tensor requires gradients, whatever its class says. Cost: called for each parameter in each step, so it is in C.
requires_grad: Callable[[torch.Tensor], bool] = torch.Tensor.requires_grad.__get__  # type: ignore[attr-defined]


def in_backward() -> bool:
    """True if a backward runs in this thread."""
    return current_backward() != -1


def is_torch_node(node: Node) -> bool:
    """Whether a node of a graph is of one of torch's operations, or of compiled ones; not of a function written in Python."""
    return not hasattr(node, "_forward_cls") or type(node).__name__ == "CompiledFunctionBackward"


def leaf_of(node: Node | None) -> torch.Tensor | None:
    """The leaf whose gradient a node of a graph accumulates; None for another node."""
    accumulates: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
    return getattr(node, "variable", None) if type(node) is accumulates else None


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Call `callback` at the end of the running backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def surround_functions(is_watched: Callable[[type], bool], call: Callable[..., Any]) -> None:
    """From now on, where an argument's class is watched, `call(kind, apply, args, kwargs)` takes the place of `kind.apply`.

    kind: a subclass of `torch.autograd.Function`. Up to torch 2.13, the user may have taken its `apply` before.
    Cost: 0.3 us for each call, and 0.05 us for each argument.
    """
    base = getattr(torch.autograd.function, "_SingleLevelFunction", None)
    if base is None:
        return

    def apply(kind: Any, *args: Any, **kwargs: Any) -> Any:
        run = super(base, kind).apply
        for arg in args:
            if is_watched(type(arg)):
                if current_transform() is not None and issubclass(kind, torch.autograd.Function):
                    break  # the transform calls `apply` again, of a class that it makes
                return call(kind, run, args, kwargs)
        return run(*args, **kwargs)

    base.apply = classmethod(apply)
    if not isinstance(torch.autograd.Function.__dict__["apply"], classmethod):  # else it ends in a call of `base.apply`
        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]


_HookGetter = Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], torch.Tensor | None]] | None]

# A tensor's hooks, or None. Cost: called for each parameter in each step, so they are functions in C.
grad_hooks: _HookGetter = attrgetter("_backward_hooks")
post_accumulate_grad_hooks: _HookGetter = attrgetter("_post_accumulate_grad_hooks")

is_zero_tensor: Callable[[torch.Tensor], bool] = of_torch("torch._is_zerotensor")  # it has no memory: autograd's zeros

# Inside, writes to a tensor do not count as modifications.
preserve_version: Callable[[torch.Tensor], AbstractContextManager[None]] = of_torch(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter"
)


class Wanted(Enum):
    """What the running backward does with the gradient of a node's output."""

    NO = auto()  # nothing: it is not computed
    RETURNED = auto()  # `torch.autograd.grad` returns it
    ACCUMULATED = auto()  # it goes on through the node; that of a leaf adds it to `.grad`


def wanted(node: Node) -> Wanted:
    """What the running backward does with the gradient that `node` is given."""
    try:
        return Wanted.ACCUMULATED if torch._C._will_engine_execute_node(node) else Wanted.NO
    except RuntimeError:  # of a leaf for `torch.autograd.grad`, about which torch does not answer
        return Wanted.RETURNED


def may_be_kept(tensor: torch.Tensor) -> bool:
    """Hooks of the user's see the gradients of a leaf, and may keep them."""
    return bool(grad_hooks(tensor))


# ---------------------------------------------------------------------- torch.func's transforms, forward-mode AD

# The innermost transform that is active, or None. Cost: called for each module in each forward, so it is a function in C.
current_transform: Callable[[], object | None] = of_torch("torch._C._functorch.peek_interpreter_stack")


def unwrap_transform(tensor: torch.Tensor) -> torch.Tensor:
    """What one transform has wrapped in a tensor; the tensor itself if none has."""
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    return torch._C._functorch.get_unwrapped(tensor) if wrapped else tensor


_NOTHING = nullcontext()


def outside_transforms() -> AbstractContextManager[object]:
    """Inside, the active transforms of `torch.func` do not apply, nor do modes, as for `outside_modes`.

    Cost: 0.2 us if there are none.
    """
    if current_transform() is None:
        return outside_modes()
    return _outside_transforms()


@contextmanager
def _outside_transforms() -> Iterator[None]:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    with temporarily_clear_interpreter_stack(), outside_modes():
        yield


def outside_modes() -> AbstractContextManager[object]:
    """Inside, no dispatch mode of this thread sees the operations, unless its class has a true `sees_hooks`.

    For what we add to a module's own operations: a selective activation checkpoint compares those of two runs. Torch's own
    modes, such as those of fake tensors, stay.   Cost: 0.1 us if there are no modes, otherwise 5 us.
    """
    return _outside_modes() if torch._C._len_torch_dispatch_stack() else _NOTHING


@contextmanager
def _outside_modes() -> Iterator[None]:
    modes = [mode for mode in _get_current_dispatch_mode_stack() if getattr(mode, "_mode_key", None) is None]
    seeing = [mode for mode in modes if getattr(mode, "sees_hooks", False)]
    before = _replaced_dispatch_modes(len(modes), seeing)
    try:
        yield
    finally:
        _replaced_dispatch_modes(len(seeing), before)


def _replaced_dispatch_modes(number: int, modes: list[TorchDispatchMode]) -> list[TorchDispatchMode]:
    """Let the thread be in these modes, instead of the innermost `number`, which are returned, the outermost first."""
    before = [_pop_dispatch_mode() for _ in range(number)][::-1]
    for each in modes:
        _push_dispatch_mode(each)
    return before


def forward_mode_is_active() -> bool:
    """Some tensors may have tangents."""
    return forward_ad._current_level >= 0


# ---------------------------------------------------------------------- subclasses of tensors, storages


def disabled_torch_function() -> Any:
    """The `__torch_function__` of subclasses that only take part in `__torch_dispatch__`."""
    return torch._C._disabled_torch_function_impl


# Inside, the `__torch_function__` of subclasses is not called.
as_plain_tensors: Callable[[], AbstractContextManager[None]] = of_torch("torch._C.DisableTorchFunctionSubclass")

# Inside, neither that nor a `TorchFunctionMode` is called.
without_torch_functions: Callable[[], AbstractContextManager[None]] = of_torch("torch._C.DisableTorchFunction")


@contextmanager
def left_mode(mode: TorchFunctionMode) -> Iterator[None]:
    """In the block, what this thread has entered of modes, but for this one."""
    others = [each for each in _get_current_function_mode_stack() if each is not mode]
    before = _replaced_modes(others)
    try:
        yield
    finally:
        _replaced_modes(before)


def _replaced_modes(modes: list[TorchFunctionMode]) -> list[TorchFunctionMode]:
    """Let the thread be in these modes. Returns those that it was in."""
    before = _get_current_function_mode_stack()
    for _ in before:
        _pop_mode()
    for each in modes:
        _push_mode(each)
    return before


# torch's own attention, whatever `torch.nn.functional` has under its name.
torch_attention: Callable[..., torch.Tensor] = of_torch(
    "torch._C._nn.scaled_dot_product_attention", instead=torch.nn.functional.scaled_dot_product_attention
)


def same_storage(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    """Two Python objects stand for one storage."""
    return one._cdata == other._cdata


def no_swap_memory(one: torch.UntypedStorage, other: torch.UntypedStorage) -> None:
    """Stands in for `swap_memory` in torch 2.11, without which buffers are malloc's blocks: RuntimeError."""
    raise RuntimeError(f"torch {torch.__version__} has no torch.UntypedStorage._swap_data_ptr_: install a newer version")


# Exchanges the memory of two storages, of which one has none; views of both follow.
swap_memory: Callable[[torch.UntypedStorage, torch.UntypedStorage], object] = of_torch(
    "torch.UntypedStorage._swap_data_ptr_", instead=no_swap_memory
)


# ---------------------------------------------------------------------- profiler, compiler, optimizers

# Its `_is_profiler_enabled` changes when a profiler starts or stops.
profiler_state: Any = profiler if hasattr(profiler, "_is_profiler_enabled") else SimpleNamespace(_is_profiler_enabled=False)


@functools.cache
def hide_package_from_compiler() -> None:
    """Exclude our files from torch.compile, once: a graph ends before a call into them, and a new one begins there.

    Cost: importing the compiler takes seconds and 70 MB, once; torch's optimizers import it as well. The public function,
    `torch.compiler.disable`, costs some microseconds per hook, and drops the hooks in a backward.
    """
    from torch._dynamo import trace_rules

    for package in ("shardrt", "shardrt.comm", "shardrt.kernels") if hasattr(trace_rules, "add") else ():
        trace_rules.add(package)


def visible_to_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which torch.compile looks into though `hide_package_from_compiler` hides the files of ours."""
    assert isinstance(function, FunctionType), "one of Python"
    code = function.__code__.replace(co_filename="visible to torch.compile")
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def compiler_in_use() -> bool:
    """Something in this process was given to torch.compile."""
    module = sys.modules.get("torch._dynamo.eval_frame")
    # torch.compiler.disable has the backend None.
    return any(backend is not None for backend in getattr(module, "cached_backends", {}).values())


_eval_frame_callback = of_torch("torch._C._dynamo.eval_frame.get_eval_frame_callback", instead=lambda: None)


def compiling() -> bool:
    """A function given to torch.compile is traced, or runs and has called this one, be that by a graph break."""
    return torch.compiler.is_compiling() or _eval_frame_callback() is not None


def init_group(kind: type) -> Callable[..., Any] | None:
    """The method of an optimizer's class that fills the lists of its step; None if it does not take them by position."""
    found: Callable[..., Any] | None = getattr(kind, "_init_group", None)
    if found is None:
        return None
    kinds = {parameter.kind for parameter in inspect.signature(found).parameters.values()}
    return None if inspect.Parameter.KEYWORD_ONLY in kinds else found


def exchange_step(kind: type[Optimizer], exchanging: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put `exchanging(step)` in the place of the class's own `step`, if that is torch's.

    The first optimizer of a class has torch call its hooks in a wrapper of the class's step, of which schedulers take hold:
    what the wrapper calls is exchanged. A step that others have put there is left alone.
    """
    step: Any = vars(kind).get("step")
    if _is_torchs(step):
        kind.step = exchanging(step)  # type: ignore[method-assign]
    elif getattr(step, "__code__", None) is _HOOKED:
        called = step.__closure__[_HOOKED.co_freevars.index("func")]
        if _is_torchs(called.cell_contents):
            called.cell_contents = exchanging(called.cell_contents)


_HOOKED: CodeType = cast(Any, Optimizer.profile_hook_step(len)).__code__  # that of every such wrapper


def _is_torchs(step: Any) -> bool:
    """Whether torch defines this function, which is not its wrapper for hooks."""
    module = getattr(step, "__globals__", {}).get("__name__", "")
    return module.startswith("torch.optim.") and step.__code__ is not _HOOKED


def state_dict_helper(caller: FrameType) -> tuple[Any, str] | None:
    """The options and the name of the function of torch.distributed.checkpoint.state_dict that has led to this caller, if any.

    torch passes the options to nothing but its own functions, so they are read from its frames.
    """
    frame: FrameType | None = caller
    while frame is not None and frame.f_code.co_name != "_verify_options":
        frame = frame.f_back if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict" else None
    return None if frame is None or frame.f_back is None else (frame.f_locals["options"], frame.f_back.f_code.co_name)


Found = dict[torch.device, torch.Tensor]  # by device, float32 numbers that are 1 where a gradient was not finite, else 0


def after_unscaling(agree: Callable[[torch.optim.Optimizer, Found], None]) -> None:
    """From now on, `torch.amp.GradScaler` calls `agree` once for each optimizer and step, which may change what was found."""
    unscale = torch.amp.GradScaler._unscale_grads_

    def run(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Found:
        found: Found = unscale(self, optimizer, *args, **kwargs)
        agree(optimizer, found)
        return found

    torch.amp.GradScaler._unscale_grads_ = run  # type: ignore[method-assign]


def clip_lists_of(kind: type[torch.Tensor]) -> None:
    """Have torch's gradient clipping treat all tensors of this class at once, as it does plain ones.

    Cost: without it, a collective for each gradient.
    """
    kinds: list[type[torch.Tensor]] = getattr(torch.utils._foreach_utils, "_foreach_supported_types", [])
    if kind not in kinds:
        kinds.append(kind)
