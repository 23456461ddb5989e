"""Documentation that cannot go stale: what its pages show as settings, Python or commands is read as such, and every key and command is in it."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from respec.cli import app
from respec.config import Config, parse_config
from respec.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
# What a snippet need not repeat: a policy, and something to train on.
BASE = {"model": {"path": "builtin:demo"}, "task": {"dataset": "chain_sum"}}


def fenced(text: str) -> Iterator[tuple[str, str]]:
    """The language and the text of every fenced block."""
    for match in FENCE.finditer(text):
        yield match.group(1), match.group(2)


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` put over `below`, table by table."""
    both = {
        key: merged(below[key], value) if isinstance(value, dict) and isinstance(below.get(key), dict) else value
        for key, value in above.items()
    }
    return below | both


def loaded(snippet: dict[str, Any]) -> Config:
    """A snippet as a configuration: by itself if its task is whole, else with a task to train on."""
    whole = (
        {"model": BASE["model"]}
        if {"preset", "path", "env", "dataset", "mixture"} & snippet.get("task", {}).keys()
        else BASE
    )
    return parse_config(merged(whole, snippet))


def broken_settings(text: str) -> list[str]:
    """The TOML blocks of a page that are no configuration. A block may go on from the one before it."""
    wrong, before = [], {}
    for language, block in fenced(text):
        if language != "toml":
            continue
        try:
            tree = tomllib.loads(block)
            try:
                loaded(tree)
            except ConfigError:
                loaded(merged(before, tree))
            before = tree
        except (tomllib.TOMLDecodeError, ConfigError) as error:
            wrong.append(f"{error}\n{block}")
    return wrong


def broken_python(text: str) -> list[str]:
    """Python blocks that do not compile, or import from respec what it does not have."""
    wrong = []
    for language, block in fenced(text):
        if language != "python":
            continue
        try:
            tree = ast.parse(block)
        except SyntaxError as error:
            wrong.append(f"{error}\n{block}")
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "respec":
                module = importlib.import_module(node.module or "")
                wrong += [f"{node.module} has no {name.name}" for name in node.names if not hasattr(module, name.name)]
            elif isinstance(node, ast.Import):
                for name in node.names:
                    if name.name.split(".")[0] == "respec" and importlib.util.find_spec(name.name) is None:
                        wrong.append(f"there is no module {name.name}")
    return wrong


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of every `respec` command in the blocks of a shell, and those without a language."""
    for language, block in fenced(text):
        if language in ("", "console", "bash", "sh", "shell"):
            for line in block.replace("\\\n", " ").splitlines():
                with contextlib.suppress(ValueError):  # a line of output with an apostrophe is no command
                    words = shlex.split(line.removeprefix("$ "), comments=True)
                    if words[:1] == ["respec"] and len(words) > 1:
                        yield words


def broken_commands(text: str) -> list[str]:
    """Commands that the command line would not take. Nothing is run."""
    wrong = []
    for words in commands_of(text):
        command: Any = typer.main.get_command(app)
        rest, path = words[1:], ["respec"]
        while hasattr(command, "commands") and rest and rest[0] in command.commands:
            command, path, rest = command.commands[rest[0]], [*path, rest[0]], rest[1:]
        if hasattr(command, "commands"):
            if rest not in (["--version"], ["--help"]):
                wrong.append(f"{shlex.join(words)}: there is no such command")
            continue
        try:
            if "--help" not in rest:
                command.make_context(" ".join(path), list(rest))
        except Exception as error:  # click's and typer's own errors share no base that both export
            wrong.append(f"{shlex.join(words)}: {error or type(error).__name__}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_page_shows_is_what_it_says(page: Path):
    text = page.read_text()
    assert not broken_settings(text)
    assert not broken_python(text)
    assert not broken_commands(text)


def test_readmes_settings_and_python_are_valid():
    text = (ROOT / "README.md").read_text()
    assert not broken_settings(text)
    assert not broken_python(text)


def test_stale_snippets_are_seen():
    assert broken_settings("```toml\n[policy]\nlearning_rate = 1e-5\n```\n")
    assert broken_settings("```toml\n[policy\n```\n")
    assert broken_python("```python\nfrom respec.config import load_configuration\n```\n")
    assert broken_python("```python\nimport respec.nothing\n```\n")
    assert broken_python("```python\ndef f(:\n```\n")
    for line in (
        "respec trian x.toml",
        "respec train",
        "respec train x.toml --sett a.b=1",
        "respec bench",
        "respec generate m --prompt a --samples many",
    ):
        assert broken_commands(f"```console\n{line}\n```\n"), line
    assert not broken_commands("```\n$ respec train x.toml --set run.seed=$SEED   # a comment\n```\n")


def test_a_block_may_go_on_from_the_one_before_it():
    first = '```toml\n[[task.mixture]]\nname = "a"\ndataset = "chain_sum"\n```\n'
    second = "```toml\n[[task.stage]]\nfrom_step = 1\nweights = { a = 1.0 }\n```\n"
    assert not broken_settings(first + second)
    assert broken_settings(second)


def from_website(name: str) -> ModuleType:
    """A file of website/, which is no package."""
    spec = importlib.util.spec_from_file_location(f"website_{name}", ROOT / "website" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_key_and_section_is_on_the_page_of_settings():
    page = from_website("hooks").settings_page()
    for name, field in Config.model_fields.items():
        assert f"`[{name}]`" in page
        model: Any = field.annotation
        for key in model.model_fields:
            assert f"`{key}`" in page or f"[{name}.{key}]" in page, f"{name}.{key}"
    for row in (
        "| `lr` | number, > 0 | `1e-05` |",
        "| `drafter` | `auto` `off`",
        "| `path` | text | required |",
        "`[policy.lora]`",
        "`[[task.reward]]`",
    ):
        assert row in page, row


def test_every_command_is_on_the_page_of_commands():
    hooks = from_website("hooks")
    page = hooks.commands_page()
    found = hooks.commands(typer.main.get_command(app), ("respec",))
    assert len(found) > 12
    assert all(f"## {' '.join(words)}\n" in page for words, _ in found)
    assert "| `--fresh` | Delete the run folder first. |" in page


def test_every_page_has_its_place_once(tmp_path: Path):
    hooks = from_website("hooks")
    for name in ("index.md", "ppo.md", "of_tomorrow.md"):
        (tmp_path / name).write_text("# page\n")

    class Built:
        docs_dir = str(tmp_path)
        nav: Any = None

    nav = hooks.on_config(Built()).nav
    assert nav[0] == {"Start": ["index.md"]}
    assert nav[-1] == {"More": ["of_tomorrow.md"]}
    pages = [page for section in nav for named in section.values() for page in named]
    assert sorted(pages) == ["commands.md", "index.md", "of_tomorrow.md", "ppo.md", "settings.md"]


def test_a_site_that_fetches_or_leads_nowhere_is_refused(tmp_path: Path):
    check = from_website("check")
    good = '<h1 id="a">x</h1><a href="#a">1</a><a href="b.html#c">2</a><a href="https://elsewhere.example">3</a><img src="b.html">'
    (tmp_path / "a.html").write_text(good)
    (tmp_path / "b.html").write_text('<p id="c"></p>')
    assert check.faults(tmp_path) == []
    for bad in (
        '<script src="https://cdn.example/x.js"></script>', '<link rel="stylesheet" href="//fonts.example/x.css">', '<img src="https://a.example/x.png">',
        '<a href="gone.html">x</a>', '<a href="b.html#gone">x</a>', '<a href="#gone">x</a>',
    ):  # fmt: skip
        (tmp_path / "a.html").write_text(bad)
        assert len(check.faults(tmp_path)) == 1, bad
    (tmp_path / "a.html").write_text(good)
    (tmp_path / "x.css").write_text('@font-face { src: url("https://fonts.example/x.woff2") }')
    assert len(check.faults(tmp_path)) == 1
    assert check.faults(tmp_path / "empty") != []
