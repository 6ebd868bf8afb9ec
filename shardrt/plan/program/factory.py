"""A factory's model as a program: imported by name, made on the meta device, checked, and sharded if it is not yet.

A factory is `package.module:function`. It takes nothing, or the `Job`, and returns a module, or a module and a function
`step(model, job)` that returns the loss of one micro-batch.
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ...fsdp.api.fully_shard import fully_shard
from ...fsdp.api.module import FSDPModule
from ...parallel import cross_entropy
from ...parallel.experts.expert_modules import RoutedExpertsModule, SortedExpertsModule
from ...parallel.styles.modules import ParallelizedModule
from ...tensor.dtensor.dtensor import DTensor
from ..machine.hardware import SheetError
from .hugging_face import fit_to_meta, is_hugging_face
from .job import Job, JobObserver, PlanError, Program
from .recomputation import checkpoint_blocks

Step = Callable[[nn.Module, Job], torch.Tensor]


def load_factory(name: str) -> Callable[..., Any]:
    """The factory that `package.module:function` names. Modules of the current directory are found as well.

    Raises PlanError for a name of another form, a module that does not import, and what is no function of it.
    """
    return _load(name, "factory", "a function that returns a module")


def with_named_step(factory: Callable[..., Any], name: str, step: str) -> Callable[[Job], tuple[Any, Any]]:
    """The factory with a step, which `package.module:function` names, for the module alone that it returns.

    Raises PlanError as `load_factory` does.
    """
    one_micro_batch = _load(step, "step", "a function step(model, job) that returns the loss")

    def with_step(job: Job) -> tuple[Any, Any]:
        made = _made(factory, job)
        if isinstance(made, tuple):
            raise PlanError(f"{name}: the factory returns a step of its own; expected a module, with --step {step}")
        return made, one_micro_batch

    return with_step


def _load(name: str, what: str, expected: str) -> Callable[..., Any]:
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise PlanError(f"{what} {name!r}: expected package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise PlanError(f"{what} {name}: the module does not import: {describe(error)}") from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise PlanError(f"{what} {name}: {module_name} has no {attribute!r}")
        found = getattr(found, part)
    if not callable(found):
        raise PlanError(f"{what} {name}: expected {expected}, found {type(found).__name__}")
    return found


def make_program(factory: Callable[..., Any], job: Job, name: str = "factory") -> Program:
    """The program of a factory, in the world of `job.ranks` ranks that is current.

    A model with modules that are sharded is taken as it is. Of another one the elements of each nn.ModuleList are sharded, then
    the model. Raises PlanError if the factory raises, returns no module, or makes tensors that hold data, and when the program
    runs, for what the job asks for and nobody has read.
    """
    observer = JobObserver(job)
    with torch.device("meta"):
        model, step = _call(factory, observer.job, name)
    check_meta(model, name)
    if is_hugging_face(model):
        fit_to_meta(model)
    if job.tp > 1 and not _is_tensor_parallel(model):
        raise PlanError(
            f"{name}: no module is tensor-parallel, with tp={job.tp}: call shardrt.parallel.parallelize_module with "
            'job.mesh()["tp"] in the factory'
        )
    if job.ep > 1 and not any(map(has_divided_experts, model.modules())):
        raise PlanError(
            f"{name}: no module's experts are divided, with ep={job.ep}: call shardrt.parallel.parallelize_module with "
            'job.expert_mesh()["ep"] and ExpertParallel() in the factory'
        )
    if not any(isinstance(module, FSDPModule) for module in model.modules()):
        shard_model(model, observer.job, name)
    model.train()

    def one_micro_batch() -> torch.Tensor:
        with as_plan_error(f"{name}: the forward on the meta device failed:"), torch.device("meta"):
            loss = step(model, observer.job)
        _check_made(loss, job, name)
        _check_reads(job, observer.reads, name)
        return loss

    return Program(model, one_micro_batch, observer.reads, observer.received)


def _call(factory: Callable[..., Any], job: Job, name: str) -> tuple[nn.Module, Step]:
    with as_plan_error(f"{name} raised"):
        made = _made(factory, job)
    model, step = made if isinstance(made, tuple) and len(made) == 2 else (made, language_model_step)
    if not isinstance(model, nn.Module):
        raise PlanError(f"{name}: expected an nn.Module, or a module and a step, found {_kind(made)}")
    if not callable(step):
        raise PlanError(f"{name}: expected a step that can be called, found {_kind(step)}")
    return model, step


def _made(factory: Callable[..., Any], job: Job) -> Any:
    """What the factory returns. It is given the job if it takes an argument."""
    try:
        takes = [each for each in inspect.signature(factory).parameters.values() if each.default is each.empty]
    except ValueError:  # a function in C has no signature
        takes = []
    return factory(job) if any(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in takes) else factory()


def _check_made(made: object, job: Job, name: str) -> None:
    """Raise PlanError unless a step has returned the loss, or what the stage sends."""
    is_loss = job.stage == job.pp - 1
    if is_loss and not (isinstance(made, torch.Tensor) and made.numel() == 1):
        raise PlanError(f"{name}: expected a step that returns the loss, a tensor of one element; found {_kind(made)}")
    if not is_loss and not (isinstance(made, torch.Tensor) and made.requires_grad):
        raise PlanError(
            f"{name}: expected a step that returns what stage {job.stage} of {job.pp} sends, a tensor that needs a gradient "
            f"(stages without one are not forecast); found {_kind(made)}"
        )


def _is_tensor_parallel(model: nn.Module) -> bool:
    """Whether some module has been parallelised, or some parameter is distributed over an axis "tp"."""
    params = (param for param in model.parameters() if isinstance(param, DTensor))
    return any(isinstance(module, ParallelizedModule) for module in model.modules()) or any(
        "tp" in param.device_mesh.axis_names for param in params
    )


def has_divided_experts(module: nn.Module) -> bool:
    """Whether `ExpertParallel` has divided the module's experts over ranks."""
    return isinstance(module, RoutedExpertsModule | SortedExpertsModule)


def _check_reads(job: Job, reads: Set[str], name: str) -> None:
    """Raise PlanError for what is not the default, and that neither the factory nor `shard_model` has read."""
    default = Job(job.ranks)
    for field in _TAKES_EFFECT:
        value = getattr(job, field)
        if field not in reads and value != getattr(default, field):
            raise PlanError(
                f"{name}: {field}={value!r} has no effect, as the factory has sharded the model itself and does not read "
                f"job.{field}: use it there (job.shard_options() are the keywords of fully_shard), or leave the option out"
            )


_TAKES_EFFECT = (
    *("cp", "replicas", "reshard_after_forward", "mp_policy", "offload_policy", "quantization_policy", "prefetch_policy"),
    "checkpoint_activations",
)


def check_meta(model: nn.Module, name: str) -> None:
    """Raise PlanError unless all parameters and buffers are on the meta device, naming the first that is not."""
    for kind, tensors in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for key, tensor in tensors:
            if tensor.device.type != "meta":
                raise PlanError(
                    f"{name}: {kind} '{key}' is on {tensor.device} and holds data; expected the meta device: leave out "
                    "device=, .to() and from_pretrained(), and make tensors by torch's functions"
                )


# ---------------------------------------------------------------------- sharding


def shard_model(model: nn.Module, job: Job, name: str) -> None:
    """Shard divided experts, the elements of each nn.ModuleList, then the model.

    Raises PlanError for a model with too few blocks to checkpoint.
    """
    options = job.shard_options()
    found, again = list(blocks(model)), job.checkpoint_activations
    if again and not found:
        raise PlanError(f"{name}: no nn.ModuleList whose elements could be checkpointed; expected one, of the model's blocks")
    if isinstance(again, int) and again > len(found) > 0:
        raise PlanError(f"{name}: every {again}th block is to be recomputed, of {len(found)}; expected at most {len(found)}")
    checkpoint_blocks(found, again)
    for module in list(filter(has_divided_experts, model.modules())):
        fully_shard(module, **job.shard_options(experts=True))
    for block in found:
        fully_shard(block, **options)
    fully_shard(model, **options)
    model.set_prefetch_policy(job.prefetch_policy)  # type: ignore[operator]


def blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The elements of the outermost ModuleLists."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from blocks(child)


# ---------------------------------------------------------------------- a step


def language_model_step(model: nn.Module, job: Job) -> torch.Tensor:
    """The mean cross-entropy of (batch, sequence) int64 tokens. What the model returns are logits, or has them as `logits`.

    Raises PlanError without `job.sequence`, in a pipeline, and for a model that returns something else.
    """
    if job.pp > 1:
        raise PlanError(f"pp={job.pp} with a factory that returns a module alone: return (model, step), both of job.stage")
    if job.local_sequence is None:
        raise PlanError("expected a sequence length (--sequence), since the factory returns no step of its own")
    tokens = torch.zeros((job.batch, job.local_sequence), dtype=torch.int64)
    out = model(tokens)
    logits = getattr(out, "logits", out)
    if not isinstance(logits, torch.Tensor) or logits.dim() < 2:
        raise PlanError(
            f"the model returns {_kind(logits)}; expected logits, a tensor of shape (batch, sequence, vocabulary), or an "
            "object that has them as `logits`. For others give --step package.module:function, or return (model, step) from "
            "the factory: step(model, job) returns the loss"
        )
    return token_loss(logits, torch.zeros_like(tokens))


def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy, in float32, of (B, T, V) logits, which may be a `DTensor` in parts of the vocabulary."""
    if isinstance(logits, DTensor):
        return cross_entropy(logits, targets)
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


# ---------------------------------------------------------------------- messages


@contextmanager
def as_plan_error(what: str) -> Iterator[None]:
    """Raise a PlanError that begins so for whatever else the `with` block raises, or ends the process by."""
    try:
        yield
    except (PlanError, SheetError):
        raise
    except (Exception, SystemExit) as error:
        raise PlanError(f"{what} {describe(error)}") from error


def describe(error: BaseException) -> str:
    """The error in one line, and what caused it, with the last line of code outside of installed packages it came through."""
    text = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_own(Path(frame.filename))]
    place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    cause = f", caused by {describe(error.__cause__)}" if error.__cause__ is not None else ""
    return f"{type(error).__name__}: {text}{place}{cause}" if text else f"{type(error).__name__}{place}{cause}"


def _is_own(path: Path) -> bool:
    """Whether a file is the user's: not the planner's, not installed, not of the standard library."""
    folder = Path(__file__).resolve().parents[2]
    installed = {Path(torch.__file__).resolve().parents[1], Path(inspect.__file__).resolve().parent}
    return path.exists() and not any(path.resolve().is_relative_to(each) for each in (folder, *installed))


def _kind(value: object) -> str:
    kind = type(value).__name__
    if isinstance(value, tuple) and value:
        return f"{kind} of {', '.join(map(_kind, value))}"
    return f"{kind} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else kind
