"""How much time probes may take, and where."""

from __future__ import annotations

import json

from respec.speculation.probing import Purses


def test_what_small_batches_saved_up_is_not_spent_in_large_ones():
    purses = Purses(0.01)
    purses.of(1).elapsed_s = 1000.0
    assert purses.of(1).allows(5.0) and not purses.of(64).allows(5.0)
    purses.of(64).elapsed_s = 1000.0
    assert purses.of(64).allows(5.0) and purses.of(100) is purses.of(64), "one octave, one purse"


def test_purses_outlive_a_run():
    purses = Purses(0.02)
    purses.of(5).elapsed_s, purses.of(5).spent_s = 3.0, 0.5
    assert Purses.restored(json.loads(json.dumps(purses.state()))) == purses
