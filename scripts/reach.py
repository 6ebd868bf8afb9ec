"""Which tests a change can reach: those whose files depend on a changed one, at first or at second hand.

A file depends on what it imports, also inside functions, and on what it reads or starts by path (`folder / "sheets"`). A test
or script depends on all that its strings name: modules (`-m shardrt.launch`), files, folders (`"examples"`), and the imports of
programs. `from shardrt import Run` is a dependency on the file that defines `Run`, not on all that the package imports.
"""

from __future__ import annotations

import ast
import re
import subprocess
import textwrap
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import cast

ROOT = Path(__file__).resolve().parent.parent
# Every test depends on these: settings, versions, and what runs the tests.
EVERYWHERE = {
    "setup.cfg",
    "pyproject.toml",
    "constraints.txt",
    "tests/conftest.py",
    "tests/support/ranks.py",
    "tests/support/worker.py",
}
ALWAYS = "test_docs.py"  # reads every file
SOURCES = ("", "docs/", "scripts/", "tests/support/", "tests/fake_cuda/")  # folders whose modules are imported by name


def reached_tests(revision: str) -> list[str]:
    """The files of tests that depend on a file that differs from the revision, or is new. Raises ValueError if git fails."""
    changed = {canonical(name) for name in changed_files(revision)}
    tests = sorted(path for path in python_files() if path.startswith("tests/") and Path(path).name.startswith("test_"))
    if changed & EVERYWHERE:
        return tests
    return [test for test in tests if reachable(test) & changed or Path(test).name == ALWAYS]


def changed_files(revision: str) -> list[str]:
    """The paths, from the root, of files that differ from the revision, and of new ones that git does not ignore."""
    return [*git("diff", "--name-only", "--no-renames", revision, "--"), *git("ls-files", "--others", "--exclude-standard")]


def git(*arguments: str) -> list[str]:
    """The lines that a git command prints."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"git {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


def canonical(path: str) -> str:
    """A path from the root, without the package's links to comm/ and kernels/."""
    return re.sub(r"^shardrt/(comm|kernels)(/|$)", r"\1\2", path)


@cache
def python_files() -> frozenset[str]:
    """All Python files that git knows or that are new."""
    known = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    return frozenset(path for path in known if (ROOT / path).is_file())


@cache
def named_files() -> dict[str, set[str]]:
    """The files that a string may name: by their own names, and by those of folders, except for packages and the top ones."""
    found: dict[str, set[str]] = {}
    deleted = git("ls-tree", "-r", "--name-only", "HEAD")
    paths = {Path(path) for path in (*git("ls-files", "--cached", "--others", "--exclude-standard"), *deleted)}
    packages = {path.parent for path in paths if path.name == "__init__.py"}
    for path in paths:
        folders = [folder.name for folder in path.parents[:-2] if folder not in packages]
        for part in (path.name, *folders):
            found.setdefault(part, set()).add(str(path))
    return found


def reachable(start: str) -> set[str]:
    """The file itself and everything that it depends on."""
    seen, todo = {start}, [start]
    while todo:
        new = dependencies(todo.pop()) - seen
        seen |= new
        todo += new
    return seen


@cache
def dependencies(path: str) -> frozenset[str]:
    """The files that a file names itself; none for one that is not Python, and for a package's list of public names."""
    if path not in python_files() or is_list_of_names(path):
        return frozenset()
    names = Names(package_of(path))
    names.visit(parsed(path))
    if path.startswith(("tests/", "scripts/")):
        names.read_texts(parsed(path))
    return frozenset(names.files)


@cache
def parsed(path: str) -> ast.Module:
    try:
        return ast.parse((ROOT / path).read_text())
    except SyntaxError as error:
        raise ValueError(f"{path}, line {error.lineno}: {error.msg}") from error


def is_list_of_names(path: str) -> bool:
    """True if a package only imports what others use from there: they depend on what they use."""
    *_, name = Path(path).parts
    kinds = (ast.ImportFrom, ast.Assign, ast.Expr)
    return name in ("__init__.py", "exports.py") and all(isinstance(node, kinds) for node in parsed(path).body)


def package_of(path: str) -> str:
    """The package in which a file's relative imports begin, as in `shardrt.comm`."""
    parts = Path(path).parent.parts
    return ".".join(("shardrt", *parts) if parts[:1] in (("comm",), ("kernels",)) else parts)


class Names(ast.NodeVisitor):
    """Collects the files that a program names."""

    def __init__(self, package: str) -> None:
        self.files: set[str] = set()
        self._package = package
        self._modules: dict[str, str] = {}  # by the names that they have in this program

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.files |= module_file(alias.name)
            name = alias.asname or alias.name.partition(".")[0]
            self._modules[name] = alias.name if alias.asname else name

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        above = self._package.split(".")[: len(self._package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            self.files |= definition(module, alias.name)
            self._modules[alias.asname or alias.name] = f"{module}.{alias.name}"

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """`shardrt.checkpoint.save`, and `checkpoint.save` after an import of that package."""
        if module := self._module(node.value):
            self.files |= definition(module, node.attr)
        self.generic_visit(node)

    def _module(self, node: ast.expr) -> str | None:
        """The module that an expression is; None for any other value."""
        if isinstance(node, ast.Name):
            module = self._modules.get(node.id)
        elif isinstance(node, ast.Attribute) and (parent := self._module(node.value)):
            module = f"{parent}.{node.attr}"
        else:
            return None
        return module if module and module_file(module) else None

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """`folder / "guard" / "__main__.py"`."""
        parts, left = list[str](), cast(ast.expr, node)
        while isinstance(left, ast.BinOp) and isinstance(left.op, ast.Div) and (part := text_of(left.right)):
            parts, left = [part, *parts], left.left
        self.files |= files_at("/".join(parts))
        if parts:  # the whole path, not those of its folders
            self.visit(left)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """`path.with_name("supervisor.py")`."""
        if isinstance(node.func, ast.Attribute) and node.func.attr == "with_name" and text_of(node.args[0]).count("."):
            self.files |= files_at(text_of(node.args[0]))
        self.generic_visit(node)

    def read_texts(self, tree: ast.AST) -> None:
        """Read the strings of a program, except for docstrings."""
        for node in ast.walk(tree):
            if not isinstance(node, ast.Expr):
                for child in ast.iter_child_nodes(node):
                    if isinstance(child, ast.Constant) and isinstance(child.value, str):
                        self._read(child.value)

    def _read(self, text: str) -> None:
        if "import " in text:
            with suppress(SyntaxError):  # it is prose
                program = ast.parse(textwrap.dedent(text))
                self.visit(program)
        if re.fullmatch(r"shardrt(\.\w+)*", text):
            self.files |= module_file(text) | module_file(f"{text}.__main__")
        elif re.fullmatch(r"[\w./-]+", text):
            self.files |= named_files().get(Path(text).name, set())


def text_of(node: ast.expr) -> str:
    """The string that an expression is; empty for all others."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


@cache
def files_at(path: str) -> frozenset[str]:
    """The files whose paths end like this, and those of folders whose paths do, except for the top ones."""
    every = {file for files in named_files().values() for file in files} if path else set()
    return frozenset(file for file in every if f"/{file}".endswith(f"/{path}") or f"/{path}/" in file)


@cache
def module_file(module: str) -> frozenset[str]:
    """The file of a module of this checkout; nothing for others."""
    path = module.replace(".", "/")
    names = (f"{source}{path}{end}" for source in SOURCES for end in (".py", "/__init__.py"))
    return frozenset(canonical(name) for name in names) & python_files()


@cache
def installed(module: str) -> frozenset[str]:
    """The modules that a package and those above it import for what the import does: `from . import dispatch as dispatch`."""
    found = frozenset[str]()
    for package in (module, *(module[: dot.start()] for dot in re.finditer(r"\.", module))):
        for path in module_file(package):
            for node in ast.walk(parsed(path)) if is_list_of_names(path) else ():
                if isinstance(node, ast.ImportFrom):
                    for alias in node.names:
                        if alias.asname == alias.name:
                            found |= module_file(".".join(part for part in (package, node.module, alias.name) if part))
    return found


@cache
def definition(module: str, name: str) -> frozenset[str]:
    """What `from module import name` depends on: the module's file, and the one that defines the name where it is imported."""
    if found := module_file(f"{module}.{name}"):
        return found | installed(module)
    lists = module_file(module) | module_file(f"{module}.exports")
    own = lists | installed(module)
    for path in lists:
        for node in ast.walk(parsed(path)) if is_list_of_names(path) else ():
            if isinstance(node, ast.ImportFrom) and any(name in (alias.asname, alias.name) for alias in node.names):
                return own | definition(".".join(part for part in (module, node.module) if part), name)
    return own
