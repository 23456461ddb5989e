"""Filters: which groups stay, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from respec.policy.filters import FILTERS

# Deviations: 0, 1/2, 0 (of numbers whose mean is not exact), sqrt(3)/4, 1/2.
GROUPS = [np.array(rewards) for rewards in ([1, 1, 1, 1], [0, 1, 1, 0], [0.1] * 3, [0, 0, 0, 1], [1, 1, 0, 0])]


def test_golden_choices() -> None:
    assert FILTERS["none"].keep(GROUPS, 0.1).tolist() == [True] * 5
    assert FILTERS["spread"].keep(GROUPS, 0.1).tolist() == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("share", "kept"), [(0.1, [1]), (0.2, [1]), (0.21, [1, 4]), (0.6, [1, 3, 4]), (0.8, [0, 1, 3, 4])]
)
def test_the_share_of_most_spread_is_rounded_up_and_takes_the_earlier_of_equals(share: float, kept: list[int]) -> None:
    assert np.flatnonzero(FILTERS["top_spread"].keep(GROUPS, share)).tolist() == kept


def test_seven_per_cent_of_a_hundred_are_seven() -> None:
    assert 0.07 * 100 > 7
    assert FILTERS["top_spread"].keep(GROUPS * 20, 0.07).sum() == 7


def test_only_a_filter_whose_groups_can_be_had_by_drawing_more_draws_more() -> None:
    assert {name for name, entry in FILTERS.items() if entry.redraws} == {"spread"}
