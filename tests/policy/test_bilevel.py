"""Bi-level GAE against numbers worked out by hand, and against GAE where the two are the same."""

from __future__ import annotations

import numpy as np
import pytest

from respec.policy.bilevel import bi_level_gae

# Three turns of 2, 1 and 3 tokens; what the environment said has values too, which must not matter.
TURN = np.array([0, 0, -1, -1, 1, -1, 2, 2, 2])
VALUE = np.array([0.5, 0.4, 9.0, 9.0, 0.2, 9.0, -0.1, 0.3, 0.6])
REWARD = np.array([1.0, -0.5, 2.0])


def test_golden_numbers():
    """turn_gamma 0.9, turn_lam 0.5, gamma 0.8, lam 0.25; V = 0.4, 0.2, 0.6 before the turns' last tokens.

    Turns: A_2 = 2 - 0.6 = 1.4; A_1 = -0.5 + 0.9 * 0.6 - 0.2 + 0.45 * 1.4 = 0.47; A_0 = 1 + 0.9 * 0.2 - 0.4 + 0.45 * 0.47 = 0.9915.
    Tokens: turn 0: 0.8 * 0.4 - 0.5 + 0.2 * 0.9915 = 0.0183; turn 2: 0.8 * 0.6 - 0.3 + 0.2 * 1.4 = 0.46, then
    0.8 * 0.3 + 0.1 + 0.2 * 0.46 = 0.432.
    """
    found = bi_level_gae(REWARD, VALUE, TURN, 0.9, 0.5, 0.8, 0.25)
    np.testing.assert_allclose(found, [0.0183, 0.9915, 0, 0, 0.47, 0, 0.432, 0.46, 1.4], atol=1e-12)


def test_a_truncated_episode_counts_what_comes_after():
    """A_2 = 2 + 0.9 * 3 - 0.6 = 4.1."""
    assert bi_level_gae(REWARD, VALUE, TURN, 0.9, 0.5, 0.8, 0.25, after=3.0)[-1] == pytest.approx(4.1, abs=1e-12)


def test_turns_of_one_token_are_plain_gae_over_turns():
    rng = np.random.default_rng(0)
    reward, value = rng.normal(size=6), rng.normal(size=6)
    found = bi_level_gae(reward, value, np.arange(6), 0.95, 0.7, 0.1, 0.2)
    delta = reward + 0.95 * np.append(value[1:], 0) - value
    wanted = [sum((0.95 * 0.7) ** (j - i) * delta[j] for j in range(i, 6)) for i in range(6)]
    np.testing.assert_allclose(found, wanted, atol=1e-12)


def test_without_discounts_every_token_has_the_return_to_come_less_its_value():
    found = bi_level_gae(REWARD, VALUE, TURN, 1.0, 1.0, 1.0, 1.0)
    to_come = np.array([2.5, 2.5, 0, 0, 1.5, 0, 2, 2, 2])
    drawn = TURN >= 0
    np.testing.assert_allclose(found[drawn], (to_come - VALUE)[drawn], atol=1e-12)
    assert (found[~drawn] == 0).all()
