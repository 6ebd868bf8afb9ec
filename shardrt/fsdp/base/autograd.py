"""Hooks in the autograd graph: they tell which forward calls a backward comes back to, and how far the backward is.

Autograd calls the hook of a node (`GradHook`) once the gradient of that node's output is complete. The nodes between modules
are therefore the places where the backward of one module ends and that of the module before it begins:

    forward    input --> module A --> output of A = input of B --> module B --> output
    backward             A ends <-- hook: B ends, A begins     <-- hook: B begins

A module whose inputs require no gradient has no node before it; its parameters' gradients are watched one by one instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum, auto
from weakref import ref

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from ...tensor.dtensor.dtensor import DTensor
from ...tensor.dtensor.group_registry import Group
from ...torch_internals import as_plain_tensors, current_transform, outside_modes, requires_grad, unwrap_transform
from .trees import StandIns


class GroupPhase(IntEnum):
    """What a group's modules are doing. (An IntEnum, because the hash of a plain Enum is Python code.)"""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()


_MOVES = {
    GroupPhase.IDLE: {GroupPhase.FORWARD, GroupPhase.BACKWARD, GroupPhase.IDLE},
    GroupPhase.FORWARD: {GroupPhase.IDLE},
    GroupPhase.BACKWARD: {GroupPhase.BACKWARD, GroupPhase.IDLE},
}


class BackwardProgress(IntEnum):
    """How far a backward is, as seen by one group."""

    GRADIENT_READY = auto()  # one more gradient of the group is complete
    MODULE_DONE = auto()  # the backward of one call of its module is over
    BACKWARD_DONE = auto()  # the whole backward is over


class ForwardCall:
    """One forward call of a group's module that a backward will come back to.

    `inputs` counts the call's inputs that require a gradient; the last of those gradients ends the call's backward.
    Cost: the fields are plain, because a method for each would be called several times per group and step.
    """

    __slots__ = ("inputs", "inputs_left")
    inputs: int  # written by GradHook.on_post_backward()
    inputs_left: int  # inputs without a gradient so far; written by ModuleCalls.begin_backward() and input_done()

    def __init__(self) -> None:
        self.inputs = self.inputs_left = 0


class GradHook:
    """A hook at an autograd node between modules, called when the gradient there is complete.

    Then the backward of the module that took the tensor as an input is over, and the backward of the modules that returned
    the tensor begins, the innermost first. In a chain of modules one hook, and one call from autograd, serves both.
    """

    __slots__ = ("_on_post_backward", "_on_pre_backward", "ended_call")
    ended_call: ForwardCall | None  # the call that `_on_post_backward` ends
    _on_post_backward: Callable[[], None] | None
    _on_pre_backward: list[Callable[[], None]]

    def __init__(self) -> None:
        self.ended_call = None
        self._on_post_backward = None
        self._on_pre_backward = []

    @classmethod
    def find(cls, node: Node) -> GradHook | None:
        """The hook at this node, if there is one."""
        return node.metadata.get(cls)  # type: ignore[attr-defined]  # a property that torch declares as a method

    @classmethod
    def at(cls, node: Node) -> GradHook:
        """The hook at this node. It is made if there is none."""
        metadata: dict[object, GradHook] = node.metadata  # type: ignore[assignment]
        grad_hook = metadata.get(cls)
        if grad_hook is None:
            metadata[cls] = grad_hook = cls()
            node.register_prehook(grad_hook)
        return grad_hook

    def on_pre_backward(self, callback: Callable[[], None]) -> None:
        """Also call `callback` when the gradient here is complete, where the backward of a module begins."""
        self._on_pre_backward.append(callback)

    def on_post_backward(self, call: ForwardCall, callback: Callable[[], None]) -> None:
        """Count one more input of `call` that requires a gradient, and call `callback` when that gradient is complete."""
        call.inputs += 1
        self._on_post_backward, self.ended_call = callback, call

    def __call__(self, gradients: object) -> None:
        if self._on_post_backward is not None:
            self._on_post_backward()
        for callback in self._on_pre_backward:
            callback()


class TensorWatcher:
    """Puts hooks on the tensors that go into and come out of the modules under one root."""

    _newest_output: GradHook | None  # the hook at an output of the module that ran last; written by watch_outputs()

    def __init__(self) -> None:
        self._newest_output = None

    def watch_input(self, call: ForwardCall, callback: Callable[[], None], tensor: torch.Tensor) -> torch.Tensor:
        """Call `callback` once the gradient of `tensor`, an input of `call`, is complete.

        Returns: the input, or an alias of it, whose gradient is complete when the module's own backward is over.
        """
        if not tensor.requires_grad:
            return tensor
        node = tensor.grad_fn
        grad_hook = GradHook.find(node) if node is not None else None
        if grad_hook is None or grad_hook is not self._newest_output or grad_hook.ended_call is not None:
            # Other code may use this input too, and its gradient would be complete only after that code's backward. The
            # gradient of an alias is not. (A DTensor is not viewed: a view is one of all its elements, also of other ranks'.)
            with outside_modes():
                tensor = torch.ops.aten.alias(tensor) if isinstance(tensor, DTensor) else tensor.view_as(tensor)
            assert tensor.grad_fn is not None
            grad_hook = GradHook.at(tensor.grad_fn)
        grad_hook.on_post_backward(call, callback)
        return tensor

    def watch_outputs(self, call: ForwardCall, callback: Callable[[], None], tensors: Sequence[torch.Tensor]) -> bool:
        """Call `callback` when the gradient of one of these outputs of `call` is complete: the module's backward begins.

        Returns: whether there is such an output.
        """
        found = False
        for tensor in tensors if current_transform() is None else _of_every_level(tensors):
            if (node := tensor.grad_fn) is not None:
                grad_hook = GradHook.at(node)
                if grad_hook.ended_call is not call:  # an input that is passed on does not begin the module's backward
                    self._newest_output, found = grad_hook, True
                    grad_hook.on_pre_backward(callback)
                    if (base := tensor._base) is not None and (below := _below_views(node, base.grad_fn, call)) is not None:
                        GradHook.at(below).on_pre_backward(callback)
        return found


def _below_views(node: Node, origin: Node | None, call: ForwardCall) -> Node | None:
    """`origin`, the node of the tensor of which an output of `call` is a view. None if that tensor came from an input.

    node: that of the output itself.
    Hazard: an in-place operation on a view takes the view's own nodes out of the graph, and their hooks with them, so the
    tensor below needs a hook as well. (F.linear of an input with three dims returns a view.)
    """
    below: Node | None = node
    while below is not None and below is not origin:
        below = below.next_functions[0][0] if below.next_functions else None
        if below is not None and (found := GradHook.find(below)) is not None and found.ended_call is call:
            return None
    return below


def _of_every_level(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """The tensors, and what the transforms of `torch.func` have wrapped in them: each level has a graph of its own."""
    for tensor in tensors:
        yield tensor
        while (inner := unwrap_transform(tensor)) is not tensor:
            yield (tensor := inner)


def before_backward_of(tensors: Iterable[torch.Tensor], callback: Callable[[], None]) -> None:
    """Call `callback` before the nodes that made these tensors run, those below a view included (see `_below_views`)."""
    for tensor in tensors if current_transform() is None else _of_every_level(tensors):
        for made in (tensor, tensor._base):
            if made is not None and (node := made.grad_fn) is not None:
                GradHook.at(node).on_pre_backward(callback)


class ModuleCalls:
    """The calls of a group's modules: those running, and those whose backward is under way."""

    phase: GroupPhase  # written by move() and reset()
    running: bool  # one of the modules is in its forward; written by `module.run_forward` alone
    forward_call: ForwardCall  # the call of the module that runs, or ran last; written by `hooks` alone
    stand_ins: StandIns | None  # what the module that runs was given in the place of tensors; written in `hooks` alone
    open_calls: set[ForwardCall]  # calls whose backward is under way
    _modules: Sequence[ref[nn.Module]]
    _not_run: set[ref[nn.Module]]  # modules that have not run since the last time that all had run
    _on_gradient: Callable[[torch.Tensor], None] | None  # called for each gradient of a trainable parameter, if any is watched
    _watches: list[RemovableHandle]  # hooks that call it

    def __init__(self, modules: Sequence[ref[nn.Module]]) -> None:
        self.phase = GroupPhase.IDLE
        self.running = False
        self.forward_call = ForwardCall()
        self.stand_ins = None
        self.open_calls = set()
        self._modules = modules
        self._not_run = set(modules)
        self._on_gradient, self._watches = None, []

    def move(self, phase: GroupPhase, group: Group) -> None:
        """Enter `phase`. Raises RuntimeError, which names the group, if it cannot follow the current phase."""
        if phase not in _MOVES[self.phase]:
            raise RuntimeError(
                f"'{group.name}' cannot go from {self.phase.name} to {phase.name} (rank {group.mesh.rank}): an exception cut "
                "a forward or a backward short; call reset_iter_state() on the root to go on"
            )
        self.phase = phase

    def begin_iteration(self) -> None:
        """Note that no module has run yet in this iteration. Only groups of several modules need it."""
        self._not_run.update(self._modules)

    def all_have_run(self, module: nn.Module) -> bool:
        """Note that `module` has run. Returns: whether all modules of the group have run now."""
        if len(self._modules) == 1:
            return True
        self._not_run.discard(ref(module))
        if self._not_run:
            return False
        self._not_run.update(self._modules)
        return True

    def watch_gradients(self, params: Iterable[nn.Parameter], callback: Callable[[torch.Tensor], None]) -> None:
        """Call `callback` whenever one of these parameters has got its gradient. No-op if gradients are watched already.

        Cost: some microseconds of Python per parameter and backward.
        """
        if self._on_gradient is None:
            self._on_gradient = callback
            self.watch_again(params)

    def watch_again(self, params: Iterable[nn.Parameter]) -> None:
        """Watch these parameters instead, in graphs that exist as well. No-op if no gradients are watched.

        Those of them that code around the module has frozen where they stayed gathered get none.
        """
        if (callback := self._on_gradient) is not None:
            self._remove_watches()
            with as_plain_tensors():
                self._watches = [each.register_post_accumulate_grad_hook(callback) for each in params if requires_grad(each)]

    @property
    def watches_gradients(self) -> bool:
        """Whether each trainable parameter has a hook of `watch_gradients`."""
        return bool(self._watches)

    def unwatch_gradients(self) -> None:
        """Stop watching gradients, until `watch_gradients` is called again."""
        self._on_gradient = None
        self._remove_watches()

    def _remove_watches(self) -> None:
        while self._watches:
            self._watches.pop().remove()

    def begin_backward(self, call: ForwardCall, group: Group) -> bool:
        """Note that the backward of this call begins. Returns: False if it had begun before."""
        if call in self.open_calls:
            return False
        self.open_calls.add(call)
        call.inputs_left = call.inputs
        self.move(GroupPhase.BACKWARD, group)
        return True

    def input_done(self, call: ForwardCall) -> bool:
        """Note that one more input of this call has its gradient. Returns: whether it was the last: the backward is over."""
        call.inputs_left -= 1
        if call.inputs_left:
            return False
        self.open_calls.discard(call)
        return True

    def end_backward(self, group: Group) -> None:
        """Note that the whole backward is over: none of its calls is open any more. Only after begin_backward()."""
        self.open_calls.clear()
        self.move(GroupPhase.IDLE, group)

    def reset(self) -> None:
        """Forget a failed iteration."""
        self.phase = GroupPhase.IDLE
        self.open_calls.clear()
        self._not_run = set(self._modules)
