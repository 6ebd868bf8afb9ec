"""Private names of torch: what each does, compared with what stands in for it on a torch without the name."""

import importlib.util
import logging
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

ROOT = Path(__file__).resolve().parents[1]
NAMES = [  # as owner, name
    "torch._C._current_graph_task_id",
    "torch.autograd.variable.Variable._execution_engine",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "torch._C._disabled_torch_function_impl",
    "torch.autograd.grad_mode._unsafe_preserve_version_counter",
    "torch._dynamo.trace_rules.add",
    "torch.autograd.profiler._is_profiler_enabled",
    "torch._ops.OpOverload",
    "torch._ops.OpOverloadPacket",
    "torch.utils._pytree.tree_map",
    "torch.utils._pytree.tree_map_only",
    "torch.utils._pytree.tree_leaves",
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
    for path in NAMES:
        assert torch_internals.find(path) is not None, path
    assert torch_internals.find("torch.no_such_module.name") is None
    assert torch_internals.find("no_such_package.name") is None


def test_in_backward() -> None:
    with without("torch._C._current_graph_task_id") as lacking:
        ways = [torch_internals.in_backward, lacking.in_backward, lacking.backward_is_on_the_stack]
        for in_backward in ways:
            assert not in_backward()
            assert during_backward(in_backward) is True
    assert lacking.in_backward is lacking.backward_is_on_the_stack


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
    assert caplog.text.count("hooks of register_post_accumulate_grad_hook") == 1


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


def test_transforms_may_be_active() -> None:
    """Without the name the answer is the safe one."""
    assert not torch_internals.transforms_may_be_active()
    seen = []

    def fn(x: torch.Tensor) -> torch.Tensor:
        seen.append(torch_internals.transforms_may_be_active())
        return x.sum()

    torch.func.grad(fn)(torch.ones(2))
    assert seen == [True]
    with without("torch._C._functorch.peek_interpreter_stack") as lacking:
        assert lacking.transforms_may_be_active()


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
        with pytest.raises(RuntimeError, match="first forward of a sharded module inside a transform"):
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
    assert DTensor.__torch_function__ is not None


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


def test_import_without_any_private_name() -> None:
    """And a step, as far as torch itself does without them."""
    deleted = [name for name in NAMES if not name.startswith(("torch._dynamo", "torch._ops"))]  # which torch itself needs
    script = ALONE.format(root=str(ROOT), names=deleted)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "a step works" in ran.stdout


def test_private_names_are_used_in_one_file_only() -> None:
    """In the package, and in the kernels in the one place that has its own way to do without."""
    modules = ("torch._C", "torch._dynamo", "torch._ops", "torch._functorch", "utils._pytree")
    attributes = (
        "_execution_engine",
        "_unsafe_preserve",
        "._use_count",
        "._cdata",
        "._is_profiler_enabled",
        "._post_accumulate",
    )
    users = {
        f"{path.relative_to(ROOT)}: {mark}"
        for folder in ("shardrt", "comm", "kernels")
        for path in (ROOT / folder).rglob("*.py")
        for mark in (*modules, *attributes)
        if mark in path.read_text()
    }
    inside = {user for user in users if user.startswith("shardrt/torch_internals.py")}
    # `profiler_state` is read there, for speed.
    assert users - inside == {"kernels/cuda.py: torch._C", "shardrt/fsdp/ranges.py: ._is_profiler_enabled"}
