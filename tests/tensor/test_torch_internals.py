"""Private names of torch: what each does, compared with what stands in for it on a torch without the name."""

import ast
import importlib.util
import logging
import re
import subprocess
import sys
import threading
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.autograd import profiler

from shardrt import torch_internals
from shardrt.tensor.dtensor import DTensor

ROOT = Path(__file__).resolve().parents[2]
NAMES = [  # as owner, name
    "torch._C._current_graph_task_id",
    "torch.autograd.variable.Variable._execution_engine",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._C._functorch.get_unwrapped",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "torch._C._will_engine_execute_node",
    "torch._C.DisableTorchFunctionSubclass",
    "torch.autograd.forward_ad._current_level",
    "torch._dynamo.eval_frame.cached_backends",
    "torch._C._dynamo.eval_frame.get_eval_frame_callback",
    "torch.optim.Adam._init_group",
    "torch.utils._foreach_utils._foreach_supported_types",
    "torch._C._disabled_torch_function_impl",
    "torch.autograd.grad_mode._unsafe_preserve_version_counter",
    "torch._dynamo.trace_rules.add",
    "torch.autograd.profiler._is_profiler_enabled",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_leaves",
    "torch.utils._python_dispatch.TorchDispatchMode",
]
OF_CLASSES_IN_C = [  # which cannot be deleted
    "torch.Tensor._backward_hooks",
    "torch.Tensor._post_accumulate_grad_hooks",
    "torch.UntypedStorage._cdata",
    "torch.UntypedStorage._swap_data_ptr_",
]


@contextmanager
def without(*paths: str) -> Iterator[ModuleType]:
    """`torch_internals`, imported anew in a torch that lacks these names."""
    with pytest.MonkeyPatch.context() as patch:
        for path in paths:
            owner, _, name = path.rpartition(".")
            patch.delattr(torch_internals.find(owner), name)
        yield imported_anew()


def imported_anew() -> ModuleType:
    assert torch_internals.__file__ is not None
    spec = importlib.util.spec_from_file_location("torch_internals_anew", torch_internals.__file__)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def during_backward(seen: Callable[[], object]) -> object:
    """What `seen` returns while a backward runs."""
    found = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda grad: found.append(seen()))
    x.sum().backward()
    return found[0]


def test_all_names_are_there() -> None:
    """This torch has every name, so what the other tests compare is two different ways."""
    for path in (*NAMES, *OF_CLASSES_IN_C):
        assert torch_internals.find(path) is not None, path
    assert torch_internals.find("torch.no_such_module.name") is None
    assert torch_internals.find("no_such_package.name") is None


def test_dispatch_mode() -> None:
    with without("torch.utils._python_dispatch.TorchDispatchMode") as lacking:
        assert lacking.TorchDispatchMode is lacking.NoDispatchMode
        with pytest.raises(RuntimeError, match="TorchDispatchMode, which a forecast needs"):
            lacking.TorchDispatchMode()


def test_the_table_names_what_is_tested() -> None:
    """Each row of the docstring has a name of the lists above, its last part or its module; each of those has a row."""
    assert torch_internals.__doc__ is not None
    rows = [line.split("|")[1:3] for line in torch_internals.__doc__.splitlines() if line.startswith("| `")]
    owned = {function for functions, _ in rows for function in re.findall(r"`(\w+)`", functions)}
    assert all(hasattr(torch_internals, function) for function in owned)
    in_table = {name for _, cell in rows for name in re.findall(r"`([\w.]+)`", cell)}
    tested = {*NAMES, *OF_CLASSES_IN_C}
    covered = {path: [name for name in in_table if f".{name}." in f".{path}."] for path in tested}
    assert [path for path, names in covered.items() if not names] == []
    assert in_table == {name for names in covered.values() for name in names}


def test_in_backward() -> None:
    with without("torch._C._current_graph_task_id") as lacking:
        ways = [torch_internals.in_backward, lacking.in_backward, lacking.backward_is_on_the_stack]
        for in_backward in ways:
            assert not in_backward()
            assert during_backward(in_backward) is True
    assert lacking.current_backward() == -1
    assert during_backward(lacking.current_backward) == 0


def test_in_backward_in_a_thread_of_autograd() -> None:
    """Such a thread is not Python's, so `threading` makes a dummy for it; there is no stack to search."""
    found = []

    def run() -> None:
        threading.current_thread().name = "Dummy-1"
        found.append(torch_internals.backward_is_on_the_stack())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [True]


def test_queue_backward_callback() -> None:
    ended: list[int] = []
    during_backward(lambda: torch_internals.queue_backward_callback(lambda: ended.append(1)))
    assert ended == [1]
    with (
        without("torch.autograd.variable.Variable._execution_engine") as lacking,
        pytest.raises(RuntimeError, match="which the backward of a sharded module needs"),
    ):
        lacking.queue_backward_callback(lambda: None)


def test_post_accumulate_grad_hooks(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.ones(2, requires_grad=True)
    assert not torch_internals.post_accumulate_grad_hooks(tensor)
    handle = tensor.register_post_accumulate_grad_hook(print)
    assert list((torch_internals.post_accumulate_grad_hooks(tensor) or {}).values()) == [print]
    handle.remove()
    with monkeypatch.context() as patch:  # a name of a class written in C cannot be deleted
        patch.setattr(torch, "Tensor", object)
        lacking = imported_anew()
    with caplog.at_level(logging.WARNING, logger="shardrt"):
        assert lacking.post_accumulate_grad_hooks(tensor) is None
        assert lacking.post_accumulate_grad_hooks(tensor) is None
    assert caplog.text.count("register_post_accumulate_grad_hook") == 1


def test_preserve_version() -> None:
    tensor = torch.ones(2)
    with torch_internals.preserve_version(tensor):
        tensor.add_(1)
    assert tensor._version == 0
    with (
        without("torch.autograd.grad_mode._unsafe_preserve_version_counter") as lacking,
        pytest.raises(RuntimeError, match="which a parameter with an all-gather extension needs"),
    ):
        lacking.preserve_version(tensor)


def test_current_transform() -> None:
    """Without the name the answer is the safe one."""
    assert torch_internals.current_transform() is None
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_internals.current_transform() is not None)
        return x.sum()

    torch.func.grad(fn)(torch.ones(2))
    assert seen == [True]
    with without("torch._C._functorch.peek_interpreter_stack") as lacking:
        assert lacking.current_transform() is not None


@pytest.mark.parametrize("lacks", [False, True])
def test_unwrap_transform(lacks: bool) -> None:
    """One transform at a time, the innermost first."""
    with without(*["torch._C._functorch.get_unwrapped"] * lacks) as module:
        unwrap = module.unwrap_transform
    x, seen = torch.ones(2), []

    def fn(tensor: torch.Tensor) -> torch.Tensor:
        if not lacks:
            once = unwrap(tensor)
            seen.extend([once is not tensor, unwrap(once) is not once, unwrap(unwrap(once)) is unwrap(once)])
        return tensor.square().sum()

    assert unwrap(x) is x
    torch.func.grad(torch.func.grad(fn))(x[0])
    assert seen == [] if lacks else [True, True, True]


def test_same_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of storages without memory, as far as they are one object."""
    with monkeypatch.context() as patch:  # a name of a class written in C cannot be deleted
        patch.setattr(torch, "UntypedStorage", object)
        lacking = imported_anew()
    assert lacking.same_storage is lacking.same_address
    one, other = torch.ones(3).untyped_storage(), torch.ones(3).untyped_storage()
    view = torch.empty(0).set_(one, 1, (2,), (1,)).untyped_storage()
    for same_storage in (torch_internals.same_storage, lacking.same_storage):
        assert same_storage(one, view)
        assert not same_storage(one, other)
    one.resize_(0)
    other.resize_(0)
    for same_storage in (torch_internals.same_storage, lacking.same_storage):
        assert same_storage(one, one)
        assert not same_storage(one, other)


def wrapped_inside(context: Callable[[], Any]) -> bool:
    """Whether a tensor made in `context`, inside of a transform, is wrapped by it."""
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        with context():
            made = torch.zeros(()).clone()
        seen.append(torch.func.debug_unwrap(made) is not made)
        return x.sum()

    torch.func.grad(fn)(torch.ones(2))
    return seen[0]


def test_outside_transforms() -> None:
    assert not wrapped_inside(torch_internals.outside_transforms)
    with without("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack") as lacking:
        with lacking.outside_transforms():
            pass
        with pytest.raises(RuntimeError, match="a forward of a sharded module inside a transform"):
            wrapped_inside(lacking.outside_transforms)


@pytest.mark.parametrize("lacks", [False, True])
def test_disabled_torch_function(lacks: bool) -> None:
    """Operators reach `__torch_dispatch__`, and no output is converted to the subclass."""
    with without(*["torch._C._disabled_torch_function_impl"] * lacks) as module:
        function = module.disabled_torch_function()
    reached = []

    class Sub(torch.Tensor):
        __torch_function__ = function

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            reached.append(func)
            return torch.full((2,), 3.0)

    made = torch.Tensor._make_wrapper_subclass(Sub, (2,))
    assert type(torch.add(made, 1, alpha=2)) is torch.Tensor
    assert type(made.mul(made)) is torch.Tensor
    assert type(torch.cat([made, torch.ones(2)], dim=0)) is torch.Tensor
    assert reached == [torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor, torch.ops.aten.cat.default]
    assert (function is module.public_torch_function) == lacks
    assert DTensor.__torch_function__ is torch._C._disabled_torch_function_impl


def test_wanted() -> None:
    x, y = (torch.ones(2, requires_grad=True) for _ in range(2))
    out: Any = x * y
    nodes = [node for node, _ in out.grad_fn.next_functions]
    found: list[list[Any]] = []
    with without("torch._C._will_engine_execute_node") as lacking:
        assert lacking.wanted(nodes[0]).name == "RETURNED"
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
    assert torch_internals.may_be_kept(object())  # type: ignore[arg-type]  # without the name


def test_forward_mode_is_active() -> None:
    assert not torch_internals.forward_mode_is_active()
    with torch.autograd.forward_ad.dual_level():
        assert torch_internals.forward_mode_is_active()
    with without("torch.autograd.forward_ad._current_level") as lacking:
        assert lacking.forward_mode_is_active()


def test_as_plain_tensors() -> None:
    class Sub(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("called")

    assert torch_internals.as_plain_tensors is not None
    with torch_internals.as_plain_tensors():
        assert type(torch.ones(2).as_subclass(Sub) + 1) is torch.Tensor
    with without("torch._C.DisableTorchFunctionSubclass") as lacking:
        assert lacking.as_plain_tensors is None


def test_compiler_in_use() -> None:
    torch._dynamo.reset()
    assert not torch_internals.compiler_in_use()
    torch.compiler.disable(lambda: None)
    assert not torch_internals.compiler_in_use()
    with without("torch._dynamo.eval_frame.cached_backends") as lacking:
        assert lacking.compiler_in_use()
    torch.compile(lambda: None, backend="eager")
    assert torch_internals.compiler_in_use()
    torch._dynamo.reset()


def test_hide_from_compiler(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its effect is tested in `test_compile.py`."""
    added: list[str] = []
    monkeypatch.setattr(torch_internals.find("torch._dynamo.trace_rules"), "add", added.append)
    torch_internals.hide_from_compiler(["one", "other"])
    assert added == ["one", "other"]
    with without("torch._dynamo.trace_rules.add") as lacking, caplog.at_level(logging.WARNING, logger="shardrt"):
        lacking.hide_from_compiler(["one"])
    assert "torch.compile of sharded modules may fail" in caplog.text


def test_profiler_state() -> None:
    state = torch_internals.profiler_state
    assert not state._is_profiler_enabled
    with torch.profiler.profile():
        assert state._is_profiler_enabled
    assert state is profiler
    with without("torch.autograd.profiler._is_profiler_enabled") as lacking:
        assert lacking.profiler_state._is_profiler_enabled


def test_operators() -> None:
    with without("torch._ops.OpOverload", "torch._ops.OpOverloadPacket") as lacking:
        overload, packet = lacking.OpOverload, lacking.OpOverloadPacket
    assert (overload, packet) == (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


Pair = namedtuple("Pair", "one other")


def test_trees() -> None:
    """Through what operators take and return, the same as torch's."""
    tree = (1, [2, {"a": Pair(3.5, (4,))}, []], "five", None)
    double: Callable[[Any], Any] = lambda value: value * 2 if value is not None else None  # noqa: E731
    with without(*(f"torch.utils._pytree.{name}" for name in ("tree_map", "tree_map_only", "tree_leaves"))) as lacking:
        pass
    assert lacking.tree_map is lacking.plain_tree_map
    assert lacking.tree_map(double, tree) == torch_internals.tree_map(double, tree)
    assert lacking.tree_map_only(int, double, tree) == torch_internals.tree_map_only(int, double, tree)
    assert lacking.tree_leaves(tree) == torch_internals.tree_leaves(tree) == [1, 2, 3.5, 4, "five", None]
    assert type(lacking.tree_map(double, tree)[1][1]["a"]) is Pair


ALONE = """
import sys
sys.path.insert(0, {root!r})
import importlib
import torch, torch.utils._pytree
trees, engine = dict(vars(torch.utils._pytree)), torch.autograd.Variable._execution_engine
for path in {names!r}:
    owner, _, name = path.rpartition(".")
    module, _, last = owner.rpartition(".")
    delattr(getattr(importlib.import_module(module), last), name)
for absent in ("torch._dynamo", "torch._C._dynamo.guards"):
    sys.modules[absent] = None
import shardrt
vars(torch.utils._pytree).update(trees)  # what torch itself imports from there later
shardrt.init()
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
whole = [param.detach().clone() for param in model.parameters()]
x = torch.ones(5, 3)
expected = model(x).detach()
for module in (*model, model):
    shardrt.fully_shard(module)
assert torch.equal(model(x), expected)
with torch.no_grad():
    model[0].weight.add_(1).mul_(2)
assert torch.equal(model[0].weight.full_tensor(), (whole[0] + 1) * 2)
torch.autograd.Variable._execution_engine = engine  # without which torch has no backward
loss = model(x).sum()
loss.backward()
assert torch.equal(model[1].bias.grad.full_tensor(), torch.full((2,), 5.0))
assert all(param.grad is not None for param in model.parameters())
print("a step works")
shardrt.finalize()
"""


def test_a_step_without_the_private_names() -> None:
    """Import, forward, optimizer arithmetic and backward, without all names that torch itself can do without."""
    needed_by_torch = (
        "torch._dynamo",
        "torch._ops",
        "torch._C.Disable",
        "torch._C._disabled_torch_function_impl",  # by `register_hook` of a subclass
        "torch.autograd.forward_ad",
        "torch._C._functorch.get_",
        "torch._C._functorch.is_",
        "torch.utils._python",
        "torch.utils._foreach",
    )
    deleted = [name for name in NAMES if not name.startswith(needed_by_torch)]
    script = ALONE.format(root=str(ROOT), names=deleted)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "a step works" in ran.stdout


# By file, beside `torch_internals.py`: what everybody who subclasses tensors or modules uses, and what has its own way to do
# without. Names of instances, such as `param._version`, cannot be told from other attributes; the two that matter are in
# `OF_CLASSES_IN_C`.
ALLOWED = {
    "shardrt/tensor/dtensor.py": {"torch.Tensor._make_wrapper_subclass"},
    "shardrt/tensor/views.py": {"torch.Tensor._make_wrapper_subclass"},
    "kernels/cuda.py": {"torch._C._dynamo.guards.TensorGuards", "torch._foreach_mul_"},
    "kernels/host.py": {"torch._foreach_add_", "torch._foreach_copy_", "torch._foreach_norm"},
    "kernels/norm.py": {"torch._foreach_mul_"},
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
    watched = {
        "_execution_engine",
        "_is_profiler_enabled",
        "_use_count",
        *(path.rpartition(".")[2] for path in OF_CLASSES_IN_C),
    }
    for path in (path for folder in ("shardrt", "comm", "kernels") for path in (ROOT / folder).rglob("*.py")):
        source, name = path.read_text(), str(path.relative_to(ROOT))
        if name != "shardrt/torch_internals.py":
            found[name] = private_names(source)
            attributes = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
            of_instances[name] = attributes & watched
    assert {name: names for name, names in found.items() if names} == ALLOWED
    assert {name: names for name, names in of_instances.items() if names} == READ_FOR_SPEED


def test_compiling() -> None:
    found: list[bool] = []
    with without("torch._C._dynamo.eval_frame.get_eval_frame_callback") as lacking:
        for compiling in (torch_internals.compiling, lacking.compiling):
            seen = torch.compiler.disable(lambda ask=compiling: found.append(ask()), recursive=False)
            torch.compile(lambda run=seen: run(), backend="eager")()
    assert found == [True, True]
    assert not torch_internals.compiling()


def test_init_group() -> None:
    class ByName(torch.optim.Adam):
        def _init_group(self, group: Any, *, params: Any) -> None:  # type: ignore[override]
            pass

    assert torch_internals.init_group(torch.optim.Adam) is not None
    assert torch_internals.init_group(ByName) is None
    with without("torch.optim.Adam._init_group"):
        assert torch_internals.init_group(torch.optim.Adam) is None


def test_clip_lists_of() -> None:
    """The number of collectives is in test_optimizer_steps.py."""
    kinds = torch_internals.find("torch.utils._foreach_utils._foreach_supported_types")
    assert kinds.count(DTensor) == 1
    torch_internals.clip_lists_of(DTensor)
    assert kinds.count(DTensor) == 1
    with without("torch.utils._foreach_utils._foreach_supported_types") as made:
        made.clip_lists_of(DTensor)
