"""What the package changes in the user's process: nothing at import, nothing later that the user's own optimizers notice."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

IMPORT_ALONE = """
import inspect, os, signal, sys, threading
import torch
from torch.optim import optimizer as steps
from torch.nn.modules import module as modules
from torch.utils import _foreach_utils

def state():
    kinds = [kind for kind in vars(torch.optim).values() if inspect.isclass(kind)]
    kinds += [torch.nn.Module, torch.Tensor, torch.nn.Parameter]
    registries = [value for name, value in (vars(steps) | vars(modules)).items() if name.startswith("_global")]
    hooks = [dict(value) for value in registries if isinstance(value, dict)]
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return [
        {kind: dict(vars(kind)) for kind in kinds}, hooks, list(_foreach_utils._foreach_supported_types), handlers,
        sys.excepthook, threading.excepthook, os._exit, sys.exit, dict(os.environ),
    ]

before = state()
from shardrt import *
assert state() == before
"""

NAMES = """
import pickle, pydoc
from concurrent.futures import ThreadPoolExecutor
import shardrt

def heavy():
    return {"torch", "numpy", "mpi4py"} & sys.modules.keys()

assert shardrt.__version__ and not hasattr(shardrt, "_unknown") and not hasattr(shardrt, "__wrapped__")
from shardrt import launch
assert not heavy()
with ThreadPoolExecutor(4) as pool:
    names = "shardrt.fully_shard", "shardrt.comm.world", "shardrt.checkpoint.Run", "shardrt.tensor.DTensor"
    found = list(pool.map(eval, names, [globals()] * 4))
assert found[3] is pickle.loads(pickle.dumps(shardrt.DTensor))
assert found[1] is shardrt.world and found[2] is shardrt.Run
assert shardrt.parallel.parallelize_module and shardrt.torch_names.lacking() == []
for package in (shardrt, shardrt.comm, shardrt.checkpoint):
    assert set(package.__all__) < set(dir(package)) and set(package.__all__) <= vars(package).keys()
    names = {}
    exec(f"from {package.__name__} import *", names)
    assert names.keys() - {"__builtins__"} == set(package.__all__)
    try:
        package.unknown
    except AttributeError as error:
        assert str(error) == f"module '{package.__name__}' has no attribute 'unknown'", error
    else:
        raise AssertionError(package)
assert "fully_shard(" in pydoc.render_doc(shardrt, renderer=pydoc.plaintext)
"""

WITHOUT_TORCH = """
import traceback
sys.modules["torch"] = None
import shardrt
for name in ("init", "unknown"):
    try:
        getattr(shardrt, name)
    except ModuleNotFoundError as error:
        assert error.name == "torch"
    else:
        raise AssertionError(name)
"""

LATER = """
import copy, pickle, warnings
import torch
from torch import nn
import shardrt

warnings.simplefilter("error")
seen = []

class Scaled(torch.optim.Adam):
    def step(self, closure=None):
        seen.append("own")
        return super().step(closure)

def train(model, optimizer, scheduler):
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), step + 1.0)).sum().backward()
        optimizer.step()
        scheduler.step()

def made(kind):
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: seen.append(args[0] is optimizer))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

def parameters(kind, run):
    model, optimizer, scheduler = made(kind)
    run(model, optimizer, scheduler)
    return [param.detach().clone() for param in model.parameters()], len(seen)

kinds = (torch.optim.Adam, torch.optim.SGD, Scaled)
expected = [parameters(kind, train) for kind in kinds]
seen.clear()
adam = torch.optim.Adam.step
waiting = [made(kind) for kind in kinds]  # with schedulers that have wrapped the step of before
shardrt.init()
sharded = shardrt.fully_shard(nn.Linear(4, 4))
assert torch.optim.Adam.step is adam  # what it calls is another: schedulers hold it
ours = torch.optim.Adam(sharded.parameters(), lr=0.1)
assert seen == []
for each, (values, _) in zip(waiting, expected):
    train(*each)
    assert all(map(torch.equal, each[0].parameters(), values))
    for again in (copy.deepcopy(each[1]), pickle.loads(pickle.dumps(each[1]))):
        assert type(again) is type(each[1])
        again.step()
assert all(seen), seen
seen.clear()
for kind, (values, count) in zip(kinds, expected):
    found, now = parameters(kind, train)
    assert all(map(torch.equal, found, values))
    assert now == count
assert not waiting[0][1]._optimizer_load_state_dict_post_hooks  # which those with our parameters have
late = waiting[0][1]
late.add_param_group({"params": list(sharded.parameters())})
for optimizer in (ours, late):  # of one step each
    sharded(torch.ones(2, 4)).sum().backward()
    before = [param.full_tensor().detach().clone() for param in sharded.parameters()]
    optimizer.step()
    assert not any(map(torch.equal, before, [param.full_tensor() for param in sharded.parameters()]))
    optimizer.zero_grad()
shardrt.finalize()
"""


def run(script: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{script}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr


def test_names_are_imported_when_they_are_used() -> None:
    run(NAMES)


def test_a_module_that_others_need_can_be_the_first() -> None:
    run("import shardrt.comm.startup.bootstrap")


def test_without_torch_the_import_of_names_says_so() -> None:
    run(WITHOUT_TORCH)


def test_an_import_changes_nothing_of_torch() -> None:
    run(IMPORT_ALONE)


@pytest.mark.rest
def test_optimizers_of_others_are_as_before() -> None:
    """Their bits, hooks, schedulers, copies and pickles; also where they were made before the first sharded parameter."""
    run(LATER)


CHANGES = re.compile(
    r"""
    ^\s*(?:torch|os|sys|threading|signal|Distributed\w+)(?:\.\w+)+\ =\ | \b(?:signal|faulthandler)\.(?:signal|register)\(
    | \batexit\.register\( | \bos\.(?:register_at_fork\(|environ\.(?:pop|setdefault)\(|environ\[\w+\]\ =)
    | \b(?:prctl|mallopt|dump_traceback_later|set_wakeup_fd|register_backend|sys\.path\.insert)\(
    | \.__class__\ = | (?<!def\ )\bregister_\w*hook\( | setattr\(os\b
    """,
    re.VERBOSE | re.MULTILINE,
)
# Programs of shardrt's own, whose processes are not the user's.
OF_NO_USER = ("comm/stress/", "comm/ending/guard/", "shardrt/launch.py", "shardrt/launcher/", "shardrt/stress.py")


def test_the_page_has_all_that_is_changed() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page[page.index("## What is changed in the user's process") :].partition("\n\nWhat surrounds steps")[0]
    listed = {path for row in table.splitlines()[6:] for path in re.findall(r"`([\w/]+\.py)`", row.split("|")[2])}
    found = set()
    for path in (*(ROOT / "comm").rglob("*.py"), *(ROOT / "kernels").rglob("*.py"), *(ROOT / "shardrt").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if not name.startswith((*OF_NO_USER, "shardrt/comm/", "shardrt/kernels/")) and CHANGES.search(code_of(path)):
            found.add(name.removeprefix("shardrt/"))
    assert sorted(found - listed) == []
    assert all((ROOT / "shardrt" / path).is_file() for path in listed)


def code_of(path: Path) -> str:
    """A file without its comments and docstrings."""
    return re.sub(r'"""(?:.|\n)*?"""|#.*', "", path.read_text())
