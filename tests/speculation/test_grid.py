"""The paper's own grid, unknown to the controller, which sees only the noisy rate of what it runs.

Stated burn-in: 1,500 rounds in which up to 30 % of time may go to probes. The 5,000 rounds after it count: goodput of the plan
that was run over that of the best plan at that batch size, probes (at most 1 % of time) included.
"""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from simulator import CONTEXT, falling, peaks, replay

from respec.speculation.acceptance import Acceptance
from respec.speculation.controller import Controller
from respec.speculation.cost_model import CostModel
from respec.speculation.settings import Settings
from respec.types import PLAIN, Plan, RoundRecord

GRID = Path(__file__).parents[1] / "data" / "respec_fig7.csv"
BURN_IN, ROUNDS, NOISE = 1500, 5000, 0.05
# That all plans take a second whatever the load, and nothing about drafts.
IGNORANT = CostModel((), (1.0, 0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0))
SETTINGS = Settings(burn_in=BURN_IN, burn_in_share=0.3, spread=0.3)


class Grid:
    """Speedups over plain decoding by plan and batch, between batches by the logarithm; plain decoding takes a second a round."""

    def __init__(self, seed: int) -> None:
        lines = [line for line in GRID.read_text().splitlines() if not line.startswith("#")]
        self._speedup: dict[Plan, dict[int, float]] = {}
        for row in csv.DictReader(lines):
            plan = Plan("eagle", int(row["s"]), int(row["t"]), int(row["n"]))
            self._speedup.setdefault(plan, {})[int(row["batch"])] = float(row["speedup"])
        self.plans = (PLAIN, *self._speedup)
        self._rng = np.random.default_rng(seed)

    def rate(self, active: int, plan: Plan, round: int) -> float:
        if not plan.n:
            return float(active)
        by_batch = self._speedup[plan]
        return active * float(np.interp(np.log2(active), np.log2(list(by_batch)), list(by_batch.values())))

    def run(self, active: int, plan: Plan, round: int) -> RoundRecord:
        rate = self.rate(active, plan, round) * (1 + NOISE * self._rng.standard_normal())
        return RoundRecord(active, 0, plan, 0, 0, active, 0.0, active / rate, 0.0, CONTEXT)


def test_the_grid_is_whole():
    world = Grid(0)
    assert len(world.plans) == 10
    assert world.rate(2, Plan("eagle", 5, 8, 32), 0) == pytest.approx(2 * 1.464)
    assert world.rate(64, Plan("eagle", 5, 8, 32), 0) == pytest.approx(64 * 0.448)


@pytest.mark.parametrize("trace", [falling, peaks])
@pytest.mark.parametrize("seed", [0, 1])
def test_98_percent_of_the_oracle_after_burn_in(trace, seed: int):
    world = Grid(seed)
    active = trace(BURN_IN + ROUNDS, 64, 13)
    controller = Controller(world.plans, IGNORANT, Acceptance(8), settings=SETTINGS)
    found = replay(controller, world, active)
    late = slice(BURN_IN, None)
    got = sum(world.rate(b, p, 0) for b, p in zip(active[late], found.plans_R[late], strict=True))
    best = sum(max(world.rate(b, p, 0) for p in world.plans) for b in active[late])
    assert got / best >= 0.98
    assert found.share_R[late].mean() >= 0.98  # every round alike, whatever its batch
    assert found.switches <= len(active) / 50
