"""Private names of torch: what each does, and that they are used in one file only."""

import ast
import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ranks import FRESH, run_script
from shardrt import torch_internals, torch_names
from shardrt.tensor.dtensor.dtensor import DTensor

ROOT = Path(__file__).resolve().parents[2]


def during_backward(seen: Callable[[], object]) -> object:
    """What `seen` returns while a backward runs."""
    found = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: found.append(seen()))
    x.sum().backward()
    return found[0]


def sources() -> dict[str, str]:
    """Of the packages, but for the table's own."""
    paths = [path for folder in ("shardrt", "comm", "kernels") for path in (ROOT / folder).rglob("*.py")]
    return {name: path.read_text() for path in paths if (name := str(path.relative_to(ROOT))) != "shardrt/torch_names.py"}


def test_the_table_names_what_is_used() -> None:
    """Each private name has a row, and each row is used."""
    everything = "".join(sources().values())
    unused = [name for name in torch_names.FAILS_WITHOUT if not re.search(rf"\b{name.rpartition('.')[2]}\b", everything)]
    assert unused == []
    used = set(re.findall(r'of_torch\(\s*"([\w.]+)"', everything)).union(*map(private_names, sources().values()))
    rows = [f"{name}." for name in torch_names.FAILS_WITHOUT]  # of what they belong to, too
    general = ("torch._foreach_", "torch.Tensor._make_wrapper_subclass")
    without = [name for name in used if not any(f"{name}.".startswith(row) or row.startswith(f"{name}.") for row in rows)]
    assert [name for name in without if not name.startswith(general)] == []


def test_this_torch_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_names.lacking() == []
    gone = ("torch.no_module.name", "torch.Tensor._no_name", "torch._dynamo.trace_rules.no_name", "torch._dynamo.no_file.add")
    monkeypatch.setattr(torch_names, "FAILS_WITHOUT", dict.fromkeys((*gone, "torch._dynamo.trace_rules.add"), ""))
    assert torch_names.lacking() == list(gone)


GONE = """
import torch
del torch._C._current_graph_task_id, torch.autograd.profiler._is_profiler_enabled, torch.autograd.function._SingleLevelFunction
import shardrt
world = shardrt.init("cpu")
assert not shardrt.torch_internals.profiler_state._is_profiler_enabled
torch.manual_seed(0)
model = shardrt.fully_shard(torch.nn.Linear(2, 2))
try:
    model(torch.ones(1, 2))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.rest
def test_what_is_gone_is_named_once() -> None:
    """With what fails for it; the rest works, and what fails says why."""
    done = run_script(GONE, 2, FRESH, code=0)
    first, *lines = done.stderr.splitlines()
    assert first.startswith(f"torch {torch.__version__} lacks private names")
    assert [line.strip() for line in lines] == [
        "torch._C._current_graph_task_id, for sharded modules",
        "torch.autograd.function._SingleLevelFunction, for sharded parameters as arguments of a torch.autograd.Function",
        "torch.autograd.profiler._is_profiler_enabled, for names of modules in profiles",
    ]
    assert done.stdout.count(f"torch {torch.__version__} has no torch._C._current_graph_task_id") == 2


def test_in_backward() -> None:
    assert not torch_internals.in_backward()
    assert during_backward(torch_internals.in_backward) is True


def test_queue_backward_callback() -> None:
    ended: list[int] = []
    during_backward(lambda: torch_internals.queue_backward_callback(lambda: ended.append(1)))
    assert ended == [1]


def test_post_accumulate_grad_hooks() -> None:
    tensor = torch.ones(2, requires_grad=True)
    assert not torch_internals.post_accumulate_grad_hooks(tensor)
    handle = tensor.register_post_accumulate_grad_hook(print)
    assert list((torch_internals.post_accumulate_grad_hooks(tensor) or {}).values()) == [print]
    handle.remove()


def test_preserve_version() -> None:
    tensor = torch.ones(2)
    with torch_internals.preserve_version(tensor):
        tensor.add_(1)
    assert tensor._version == 0


def test_current_transform() -> None:
    assert torch_internals.current_transform() is None
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_internals.current_transform() is not None)
        return x.sum()

    torch.func.grad(fn)(torch.ones(2))
    assert seen == [True]


def test_unwrap_transform() -> None:
    """One transform at a time, the innermost first."""
    unwrap = torch_internals.unwrap_transform
    x, seen = torch.ones(2), []

    def fn(tensor: torch.Tensor) -> torch.Tensor:
        once = unwrap(tensor)
        seen.extend([once is not tensor, unwrap(once) is not once, unwrap(unwrap(once)) is unwrap(once)])
        return tensor.square().sum()

    assert unwrap(x) is x
    torch.func.grad(torch.func.grad(fn))(x[0])
    assert seen == [True, True, True]


def test_same_storage() -> None:
    """Also of storages without memory."""
    one, other = torch.ones(3).untyped_storage(), torch.ones(3).untyped_storage()
    view = torch.empty(0).set_(one, 1, (2,), (1,)).untyped_storage()
    assert torch_internals.same_storage(one, view)
    assert not torch_internals.same_storage(one, other)
    one.resize_(0)
    other.resize_(0)
    assert torch_internals.same_storage(one, view)
    assert not torch_internals.same_storage(one, other)


def test_outside_transforms() -> None:
    with torch_internals.outside_transforms():
        pass
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch_internals.outside_transforms():
            made = torch.zeros(()).clone()
        seen.append(torch.func.debug_unwrap(made) is not made)
        return x.sum()

    torch.func.grad(fn)(torch.ones(2))
    assert seen == [False]


class Seen(torch_internals.TorchDispatchMode):
    """Remembers the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


class SeesHooks(Seen):
    sees_hooks = True


@pytest.mark.parametrize("leave", [torch_internals.outside_modes, torch_internals.outside_transforms])
def test_outside_modes(leave: Any) -> None:
    """Modes are back afterwards, also after an exception, in their order; fake tensors stay fake."""
    x = torch.ones(2)
    with leave():
        assert x.neg().sum() == -2
    with Seen() as outer, SeesHooks() as hooks, Seen() as inner, contextlib.suppress(KeyError):
        x.neg()
        with leave():
            x.exp()
            with leave():
                x.sin()
            raise KeyError
    with outer, inner:
        with leave():
            x.log()
        x.abs()
    assert (outer.names, inner.names, hooks.names) == (["neg", "abs"], ["neg", "abs"], ["neg", "exp", "sin"])
    with FakeTensorMode() as fake, leave():
        assert isinstance(torch.ones(2), type(fake.from_tensor(x)))


def test_disabled_torch_function() -> None:
    """Operators reach `__torch_dispatch__`, and no output is converted to the subclass."""
    reached = []

    class Sub(torch.Tensor):
        __torch_function__ = torch_internals.disabled_torch_function()

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            reached.append(func)
            return torch.full((2,), 3.0)

    made = torch.Tensor._make_wrapper_subclass(Sub, (2,))
    assert type(torch.add(made, 1, alpha=2)) is torch.Tensor
    assert type(made.mul(made)) is torch.Tensor
    assert type(torch.cat([made, torch.ones(2)], dim=0)) is torch.Tensor
    assert reached == [torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.cat.default]


def test_wanted() -> None:
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    out: Any = x * y
    nodes = [node for node, _ in out.grad_fn.next_functions]
    found: list[list[Any]] = []
    out.register_hook(lambda grad: found.append([torch_internals.wanted(node).name for node in nodes]))
    out.sum().backward(retain_graph=True)
    out.sum().backward(inputs=[x], retain_graph=True)
    torch.autograd.grad(out.sum(), [y])
    assert found == [["ACCUMULATED", "ACCUMULATED"], ["ACCUMULATED", "NO"], ["NO", "RETURNED"]]


def test_may_be_kept() -> None:
    x = torch.ones(2, requires_grad=True)
    assert not torch_internals.may_be_kept(x)
    handle = x.register_hook(print)
    assert torch_internals.may_be_kept(x)
    handle.remove()
    assert not torch_internals.may_be_kept(x)


def test_forward_mode_is_active() -> None:
    assert not torch_internals.forward_mode_is_active()
    with torch.autograd.forward_ad.dual_level():
        assert torch_internals.forward_mode_is_active()


def test_as_plain_tensors() -> None:
    class Sub(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("called")

    with torch_internals.as_plain_tensors():
        assert type(torch.ones(2).as_subclass(Sub) + 1) is torch.Tensor


def test_compiler_in_use() -> None:
    torch._dynamo.reset()
    assert not torch_internals.compiler_in_use()
    torch.compiler.disable(lambda: None)
    assert not torch_internals.compiler_in_use()
    torch.compile(lambda: None, backend="eager")
    assert torch_internals.compiler_in_use()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # by torch 2.11
def test_profiler_state() -> None:
    state = torch_internals.profiler_state
    assert not state._is_profiler_enabled
    with torch.profiler.profile():
        assert state._is_profiler_enabled


# By file, beside `torch_internals.py`: what everybody who subclasses tensors or modules uses, and `TensorGuards`. Names of
# instances, such as `param._version`, cannot be told from other attributes; those that matter are in `OF_INSTANCES`.
ALLOWED = {
    "shardrt/tensor/dtensor/dtensor.py": {"torch.Tensor._make_wrapper_subclass"},
    "shardrt/tensor/operations/views.py": {"torch.Tensor._make_wrapper_subclass"},
    "comm/core/streams.py": {"torch._C._cuda_getCurrentRawStream"},
    "kernels/cuda.py": {
        "torch._C._cuda_getCurrentRawStream",
        "torch._C._dynamo.guards.TensorGuards",
        "torch._foreach_mul_",
    },
    "kernels/host.py": {"torch._foreach_add_", "torch._foreach_copy_", "torch._foreach_norm"},
    "kernels/norm.py": {"torch._foreach_mul_"},
    "shardrt/integrations/torch_distributed/comm_hooks.py": {
        "torch.nn.parallel.DistributedDataParallel._register_builtin_comm_hook",
    },
    "shardrt/integrations/torch_distributed/dispatch.py": {
        "torch._C.DispatchKeySet",
        "torch._C._ExcludeDispatchKeyGuard",
        "torch._C._IncludeDispatchKeyGuard",
        "torch._C._autograd._profiler_enabled",
        "torch._C._disabled_torch_dispatch_impl",
        "torch._C._len_torch_dispatch_stack",
        "torch._C._parse_dispatch_key",
        "torch._subclasses.fake_tensor.FakeTensor",
    },
}
OF_INSTANCES = {  # as written, and where it belongs
    "_backward_hooks": "torch.Tensor",
    "_is_zerotensor": "torch",
    "_post_accumulate_grad_hooks": "torch.Tensor",
    "_cdata": "torch.UntypedStorage",
    "_swap_data_ptr_": "torch.UntypedStorage",
    "_is_profiler_enabled": "torch.autograd.profiler",
    "cached_backends": "torch._dynamo.eval_frame",
}
READ_FOR_SPEED = {"shardrt/fsdp/base/events.py": {"_is_profiler_enabled"}}  # of `profiler_state`


def dotted(node: ast.expr) -> str:
    """`torch.a.b` of such an expression; "" of others."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(tree: ast.AST) -> dict[str, str]:
    """What the imports of a file bind: what each name stands for."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound.update({alias.asname or alias.name.partition(".")[0]: alias.asname and alias.name for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and not node.level:
            bound.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return {name: path or name for name, path in bound.items()}


def private_names(source: str) -> set[str]:
    """Names of torch with an underscore that a file imports, or reaches from what it imports; the longest ones only."""
    tree = ast.parse(source)
    bound = imported(tree)
    paths = {*bound.values()}
    paths.update(alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and (path := dotted(node)):
            first, _, rest = path.partition(".")
            paths.add(f"{bound.get(first, '')}.{rest}")
    found = {path for path in paths if path.startswith("torch.") and re.search(r"\._(?!_)", path)}
    return {path for path in found if not any(other.startswith(f"{path}.") for other in found)}


def test_private_names() -> None:
    source = """
import torch
import torch._dynamo.config
import torch.nn as tnn
from torch import nn, _C as c
from torch.autograd import Variable
from ._local import torch_like

def fn():
    from torch._ops import OpOverload
    torch._C._functorch.peek()
    tnn.Module._apply
    Variable._execution_engine
    nn.Module.__call__
    torch_like._name
"""
    assert private_names(source) == {
        "torch._C",
        "torch._C._functorch.peek",
        "torch._dynamo.config",
        "torch._ops.OpOverload",
        "torch.autograd.Variable._execution_engine",
        "torch.nn.Module._apply",
    } - {"torch._C"}


def test_private_names_are_used_in_one_file_only() -> None:
    """In the packages."""
    found, of_instances = {}, {}
    watched = {"_execution_engine", "_use_count", *OF_INSTANCES}
    for name, source in sources().items():
        if name != "shardrt/torch_internals.py":
            found[name] = private_names(source)
            attributes = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
            of_instances[name] = attributes & watched
    assert {name: names for name, names in found.items() if names} == ALLOWED
    assert {name: names for name, names in of_instances.items() if names} == READ_FOR_SPEED


def test_compiling() -> None:
    found: list[bool] = []
    seen = torch.compiler.disable(lambda: found.append(torch_internals.compiling()), recursive=False)
    torch.compile(lambda: seen(), backend="eager")()
    assert found == [True]
    assert not torch_internals.compiling()


def test_init_group() -> None:
    class ByName(torch.optim.Adam):
        def _init_group(self, group: Any, *, params: Any) -> None:  # type: ignore[override]
            pass

    assert torch_internals.init_group(torch.optim.Adam) is not None
    assert torch_internals.init_group(ByName) is None
    assert torch_internals.init_group(torch.optim.LBFGS) is None


def test_clip_lists_of() -> None:
    """The number of collectives is in test_optimizer_steps.py."""
    kinds: list[type[torch.Tensor]] = torch.utils._foreach_utils._foreach_supported_types
    before = list(kinds)
    for _ in range(2):
        torch_internals.clip_lists_of(DTensor)
    assert kinds.count(DTensor) == 1
    kinds[:] = before
