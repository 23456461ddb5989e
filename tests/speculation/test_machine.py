"""A machine that becomes slow or quick as a whole is followed at once; a hiccup, or one plan's own cost, is not mistaken for that."""

from __future__ import annotations

import pytest

from respec.speculation.machine import MachineSpeed


@pytest.mark.parametrize("times", [0.1, 8.0, 30.0])
def test_a_shift_of_the_whole_machine_is_followed_within_three_rounds(times):
    speed = MachineSpeed()
    for _ in range(3):
        speed.observe(times * 1e-3, 1e-3)
    assert speed.factor == pytest.approx(times)
    for _ in range(3):
        speed.observe(1e-3, 1e-3)
    assert speed.factor == pytest.approx(1.0)


def test_a_hiccup_changes_nothing():
    speed = MachineSpeed()
    for round_ in range(100):
        speed.observe(20e-3 if round_ % 10 in (0, 1) else 1e-3, 1e-3)
    assert speed.factor == 1.0


def test_what_a_plan_may_be_mistaken_by_is_left_to_its_own_correction():
    speed = MachineSpeed()
    for times in (2.0, 0.4, 3.0, 3.5, 0.3):
        for _ in range(10):
            speed.observe(times * 1e-3, 1e-3)
    assert speed.factor == 1.0
