"""Names of ways to draft: what they ask of the configuration, and what is no name."""

from __future__ import annotations

import pytest

from respec.bench.variants import OnOff, variants_by_name
from respec.config import SpeculationConfig
from respec.errors import ConfigError
from respec.rollout.planner import StaticPlanner
from respec.types import PLAIN, Load, Plan


def made(*names: str, asked: list[SpeculationConfig] | None = None):
    """The variants, and into `asked` what controllers were made for."""
    kept = [] if asked is None else asked

    def controller(config: SpeculationConfig) -> StaticPlanner:
        kept.append(config)
        return StaticPlanner(PLAIN)

    return variants_by_name(names, SpeculationConfig(), controller, lambda _: ())


def test_a_plan_may_be_named_and_turned_on_below_a_batch_size():
    chain, tree, below = made("suffix:4", "suffix:6:3:16", "ngram:3@2")
    assert (chain.planner(), tree.planner()) == (Plan("suffix", 4, 1, 4), Plan("suffix", 6, 3, 16))
    planner = below.planner()
    assert isinstance(planner, OnOff)
    assert planner.plan(Load(2, 0, 9.0, ())) == Plan("ngram", 3, 1, 3) and planner.plan(Load(3, 0, 9.0, ())) == PLAIN


def test_options_reach_the_configuration():
    asked: list[SpeculationConfig] = []
    first, second, third, _ = made("auto", "auto+depths", "auto+rejection+history", "auto+whole", asked=asked)
    assert [config.per_request_depth for config in asked] == [False, True, False, False]
    assert [config.cut for config in asked] == [True, True, True, False]
    assert (first.mode, third.mode) == ("matching", "rejection") and third.history and not second.history
    # one controller lives on over all repeats
    assert second.planner() is second.planner()


@pytest.mark.parametrize("name", ["oracle", "suffix:x", "auto+speed", "suffix@many"])
def test_what_is_no_way_is_refused_with_the_form(name: str):
    with pytest.raises(ConfigError, match=r"drafter:s:t:n"):
        made(name)
