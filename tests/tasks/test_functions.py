from __future__ import annotations

from pathlib import Path

import pytest

from respec.errors import ConfigError
from respec.tasks.functions import resolve_function


@pytest.fixture
def modules(here: Path) -> Path:
    (here / "prizes.py").write_text("import helpers_of_prizes\nLIMIT = 3\ndef brevity():\n    return 'short'\n")
    (here / "helpers_of_prizes.py").write_text(
        "class Group:\n    @staticmethod\n    def rule():\n        return 'ruled'\n"
    )
    (here / "broken_prizes.py").write_text("raise ValueError('not today')\n")
    (here / "needy_prizes.py").write_text("import a_package_nobody_has\n")
    (here / "box").mkdir()
    (here / "box" / "__init__.py").write_text("")
    (here / "box" / "inner.py").write_text("def f():\n    return 1\n")
    return here


def test_functions_of_the_working_directory(modules: Path):
    assert resolve_function("prizes:brevity", "key")() == "short"
    assert resolve_function("helpers_of_prizes:Group.rule", "key")() == "ruled"
    assert resolve_function("box.inner:f", "key")() == 1


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("prizes", "not of the form 'module:function'"),
        (":f", "not of the form"),
        ("prizes:", "not of the form"),
        ("prize:brevity", "there is no module 'prize' in .*did you mean .*'prizes'"),
        ("zzzz:brevity", "there is no module 'zzzz' in .*PYTHONPATH"),
        ("box.iner:f", "there is no module 'box.iner'.*did you mean 'inner'"),
        ("prizes:brevty", "module 'prizes' has no 'brevty'; did you mean 'brevity'"),
        ("prizes:zzzz", "has no 'zzzz'; it defines 'brevity'"),
        ("prizes:LIMIT", "'LIMIT' is a int, not a function"),
        ("broken_prizes:f", "importing 'broken_prizes' raised ValueError: not today"),
        ("needy_prizes:f", "'needy_prizes' was found, but it imports 'a_package_nobody_has', which is not installed"),
    ],
)
def test_errors_name_the_key_and_what_is_near(modules: Path, spec: str, message: str):
    with pytest.raises(ConfigError, match="task.solution = '" + spec + "'.*" + message):
        resolve_function(spec, "task.solution")
