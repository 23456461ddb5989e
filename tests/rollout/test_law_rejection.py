"""Law 1 (`rejection`): equal to plain decoding in distribution, by enumeration on a tiny vocabulary and by a test of stated power."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch
from scipy.stats import chi2, ncx2, norm

from respec.models.decoder import Decoder
from respec.rollout import verify
from respec.rollout.draft.comb import Comb, grow, widths
from respec.rollout.draft.protocol import DraftContext
from respec.rollout.engine import Engine
from respec.rollout.kv_cache import KVCache
from respec.rollout.randomness import Lane, sequence_key, token_key, uniform
from respec.rollout.request import Request
from respec.rollout.sampling import process, race
from respec.rollout.tree import DraftTree
from respec.rollout.verify import judge_children
from respec.types import Ask, Plan, Prompt, Proposer, Rollout, Sampling, Stream
from respec.weights.publish import publish

LEVEL, POWER, BIAS = 1e-4, 0.99, 0.01
V = 5


def drawn_sets(q: np.ndarray, count: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """All ordered sets of `count` tokens (fewer where q has fewer) drawn from q without replacement, with their probabilities."""
    if count == 0 or q.sum() <= 0:
        yield (), 1.0
        return
    for token in np.flatnonzero(q):
        rest = q.copy()
        rest[token] = 0.0
        share = q[token] / q.sum()
        for others, mass in drawn_sets(rest, count - 1):
            yield (int(token), *others), share * mass


def without(q: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    q = q.copy()
    q[list(tokens)] = 0.0
    return q / q.sum()


def outcomes(p: np.ndarray, children: Sequence[int], law: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """(probability that each child stands, law of the token where none does, times its probability), all accept numbers integrated out.

    Child j is to stand for accept numbers below min(1, p_j / q_j): judge_children is asked on either side of that.
    """
    stands, reach, falls = np.zeros(len(children)), 1.0, np.ones(len(children))
    left = p
    for j, token in enumerate(children):
        left = judge_children(p, children[:j], law, falls[:j])[1]
        q = 1.0 if law is None else without(law, children[:j])[token]
        threshold = min(1.0, left[token] / q)
        assert (
            threshold < 1e-12 or judge_children(p, children[: j + 1], law, np.r_[falls[:j], threshold - 1e-12])[0] == j
        )
        assert (
            threshold == 1 or judge_children(p, children[: j + 1], law, np.r_[falls[:j], threshold + 1e-12])[0] is None
        )
        stands[j] = reach * threshold
        reach *= 1 - threshold
        if reach <= 0:
            return stands, np.zeros_like(p)
        left = judge_children(p, children[: j + 1], law, falls[: j + 1])[1]
    return stands, reach * left


def output_law(p: np.ndarray, q: np.ndarray, count: int, drawn: bool = True) -> np.ndarray:
    """The law of the token that comes out of a node with `count` children drawn from q; else the `count` most probable, deterministic."""
    total = np.zeros_like(p)
    looked_up = [(tuple(np.argsort(-q)[:count].tolist()), 1.0)]
    for children, mass in drawn_sets(q, count) if drawn else looked_up:
        stands, left = outcomes(p, children, q if drawn else None)
        total += mass * left
        for token, share in zip(children, stands, strict=True):
            total[token] += mass * share
    return total


def laws(seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.dirichlet(np.full(V, 0.7)), rng.dirichlet(np.full(V, 0.7))


@pytest.mark.parametrize("count", [1, 2, 3, V])
@pytest.mark.parametrize("drawn", [True, False], ids=["drawn", "deterministic"])
def test_the_output_law_of_a_set_of_siblings_is_the_targets(count, drawn):
    for seed in range(3):
        p, q = laws(seed)
        assert np.abs(output_law(p, q, count, drawn) - p).max() < 1e-12


ONE = np.eye(V)
THIRDS = np.array([1, 1, 1, 0, 0]) / 3
EDGES = {
    "q is p": (THIRDS, THIRDS),
    "one-hot p, temperature 0": (ONE[2], THIRDS),
    "one-hot p and q": (ONE[2], ONE[2]),
    "one-hot p, another one-hot q": (ONE[2], ONE[0]),
    "supports apart": (np.array([0, 0, 0, 0.4, 0.6]), THIRDS),
    "q runs out of mass before p": (np.array([0.1, 0.2, 0.3, 0.3, 0.1]), np.array([0.5, 0.5, 0, 0, 0])),
    "truncated p": (np.array([0.75, 0.25, 0, 0, 0]), np.full(V, 0.2)),
    "nearly all of q on one": (np.array([0.5, 0.5, 0, 0, 0]), np.array([1 - 4e-9, 1e-9, 1e-9, 1e-9, 1e-9])),
}


@pytest.mark.parametrize("name", EDGES)
@pytest.mark.parametrize("count", [1, 2, 3, V])
def test_the_law_holds_at_the_edges(name, count):
    p, q = EDGES[name]
    for drawn in (True, False):
        assert np.abs(output_law(p, q, count, drawn) - p).max() < 1e-12


def test_top_k_cuts_target_and_draft_alike():
    logits = np.random.default_rng(0).normal(size=(2, V))
    for sampling in (Sampling(1, 1.0, top_k=2), Sampling(1, 0.5, top_p=0.7), Sampling(1, 0.0)):
        p, q = (process(row, sampling).p for row in logits)
        for count in (1, 2, 3):
            assert np.abs(output_law(p, q, count) - p).max() < 1e-12


def test_a_first_sibling_stands_with_one_minus_the_total_variation():
    p, q = laws(4)
    stands = sum(mass * outcomes(p, children, q)[0][0] for children, mass in drawn_sets(q, 1))
    assert abs(stands - np.minimum(p, q).sum()) < 1e-12


@pytest.mark.parametrize("count", [1, 2, 3])
def test_two_tokens_of_a_comb_have_the_joint_law(count):
    """Children of the pending token, the first of them continued: the second token comes from its children, or from the target."""
    rng = np.random.default_rng(5)
    p, q = laws(6)
    p_after, q_after = (rng.dirichlet(np.ones(V), size=V) for _ in range(2))
    second = np.stack([output_law(p_after[x], q_after[x], count) for x in range(V)])
    joint = np.zeros((V, V))
    for children, mass in drawn_sets(q, count):
        stands, left = outcomes(p, children, q)
        for j, (token, share) in enumerate(zip(children, stands, strict=True)):
            joint[token] += mass * share * (second[token] if j == 0 else p_after[token])
        joint += mass * left[:, None] * p_after
    assert np.abs(joint - p[:, None] * p_after).max() < 1e-12


def target_and_draft(make_policy) -> tuple[np.ndarray, np.ndarray]:
    """The tiny policy's law after a prompt, and that of another policy, for a draft."""
    laws = []
    for seed in (0, 1):
        decoder = publish(make_policy(seed=seed), "float32", 0)
        cache = KVCache(decoder.shape, 1, 16)
        hidden = decoder.hidden(np.array([5, 9, 30]), np.zeros(3, np.int64), np.arange(3), cache).hidden
        laws.append(process(decoder.logits(hidden)[-1].double().numpy(), Sampling(1, 0.7)).p)
    return laws[0], laws[1]


def keys(n: int, lane: Lane) -> np.ndarray:
    sequence = np.concatenate([sequence_key(0, 0, 0, 0, 0)] * n) + np.arange(n, dtype=np.uint64)
    return token_key(sequence, np.zeros(n, np.int64), lane)


def outputs(p: np.ndarray, q: np.ndarray, children: np.ndarray, lenience: float = 1.0) -> np.ndarray:
    """Counts of the tokens that come out of one position for many keys, by the verifier and its own lanes of numbers."""
    n, count = children.shape
    accept = uniform(keys(n, Lane.ACCEPT)[:, None], np.arange(count, dtype=np.uint64)) / lenience
    residual = keys(n, Lane.RESIDUAL)
    found = np.zeros(len(p))
    for row, tokens in enumerate(children.tolist()):
        stands, left = judge_children(p, tokens, q, accept[row])
        found[tokens[stands] if stands is not None else int(race(left, residual[row : row + 1], 1)[0])] += 1
    return found


def lenient_law(p: np.ndarray, q: np.ndarray, lenience: float) -> np.ndarray:
    """What comes out of a chain where a verifier accepts with min(1, lenience p / q), the residual unchanged."""
    kept, left = np.minimum(q, lenience * p), np.maximum(p - q, 0)
    return kept + (1 - kept.sum()) * left / left.sum()


def test_a_bias_of_one_percent_is_caught_and_there_is_none(make_policy):
    """Pearson's chi-square over all 48 tokens of n = 250,000 draws at one position, two siblings each; seeds fixed.

    Under a bias d of total variation at least 0.01 the statistic is noncentral with n sum d_i^2 / p_i >= n (sum |d_i|)^2 = 4 n TV^2 (Cauchy-
    Schwarz), whatever the bias's shape: at level 1e-4 the power is at least 0.99, worked out below from the noncentral chi-square. A
    verifier that accepts too often, by as much as makes TV 0.01, fails the same test.
    """
    n, freedom = 250_000, 47
    critical = chi2.isf(LEVEL, freedom)
    assert ncx2.sf(critical, freedom, 4 * BIAS**2 * n) > POWER
    p, q = target_and_draft(make_policy)
    assert (p * n).min() > 5 and np.abs(p - q).sum() / 2 > 0.2
    draft = keys(n, Lane.DRAFT)
    parts = (-np.log(uniform(part[:, None], np.arange(48, dtype=np.uint64))) / q for part in np.array_split(draft, 20))
    children = np.concatenate([np.argpartition(part, (0, 1), axis=1)[:, :2] for part in parts])
    assert all(np.array_equal(race(q, draft[i : i + 1], 2), children[i]) for i in range(100))

    def statistic(counts: np.ndarray) -> float:
        return float(((counts - n * p) ** 2 / (n * p)).sum())

    assert statistic(outputs(p, q, children)) < critical
    lenience = next(x for x in np.arange(1, 2, 1e-3) if np.abs(lenient_law(p, q, x) - p).sum() / 2 >= BIAS)
    assert statistic(outputs(p, q, children[:, :1], lenience)) > critical


class TableDrafter:
    """Draws from a fixed law by the last token: a drafter whose distribution is known, and wrong."""

    name = "table"

    def __init__(self) -> None:
        self.law = np.random.default_rng(1).dirichlet(np.full(48, 0.5), size=48)

    def propose(
        self, requests: Sequence[Request], plan: Plan, limits: Sequence[int], context: DraftContext
    ) -> list[DraftTree]:
        combs = [Comb(request, widths(plan, limit)) for request, limit in zip(requests, limits, strict=True)]
        while growing := [comb for comb in combs if comb.wants]:
            last = [comb.chain[-1] if comb.chain else comb.request.pending for comb in growing]
            grow(growing, torch.from_numpy(np.log(self.law[last]) * 0.7), context)
        return [comb.tree(Proposer.MODEL) for comb in combs]

    def finish(self, request: Request) -> None: ...

    def learn(self, rollouts: Sequence[Rollout]) -> None: ...

    def drop(self) -> None: ...


def excess(
    rollouts: Sequence[Rollout], decoder: Decoder, law: np.ndarray, temperature: float
) -> tuple[float, float, int]:
    """How much more often than p says tokens came that the draft's law overrates (q > p): z, the sum of variances, tokens.

    Each token is held against p after its own prefix, so that tokens of any place add up.
    """
    seen = expected = variance = 0.0
    cache = KVCache(decoder.shape, 1, 64)
    for rollout in rollouts:
        tokens = np.array([*rollout.prompt.token_ids, *rollout.token_T], np.int64)
        hidden = decoder.hidden(tokens, np.zeros(len(tokens), np.int64), np.arange(len(tokens)), cache).hidden
        first = len(rollout.prompt.token_ids)
        p = torch.softmax(decoder.logits(hidden[first - 1 : -1]).double() / temperature, 1).numpy()
        overrated = law[tokens[first - 1 : -1]] > p
        mass = (p * overrated).sum(1)
        seen += overrated[np.arange(len(p)), rollout.token_T].sum()
        expected, variance = expected + mass.sum(), variance + (mass * (1 - mass)).sum()
    return (seen - expected) / variance**0.5, variance, sum(len(rollout.token_T) for rollout in rollouts)


@pytest.mark.parametrize("plan", [Plan("table", 3, 1, 3), Plan("table", 3, 3, 7)], ids=["chain", "comb"])
def test_whole_completions_have_the_targets_law(make_policy, monkeypatch, plan):
    """End to end through the engine, every token under its own prefix: a two-sided z-test at level 1e-4 of whether tokens that the
    draft overrates come too often, which is where a wrong acceptance shows. A bias that moves a mass b from underrated to overrated
    tokens shifts z by b n / sqrt(variance): with n of about 6,000 tokens 0.04 is caught with power 0.99 (asserted from the run's own
    variance). A verifier that takes 0.8 of the accept number fails.
    """
    decoder, sampling, drafter = publish(make_policy(), "float32", 0), Sampling(30, 0.7), TableDrafter()
    asks = [Ask(Prompt(row, "", (3 + row, 9)), Stream.TRAIN, 0, 40) for row in range(6)]

    def measure() -> tuple[float, float, int]:
        engine = Engine(decoder, make_policy().tokenizer, (1,), 3, 120, drafters=[drafter], mode="rejection")
        rollouts, stats = engine.rollout(asks, sampling, plan)
        assert 0 < stats.accepted < stats.drafted
        return excess(rollouts, decoder, drafter.law, 0.7)

    z, variance, n = measure()
    assert 0.04 * n / variance**0.5 - norm.isf(LEVEL / 2) > norm.isf(1 - POWER)
    assert abs(z) < norm.isf(LEVEL / 2)
    monkeypatch.setattr(verify, "uniform", lambda key, index: 0.8 * uniform(key, index))
    assert abs(measure()[0]) > norm.isf(LEVEL / 2)
