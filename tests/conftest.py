"""Which tests run, in which process, and fixtures that several files of tests share."""

import os
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

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


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):
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
    """Deselect what only `--all` runs; with several processes, start the longest groups first."""
    if not config.getoption("--all"):
        left_out = [item for item in items if item.get_closest_marker("all") is not None]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.get_closest_marker("all") is None]
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if group := group_of(item):
            item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=rank_of)


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
