"""`dev.py test --changed`: which tests a change can reach."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

import reach


@pytest.mark.parametrize(
    ("test", "file"),
    [
        ("test_cost.py", "shardrt/plan/machine/cost.py"),  # imported
        ("test_plan_command.py", "comm/groups/mesh.py"),  # at second hand
        ("test_train_script.py", "scripts/train.py"),  # started
        ("test_runs.py", "shardrt/launcher/supervisor.py"),  # started by what the test starts
        ("test_collectives.py", "comm/backends/node/node_algorithms.py"),
        ("test_metrics.py", "shardrt/instruments/metrics.py"),  # by `shardrt.Metrics`
        ("test_examples.py", "scripts/examples/hsdp.py"),  # in a folder that is named
        ("test_docs.py", "README.md"),
        ("test_guard.py", "comm/ending/guard/watch.py"),
        ("test_launch.py", "comm/ending/guard/watch.py"),  # started by path
        ("test_kernels.py", "kernels/kernels.cu"),
        ("test_hardware.py", "shardrt/plan/machine/sheets/h100.toml"),
    ],
)
def test_what_a_file_depends_on(test: str, file: str) -> None:
    assert file in reach.reachable(path_of(test))


@pytest.mark.parametrize(
    ("test", "file"),
    [
        ("test_cost.py", "shardrt/checkpoint/__main__.py"),
        ("test_collectives.py", "shardrt/parallel/styles/styles.py"),
        ("test_metrics.py", "shardrt/plan/machine/cost.py"),
        ("test_train_script.py", "README.md"),
    ],
)
def test_what_a_file_does_not_depend_on(test: str, file: str) -> None:
    assert file in {*reach.named_files()[Path(file).name]}
    assert file not in reach.reachable(path_of(test))


def test_every_file_is_reached() -> None:
    """Except for the settings of the documentation, and what pytest finds by itself."""
    reached = set().union(*(reach.reachable(test) for test in files_of_tests()))
    assert {path for path in reach.python_files() - reached if not path.endswith("conftest.py")} <= {
        *("docs/conf.py", "docs/docstrings.py")
    }


def test_changes_since_a_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New files count, and ignored ones do not; a link's files are those that it leads to."""
    monkeypatch.setattr(reach, "ROOT", tmp_path)
    for command in (["init", "-q"], ["config", "user.email", "a@b"], ["config", "user.name", "a"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    (tmp_path / "kept.py").write_text("1")
    (tmp_path / "edited.py").write_text("1")
    (tmp_path / ".gitignore").write_text("ignored.py")
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    subprocess.run(["git", "commit", "-q", "-m", "first"], cwd=tmp_path, check=True)
    (tmp_path / "edited.py").write_text("2")
    (tmp_path / "new.py").write_text("1")
    (tmp_path / "ignored.py").write_text("1")
    assert sorted(reach.changed_files("HEAD")) == ["edited.py", "new.py"]
    with pytest.raises(ValueError, match="git diff --name-only --no-renames nowhere --: fatal: bad revision 'nowhere'"):
        reach.changed_files("nowhere")
    assert reach.canonical("shardrt/comm/groups/mesh.py") == "comm/groups/mesh.py"


def files_of_tests() -> list[str]:
    return [path for path in reach.python_files() if Path(path).name.startswith("test_")]


def path_of(test: str) -> str:
    """Where a file of tests lies."""
    (path,) = (path for path in files_of_tests() if Path(path).name == test)
    return path
