"""Sharing drafts out by who ends the rollout: it pays where lengths are known and differ, and does nothing where they do not."""

from __future__ import annotations

import numpy as np
import pytest
from das import rollout_seconds
from rollouts import (
    ACCEPT_D,
    BASE_S,
    COST,
    PLANS,
    ROW_S,
    acceptance,
    by_das,
    by_price,
    finished,
    lengths,
    one_depth,
    roll,
)

from respec.speculation.controller import Controller
from respec.speculation.depth import Chains, depths, prices, token_seconds
from respec.speculation.explain import explain
from respec.speculation.pace import PacedController
from respec.speculation.sharing import Sharing
from respec.types import Load, Plan, RoundRecord

OUTLOOK = acceptance().outlook("eagle", 1, np.ones(len(ACCEPT_D)))
CHAINS = Chains("eagle", (1, 2, 3, 4, 6, 8), OUTLOOK, COST)


def ratios(rows: int, group: int, between: float, within: float, way=by_price, epochs: int = 4) -> np.ndarray:
    """Seconds of ten rollouts, over those of the best one depth for all."""
    found = []
    for seed in range(10):
        *history, now = lengths(np.random.default_rng(seed), rows, group, 50, between, within, epochs + 1)
        found.append(roll(now, way(history), seed).seconds / roll(now, one_depth, seed).seconds)
    return np.array(found)


def test_a_rollout_with_a_long_tail_ends_sooner():
    """64 sequences of 8 rows, lengths 4 to 256. Standard deviation of a rollout's ratio: 0.015, so ten give 0.005."""
    known, hazy = ratios(8, 8, 0.8, 0.05), ratios(8, 8, 0.8, 0.2)
    assert known.mean() < 0.975 and hazy.mean() < 0.99
    assert known.mean() < ratios(8, 8, 0.8, 0.05, by_das).mean()


@pytest.mark.parametrize(("rows", "group"), [(8, 8), (4, 4), (1, 2)])
def test_where_all_are_equally_long_nothing_is_lost(rows: int, group: int):
    """Who is ahead by luck is not yet expected to end sooner by much. Standard deviation of a rollout's ratio: 0.007 at most."""
    assert ratios(rows, group, 0.0, 0.0).mean() <= 1.01


def test_where_nobody_knows_which_will_be_long_nothing_is_lost():
    """No history; and rows alike whose answers differ by a factor of 2.2, of which 32 are known."""
    assert ratios(8, 8, 0.8, 0.2, epochs=0).max() <= 1.001
    assert ratios(8, 8, 0.0, 0.8).mean() <= 1.01


def test_a_token_is_worth_what_the_rollout_gets_shorter_by():
    token_s = token_seconds(CHAINS, 64, 60.0)
    assert token_s[0] == 0 and (np.diff(token_s) > 0).all()
    # the last of all is worth a whole round for one; the others their rows
    certain = prices(np.tile([50.0, 200.0, 100.0], (8, 1)), token_s[:4])
    np.testing.assert_allclose(certain, [token_s[3] - token_s[2], token_s[1], token_s[2] - token_s[1]])
    # equals share alike, and all together are worth a token for all
    rng = np.random.default_rng(0)
    alike = prices(np.full((8, 20), 70.0), token_s[:21])
    np.testing.assert_allclose(alike, token_s[20] / 20)
    assert prices(rng.lognormal(4, 1, (8, 20)), token_s[:21]).sum() == pytest.approx(token_s[20])


def test_at_equal_prices_the_depth_for_all_is_that_of_highest_goodput():
    token_s = token_seconds(CHAINS, 64, 60.0)
    for active in (2, 4, 8, 16, 32, 64):
        load = Load(active, 0, 60.0, (200,) * active)
        found, gain = depths(load, 0, np.full(active, token_s[active] / active), CHAINS)
        assert len(set(found.tolist())) == 1 and gain >= -1e-9
        per_token = [seconds(active, s) / OUTLOOK.tokens_S[s] for s in (0, *CHAINS.depths)]
        assert seconds(active, found[0]) / OUTLOOK.tokens_S[found[0]] == pytest.approx(min(per_token), rel=1e-6)


def seconds(active: int, s: int) -> float:
    return float(
        COST.seconds(active, np.array([active * (1.0 + s)]), 60.0, ("eagle" if s else "off",), np.array([s]))[0]
    )


def test_the_longer_a_request_the_deeper_it_drafts_and_never_past_its_budget():
    left = np.sort(np.random.default_rng(0).lognormal(4, 1, 24))
    load = Load(24, 0, 60.0, (1, 2, *[200] * 22))
    found, gain = depths(load, 1, prices(np.tile(left, (8, 1)), token_seconds(CHAINS, 24, 60.0)), CHAINS)
    assert found.tolist() == sorted(found.tolist()) and found[0] == 0 and found[1] <= 1 and found[-1] >= 4
    # by the count of DAS, with these depths to the end, it is a gain as well
    one = [rollout_seconds(np.full(24, s), left, OUTLOOK, BASE_S, ROW_S) for s in range(9)]
    assert gain > 0 and rollout_seconds(found, left, OUTLOOK, BASE_S, ROW_S) < min(one)


def load_of(drawn: int, waiting: int = 0) -> Load:
    """Thirty sequences of row 0, two of row 1."""
    return Load(32, waiting, 60.0, (256 - drawn,) * 32, row_B=(*[0] * 30, 1, 1), drawn_B=(drawn,) * 32)


LENGTHS = np.array([[30] * 8, [220] * 8])


def test_it_takes_knowledge_and_no_queue():
    sharing, seen = Sharing(PLANS, COST), acceptance()
    for plan in (PLANS[0], PLANS[2]):
        assert sharing.look(load_of(10), plan, "eagle", seen) is None
    sharing.learn(finished(LENGTHS))
    found = sharing.look(load_of(10), PLANS[0], "eagle", seen)
    assert found is not None and found.gain > 0.03
    assert found.plan == Plan("eagle", found.plan.s, 1, found.plan.s) and max(found.depth_B) <= found.plan.s
    assert min(found.depth_B[30:]) > max(found.depth_B[:30])
    assert sharing.look(load_of(10, waiting=1), PLANS[0], "eagle", seen) is None
    assert sharing.look(load_of(10), PLANS[0], "suffix", seen) is None
    assert sharing.look(load_of(10), Plan("eagle", 2, 4, 8), "eagle", seen) is None


def test_a_paced_controller_gives_the_depths_and_says_so():
    seen = acceptance()
    seen.discount(0.01)
    controller = Controller(PLANS, COST, seen, 32)
    paced = PacedController(controller, share=1.0, sharing=Sharing(PLANS, COST))
    paced.plan(load_of(10))
    assert paced.depths() is None
    paced.learn(finished(LENGTHS))
    for _ in range(20):
        plan, depth_B = paced.plan(load_of(10)), paced.depths()
        if depth_B is None:
            continue
        asked = [sum(depth >= d for depth in depth_B) for d in range(1, plan.s + 1)]
        stands = tuple(int(n * a) for n, a in zip(asked, ACCEPT_D.cumprod(), strict=False))
        record = RoundRecord(
            32, 0, plan, sum(asked), sum(stands), 32 + sum(stands), 0.002, 0.03, 0.0, 60.0, tuple(asked), (asked[0], *stands[:-1]), stands
        )  # fmt: skip
        paced.observe(record)
    # who was not asked to draft has not failed to
    assert controller.acceptance.drafted("eagle")[0] > 0.99
    shared = [decision for decision in controller.decisions if decision.kind == "share"]
    assert shared and "the longest first" in shared[0].reason and shared[0].chosen.drafter == "eagle"
    assert f"depths {min(depth_B or (0,))}-" in explain(shared)
