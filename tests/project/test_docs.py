"""The documentation: a short README, links that lead somewhere, code that compiles, and names and pictures that exist."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shardrt
import shardrt.comm
import shardrt.kernels
import shardrt.tensor
from shardrt.comm.program.version import __version__

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
WRITTEN = {"scripts/results"}  # by scripts/gpu_check.py, on a GPU
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """As GitHub and MyST make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130


@every_page
def test_lines_are_short(page: Path) -> None:
    """Except for tables, for code and for what cannot be broken."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    whole = re.compile(r"`[^`]*`|!?\[[^\]]*\]\([^)]*\)")
    long = [line for line in prose.splitlines() if len(line) > 128 and not line.startswith("|")]
    assert [line for line in long if " " in whole.sub("", line).strip()] == []


@every_page
def test_what_is_installed_exists(page: Path) -> None:
    """No package index has shardrt: a checkout is installed. The version in outputs is that of the package."""
    text = page.read_text()
    assert not re.search(r"pip install[^\n]*['\" ]shardrt\b", text)
    assert set(re.findall(r"^# shardrt (\d+\.\d+\.\d+)", text, re.MULTILINE)) <= {__version__}


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, fragment = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if fragment:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            assert fragment in map(anchor, headings), target


@every_page
def test_paths_and_names_exist(page: Path) -> None:
    text = page.read_text()
    for path in re.findall(r"(?<![\w/.~-])(?:scripts|tests|docs|comm|shardrt|kernels)/[\w/.]*\w", text):
        assert (ROOT / path).exists() or path in WRITTEN, path
    for name in re.findall(r"(?<![\w.\"-])shardrt\.(\w+)", text):
        assert hasattr(shardrt, name) or name in {"comm", "integrations", "launch", "stress"}, f"shardrt.{name}"


@every_page
def test_python_blocks_compile(page: Path) -> None:
    for block in blocks(page, "python"):
        ast.parse(block)


@pytest.mark.parametrize(
    "module",
    [shardrt, shardrt.checkpoint, shardrt.comm, shardrt.kernels, shardrt.tensor],
    ids=lambda module: module.__name__,
)
def test_the_reference_has_every_public_name(module: object) -> None:
    pages = "".join(page.read_text() for page in (DOCS / "reference").glob("*.rst"))
    documented = {name.rpartition(".")[2] for name in re.findall(r"^\.\. (?:auto|py:)\w+:: (\S+)", pages, re.MULTILINE)}
    assert set(module.__all__) - documented == set()  # type: ignore[attr-defined]


@pytest.mark.rest
def test_pictures_are_those_that_the_script_makes(tmp_path: Path) -> None:
    if f"matplotlib=={importlib.metadata.version('matplotlib')}\n" not in (ROOT / "constraints.txt").read_text():
        pytest.skip("another matplotlib draws other bytes")
    subprocess.run([sys.executable, str(DOCS / "pictures.py"), str(tmp_path)], check=True)
    made, kept = ({path.name: path.read_text() for path in folder.glob("*.svg")} for folder in (tmp_path, DOCS / "pictures"))
    assert made.keys() == kept.keys()
    assert made == kept, "run docs/pictures.py"


# ---------------------------------------------------------------------- the index of errors


def texts_of_the_code() -> list[str]:
    """All strings of the package; "..." is in the place of what is formatted."""
    found = []
    for path in (path for folder in ("shardrt", "comm") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(str(part.value) if isinstance(part, ast.Constant) else "..." for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


def has(text: str, pieces: list[str]) -> bool:
    """Whether the text has the pieces, in this order."""
    place = 0
    for piece in (each.strip() for each in pieces):
        place = text.find(piece, place)
        if place < 0:
            return False
        place += len(piece)
    return True


def test_the_errors_of_the_index_are_in_the_code() -> None:
    """The fixed words of each message, in this order, in one string of the code."""
    messages = re.findall(r"^\| (`.*?`) \|", (DOCS / "errors.md").read_text(), re.MULTILINE)
    pieces = [message.replace("` `", "...").strip("`").split("...") for message in messages]
    texts = texts_of_the_code()
    assert len(messages) >= 40
    assert [message for message, each in zip(messages, pieces, strict=True) if not any(has(text, each) for text in texts)] == []
