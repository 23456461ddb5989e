"""Law 1 where drafts are cut short of tokens that are not worth a row; and that what is said of the fates of those tokens is true."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from respec.models.eagle import create_head
from respec.rollout.cutting import choose, fates, judge
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.engine import Engine
from respec.rollout.sampling import Draws
from respec.rollout.tree import DraftTree
from respec.rollout.verify import Verdict
from respec.types import PLAIN, Ask, Leads, Load, Mode, Plan, Prompt, Proposer, Rollout, RoundRecord, Sampling, Stream
from respec.weights.publish import publish

CHAIN = Plan("eagle", 5, 1, 5)


class Whim:
    """A cut that follows nothing: chances are drawn anew for every token."""

    deep = 6

    def __init__(self, rng: np.random.Generator, floor: float, beside: tuple[str, ...]) -> None:
        self._rng, self.floor, self.beside = rng, floor, beside

    def chance(self, drafter: str, depth: int | np.ndarray, lead: np.ndarray) -> np.ndarray:
        assert drafter == "suffix" or not (lead < 0).any()
        return np.where(np.isnan(lead), 0.0, self._rng.random(lead.shape))


class Cutting:
    """Plain rounds and drafted ones in turn, each with a floor of its own."""

    predicted = 0.0

    def __init__(self, floors: Sequence[float], beside: tuple[str, ...] = ()) -> None:
        self._rng, self._floors, self._beside = np.random.default_rng(5), floors, beside
        self.rounds: list[RoundRecord] = []
        self.leads: list[Leads] = []
        self.besides: list[Leads] = []

    @property
    def cutter(self) -> Cutting:
        return self

    def plan(self, load: Load) -> Plan:
        return PLAIN if self._rng.random() < 0.2 else CHAIN

    def depths(self) -> None:
        """As deep as the plan."""

    def cut(self) -> Whim:
        return Whim(self._rng, float(self._rng.choice(self._floors)), self._beside)

    def judged(self, leads: Sequence[Leads]) -> None:
        self.leads.append(leads[0])
        self.besides += leads[1:]

    def observe(self, record: RoundRecord) -> None:
        self.rounds.append(record)

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing."""


def asks(group: int = 3) -> list[Ask]:
    rng = random.Random(3)
    prompts = [Prompt(row, "", tuple(rng.randrange(3, 48) for _ in range(n))) for row, n in enumerate((1, 4, 19, 37))]
    return [Ask(prompt, Stream.TRAIN, 0, group) for prompt in prompts]


def engine(policy, dtype: str, mode: Mode = "matching") -> Engine:
    decoder = publish(policy, dtype, 0)
    drafter = EagleDrafter(create_head(policy.model, range(1, 40), 0), decoder.shape.dtype)
    return Engine(
        decoder, policy.tokenizer, policy.eos_token_ids, 7, 8, 64, [drafter, SuffixDrafter(1, 0.3, 1000)], mode
    )


@pytest.mark.parametrize("sampling", [Sampling(30, 0.8), Sampling(20, 0.0), Sampling(20, 0.9, top_k=4)], ids=str)
@pytest.mark.parametrize("beside", [(), ("suffix",)], ids=["alone", "beside"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_cutting_changes_no_token_and_no_bit(make_policy, dtype, beside, sampling):
    policy = make_policy("llama", torch.float64 if dtype == "float64" else torch.float32)
    plain, _ = engine(policy, dtype).rollout(asks(), sampling)
    planner = Cutting((0.0, 0.3, 0.6, 1.1), beside)
    running = engine(policy, dtype)
    # an earlier epoch of the same completions: of random tokens look-ups have nothing to say else
    running.drafters["suffix"].learn(plain)
    drafted, stats = running.rollout(asks(), sampling, planner)
    for one, other in zip(plain, drafted, strict=True):
        assert np.array_equal(one.token_T, other.token_T)
        assert np.abs(one.logprob_T - other.logprob_T).max() <= (1e-6 if dtype == "float64" else 0.0)
    if not sampling.temperature:  # greedily a head that has learned nothing is never right
        return
    assert 0 < stats.accepted < stats.drafted
    # there are rounds cut down to nothing, and rounds cut below an accepted token
    assert any(record.cut and not record.drafted for record in planner.rounds)
    assert any(record.cut and record.accepted for record in planner.rounds)
    if beside:
        assert _told(drafted, planner)


def _told(rollouts: Sequence[Rollout], planner: Cutting) -> bool:
    """Whether look-ups were chosen and right, and the fates of their guesses are told."""
    right = any((rollout.proposer_T == Proposer.SUFFIX).any() for rollout in rollouts)
    return right and any(leads.stood_B.any() for leads in planner.besides)


def test_a_floor_of_nought_drafts_what_is_drafted_without(make_policy):
    policy = make_policy()
    _, whole = engine(policy, "bfloat16").rollout(asks(), Sampling(30, 0.8), CHAIN)
    planner = Cutting((0.0,))
    planner.plan = lambda load: CHAIN
    _, stats = engine(policy, "bfloat16").rollout(asks(), Sampling(30, 0.8), planner)
    counts = [[(r.drafted, r.drafted_D, r.tested_D, r.accepted_D) for r in s.round_R] for s in (whole, stats)]
    assert counts[0] == counts[1]
    assert not any(record.cut for record in planner.rounds)
    assert sum(int(leads.stood_B.sum()) for leads in planner.leads) == sum(sum(r.accepted_D) for r in stats.round_R)


def test_with_everything_cut_the_first_depth_is_tested_all_the_same(make_policy):
    """Rounds are plain, and say of every first token what the uncut round of the same place says."""
    policy = make_policy()
    planner = Cutting((1.1,))
    planner.plan = lambda load: CHAIN
    rollouts, stats = engine(policy, "bfloat16").rollout(asks(), Sampling(30, 0.8), planner)
    assert not stats.drafted
    assert sum(r.accepted_D[0] for r in planner.rounds if r.accepted_D) > 0
    assert all(set(r.fair_D) == {r.tested_D[:1], r.accepted_D[:1]} for r in planner.rounds)
    # what stood is what a chain of one, verified, would have had accepted in these places
    placed = sum(len(r.token_T) for r in rollouts)
    assert sum(leads.tested_B.sum() for leads in planner.leads) > 0.8 * placed


def test_in_rejection_nothing_is_cut(make_policy):
    """There a token may not decide by itself whether it is looked at."""
    policy, planner = make_policy(), Cutting((1.1,))
    _, stats = engine(policy, "bfloat16", "rejection").rollout(asks(), Sampling(30, 0.8), planner)
    assert stats.drafted and not planner.leads and not any(record.cut for record in planner.rounds)


def chain(tokens: Sequence[int], left_out: int | None) -> DraftTree:
    leads = tuple(range(len(tokens) + (left_out is not None)))
    whole = DraftTree.chain(tokens, Proposer.EAGLE)
    return DraftTree(whole.token_n, whole.parent_n, Proposer.EAGLE, lead_n=leads, left_out=left_out)


def verdict(tree: DraftTree, drawn: Sequence[int]) -> Verdict:
    stood = next((d for d, (a, b) in enumerate(zip(tree.token_n, drawn, strict=False)) if a != b), len(tree.token_n))
    draws = Draws(np.array(drawn[: stood + 1], np.int32), *(np.zeros(stood + 1, np.float32) for _ in range(3)))
    return Verdict(tuple(range(stood)), draws, stood)


@pytest.mark.parametrize(("tokens", "left_out", "drawn", "tested", "stood"), [
    ((5, 6), None, (5, 6, 7), 2, 2), ((5, 6), None, (5, 9), 2, 1), ((5, 6), 7, (5, 6, 7), 3, 3), ((5, 6), 7, (5, 6, 8), 3, 2),
    ((5, 6), 7, (9,), 1, 0), ((), 7, (7,), 1, 1), ((), 7, (8,), 1, 0),
])  # fmt: skip
def test_fates_by_hand(tokens, left_out, drawn, tested, stood):
    tree = chain(tokens, left_out)
    its = verdict(tree, drawn)
    assert fates([tree], [its]) == ([tested], [stood])
    (leads,) = judge(("eagle",), [DraftTree(), tree], [verdict(DraftTree(), (1,)), its])
    assert leads.lead_BD.tolist() == [list(map(float, tree.lead_n))]
    assert (leads.tested_B.tolist(), leads.stood_B.tolist()) == ([tested], [stood])


def test_the_fates_of_a_chain_that_was_not_chosen():
    own, guess = chain((5, 6), 7), replace(chain((5, 8, 9, 4), None), proposer=Proposer.SUFFIX)
    chosen = replace(guess, rivals=(own, guess))
    # the target drew 5, 8, 9 and then 3: the drafter's second token was refused, the guess's fourth
    its = verdict(guess, (5, 8, 9, 3))
    assert fates([chosen], [its]) == ([2], [1])
    first, second = judge(("eagle", "suffix"), [chosen], [its])
    assert (first.tested_B.tolist(), first.stood_B.tolist()) == ([2], [1])
    assert (second.tested_B.tolist(), second.stood_B.tolist()) == ([4], [3])
    assert first.lead_BD.tolist() == [[0, 1, 2]] and second.lead_BD.tolist() == [[0, 1, 2, 3]]


class Sure:
    """A drafter's tokens stand as surely as their leads say."""

    deep, beside = 4, ("suffix",)

    def __init__(self, floor: float) -> None:
        self.floor = floor

    def chance(self, drafter: str, depth: int | np.ndarray, lead: np.ndarray) -> np.ndarray:
        return np.nan_to_num(lead)


def test_each_request_has_the_draft_that_is_worth_more_above_the_floor():
    def led(tokens: Sequence[int], lead: Sequence[float], left_out: int | None = None) -> DraftTree:
        return replace(DraftTree.chain(tokens, Proposer.EAGLE), lead_n=tuple(lead), left_out=left_out)

    own = [led((1,), (0.9, 0.5), 2), led((1,), (0.9, 0.5), 2), led((), (0.3,), 1), DraftTree()]
    guess = [led((3, 4), (0.8, 0.9)), led((3, 4), (0.95, 0.9)), led((3,), (0.4,)), led((3,), (0.99,))]
    chosen = choose("eagle", own, "suffix", guess, Sure(0.6))
    # 0.3 against 0.2 + 0.12; against 0.35 + 0.255; nothing against nothing; nothing against 0.39
    assert [tree.token_n for tree in chosen] == [(3, 4), (3, 4), (), (3,)]
    assert [tree.token_n for tree in choose("eagle", own, "suffix", guess, Sure(0.75))] == [(1,), (3, 4), (), (3,)]
    assert all(tree.rivals == pair for tree, pair in zip(chosen, zip(own, guess, strict=True), strict=True))
