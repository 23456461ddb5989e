"""Reads a configuration from TOML and `--set a.b=value`; unknown keys are errors that name the nearest known one."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError

from respec.config.sections import Config
from respec.errors import ConfigError

Section = TypeVar("Section", bound=BaseModel)


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> Config:
    """Reads a TOML file and applies `a.b=value` overrides (values in TOML syntax; a bare word is a string).

    Raises ConfigError for a missing file, bad TOML, an unknown key (naming the nearest known one) or a value out of range.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file at '{path}'; see examples/ for ones to start from") from None
    except (IsADirectoryError, PermissionError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' cannot be read as a configuration: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"'{path}' is not valid TOML: {error}") from None
    for override in overrides:
        _apply(tree, override)
    return parse_config(tree, str(path))


def parse_config(tree: dict[str, Any], origin: str = "the configuration") -> Config:
    """Validates a tree of plain values. Raises ConfigError."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        lines = [_explain(item) for item in error.errors()]
        raise ConfigError(f"in {origin}:\n" + "\n".join(f"  {line}" for line in lines)) from None


def parse_section(kind: type[Section], tree: Section | Mapping[str, Any], name: str) -> Section:
    """One section alone, from a tree of plain values; one that is made already is handed back. Raises ConfigError."""
    if isinstance(tree, kind):
        return tree
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        lines = [_explain({**item, "loc": (name, *item["loc"])}) for item in error.errors()]
        raise ConfigError("\n".join(lines)) from None


def _apply(tree: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    parts = key.strip().split(".")
    if not separator or not all(parts):
        raise ConfigError(f"--set takes section.key=value, for example policy.lr=1e-5; got '{override}'")
    try:
        value = tomllib.loads(f"value = {text.strip()}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    node: Any = tree
    for part in parts[:-1]:
        node = node.setdefault(part, {})
        if not isinstance(node, dict):
            raise ConfigError(f"--set {key}: '{part}' is a value, not a section")
    node[parts[-1]] = value


def _explain(item: Any) -> str:
    location = [str(part) for part in item["loc"] if not str(part).startswith("function-")]
    where = ".".join(location)
    if item["type"] == "extra_forbidden":
        known = _keys_at(location[:-1])
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else "known here: " + ", ".join(sorted(known))
        return f"{where}: there is no such key; {hint}"
    if item["type"] == "missing":
        return f"{where}: is missing and has no default"
    got = f" (got {item['input']!r})" if not isinstance(item["input"], dict) else ""
    return f"{where or 'the configuration'}: {item['msg'].removeprefix('Value error, ')}{got}"


def _keys_at(location: list[str]) -> list[str]:
    model: type[BaseModel] = Config
    for part in location:
        if part.isdigit():
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)
