"""The ways to draft that are measured side by side, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from respec.bench.speculation import Variant
from respec.config import SpeculationConfig
from respec.errors import ConfigError
from respec.rollout.draft.protocol import Drafter
from respec.rollout.planner import Planner
from respec.types import PLAIN, Load, Plan, RoundRecord

HISTORY = "+history"
REJECTION = "+rejection"
DEPTHS = "+depths"
WHOLE = "+whole"
FORM = (
    f"auto, drafter, drafter:s or drafter:s:t:n; then @b for 'only while at most b are active', {HISTORY}, {REJECTION}, {DEPTHS} (requests "
    f"to depths of their own), {WHOLE} (drafts never cut)"
)


@dataclass(frozen=True)
class OnOff:
    """One plan while at most `most` sequences are active, plain decoding above: what most engines offer."""

    on: Plan
    most: int
    predicted: float = 0.0

    def plan(self, load: Load) -> Plan:
        return self.on if load.active <= self.most else PLAIN

    def observe(self, record: RoundRecord) -> None:
        """Nothing: it has decided."""


def variants_by_name(
    names: Sequence[str],
    base: SpeculationConfig,
    controller: Callable[[SpeculationConfig], Planner],
    drafters: Callable[[SpeculationConfig], Sequence[Drafter]],
) -> list[Variant]:
    """One variant a name; `controller` makes the planner of `auto`, which lives on over all repeats, as it does in a run.

    Raises ConfigError for a name that is none.
    """
    return [_variant(name, base, controller, drafters) for name in names]


def _variant(
    name: str,
    base: SpeculationConfig,
    controller: Callable[[SpeculationConfig], Planner],
    drafters: Callable[[SpeculationConfig], Sequence[Drafter]],
) -> Variant:
    word, *options = name.split("+")
    word, _, most = word.partition("@")
    drafter, *numbers = word.split(":")
    try:
        s, t, n = (int(numbers[0]) if numbers else base.s, *(map(int, numbers[1:]) if len(numbers) > 1 else (1, 0)))
        mode = "rejection" if REJECTION[1:] in options else base.mode
        own = base.per_request_depth or DEPTHS[1:] in options
        change = {"drafter": drafter, "s": s, "t": t, "n": n, "mode": mode, "per_request_depth": own}
        change["cut"] = base.cut and WHOLE[1:] not in options
        config = SpeculationConfig.model_validate(base.model_dump() | change)
        limit = int(most) if most else None
        if set(options) - {HISTORY[1:], REJECTION[1:], DEPTHS[1:], WHOLE[1:]}:
            raise ValueError(options)
    except ValueError as error:
        reason = str(error).splitlines()[2].strip() if "validation error" in str(error) else ""
        raise ConfigError(f"'{name}' cannot be measured: {reason or 'it is no variant'}; write {FORM}") from error
    if config.mode == "lossy":
        raise ConfigError(
            f"'{name}' cannot be measured in mode lossy: it follows answers of its own earlier epochs; set speculation.mode to matching or "
            "rejection, or compare in a run, by run.compare_plain_every"
        )
    if drafter == "auto":
        living = controller(config)
        plan: Callable[[], Plan | Planner] = lambda: living  # noqa: E731
    elif limit is not None:
        plan = lambda: OnOff(config.plan(), limit)  # noqa: E731
    else:
        plan = config.plan
    return Variant(name, lambda: drafters(config), plan, HISTORY[1:] in options, config.mode, drafter == "auto")
