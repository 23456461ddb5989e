"""The ways to draft that are measured side by side, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from respec.bench.speculation import Variant
from respec.config import SpeculationConfig
from respec.errors import ConfigError
from respec.rollout.draft import make_drafters
from respec.types import Plan

WITH_HISTORY = "+history"


def variants_by_name(names: Sequence[str], base: SpeculationConfig) -> list[Variant]:
    """`drafter[:s[:t:n]][+history]` each, for example `suffix`, `suffix:8`, `suffix:6:3:16+history`.

    Raises ConfigError for a name that is none.
    """
    return [_variant(name, base) for name in names]


def _variant(name: str, base: SpeculationConfig) -> Variant:
    drafter, *numbers = name.removesuffix(WITH_HISTORY).split(":")
    try:
        s, t, n = (int(numbers[0]) if numbers else base.s, *(map(int, numbers[1:]) if len(numbers) > 1 else (1, 0)))
        config = SpeculationConfig.model_validate(base.model_dump() | {"drafter": drafter, "s": s, "t": t, "n": n})
    except ValueError as error:
        raise ConfigError(
            f"'{name}' is no variant; write drafter, drafter:s or drafter:s:t:n, with or without {WITH_HISTORY}"
        ) from error
    plan: Callable[[], Plan] = config.plan
    return Variant(name, lambda: make_drafters(config), plan, name.endswith(WITH_HISTORY), config.mode)
