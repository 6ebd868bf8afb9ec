"""Which tests run, in which process, and fixtures that several files of tests share."""

import os
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

from slurm import Slurm, install

EXAMPLES, EXAMPLES_ALL = 150, 1500  # of each property

# Tests that share a running job or an expensive fixture run in one process, in the order of the files; all others run in
# whichever is free.
SHARED_FIXTURES = ("alone", "alone_float64", "running", "uninterrupted", "wheel", "written")
MOST_RANKS = 4  # of the tests that use several jobs
# With two processes, jobs of several sizes would run at once on the few cores that led to two, and slow each other down.
BY_SIZE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 2
SLOW_FIRST = (
    "test_packaging.py",
    "test_gpu_check.py",
    "test_benchmarks.py",
    "test_train_script.py",
    "test_frameworks.py",
    "test_stress.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the tests marked `all`, and more examples of each property")
    parser.addoption("--no-processes", action="store_true", help="only the tests that start no process, and no ranks")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all") or config.getoption("--no-processes"):
        import ranks

        ranks.may_fork = False
    if find_spec("hypothesis") is None:  # a machine with a GPU runs only the tests that need one, without it
        return
    import hypothesis

    examples = EXAMPLES_ALL if config.getoption("--all") else EXAMPLES
    hypothesis.settings.register_profile("tests", deadline=None, derandomize=True, max_examples=examples, database=None)
    hypothesis.settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)  # before that of xdist, which reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the rest; deselect what only `--all` runs, or what needs ranks or Slurm; start the longest groups first."""
    mark_rest(items)
    unwanted = [] if config.getoption("--all") else ["all"]
    unwanted += ["ranks", "slurm"] if config.getoption("--no-processes") else []
    left_out = [item for item in items if any(item.get_closest_marker(mark) is not None for mark in unwanted)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in set(left_out)]
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if group := group_of(item):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=rank_of)


def mark_rest(items: list[pytest.Item]) -> None:
    """Of the cases of a test on ranks that run always, keep the first; `rest` is for the others."""
    seen = set[str]()
    for item in items:
        if item.get_closest_marker("ranks") and not any(item.get_closest_marker(mark) for mark in ("rest", "all")):
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.rest)
            seen.add(test)


def group_of(item: pytest.Item) -> str | None:
    """The tests with which this one shares a process."""
    shared = next((name for name in SHARED_FIXTURES if name in getattr(item, "fixturenames", ())), None)
    if item.get_closest_marker("ranks") is None:
        return shared
    parameters = item.callspec.params if shared is None and hasattr(item, "callspec") else {}
    return f"{parameters.get('size', MOST_RANKS)} ranks" if BY_SIZE else "ranks"


def rank_of(item: pytest.Item) -> int:
    """The place in the order: a stable sort leaves the rest as it was."""
    if item.get_closest_marker("ranks") is not None:
        return 0
    return 1 if item.path.name in SLOW_FIRST else 2


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.config.getoption("--no-processes"):
        subprocess.Popen.__init__ = skip_here  # type: ignore[method-assign]


def skip_here(*_: object, **__: object) -> NoReturn:
    pytest.skip("starts a process")


@pytest.fixture(scope="session")
def slurm() -> Iterator[Slurm]:
    """A running Slurm; the test is skipped where there can be none."""
    if reason := install():
        pytest.skip(f"no Slurm: {reason}")
    with Slurm() as running:
        yield running


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder in memory: on a disk that other tests use as well, hundreds of syncs take minutes."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)
