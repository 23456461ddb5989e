"""A machine that becomes slow or quick as a whole is followed at once; a hiccup, or one plan's own cost, is not mistaken for that."""

from __future__ import annotations

import pytest

from respec.speculation.acceptance import Acceptance
from respec.speculation.controller import Controller
from respec.speculation.cost_model import CostSample, fit
from respec.speculation.machine import MachineSpeed
from respec.types import Load, RoundRecord


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


@pytest.mark.parametrize("times", [0.05, 20.0])
def test_a_controllers_prediction_follows_a_machine_that_is_not_as_it_was_profiled(times):
    cost = fit([CostSample(b, b, 64.0, verify_s=1e-3 + 1e-5 * b) for b in (1, 2, 4, 8)])
    controller = Controller((), cost, Acceptance(depth=4), largest=8)
    load = Load(8, 0, 64.0, (100,) * 8)
    for _ in range(20):
        plan = controller.plan(load)
        controller.observe(RoundRecord(8, 0, plan, 0, 0, 8, 0.0, times * 1.08e-3, 0.0, 64.0))
    controller.plan(load)
    assert controller.predicted == pytest.approx(8 / (times * 1.08e-3), rel=0.2)
