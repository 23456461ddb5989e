"""Finding the user's own functions, given as `module:function`. Imports nothing heavy: the reward worker uses it too."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

from respec.errors import ConfigError


def resolve_function(spec: str, key: str) -> Callable[..., Any]:
    """The callable that `module:function` names; `key` is the configuration key to speak of in errors.

    The working directory comes first on the import path, as it does for a script started there, and stays there: a
    function may import its neighbours when it is called. `function` may be dotted (`Class.method`).

    Raises ConfigError, naming close matches, if the spec is malformed, the module cannot be found or raises while it is
    imported, or has no such callable.
    """
    module_name, separator, path = spec.partition(":")
    if not separator or not module_name or not path:
        raise ConfigError(f"{key} = '{spec}' is not of the form 'module:function', for example 'rewards:brevity'")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    importlib.invalidate_caches()
    target: Any = _import(module_name, spec, key)
    for name in path.split("."):
        if not hasattr(target, name):
            near = difflib.get_close_matches(name, [n for n in dir(target) if not n.startswith("__")], n=3, cutoff=0.5)
            hint = f"did you mean {_quoted(near)}?" if near else "it defines " + (_quoted(_public(target)) or "nothing")
            raise ConfigError(f"{key} = '{spec}': module '{module_name}' has no '{name}'; {hint}")
        target = getattr(target, name)
    if not callable(target):
        raise ConfigError(f"{key} = '{spec}': '{path}' is a {type(target).__name__}, not a function")
    return target


def _import(name: str, spec: str, key: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        if name != missing and not name.startswith(missing + "."):
            raise ConfigError(
                f"{key} = '{spec}': module '{name}' was found, but it imports '{missing}', which is not installed"
            ) from error
        near = difflib.get_close_matches(missing.rpartition(".")[2], _neighbours(missing), n=3, cutoff=0.5)
        hint = f"did you mean {_quoted(near)}?" if near else "put it there or on PYTHONPATH"
        raise ConfigError(
            f"{key} = '{spec}': there is no module '{missing}' in '{os.getcwd()}' or on the import path; {hint}"
        ) from error
    except Exception as error:
        raise ConfigError(f"{key} = '{spec}': importing '{name}' raised {type(error).__name__}: {error}") from error


def _neighbours(missing: str) -> list[str]:
    """Modules beside the missing one: of its package, else of the working directory."""
    parent = missing.rpartition(".")[0]
    if not parent:
        return [module.name for module in pkgutil.iter_modules([os.getcwd()])]
    found = importlib.util.find_spec(parent)
    return [module.name for module in pkgutil.iter_modules((found and found.submodule_search_locations) or [])]


def _public(target: Any) -> list[str]:
    return [name for name in dir(target) if not name.startswith("_") and callable(getattr(target, name))][:8]


def _quoted(names: list[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
