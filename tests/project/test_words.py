"""One word, one meaning: no class name occurs twice in the package."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_class_names_mean_one_thing() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in (path for folder in ("shardrt", "comm", "kernels") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and str(path.resolve()) not in places[node.name.lstrip("_")]:
                places[node.name.lstrip("_")].append(str(path.resolve()))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
