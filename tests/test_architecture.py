"""The house's plan, held by a test: who may import whom, and how long a file may be."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "respec"
# Below every room: they know of none.
GROUND = {"types", "config", "errors"}
ROOMS = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()} - GROUND
# Models are used by all rooms, and use none.
SHARED = GROUND | {"models"}
# These see all rooms, and no room sees them.
ABOVE = {
    "loop", "stages", "standalone", "cli", "bench", "doctor", "measuring", "adaptive", "drafting", "online", "distillation", "certification",
    "sentinel", "heads", "naming", "resume", "anchors", "supply", "entropy", "integrations", "text_engine", "opening", "remote", "remote_certification", "serving", "__main__", "__init__",
}  # fmt: skip
LONGEST = 300
FILES = sorted(SOURCE.rglob("*.py"))
ROOT = SOURCE.parents[1]
ALL = [
    *FILES,
    *(
        path
        for folder in ("tests", "examples", "benchmarks", "website")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ),
]
# What a later day would have to mend, and what runs code when a file is read.
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
UNSAFE = re.compile(r"\b(import pickle|from pickle|torch\.load|torch\.save)\b")
# The pipe to a process of our own carries pickles; no file does.
PIPE = {"tasks/process.py", "tasks/worker.py"}


def parts_imported(source: str, package: str) -> Iterator[tuple[str, int]]:
    """Names of the direct parts of `respec` that a file of `package` (like `respec.tasks`) imports anywhere in it, with the line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, *rest = name.split(".")
            if top == "respec" and rest and rest[0] != "__version__":
                yield rest[0], node.lineno


def undefined(source: str) -> set[str]:
    """Global names that a file reads and nothing defines. Linters cannot be asked: to them jaxtyping's shapes are names, too."""
    module = symtable.symtable(source, "<source>", "exec")
    known = {symbol.get_name() for symbol in module.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    known |= set(dir(builtins)) | {"__file__", "__name__", "__doc__"}
    tables, missing = [module], set[str]()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        known |= {s.get_name() for s in table.get_symbols() if s.is_declared_global() and s.is_assigned()}
        missing |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
    return missing - known


def part_of(path: Path) -> str:
    """The direct part of `respec` that a file belongs to: a room's name, or the file's own."""
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def allowed(part: str) -> set[str]:
    """The parts that `part` may import."""
    if part in ABOVE:
        return ROOMS | GROUND | ABOVE
    if part in ROOMS:
        return SHARED | {part} if part != "models" else GROUND | {"models"}
    return GROUND


def test_the_rooms_are_found():
    assert {"envs", "models", "tasks", "rollout", "policy", "weights", "report"} <= ROOMS
    unplaced = {part_of(path) for path in FILES} - ROOMS - ABOVE - GROUND - {"__init__", "__main__"}
    assert not unplaced, f"{sorted(unplaced)}: say in this test what they may see"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_keep_to_the_plan(path: Path):
    package = ".".join(["respec", *path.relative_to(SOURCE).parent.parts])
    part = part_of(path)
    wrong = [
        f"line {line}: respec.{name}"
        for name, line in parts_imported(path.read_text(), package)
        if name not in allowed(part)
    ]
    assert not wrong, f"{part} may import {sorted(allowed(part))}; it gets the rest as arguments"


def test_a_forbidden_import_is_seen_in_any_form():
    for line in (
        "import respec.policy.learner",
        "from respec import policy",
        "from respec.policy import learner",
        "from ..policy import learner",
        "from .. import policy",
        "def f():\n    from respec.policy.losses import x",
    ):
        assert [name for name, _ in parts_imported(line, "respec.tasks")] == ["policy"], line
    assert "policy" not in allowed("tasks")
    assert "loop" not in allowed("policy")


def test_no_file_is_too_long():
    long = {str(path.relative_to(SOURCE)): n for path in FILES if (n := len(path.read_text().splitlines())) > LONGEST}
    assert not long, f"more than {LONGEST} lines: split by what it is about"


def test_nothing_is_called_utils_or_manager():
    names = [path for path in FILES if path.stem in ("utils", "util", "helpers", "misc", "common")]
    assert not names
    classes = [
        f"{path.name}: {node.name}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Manager")
    ]
    assert not classes


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_name_is_undefined(path: Path):
    assert not undefined(path.read_text())


def test_an_undefined_name_is_seen_in_any_scope():
    for source in ("x", "def f():\n    return x", "class A:\n    def f(self):\n        return [x for _ in ()]"):
        assert undefined(source) == {"x"}, source
    assert not undefined("import x\ndef f(y):\n    global z\n    z = y\n    return x, z, len, __file__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_sources_say_what_they_are_leave_nothing_for_later_and_open_no_pickle(path: Path):
    source = path.read_text()
    assert ast.get_docstring(ast.parse(source)), "the file has no docstring"
    assert not UNFINISHED.findall(source)
    if str(path.relative_to(SOURCE)) not in PIPE:
        assert not UNSAFE.findall(source), "pickles run code when they are read; take safetensors"
