"""What mkdocs asks for while it builds the site: the order of its pages, and the pages that are written from the code.

Settings come from the pydantic models and commands from the command line itself, so neither can say what the code does not.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from respec.cli import app
from respec.config import Config

# A page that is not there yet is left out; one that is in no section comes last, under "More".
SECTIONS: dict[str, tuple[str, ...]] = {
    "Start": ("index.md", "start.md", "your_own.md", "report.md", "recipes.md", "compare.md"),
    "Speculation": ("speculation.md", "drafters.md", "does_it_spoil_my_run.md"),
    "Training": ("algorithms.md", "ppo.md", "dapo.md", "terms.md", "adapters.md", "mismatch.md", "agents.md", "data.md"),
    "With other tools": ("trl.md", "vllm.md", "library.md", "serve.md", "tracking.md", "dash.md"),
    "Results": (
        "results.md", "speculation_smollm2.md", "auto_smollm2.md", "long_tail_smollm2.md", "online_learner.md", "sentinel_faults.md",
        "reward_curves.md", "five_runs.md", "peers.md",
    ),
    "Reference": ("settings.md", "commands.md", "metrics.md", "api.md"),
}  # fmt: skip
WRITTEN = {"settings.md": lambda: settings_page(), "commands.md": lambda: commands_page()}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Orders the pages that there are."""
    pages = {path.name for path in Path(config.docs_dir).glob("*.md")} | WRITTEN.keys()
    placed = {name: [page for page in named if page in pages] for name, named in SECTIONS.items()}
    rest = sorted(pages.difference(*SECTIONS.values()))
    config.nav = [{name: list(found)} for name, found in [*placed.items(), ("More", rest)] if found]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are written from the code."""
    for name, write in WRITTEN.items():
        files.append(File.generated(config, name, content=write()))
    return files


def settings_page() -> str:
    """Every key of a run's TOML file: what it takes, its default, and what it means."""
    parts = [
        "# Settings",
        "Every key of a run's TOML file, read off the models that check it. An unknown key is an error that names the nearest known one. Any key "
        "can be set for one run: `respec train run.toml --set policy.lr=2e-5`. A run folder holds the resolved file, `config.toml`.",
    ]
    for name, field in Config.model_fields.items():
        parts += section(name, _model_in(field.annotation), f"[{name}]")
    return "\n\n".join(parts) + "\n"


def section(name: str, model: type[BaseModel] | None, heading: str, level: int = 2) -> list[str]:
    """A heading, the model's docstring and a table of its keys; sections within it follow."""
    assert model is not None, f"{name} is not a section"
    rows, inner = ["| key | takes | default | |", "|---|---|---|---|"], []
    for key, field in model.model_fields.items():
        nested = _model_in(field.annotation)
        if nested is model:
            rows.append(
                f"| `[[{name}.{key}]]` | tables | none | as many sections as you like, each with the keys of this one |"
            )
        elif nested is not None:
            listed = get_origin(field.annotation) is tuple
            inner += section(f"{name}.{key}", nested, f"[[{name}.{key}]]" if listed else f"[{name}.{key}]", level + 1)
        else:
            cells = (f"`{key}`", takes(field), default(field), _text(field.description or ""))
            rows.append("| " + " | ".join(cells) + " |")
    title = f"{'#' * level} `{heading}` {{ #{name.replace('.', '-')} }}"
    return [title, " ".join((model.__doc__ or "").split()), "\n".join(rows), *inner]


def takes(field: FieldInfo) -> str:
    """What a key may be, in words: its type, or its words, and its bounds."""
    return _text(", ".join([_kind(field.annotation), *_bounds(field.metadata)]))


def default(field: FieldInfo) -> str:
    """A key's default in TOML's writing; 'required' without one, 'unset' for None."""
    value: Any = field.default_factory() if field.default_factory else field.default  # type: ignore[call-arg]
    if value is PydanticUndefined:
        return "required"
    return "unset" if value is None else f"`{_toml(value)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, Path)):
        return f'"{value}"'.replace("\n", "\\n")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value)


def _kind(annotation: Any) -> str:
    origin, inside = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " ".join(f"`{value}`" for value in inside)
    if origin in (Union, types.UnionType):
        return ", ".join(_kind(part) for part in inside if part is not type(None))
    if origin is tuple:
        whole = f"list of {_kind(inside[0])}s" if inside[-1] is Ellipsis else f"{len(inside)} {_kind(inside[0])}s"
        return "list of: " + _kind(inside[0]) if get_origin(inside[0]) is Literal else whole
    if origin is dict:
        return "table"
    words = {str: "text", Path: "path", bool: "true or false", int: "integer", float: "number", dict: "table"}
    return words.get(annotation, str(getattr(annotation, "__name__", annotation)))


def _bounds(metadata: list[Any]) -> list[str]:
    signs = {
        annotated_types.Ge: ("≥", "ge"), annotated_types.Gt: (">", "gt"), annotated_types.Le: ("≤", "le"), annotated_types.Lt: ("<", "lt"),
    }  # fmt: skip
    return [
        f"{sign} {getattr(item, name):g}"
        for item in metadata
        for kind, (sign, name) in signs.items()
        if isinstance(item, kind)
    ]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The section that an annotation holds, alone, as an option, or as a list."""
    found = [annotation, *get_args(annotation)]
    return next((part for part in found if isinstance(part, type) and issubclass(part, BaseModel)), None)


def _text(text: str) -> str:
    """Words that a cell of a table can hold."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def commands_page() -> str:
    """Every command with its help, as `--help` says it."""
    parts = [
        "# Commands",
        "What `respec COMMAND --help` says. A mistake of the user's is one paragraph that says what to do, and exit code 2.",
    ]
    for words, command in commands(typer.main.get_command(app), ("respec",)):
        parts += [f"## {' '.join(words)}", *_help(command.help or "", words), _options(words, command)]
    return "\n\n".join(part for part in parts if part) + "\n"


def commands(command: Any, words: tuple[str, ...]) -> list[tuple[tuple[str, ...], Any]]:
    """Every command below a group, with the words that call it."""
    if not hasattr(command, "commands"):
        return [(words, command)]
    return [found for name, inner in command.commands.items() for found in commands(inner, (*words, name))]


def _help(text: str, words: tuple[str, ...]) -> list[str]:
    """A command's own words, with its examples as code."""
    lines = [line.strip() for line in text.splitlines()]
    told = "\n".join(line for line in lines if not line.startswith("Example:")).strip()
    shown = "\n".join(line.removeprefix("Example:").strip() for line in lines if line.startswith("Example:"))
    return [told.replace("<", "&lt;"), f"```console\n{shown}\n```" if shown else ""]


def _options(words: tuple[str, ...], command: Any) -> str:
    rows = ["| | | default |", "|---|---|---|"]
    for item in command.params:
        if item.name == "help":
            continue
        names = (
            ", ".join(f"`{name}`" for name in item.opts)
            if item.param_type_name == "option"
            else f"`{item.name.upper()}`"
        )
        value = item.default
        plain = value in (None, "", [], (), False) or callable(value) or "Sentinel" in type(value).__name__
        shown = "required" if item.required else "" if plain else f"`{value}`"
        rows.append(f"| {names} | {_text(getattr(item, 'help', None) or '')} | {_text(shown)} |")
    return "\n".join(rows) if len(rows) > 2 else ""
