"""A paced controller thinks for a small share of the time, never misses a change of load, and keeps its plan in between."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from respec.speculation.acceptance import Acceptance
from respec.speculation.controller import Controller
from respec.speculation.cost_model import CostSample, fit
from respec.speculation.pace import PacedController
from respec.types import Load, Plan, RoundRecord, Version

LOOK_S = 100e-6


class Clock:
    """Every reading is `LOOK_S` later than the one before: what a call of the controller takes."""

    now = 0.0

    def __call__(self) -> float:
        self.now += LOOK_S
        return self.now


def paced(share: float) -> PacedController:
    cost = fit([CostSample(b, b * k, 64.0, verify_s=1e-3 + 1e-5 * b * k) for b in (1, 4, 8) for k in (1, 2, 4, 8)])
    plans = [Plan("suffix", s, 1, s) for s in (1, 2, 4)]
    return PacedController(Controller(plans, cost, Acceptance(depth=4), largest=8), share, grace_s=0.0, clock=Clock())


def played(controller: PacedController, loads: list[Load]) -> list[bool]:
    """Which rounds were looked at."""
    looked = []
    for load in loads:
        plan = controller.plan(load)
        looked.append(controller._looks)
        deep = tuple(load.active for _ in range(plan.s))
        controller.observe(
            RoundRecord(
                load.active, load.waiting, plan, load.active * plan.n, 0, load.active, 0.0, 1e-3, 0.0, load.context,
                deep, deep[:1], tuple(0 for _ in deep[:1]),
            )
        )  # fmt: skip
    return looked


def test_thinking_keeps_to_its_share():
    load = Load(8, 0, 64.0, (100,) * 8)
    looked = played(paced(share=0.01), [load] * 5000)
    # two calls of LOOK_S a look, a hundredth of rounds of a millisecond: one look in twenty rounds, probes apart
    assert 0.03 <= np.mean(looked) <= 0.08
    assert np.mean(played(paced(share=1.0), [load] * 500)) == 1.0


def test_a_change_of_load_or_version_is_always_looked_at():
    load = Load(8, 0, 64.0, (100,) * 8)
    loads = [load] * 50 + [replace(load, active=7, remaining_B=(100,) * 7)] + [replace(load, version=Version(1))]
    looked = played(paced(share=0.0), loads)
    assert looked[0] and looked[50] and looked[51]
    assert np.mean(looked[5:50]) < 0.2


def test_news_is_looked_at_at_once():
    load, controller = Load(8, 0, 64.0, (100,) * 8), paced(share=0.0)
    assert not any(played(controller, [load] * 100)[50:])
    controller.told()
    assert played(controller, [load] * 3) == [True, False, False]


@dataclass(frozen=True)
class Guessed:
    """What `count` guesses of an idle drafter to depth 4 came to."""

    count: float
    accept: float

    @property
    def asked_D(self) -> list[float]:
        return [self.count] * 4

    drafted_D = asked_D

    @property
    def accepted_D(self) -> list[float]:
        return [self.count * self.accept**d for d in range(1, 5)]

    @property
    def tested_D(self) -> list[float]:
        return [self.count * self.accept**d for d in range(4)]

    parents_D = tested_D


def test_an_idle_drafter_is_turned_on_where_its_guesses_come_true():
    """400 guesses say that it is of no use, and it stays off; 60 of a tail that repeats itself say that it is, and it is chosen without a
    probe."""
    controller, load = paced(1.0), Load(4, 0, 64.0, (100,) * 4)
    for _ in range(50):
        controller.shadow("suffix", Guessed(8.0, 0.05))
    assert not controller.controller.predict(load)[0].plan.n
    for _ in range(6):
        controller.shadow("suffix", Guessed(10.0, 0.6))
    assert controller.controller.predict(load)[0].plan.drafter == "suffix"


def test_guesses_of_late_count_more_than_those_before():
    """A drift too slow to be a surprise: after 100 guesses of a drafter in use, most of the belief would still be the old."""
    controller = paced(1.0)
    for _ in range(50):
        controller.shadow("suffix", Guessed(8.0, 0.3))
    for _ in range(25):
        controller.shadow("suffix", Guessed(4.0, 0.45))
    assert 0.385 < controller.controller.acceptance.accept("suffix")[0] < 0.45
