"""Rollouts whose requests are drafted best by a head, by a look-up, or not at all, the truth known: what it costs a controller to find out."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from respec.adaptive import make_controller
from respec.config import SpeculationConfig
from respec.speculation.controller import Controller
from respec.speculation.cost_model import CostModel
from respec.types import Cut, Leads, Load, Plan, RoundRecord

DEEPEST, LONGEST, PROMPT = 8, 256, 40
# Seconds of SmolLM2-135M's rounds on two cores: by row, and of an EAGLE-3 head fixed, by sequence, by step, and by both; a start reads all keys.
BASE_S, ROW_S, DRAFT_S, START_S = 8.5e-3, 0.45e-3, (0.86e-3, 0.035e-3, 0.46e-3, 0.0165e-3), (1e-3, 1e-5)
COST = CostModel(
    (), (BASE_S, 0.0, ROW_S, 0.0, 0.0), (0.0, 0.0, 0.0), {"eagle": DRAFT_S, "suffix": (2e-4, 5e-6, 0.0, 0.0)}, start={"eagle": START_S}
)  # fmt: skip


@dataclass(frozen=True)
class Chains:
    """What one drafter has for each sequence: leads, NaN after the last, and how many tokens would stand."""

    lead_BD: Float[np.ndarray, "B D"]
    stood_B: Int[np.ndarray, "B"]

    def stands(self, drafter: str, cut: Cut) -> Float[np.ndarray, "B D"]:
        """The chance of each token and all before it."""
        depth = np.arange(1, self.lead_BD.shape[1] + 1)
        return np.cumprod(cut.chance(drafter, depth, self.lead_BD), axis=1)


class Mixture:
    """Of the sequences of a round a share `copies` and another is `easy` to the head; in these a drafter's leads are long, and what it drafts stands. In
    `spurious` of the rest the look-up has a draft all the same."""

    def __init__(self, seed: int, copies: float = 0.25, easy: float = 0.5, spurious: float = 0.6) -> None:
        self.rng = np.random.default_rng(seed)
        self.copies, self.easy, self.spurious = copies, easy, spurious
        self.leads: list[Leads] = []

    def _drawn(self, room_B: Int[np.ndarray, "B"]) -> dict[str, Chains]:
        """Each drafter's whole chains in a round."""
        kind = self.rng.random(len(room_B))
        copies, easy = kind < self.copies, (kind >= self.copies) & (kind < self.copies + self.easy)
        head = self._chains(np.where(easy, 8.0, 0.6), 0.6, room_B)
        found = copies | (self.rng.random(len(room_B)) < self.spurious)
        return {"eagle": head, "suffix": self._chains(np.where(copies, 6.0, 0.5), 0.75, np.where(found, room_B, 0))}

    def _chains(self, scale_B: Float[np.ndarray, "B"], doubt: float, length_B: Int[np.ndarray, "B"]) -> Chains:
        """Leads about `scale_B`; a token stands with a chance of 1 - doubt · exp(-lead)."""
        lead = self.rng.exponential(scale_B[:, None], (len(scale_B), DEEPEST))
        lead[np.arange(DEEPEST) >= length_B[:, None]] = np.nan
        stands = self.rng.random(lead.shape) < 1 - doubt * np.exp(-lead)
        return Chains(lead, np.cumprod(stands, axis=1).sum(axis=1))

    def run(
        self, plan: Plan, room_B: Int[np.ndarray, "B"], context: float, cut: Cut | None
    ) -> tuple[RoundRecord, np.ndarray]:
        """One round; what it was like, and how many drafted tokens each sequence keeps."""
        made, none = self._drawn(np.minimum(room_B, DEEPEST)), np.zeros(len(room_B), int)
        self.leads = []
        if not plan.n:
            return self._record(plan, context, none, none, none, none, 0, False), none
        own = made[plan.drafter]
        own = replace(own, lead_BD=own.lead_BD[:, : plan.s])
        length = (~np.isnan(own.lead_BD)).sum(axis=1)
        if cut is None:
            kept, stood = length, np.minimum(length, own.stood_B)
            tested = np.minimum(length, stood + 1)
            rows = length if plan.t == 1 else np.where(length > 0, plan.n, 0)
            return self._record(plan, context, kept, tested, stood, rows, int(length.max()), False), stood
        stands = own.stands(plan.drafter, cut)
        # leads are the drafter's as far as it went: one token beyond the last kept
        kept = np.minimum(np.cumprod(stands >= cut.floor, axis=1).sum(axis=1), length)
        drafted = np.minimum(kept + 1, length)
        verified, agreed = kept.copy(), own.stood_B
        if cut.beside:
            guess = made["suffix"]
            chance = guess.stands("suffix", cut)
            worth, other = (np.maximum(x - cut.floor, 0.0).sum(axis=1) for x in (stands, chance))
            many = ((chance >= cut.floor) & (chance > 0)).sum(axis=1)
            verified, agreed = np.where(other > worth, many, kept), np.where(other > worth, guess.stood_B, own.stood_B)
        gain = np.minimum(verified, agreed)
        shown = np.where(np.arange(plan.s) < drafted[:, None], own.lead_BD, np.nan)
        self.leads = [self._judged(plan.drafter, shown, own.stood_B, gain)]
        if cut.beside:
            self.leads.append(self._judged("suffix", made["suffix"].lead_BD, made["suffix"].stood_B, gain))
        fate = self.leads[0]
        return self._record(
            plan, context, verified, fate.tested_B, fate.stood_B, verified, int(drafted.max()), True
        ), gain

    @staticmethod
    def _judged(drafter: str, lead_BD: np.ndarray, stood_B: np.ndarray, gain_B: np.ndarray) -> Leads:
        """The target has drawn one token more than were gained."""
        length, drawn = (~np.isnan(lead_BD)).sum(axis=1), gain_B + 1
        stood = np.minimum(np.minimum(stood_B, length), drawn)
        return Leads(drafter, lead_BD, np.minimum(np.minimum(length, drawn), stood + 1), stood)

    def _record(self, plan: Plan, context: float, deep, tested, stood, rows, steps: int, cut: bool) -> RoundRecord:
        b, accepted = len(rows), int(stood.sum()) if not cut else 0
        seconds = np.exp(0.03 * self.rng.standard_normal()) * float(
            COST.seconds(b, np.array([b + float(rows.sum())]), context, [plan.drafter], np.array([float(steps)]))[0]
        )
        reach = lambda x: tuple(int((x >= d).sum()) for d in range(1, plan.s + 1))  # noqa: E731
        return RoundRecord(
            b, 0, plan, int(rows.sum()), accepted, b + accepted, 0.0, seconds, 0.0, context, reach(deep), reach(tested), reach(stood), cut=cut
        )  # fmt: skip


def controller() -> Controller:
    """As a run makes it, looking at every round."""
    config = SpeculationConfig(drafter="auto", candidates=("suffix", "eagle"), drafter_path=Path("none"), s=DEEPEST)
    return make_controller(COST, config, 64).controller


def knowing(world: Mixture) -> Controller:
    """One that has seen this world long, at batches large and small, whole and cut."""
    subject, chain, look_up = controller(), Plan("eagle", DEEPEST, 1, DEEPEST), Plan("suffix", DEEPEST, 1, DEEPEST)
    assert subject.confidence is not None
    for batch in (64, 32, 16, 8, 4):
        room_B = np.full(batch, LONGEST)
        for _ in range(30):
            world.run(chain, room_B, PROMPT, subject.confidence.bound("eagle", 0.0))
            subject.confidence.learn(world.leads)
            for plan in (chain, look_up):
                subject.acceptance.observe(world.run(plan, room_B, PROMPT, None)[0])
    return subject


@dataclass(frozen=True)
class Spent:
    """Seconds of a rollout, and of its rounds under each drafter."""

    seconds: float
    by_drafter: dict[str, float]


def rollout(subject: Controller | Plan, world: Mixture, length_B: Int[np.ndarray, "B"]) -> Spent:
    """All sequences begun at once, each of so many tokens."""
    drawn, seconds, by_drafter, running = np.zeros(len(length_B), int), 0.0, dict[str, float](), "off"
    while (drawn < length_B).any():
        active = np.flatnonzero(drawn < length_B)
        context = PROMPT + float(drawn[active].mean())
        load = Load(len(active), 0, context, tuple((LONGEST - drawn[active]).tolist()))
        plan = subject if isinstance(subject, Plan) else subject.plan(load)
        cut = None if isinstance(subject, Plan) else subject.cut()
        record, gain = world.run(plan, LONGEST - drawn[active] - 1, context, cut)
        if plan.drafter != running:
            start = float(COST.starts(len(active), context, [plan.drafter])[0])
            record, running = replace(record, draft_s=start), plan.drafter
        record = replace(record, emitted=len(active) + int(gain.sum()), accepted=int(gain.sum()))
        drawn[active] += 1 + gain
        if isinstance(subject, Controller):
            if world.leads and subject.confidence is not None:
                subject.confidence.learn(world.leads)
            subject.observe(record)
        took = record.draft_s + record.verify_s
        seconds += took
        by_drafter[plan.drafter] = by_drafter.get(plan.drafter, 0.0) + took
    return Spent(seconds, by_drafter)


def lengths(seed: int, batch: int = 64) -> Int[np.ndarray, "B"]:
    """Log-normal lengths of answers: the batch thins out, with a long tail."""
    rng = np.random.default_rng(seed)
    return np.clip(np.exp(np.log(70) + 0.7 * rng.standard_normal(batch)), 8, LONGEST).astype(int)
