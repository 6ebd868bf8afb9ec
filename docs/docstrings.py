"""Docstrings of this project are plain text; this makes reStructuredText of them, in which nothing is markup by accident.

A line `name: text`, or one that begins with a word such as "Raises", begins an item; lines indented below continue it. Lines
indented after an empty line, and tables, are shown as they are. `name` becomes a link where the reference has that name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import shardrt
import shardrt.comm
import shardrt.kernels

if TYPE_CHECKING:
    from sphinx.application import Sphinx

_ITEM = re.compile(r"(?:[\w*]+(?:, [\w*]+)*: |(?:Raises|Returns|Cost|Hazard|Invariant|Legend|No-op|Collective)\b)")
_SPECIAL = re.compile(r"([\\*_|<>])")
_MODULES = (shardrt, shardrt.comm, shardrt.kernels)
_LINKS = {name: f"{module.__name__}.{name}" for module in reversed(_MODULES) for name in module.__all__}


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _process)
    return {"parallel_read_safe": True}


def _process(app: Sphinx, what: str, name: str, obj: object, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def to_rst(lines: list[str]) -> list[str]:
    """A docstring's lines, indentation removed, as reStructuredText."""
    out: list[str] = []
    for literal, block in _blocks(lines):
        if literal:
            out += ["::", "", *(f"    {line}" for line in block), ""]
        else:
            out += [*_paragraphs(block), ""]
    return out


def _blocks(lines: list[str]) -> Iterator[tuple[bool, list[str]]]:
    """Runs of lines without an empty one, and whether they are shown as they are."""
    block: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield block[0].startswith((" ", "|")), block
            block = []


def _paragraphs(block: list[str]) -> Iterator[str]:
    """Items of a list, and paragraphs between them."""
    in_item = False
    for before, line in zip(["", *block], block, strict=False):
        if line.startswith("- ") or _ITEM.match(line):
            in_item = True
            yield from ("", f"- {_text(line.removeprefix('- '))}")
        elif in_item and not line.startswith(" ") and before.endswith(".") and line[0].isupper():
            in_item = False
            yield from ("", _text(line))
        else:
            yield f"{'  ' * in_item}{_text(line.strip())}"


def _text(line: str) -> str:
    """Inline literals stay, names become links, and all else is escaped."""
    parts = re.split(r"(`[^`]+`)", line)
    return "".join(_code(part[1:-1]) if index % 2 else _SPECIAL.sub(r"\\\1", part) for index, part in enumerate(parts))


def _code(name: str) -> str:
    target = _LINKS.get(name.removeprefix("shardrt.").removesuffix("()"))
    code = f":py:obj:`{name} <{target}>`" if target else f"``{name}``"
    return f"\\ {code}\\ "
