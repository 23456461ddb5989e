"""Chances learned from leads, what floors promise, and that a controller that cuts wins where rows are dear."""

from __future__ import annotations

import json

import numpy as np
import pytest
from simulator import CONTEXT, Machine

from respec.speculation.acceptance import Acceptance, fairly
from respec.speculation.confidence import EDGES, FLOORS, Confidence, promise
from respec.speculation.controller import Controller
from respec.speculation.cost_model import fit
from respec.speculation.solver import forecast
from respec.types import Leads, Load, Plan, RoundRecord

DEPTH = 6


def truth(lead: np.ndarray) -> np.ndarray:
    """P(accepted | lead) of the drafter below: from chance to certainty."""
    return 1 - 0.6 * np.exp(-lead)


def drafts(rng: np.random.Generator, many: int) -> tuple[np.ndarray, np.ndarray]:
    """Leads, and how many tokens of each chain would stand: half of the sequences are easy."""
    easy = rng.random(many) < 0.5
    lead = rng.exponential(np.where(easy, 6.0, 0.7)[:, None], (many, DEPTH))
    refused = rng.random((many, DEPTH)) >= truth(lead)
    return lead, np.where(refused.any(axis=1), refused.argmax(axis=1), DEPTH)


def taught(many: int, seed: int = 0) -> Confidence:
    rng, subject = np.random.default_rng(seed), Confidence(("a",), DEPTH, memory=1e9)
    for _ in range(many // 64):
        lead, stood = drafts(rng, 64)
        subject.learn([Leads("a", lead, np.minimum(stood + 1, DEPTH), stood)])
    return subject


def test_chances_are_the_true_ones_and_never_fall_with_the_lead():
    """By 6400 chains a bin has 60 tokens and more, so that 4 standard errors are under 0.26; most are far better known."""
    chance = taught(6400).chances("a")
    assert (np.diff(chance, axis=0) >= 0).all()
    middle = (np.append(0.0, EDGES) + np.append(EDGES, 10.0)) / 2
    assert np.abs(chance - truth(middle)[:, None]).max() < 0.1


def test_a_drafter_whose_leads_say_nothing_has_one_chance_for_all():
    rng, subject = np.random.default_rng(1), Confidence(("a",), DEPTH, memory=1e9)
    lead = rng.exponential(2.0, (4000, DEPTH))
    refused = rng.random((4000, DEPTH)) >= 0.5
    stood = np.where(refused.any(axis=1), refused.argmax(axis=1), DEPTH)
    subject.learn([Leads("a", lead, np.minimum(stood + 1, DEPTH), stood)])
    assert np.abs(subject.chances("a")[:, 0] - 0.5).max() < 0.12


def test_what_floors_promise_by_hand():
    """Two sequences: of one the drafter is certain, 0.9 a step, of the other at 0.45; its later lead is unknown, since it was cut. A look-up is at
    0.9 about the second, and has nothing for the first."""
    chance = np.full((len(EDGES) + 1, 3), 0.45)
    chance[-1] = 0.9
    nan = np.nan
    lead = np.array([[[9.0, 9.0], [nan, nan]], [[0.0, nan], [9.0, nan]]])
    alone, both = (promise(chance, beside, lead) for beside in (np.zeros_like(chance), chance))
    at = {floor: i for i, floor in enumerate(FLOORS.tolist())}
    # without a floor: what is unknown is taken to be as good as what is known at its depth
    assert alone.tokens_FS[at[0.0]] == pytest.approx([(0.9 + 0.45) / 2, (0.9 + 0.81 + 0.45 + 0.45 * 0.9) / 2])
    assert alone.rows_FS[at[0.0]] == pytest.approx([1.0, 2.0])
    assert alone.tokens_FS[at[0.5]] == pytest.approx([0.45, 0.45 + 0.405])
    assert alone.rows_FS[at[0.5]] == pytest.approx([0.5, 1.0])
    assert alone.square_FS[at[0.5]] == pytest.approx([0.45, 0.45 + 3 * 0.405])
    # the first token of both is drafted to be looked at, the second only below one that was kept
    assert alone.drafted_FD[at[0.5]] == pytest.approx([1.0, 0.5])
    assert alone.rows_FS[at[0.9]] == pytest.approx([0.5, 0.5])
    # the look-up's token is verified for the second sequence, whatever the depth of the drafter's chain
    assert both.tokens_FS[at[0.5]] == pytest.approx([0.9, (0.9 + 0.81 + 0.9) / 2])
    assert both.rows_FS[at[0.5]] == pytest.approx([1.0, 1.5])


def test_promises_are_what_cutting_gives():
    """The tokens and rows of 20000 fresh drafts, cut, are those promised from 256 earlier ones: within 5 %, which is 3 standard errors."""
    subject = taught(6400)
    found, (lead, stood) = subject.promise("a"), drafts(np.random.default_rng(9), 20000)
    assert found is not None
    for index, floor in enumerate(FLOORS):
        bound, stands, kept = subject.bound("a", floor), np.ones(len(lead)), np.zeros(len(lead), int)
        for d in range(DEPTH):
            stands *= bound.chance("a", d + 1, lead[:, d])
            kept += (stands >= floor) & (kept == d)
        assert 1 + found.tokens_FS[index, -1] == pytest.approx(1 + np.minimum(kept, stood).mean(), rel=0.06)
        assert 1 + found.rows_FS[index, -1] == pytest.approx(1 + kept.mean(), rel=0.06)


def test_it_is_kept_and_taken_up_and_fades():
    subject, other = taught(640), Confidence(("a",), DEPTH)
    subject.learn([Leads("a", np.array([[1.0, np.nan]]), np.array([1]), np.array([0]))])
    other.restore(json.loads(json.dumps(subject.to_dict())))
    assert np.array_equal(other.chances("a"), subject.chances("a"))
    one, two = subject.promise("a"), other.promise("a")
    assert one is not None and two is not None and np.array_equal(one.tokens_FS, two.tokens_FS)
    before = subject.chances("a")
    subject.discount(0.0)
    assert np.array_equal(subject.chances("a"), Confidence(("a",), DEPTH).chances("a"))
    assert not np.array_equal(subject.chances("a"), before)
    assert Confidence(("a",), DEPTH).promise("a") is None


class Uneven(Machine):
    """A machine whose drafter's sequences are easy or hard, and whose tokens say by their leads which. It cuts where it is told to."""

    leads: Leads | None = None

    def run_cut(self, active: int, plan: Plan, cut) -> RoundRecord:
        if not plan.n:
            self.leads = None
            return self.run(active, plan, 0)
        lead, stood = drafts(self._rng, active)
        lead, stood = lead[:, : plan.s], np.minimum(stood, plan.s)
        kept, stands, shown = np.full(active, plan.s), np.ones(active), np.full(lead.shape, np.nan)
        for d in range(plan.s):
            alive = kept == plan.s
            shown[alive, d] = lead[alive, d]
            if cut is not None:
                stands *= cut.chance("a", d + 1, lead[:, d])
                kept[alive & (stands < cut.floor)] = d
        left_out = kept < plan.s
        tested = np.where(stood >= kept, kept + left_out, stood + 1).clip(max=plan.s)
        known = np.minimum(stood, kept + left_out)
        self.leads = Leads(plan.drafter, shown, tested, known)
        accepted, reach = np.minimum(stood, kept), lambda x: tuple(int((x >= d).sum()) for d in range(1, plan.s + 1))
        steps = self.step_s(active, active + kept.sum(), plan)
        return RoundRecord(
            active, 0, plan, int(kept.sum()), int(accepted.sum()), active + int(accepted.sum()), *steps, CONTEXT,
            reach(kept), reach(tested), reach(known), cut=bool(left_out.any()),
        )  # fmt: skip


def tokens_per_s(active: int, confidence: Confidence | None, rounds: int = 1200) -> float:
    machine = Uneven({"a": lambda round: 0.75}, 0, depths=(1, 2, 4, 6))
    subject = Controller(machine.plans, fit(machine.profile()), Acceptance(DEPTH), confidence=confidence)
    tokens = seconds = 0.0
    for r in range(rounds):
        plan = subject.plan(Load(active, 0, CONTEXT, ()))
        record = machine.run_cut(active, plan, subject.cut())
        if machine.leads is not None and confidence is not None:
            confidence.learn([machine.leads])
        subject.observe(record)
        if r >= rounds // 4:
            tokens, seconds = tokens + record.emitted, seconds + record.draft_s + record.verify_s + record.overhead_s
    return tokens / seconds


@pytest.mark.parametrize(("active", "gain"), [(1, 0.98), (8, 1.05), (24, 1.02)])
def test_cutting_pays_where_rows_are_dear_and_costs_nothing_where_they_are_free(active, gain):
    assert tokens_per_s(active, Confidence(("a",), DEPTH)) > gain * tokens_per_s(active, None)


def test_the_floor_rises_with_the_price_of_a_row():
    machine, subject = Uneven({"a": lambda round: 0.75}, 0, depths=(1, 2, 4, 6)), taught(6400)
    plans, cost = machine.plans, fit(machine.profile())
    floors = [
        forecast(Load(b, 0, CONTEXT, ()), plans, Acceptance(DEPTH), cost, subject).floor_P[-1] for b in (1, 4, 16, 64)
    ]
    assert floors == sorted(floors) and floors[0] < 0.4 < floors[-1]
    # nothing is cut off plain decoding, nor off drafters that do not say how their tokens won
    assert not forecast(Load(8, 0, CONTEXT, ()), plans, Acceptance(DEPTH), cost, Confidence((), DEPTH)).floor_P.any()


def test_a_round_with_cuts_teaches_acceptance_its_first_depth_only():
    cut = RoundRecord(
        8, 0, Plan("a", 4, 1, 4), 6, 5, 13, 0.0, 0.1, 0.0, CONTEXT, (3, 2, 1), (8, 3, 2), (6, 3, 2), cut=True
    )
    assert cut.fair_D == ((8,), (6,))
    subject = Acceptance(4)
    for _ in range(50):
        subject.observe(fairly(cut))
    assert subject.accept("a")[0] == pytest.approx(0.75, abs=0.02)
    assert subject.accept("a")[3] < 0.76
