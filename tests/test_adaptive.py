"""The adaptive server as it is put together: its plans, and what it believes before it has seen anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from respec import adaptive
from respec.adaptive import MEASURED, make_controller, plans_for
from respec.config import SpeculationConfig
from respec.drafter.agreement import ACCEPTANCE_FILE, Agreement, write_agreement
from respec.speculation.cost_model import CostSample, fit
from respec.types import Load, Plan

COST = fit(
    [CostSample(b, b * k, 64.0, verify_s=1e-2 + 1e-4 * b * k) for b in (1, 4, 8) for k in (1, 2, 4, 8)]
    + [
        CostSample(b, b * 3, 64.0, name, s, 1e-4 * s, 1e-2)
        for b in (1, 8)
        for s in (2, 8)
        for name in ("suffix", "eagle")
    ]
)
# A profile, and one in which every other round had to wait for another program.
GOOD = [CostSample(b, b * (1 + s), 64.0, verify_s=1e-3 + 1e-5 * b * (1 + s)) for b in (1, 4, 8) for s in (0, 1, 3, 7)]
SPOILT = [replace(sample, verify_s=sample.verify_s * (10 if place % 2 else 1)) for place, sample in enumerate(GOOD)]


def test_plans_go_as_deep_as_the_configuration_and_only_look_up_drafters_branch():
    plans = plans_for(("suffix", "eagle"), 6)
    assert max(plan.s for plan in plans) == 6 and {plan.drafter for plan in plans} == {"suffix", "eagle"}
    assert {plan.drafter for plan in plans if plan.t > 1} == {"suffix"}
    assert all(plan.n == plan.s for plan in plans if plan.t == 1)


def test_a_trained_head_is_tried_before_it_has_been_seen():
    config = SpeculationConfig(candidates=("suffix", "eagle"), drafter_path=Path("head"), s=6)
    controller = make_controller(COST, config, 8)
    assert controller.controller.acceptance.effective("eagle") > 0
    assert controller.controller.acceptance.effective("suffix") == 0
    chosen = controller.plan(Load(1, 0, 64.0, (100,)))
    assert chosen.drafter == "eagle" and chosen != Plan()


def test_drafts_are_cut_where_a_head_says_how_sure_it_is_and_tokens_may_depend_on_it():
    asked = {"candidates": ("suffix", "eagle"), "drafter_path": Path("head"), "s": 6}
    confidence = make_controller(COST, SpeculationConfig.model_validate(asked), 8).controller.confidence
    assert confidence is not None and (confidence.drafters, confidence.beside) == (("eagle",), ("suffix",))
    alone = make_controller(
        COST, SpeculationConfig.model_validate(asked | {"candidates": ("eagle",)}), 8
    ).controller.confidence
    assert alone is not None and alone.beside == ()
    for change in ({"mode": "rejection"}, {"cut": False}, {"candidates": ("suffix",)}):
        assert make_controller(COST, SpeculationConfig.model_validate(asked | change), 8).controller.confidence is None


@pytest.mark.parametrize("again", [GOOD, SPOILT])
def test_a_profile_of_a_busy_machine_is_measured_once_more(
    monkeypatch: pytest.MonkeyPatch, again: list[CostSample]
) -> None:
    asked, said = list[bool](), list[str]()

    def samples(*arguments: Any, fresh: bool = False) -> list[CostSample]:
        asked.append(fresh)
        return again if fresh else SPOILT

    monkeypatch.setattr(adaptive, "samples", samples)
    nothing: Any = None
    adaptive.make_planner(SpeculationConfig(), nothing, nothing, (), 8, 64, said.append)
    assert asked == [False, True] and "measured once more" in said[0]
    assert said[1] == f"profile: {fit(again).trust}"


def test_a_profile_of_a_quiet_machine_is_taken_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "samples", lambda *arguments: GOOD)
    nothing: Any = None
    said = list[str]()
    adaptive.make_planner(SpeculationConfig(), nothing, nothing, (), 8, 64, said.append)
    assert said == [f"profile: {fit(GOOD).trust}"]


def test_what_was_measured_of_a_head_is_believed_instead(tmp_path: Path):
    config = SpeculationConfig(candidates=("suffix", "eagle"), drafter_path=tmp_path, s=6)
    write_agreement(
        tmp_path, {"matching": Agreement((4000.0, 800.0), (800.0, 160.0)), "rejection": Agreement((9.0,), (9.0,))}
    )
    acceptance = make_controller(COST, config, 8).controller.acceptance
    assert acceptance.effective("eagle") == MEASURED
    np.testing.assert_allclose(acceptance.accept("eagle"), 0.2, atol=0.01)
    (tmp_path / ACCEPTANCE_FILE).write_text("{")
    assert make_controller(COST, config, 8).controller.acceptance.accept("eagle")[0] > 0.5
