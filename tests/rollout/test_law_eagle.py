"""Law 1 for the EAGLE-3 drafter: chains and combs, both modes, started late, dropped, policy and head swapped in mid sequence."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chi2, ncx2

from respec.errors import ModelError, StaleError
from respec.models.eagle import create_head
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.rollout.randomness import Lane, sequence_key, token_key
from respec.rollout.request import Request
from respec.rollout.sampling import draw, process
from respec.types import PLAIN, Ask, Load, Mode, Plan, Prompt, Rollout, RoundRecord, Sampling, Stream
from respec.weights.publish import publish
from respec.weights.swap import swap

SAMPLING = Sampling(max_new_tokens=30, temperature=0.8)
CHAIN, COMB = Plan("eagle", 5, 1, 5), Plan("eagle", 4, 3, 10)


def asks(group: int = 3) -> list[Ask]:
    rng = random.Random(3)
    prompts = [
        Prompt(row, "", tuple(rng.randrange(3, 48) for _ in range(length))) for row, length in enumerate((1, 4, 19, 37))
    ]
    return [Ask(prompt, Stream.TRAIN, 0, group) for prompt in prompts]


def head(policy, seed: int = 0, drafted=range(1, 40)):
    return create_head(policy.model, drafted, seed)


def engine(policy, dtype: str = "bfloat16", mode: Mode = "matching", max_batch: int = 8, drafting=None) -> Engine:
    decoder = publish(policy, dtype, 0)
    drafter = EagleDrafter(drafting or head(policy), decoder.shape.dtype)
    return Engine(decoder, policy.tokenizer, policy.eos_token_ids, 7, max_batch, 64, [drafter], mode)


class Apart:
    """One plan, and depths of their own for all sequences, others every round: mostly more than one is apart from the plan's."""

    predicted = 0.0

    def __init__(self, plan: Plan) -> None:
        self._plan, self._rng = plan, random.Random(11)
        self.reached: set[int] = set()

    def plan(self, load: Load) -> Plan:
        self._deep = [self._rng.randint(0, self._plan.s + 1) for _ in range(load.active)]
        return self._plan

    def depths(self) -> list[int]:
        return self._deep

    def observe(self, record: RoundRecord) -> None:
        self.reached.add(len(record.drafted_D))
        for d, many in enumerate(record.drafted_D, 1):
            assert many <= sum(deep >= d for deep in self._deep), "a sequence drafted deeper than it was given"

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing."""


@pytest.mark.parametrize("plan", [CHAIN, COMB], ids=["chain", "comb"])
def test_depths_of_their_own_change_no_token_and_no_bit(make_policy, plan):
    policy, apart = make_policy(), Apart(plan)
    plain, _ = engine(policy).rollout(asks(), SAMPLING)
    drafted, stats = engine(policy).rollout(asks(), SAMPLING, apart)
    assert equal(plain, drafted, "bfloat16")
    assert 0 < stats.accepted < stats.drafted and plan.s in apart.reached


class Scripted:
    """A planner that follows a script, over and over."""

    predicted = 0.0

    def __init__(self, plans) -> None:
        self._plans = itertools.cycle(plans)

    def plan(self, load) -> Plan:
        return next(self._plans)

    def observe(self, record) -> None:
        """Nothing."""


def equal(one, other, dtype: str) -> bool:
    same = all(np.array_equal(a.token_T, b.token_T) and a.finish == b.finish for a, b in zip(one, other, strict=True))
    gap = max(float(np.abs(a.logprob_T - b.logprob_T).max()) for a, b in zip(one, other, strict=True)) if same else 1.0
    return same and gap <= (1e-6 if dtype == "float64" else 0.0)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_chains_and_combs_give_the_tokens_and_bits_of_plain_decoding(make_policy, monkeypatch, family, dtype, native):
    if not native:
        monkeypatch.setattr("respec.models.kernels.supports", lambda *_: False)
    policy = make_policy(family, torch.float64 if dtype == "float64" else torch.float32)
    plain, _ = engine(policy, dtype).rollout(asks(), SAMPLING)
    for plan in (CHAIN, COMB):
        drafted, stats = engine(policy, dtype).rollout(asks(), SAMPLING, plan)
        assert equal(plain, drafted, dtype), plan
        assert 0 < stats.accepted < stats.drafted
        if dtype == "bfloat16" and plan == COMB:
            assert any(record.drafted > sum(record.drafted_D) for record in stats.round_R), "no draft has branched"


@pytest.mark.parametrize("sampling", [
    Sampling(20, 0.9, top_k=4), Sampling(20, 0.9, top_p=0.8), Sampling(20, 1.0, min_p=0.1), Sampling(20, 0.0), Sampling(1, 0.7),
    Sampling(20, 0.7, stop=("ab", "Q")),
], ids=str)  # fmt: skip
def test_truncation_stops_and_limits_change_nothing(make_policy, sampling):
    policy = make_policy()
    plain, _ = engine(policy).rollout(asks(), sampling)
    drafted, _ = engine(policy).rollout(asks(), sampling, COMB)
    assert equal(plain, drafted, "bfloat16")


def test_it_may_start_late_stop_and_start_again(make_policy):
    policy = make_policy()
    plain, _ = engine(policy).rollout(asks(), SAMPLING)
    scripted = Scripted([PLAIN] * 3 + [CHAIN] * 2 + [PLAIN, COMB])
    drafted, stats = engine(policy, max_batch=5).rollout(asks(), SAMPLING, scripted)
    assert equal(plain, drafted, "bfloat16")
    assert stats.accepted


def drafter_of(running: Engine) -> EagleDrafter:
    drafter = running.drafters["eagle"]
    assert isinstance(drafter, EagleDrafter)
    return drafter


def every_third_round(act):
    """A progress callback that acts after rounds 3, 6, ..."""
    rounds = itertools.count(1)

    def on_round(record) -> None:
        if next(rounds) % 3 == 0:
            act()

    return on_round


def test_what_was_dropped_is_rebuilt_from_the_tokens(make_policy):
    policy = make_policy()
    whole, before = engine(policy).rollout(asks(), SAMPLING, CHAIN)
    running = engine(policy)
    dropped, after = running.rollout(asks(), SAMPLING, CHAIN, every_third_round(drafter_of(running).drop))
    assert equal(whole, dropped, "bfloat16")
    # bit for bit the same drafts: hidden states read again are those seen the first time
    assert (before.drafted, before.accepted) == (after.drafted, after.accepted)


def test_a_head_may_be_swapped_in_mid_sequence_and_leaves_no_trace(make_policy):
    policy = make_policy()
    plain, _ = engine(policy).rollout(asks(), SAMPLING)
    running = engine(policy)
    versions = itertools.count(1)

    def adopt() -> None:
        drafter_of(running).adopt(head(policy, seed=5), next(versions))

    drafted, _ = running.rollout(asks(), SAMPLING, CHAIN, every_third_round(adopt))
    assert equal(plain, drafted, "bfloat16")
    assert drafter_of(running).version > 2
    again, after = running.rollout(asks(), SAMPLING, CHAIN)
    _, fresh = engine(policy, drafting=head(policy, seed=5)).rollout(asks(), SAMPLING, CHAIN)
    assert equal(plain, again, "bfloat16")
    assert (after.drafted, after.accepted) == (fresh.drafted, fresh.accepted)


@pytest.mark.parametrize("plan", [CHAIN, COMB], ids=["chain", "comb"])
def test_a_policy_may_be_swapped_in_mid_sequence(make_policy, plan):
    """Each token is the one that the policy of its stamp draws at its place: replaying the stamps gives the same tokens."""
    policies = make_policy(dtype=torch.float64, seed=0), make_policy(dtype=torch.float64, seed=5)
    running = engine(policies[0], "float64")

    def act() -> None:
        if running.version == 0:
            swap(running, policies[1], "float64", 1)

    rollouts, stats = running.rollout(asks(), SAMPLING, plan, every_third_round(act))
    assert stats.accepted and any(len(set(rollout.version_T.tolist())) == 2 for rollout in rollouts)
    for rollout in rollouts:
        tokens = torch.tensor([*rollout.prompt.token_ids, *rollout.token_T.tolist()])
        start = len(rollout.prompt.token_ids) - 1
        with torch.no_grad():
            logits = [policy.model(input_ids=tokens[None], use_cache=False).logits[0, start:-1] for policy in policies]
        of_stamp = torch.where(torch.from_numpy(rollout.version_T == 0)[:, None], logits[0], logits[1])
        key = sequence_key(7, Stream.TRAIN, 0, rollout.prompt.row, rollout.sample)
        index = np.arange(len(rollout.token_T))
        drawn = draw(of_stamp, token_key(np.repeat(key, len(index)), index, Lane.TARGET), SAMPLING)
        assert np.array_equal(drawn.token, rollout.token_T)


def test_weights_gone_wrong_cost_speed_only(make_policy):
    policy = make_policy()
    plain, _ = engine(policy).rollout(asks(), SAMPLING)
    broken = head(policy)
    with torch.no_grad():
        broken.fc.weight.fill_(torch.nan)
    for mode in ("matching", "rejection"):
        drafted, stats = engine(policy, mode=mode, drafting=broken).rollout(asks(), SAMPLING, CHAIN)
        assert equal(plain, drafted, "bfloat16") and not stats.drafted


@pytest.mark.parametrize("plan", [Plan("eagle", 2, 1, 2), Plan("eagle", 2, 3, 5)], ids=["chain", "comb"])
def test_rejection_gives_the_targets_distribution(make_policy, plan):
    """Chi-square of the first two tokens, in 21 cells, at level 1e-4: a total variation of 0.07 is seen with power 0.99."""
    count, cells, level = 4500, 21, 1e-4
    policy = make_policy()
    # the law of float32 decoding, whose rounding is far below what can be seen
    running = engine(policy, "float32", "rejection", max_batch=500)
    prompt = Prompt(0, "", (5, 9, 14, 21))
    sampling = Sampling(3, 1.3, top_k=12)
    rollouts, stats = running.rollout([Ask(prompt, Stream.TRAIN, 0, count)], sampling, plan)
    assert 0 < stats.accepted < stats.drafted

    def law(tokens) -> np.ndarray:
        with torch.no_grad():
            logits = policy.model(input_ids=torch.tensor(tokens), use_cache=False).logits[:, -1].double().numpy()
        return np.array([process(row, sampling).p for row in logits])

    first = law([list(prompt.token_ids)])[0]
    second = law([[*prompt.token_ids, token] for token in range(48)])
    # EOS ends a completion: it has no second token
    second[1] = np.eye(48)[0]
    joint = (first[:, None] * second).ravel()
    order = np.argsort(-joint)
    cell = np.empty(48 * 48, np.int64)
    cell[order] = np.minimum((np.cumsum(joint[order]) - joint[order] / 2) * cells, cells - 1).astype(np.int64)
    pairs = [int(r.token_T[0]) * 48 + (int(r.token_T[1]) if len(r.token_T) > 1 else 0) for r in rollouts]
    expected = np.bincount(cell, joint, cells) * count
    kept = expected > 0
    seen = np.bincount(cell[pairs], minlength=cells)
    assert not seen[~kept].any()
    statistic, freedom = float(((seen - expected)[kept] ** 2 / expected[kept]).sum()), int(kept.sum()) - 1
    critical = float(chi2.isf(level, freedom))
    # ΣΔ²/p ≥ (Σ|Δ|)² = (2 TV)²
    assert ncx2.sf(critical, freedom, count * (2 * 0.07) ** 2) >= 0.99
    assert statistic < critical


def test_the_door_refuses_what_is_stale_or_of_another_model(make_policy):
    policy = make_policy()
    drafter = EagleDrafter(head(policy), torch.float32, version=2)
    with pytest.raises(StaleError, match="version 2; version 2 is not newer"):
        drafter.adopt(head(policy), 2)
    other = create_head(policy.model, range(1, 40))
    object.__setattr__(other.shape, "taps", (1,))
    with pytest.raises(ModelError, match="layers"):
        drafter.adopt(other, 3)
    request = Request(asks()[1], 0, sequence_key(7, 0, 0, 1, 0), 0)
    with pytest.raises(ModelError, match="another model"):
        drafter.observe(request, 0, torch.zeros(3, 100))
