"""A controller that is stopped and made anew goes on with what it knew; what does not fit is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from simulator import CONTEXT, Machine, peaks, replay

from respec.speculation.acceptance import Acceptance
from respec.speculation.controller import Controller
from respec.speculation.cost_model import CostModel, fit
from respec.speculation.memory import FILE, keep, recall
from respec.speculation.settings import Settings
from respec.types import Load

ACCEPT = {"a": lambda round: 0.8, "b": lambda round: 0.2}
LOADS = [Load(batch, 0, CONTEXT, ()) for batch in (1, 8, 40)]
SETTINGS = Settings(burn_in=100)


def made(cost: CostModel, depths: tuple[int, ...] = (1, 2, 4, 7)) -> Controller:
    return Controller(Machine(ACCEPT, 0, depths).plans, cost, Acceptance(8), settings=SETTINGS)


@pytest.fixture(scope="module")
def cost() -> CostModel:
    """Wrong, and of a machine that was ten times as quick, so that there is something to learn."""
    samples = Machine(ACCEPT, 0, draft_s=5e-4).profile()
    return fit([replace(x, verify_s=x.verify_s / (8 if x.drafter == "a" else 10)) for x in samples])


@pytest.fixture
def taught(cost: CostModel) -> Controller:
    subject = made(cost)
    replay(subject, Machine(ACCEPT, 0), peaks(300))
    return subject


def promises(controller: Controller) -> list[list[float]]:
    return [
        [c.goodput for c in sorted(controller.predict(load), key=lambda c: (c.plan.drafter, c.plan.s))]
        for load in LOADS
    ]


def test_what_was_learned_outlives_the_controller(cost: CostModel, taught: Controller, tmp_path: Path):
    keep(taught, tmp_path)
    again = made(cost)
    assert recall(again, tmp_path)
    np.testing.assert_array_equal(promises(again), promises(taught))
    assert np.abs(np.array(promises(made(cost))) / promises(taught) - 1).max() > 0.5
    (state, arrays), (kept, kept_arrays) = again.state(), taught.state()
    assert state == kept and all(np.array_equal(arrays[name], kept_arrays[name]) for name in kept_arrays)
    # both go on alike, neither curious all over again
    trace = peaks(300)
    goes_on, anew = (replay(subject, Machine(ACCEPT, 5), trace) for subject in (again, made(cost)))
    assert goes_on.regret == pytest.approx(replay(taught, Machine(ACCEPT, 5), trace).regret, abs=0.02)
    assert anew.probe_share > 4 * goes_on.probe_share


def test_a_barred_drafter_stays_barred(cost: CostModel, tmp_path: Path):
    first = made(cost)
    for _ in range(40):
        first.guard.observe("a", 2.0, 1.0, False)
    assert first.guard.bars("a")
    keep(first, tmp_path)
    again = made(cost)
    recall(again, tmp_path)
    assert again.guard.bars("a") and not again.guard.bars("b")


def test_costs_that_were_profiled_anew_keep_no_corrections(cost: CostModel, taught: Controller, tmp_path: Path):
    keep(taught, tmp_path)
    other = made(replace(cost, overhead=(0.1, 0.0, 0.0)))
    assert recall(other, tmp_path)
    assert other.acceptance.to_dict() == taught.acceptance.to_dict()
    fresh = made(replace(cost, overhead=(0.1, 0.0, 0.0)))
    np.testing.assert_array_equal(other.state()[1]["mean"], fresh.state()[1]["mean"])


def test_nothing_is_taken_from_other_plans_or_a_damaged_file(cost: CostModel, taught: Controller, tmp_path: Path):
    fresh = made(cost).state()[0]
    subject = made(cost)
    assert not recall(subject, tmp_path)
    keep(taught, tmp_path)
    assert not recall(made(cost, (1, 2)), tmp_path)
    for damage in (b"", b"nonsense", (tmp_path / FILE).read_bytes()[:400]):
        (tmp_path / FILE).write_bytes(damage)
        assert not recall(subject, tmp_path)
    assert subject.state()[0] == fresh
