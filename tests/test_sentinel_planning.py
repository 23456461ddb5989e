"""The sentinel around a planner, with a drafter whose weights are the policy's: what it turns off, and what a controller then does."""

from __future__ import annotations

from respec.rollout.tree import NOTHING
from respec.sentinel import Sentinel
from respec.speculation.acceptance import Acceptance
from respec.speculation.controller import Controller
from respec.speculation.cost_model import CostSample, fit
from respec.speculation.pace import PacedController
from respec.speculation.sentinel import Watch
from respec.types import PLAIN, Load, Plan, RoundRecord, Sampling, Version

SAMPLING, FEW = Sampling(48), 6


class Renewed:
    """A drafter that decodes with the policy's weights, and drafts nothing."""

    name = "self_quant"

    def propose(self, requests, plan, limits, context):
        return [NOTHING] * len(requests)

    def renew(self, decoder) -> None:
        """Nothing."""

    def finish(self, request) -> None:
        """Nothing."""

    def learn(self, rollouts) -> None:
        """Nothing."""

    def drop(self) -> None:
        """Nothing."""


def test_without_weights_to_come_back_to_it_is_off_until_the_next_swap():
    plan, lines = Plan("self_quant", 2, 1, 2), list[str]()
    sentinel = Sentinel(plan, {"self_quant": Renewed()}, lines.append).under(SAMPLING)

    def rounds(count: int, version: int, accepted: int) -> list[Plan]:
        plans = list[Plan]()
        for _ in range(count):
            plans.append(sentinel.plan(Load(16, 0, 30.0, (30,) * 16, Version(version))))
            drafted = (16, accepted) if plans[-1].n else ()
            record = RoundRecord(16, 0, plans[-1], 32, 0, 16, 0.0, 0.0, 0.0, 30.0, drafted, drafted, drafted[1:])
            sentinel.observe(record)
        return plans

    assert PLAIN not in rounds(20, 0, 13) + rounds(20, 1, 12)
    assert rounds(20, 2, 1)[-10:] == [PLAIN] * 10
    assert len(lines) == 1 and "policy version 2" in lines[0] and "off until the next swap" in lines[0]
    assert PLAIN not in rounds(20, 3, 12) and len(lines) == 1


def test_an_adaptive_server_neither_runs_nor_probes_what_is_off():
    cost = fit([CostSample(b, b * k, 64.0, verify_s=1e-2 + 1e-5 * b * k) for b in (1, 16) for k in (1, 4)])
    controller = PacedController(Controller([Plan("self_quant", 2, 1, 2)], cost, Acceptance(depth=2), 16), share=1.0)
    lines = list[str]()
    sentinel = Sentinel(controller, {"self_quant": Renewed()}, lines.append).under(SAMPLING)

    def rounds(count: int, version: int, accepted: int) -> int:
        """How many of them drafted."""
        drafts = 0
        for _ in range(count):
            plan = sentinel.plan(Load(16, 0, 64.0, (30,) * 16, Version(version)))
            drafts += plan.n > 0
            drafted = (16, accepted) if plan.n else ()
            sentinel.observe(
                RoundRecord(16, 0, plan, 32, 0, 16 + 2 * accepted, 1e-4, 1e-2, 1e-4, 64.0, drafted, drafted, drafted[1:])
            )  # fmt: skip
        return drafts

    assert rounds(100, 0, 15) and rounds(100, 1, 15)
    assert rounds(100, 2, 0) <= FEW and controller.controller.guard.shuts("self_quant") and len(lines) == 1
    alarm = next(d for d in sentinel.take_decisions() if d.kind == "sentinel")
    assert 200 < alarm.round <= 200 + FEW and alarm.elapsed_s > 200 * 1e-2
    assert rounds(2, 3, 15) >= 0 and not controller.controller.guard.shuts("self_quant")


def test_weights_that_come_back_leave_what_is_believed_where_little_was_seen():
    cost = fit([CostSample(b, b * k, 64.0, verify_s=1e-2 + 1e-5 * b * k) for b in (1, 16) for k in (1, 4)])
    controller = PacedController(Controller([Plan("self_quant", 2, 1, 2)], cost, Acceptance(depth=2), 16))
    sentinel = Sentinel(controller, {"self_quant": Renewed()}, print)
    acceptance = controller.controller.acceptance
    acceptance.observe_shadow("self_quant", (40, 30), (30, 20), 1.0)
    sentinel._believe("self_quant", Watch(), Plan("self_quant", 2, 1, 2))
    assert acceptance.effective("self_quant") == 40


def test_a_drafter_that_is_turned_off_is_looked_away_from_at_once():
    cost = fit([CostSample(b, b * k, 64.0, verify_s=1e-2 + 1e-5 * b * k) for b in (1, 16) for k in (1, 4)])
    controller = PacedController(Controller([Plan("self_quant", 2, 1, 2)], cost, Acceptance(depth=2), 16), 0.0, 0.0)
    sentinel = Sentinel(controller, {"self_quant": Renewed()}, lambda line: None)
    load = Load(16, 0, 64.0, (30,) * 16)
    sentinel.plan(load)
    sentinel._failed("self_quant", Watch(), "its drafts collapsed", Plan("self_quant", 2, 1, 2))
    assert sentinel.plan(load) == PLAIN and controller._looks and sentinel.predicted > 0


def test_how_far_completions_are_is_what_is_drawn_where_all_that_is_known_of_the_rest_is_a_limit():
    sentinel = Sentinel(PLAIN, {}, lambda line: None).under(SAMPLING)
    limit = (SAMPLING.max_new_tokens,) * 4
    assert sentinel._age(Load(4, 0, 30.0, limit)) == 0
    assert sentinel._age(Load(4, 0, 30.0, limit, drawn_B=(20,) * 4)) == 4
    # our own engine says both, and they say the same
    assert sentinel._age(Load(4, 0, 30.0, (28,) * 4, drawn_B=(20,) * 4)) == sentinel._age(Load(4, 0, 30.0, (28,) * 4))
