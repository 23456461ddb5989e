"""Mode `lossy`: its law and its weights by enumeration through the verifier, and what the engine makes of it end to end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from respec.models.load import Policy
from respec.policy.pack import lay_out
from respec.rollout import verify
from respec.rollout.draft.previous import PreviousDrafter
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.engine import Engine
from respec.rollout.kv_cache import KVCache
from respec.rollout.lenient import Followed, Lenience, kept_probability, output_law, record
from respec.rollout.randomness import Lane, sequence_key, token_key
from respec.rollout.request import Request
from respec.rollout.sampling import process
from respec.rollout.tree import DraftTree, flatten
from respec.rollout.verify import Verdict
from respec.types import PLAIN, Ask, Mode, Plan, Prompt, Proposer, Rollout, Sampling, Stream
from respec.weights.publish import publish
from respec.weights.swap import swap

V = 5
LENIENCE = (1.0, 1.4, 3.0)
SAMPLINGS = {"whole": Sampling(8), "top_k": Sampling(8, 0.8, top_k=3)}
ASKED = Ask(Prompt(0, "", (1,)), Stream.TRAIN, 1, 1)


def logits(seed: int, count: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(count, V)) * 1.5)


def laws(rows: torch.Tensor, sampling: Sampling) -> list[np.ndarray]:
    return [process(row.numpy(), sampling).p for row in rows]


def judged(
    target: torch.Tensor, old: Sequence[int], q: Sequence[np.ndarray], lenience: float, accepts: Sequence[float], sequence: int,
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch,
) -> Verdict:  # fmt: skip
    """The verifier on an answer `old` of as many places as `target` has rows, at given accept numbers and under one sequence's key."""
    request = Request(ASKED, 0, sequence_key(sequence, 0, 0, 0, 0), 0, slot=0)
    law = record(np.stack(q), np.array(old, np.int32), V)
    tree = DraftTree.chain(old[:-1], Proposer.PREVIOUS, Followed(np.array(old, np.int32), law))
    flat = flatten([request], [tree])
    lanes = {int(token_key(request.key, np.array([t]), Lane.ACCEPT)[0]): number for t, number in enumerate(accepts)}
    monkeypatch.setattr(verify, "uniform", lambda key, index: np.array([lanes[int(one)] for one in key]))
    (verdict,) = verify.verify([tree], flat, target, "lossy", sampling, Lenience(lenience, V))
    return verdict


def outcomes(
    target: torch.Tensor, q: np.ndarray, lenience: float, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[int, int, bool, float, float]]:
    """Of one place, exhaustively: (old token, token that comes out, whether it was kept, probability, weight), the accept number
    integrated out: the verifier is asked on either side of where it is to change its mind.
    """
    (p,) = laws(target, sampling)
    for y in np.flatnonzero(q).tolist():
        threshold = float(kept_probability(p[y], q[y], lenience))

        def at(accept: float, sequence: int = 0, y: int = y) -> Verdict:
            return judged(target, [y], [q], lenience, [accept], sequence, sampling, monkeypatch)

        if threshold > 0:
            verdict = at(threshold - 1e-6)
            assert verdict.draws.token.tolist() == [y] and verdict.kept == 1 and not verdict.path
            yield y, y, True, q[y] * threshold, verdict.weighed(0)[0]
        if threshold < 1:
            seen: dict[int, float] = {}
            for sequence in range(400):
                verdict = at(threshold + 1e-6, sequence)
                assert verdict.kept == 0
                seen[int(verdict.draws.token[0])] = verdict.weighed(0)[0]
                if set(seen) == set(np.flatnonzero(p)):
                    break
            assert set(seen) == set(np.flatnonzero(p))
            for x, w in seen.items():
                yield y, x, False, q[y] * (1 - threshold) * p[x], w


@pytest.mark.parametrize("lenience", LENIENCE)
@pytest.mark.parametrize("name", SAMPLINGS)
def test_what_the_verifier_lets_out_has_the_stated_law_and_its_weights_undo_it(monkeypatch, lenience, name):
    """For a draft that is independent of the policy, sum out * w * f = sum p * f for every f, here for the indicator of each token."""
    sampling = SAMPLINGS[name]
    for seed in range(3):
        target = logits(seed, 1)
        (p,), (q,) = laws(target, sampling), laws(logits(100 + seed, 1), sampling)
        out, weighted = np.zeros(V), np.zeros(V)
        for _, x, _, probability, w in outcomes(target, q, lenience, sampling, monkeypatch):
            out[x] += probability
            weighted[x] += probability * w
        assert np.abs(out - output_law(p, q, lenience)).max() < 1e-6
        assert np.abs(weighted - p).max() < 1e-6
        assert np.abs(out - p).max() > 1e-3


def test_two_places_are_judged_each_by_its_own_number_and_the_second_only_if_the_first_is_kept(monkeypatch):
    sampling, lenience = Sampling(8), 1.4
    target = logits(7, 2)
    p, q = laws(target, sampling), laws(logits(8, 2), sampling)
    for y in range(V):
        for z in range(V):
            first, second = (float(kept_probability(p[i][t], q[i][t], lenience)) for i, t in enumerate((y, z)))

            def at(*accepts: float, y: int = y, z: int = z) -> Verdict:
                return judged(target, [y, z], q, lenience, accepts, 3, sampling, monkeypatch)

            both = at(first - 1e-6, second - 1e-6)
            assert both.draws.token.tolist() == [y, z] and both.kept == 2 and both.path == (0,)
            if second < 1:
                one = at(first - 1e-6, second + 1e-6)
                assert (
                    one.draws.token[0] == y
                    and one.kept == 1
                    and one.path == (0,)
                    and one.weight_T is not None
                    and len(one.weight_T) == 2
                )
                assert both.weighed(0)[0] == one.weighed(0)[0]
            if first < 1:
                none = at(first + 1e-6, second - 1e-6)
                assert len(none.draws.token) == 1 and none.kept == 0 and none.path == ()


SAMPLING = Sampling(max_new_tokens=24, temperature=0.7)


def asks(draw: int, stream: Stream = Stream.TRAIN) -> list[Ask]:
    return [Ask(Prompt(row, "", (3 + row, 9)), stream, draw, 4) for row in range(5)]


def previous() -> PreviousDrafter:
    return PreviousDrafter(SuffixDrafter(1, 0.1, 10_000), 10_000)


def engine(
    policy: Policy, batch: int = 16, mode: Mode = "lossy", dtype: str = "float32", factor: float = 1.3
) -> Engine:
    return Engine(
        publish(policy, dtype, 0), policy.tokenizer, policy.eos_token_ids, 7, batch, drafters=[previous()], mode=mode,
        lenience=Lenience(factor, 16),
    )  # fmt: skip


def plan(s: int) -> Plan:
    return Plan("previous", s, 1, s)


def equal(one: Sequence[Rollout], other: Sequence[Rollout]) -> bool:
    return all(
        np.array_equal(a.token_T, b.token_T) and np.array_equal(a.logprob_T, b.logprob_T)
        for a, b in zip(one, other, strict=True)
    )


def weights(rollout: Rollout) -> np.ndarray:
    assert rollout.weight_T is not None
    return rollout.weight_T


def second_epoch(running: Engine, new: Policy, s: int = 4) -> tuple[tuple[Rollout, ...], tuple[Rollout, ...]]:
    """An epoch of one policy, then one of another that follows its answers."""
    first, _ = running.rollout(asks(0), SAMPLING, plan(s))
    running.drafters["previous"].learn(first)
    swap(running, new, "float32", version=1)
    return first, running.rollout(asks(1), SAMPLING, plan(s))[0]


def test_without_old_answers_it_is_plain_decoding_and_records_what_it_drew_from(make_policy):
    policy = make_policy()
    running = engine(policy)
    first, _ = running.rollout(asks(0), SAMPLING, plan(4))
    plain, _ = running.rollout(asks(0), SAMPLING, PLAIN)
    assert equal(first, plain)
    assert all(r.weight_T is None and r.law_TK is None for r in plain)
    for rollout in first:
        assert rollout.weight_T is not None and (rollout.weight_T == 1).all()
        assert rollout.law_TK is not None and rollout.law_TK.shape == (len(rollout.token_T), 16)
        own = rollout.law_TK["token"] == rollout.token_T[:, None]
        assert (own.sum(1) == 1).all()
        assert np.abs(rollout.law_TK["logp"][own] - (rollout.logprob_T - rollout.kept_logmass_T)).max() < 1e-5
        assert (np.exp(rollout.law_TK["logp"]).sum(1) < 1 + 1e-5).all()


def test_answers_of_the_same_policy_come_out_again_at_weight_one(make_policy):
    policy = make_policy()
    first, second = second_epoch(engine(policy), policy)
    for old, rollout in zip(first, second, strict=True):
        assert np.array_equal(old.token_T, rollout.token_T) and np.abs(old.logprob_T - rollout.logprob_T).max() < 1e-6
        assert (rollout.proposer_T == Proposer.PREVIOUS).all()
        assert rollout.weight_T is not None and np.abs(rollout.weight_T - 1).max() < 1e-5


def test_answers_are_followed_up_to_the_first_token_drawn_anew_and_weighed_so_far(make_policy, near):
    policy = make_policy()
    first, second = second_epoch(engine(policy), near(policy, 0.3))
    ends = []
    for old, new in zip(first, second, strict=True):
        kept = new.proposer_T == Proposer.PREVIOUS
        end = int(kept.argmin()) if not kept.all() else len(kept)
        ends.append(end < len(kept))
        assert not kept[end:].any() and np.array_equal(new.token_T[:end], old.token_T[:end])
        assert new.weight_T is not None and (new.weight_T > 0).all() and (new.weight_T[end + 1 :] == 1).all()
        # the place drawn anew has a weight of its own
        assert end == len(kept) or end >= len(old.token_T) or new.weight_T[end] != 1
    assert any(ends) and sum(np.ptp(weights(new)) > 0.01 for new in second) > 5


def test_log_probabilities_are_the_targets_own(make_policy, near):
    policy, new = make_policy(), near(make_policy(), 0.3)
    _, rollouts = second_epoch(engine(policy), new)
    decoder = publish(new, "float32", 1)
    cache = KVCache(decoder.shape, 1, 64)
    for rollout in rollouts:
        tokens = np.array([*rollout.prompt.token_ids, *rollout.token_T], np.int64)
        hidden = decoder.hidden(tokens, np.zeros(len(tokens), np.int64), np.arange(len(tokens)), cache).hidden
        logp = torch.log_softmax(decoder.logits(hidden[1:-1]).double() / 0.7, 1).numpy()
        assert np.abs(logp[np.arange(len(logp)), rollout.token_T] - rollout.logprob_T).max() < 1e-5
        assert (rollout.version_T == 1).all()


@pytest.mark.parametrize("s", [1, 3, 16])
@pytest.mark.parametrize("batch", [2, 32])
def test_what_comes_out_depends_neither_on_the_drafts_length_nor_on_the_batch(make_policy, near, s, batch):
    policy = make_policy()
    _, one = second_epoch(engine(policy), near(policy, 0.3))
    _, other = second_epoch(engine(policy, batch), near(policy, 0.3), s)
    assert equal(one, other)
    assert all(np.array_equal(weights(a), weights(b)) for a, b in zip(one, other, strict=True))
    assert all(
        np.array_equal(a.proposer_T == Proposer.PREVIOUS, b.proposer_T == Proposer.PREVIOUS)
        for a, b in zip(one, other, strict=True)
    )


def test_the_more_lenient_the_more_is_kept(make_policy, near):
    policy = make_policy()
    kept = []
    for factor in (1.0, 2.0, 1e6):
        _, second = second_epoch(engine(policy, factor=factor), near(policy, 0.3))
        kept.append(sum(int((r.proposer_T == Proposer.PREVIOUS).sum()) for r in second))
    assert kept == sorted(kept) and kept[0] < kept[-1] == sum(len(r.token_T) for r in second)


def test_evaluation_is_never_followed(make_policy):
    policy = make_policy()
    running = engine(policy)
    first, _ = running.rollout(asks(0), SAMPLING, plan(4))
    running.drafters["previous"].learn(first)
    drafted, _ = running.rollout(asks(0, Stream.EVAL), SAMPLING, plan(4))
    plain, _ = running.rollout(asks(0, Stream.EVAL), SAMPLING, PLAIN)
    assert equal(drafted, plain)
    assert all(r.weight_T is not None and (r.weight_T == 1).all() for r in drafted)


@pytest.mark.parametrize("mode", ["matching", "rejection"])
def test_in_the_other_modes_every_weight_is_one(make_policy, near, mode):
    policy = make_policy()
    _, second = second_epoch(engine(policy, mode=mode), near(policy, 0.1))
    assert any((r.proposer_T != Proposer.TARGET).any() for r in second)
    assert all(r.weight_T is None and r.law_TK is None for r in second)
    batch = lay_out([r.prompt.token_ids for r in second], [r.token_T for r in second], 0.7)
    assert (batch.weight_C == 1).all()


@pytest.mark.parametrize("sampling", [Sampling(24, 0.7), Sampling(24, 1.3, top_k=5), Sampling(24, 0.0)], ids=str)
def test_the_laws_of_many_rows_are_those_of_each(sampling):
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(7, 300)) * 3)
    many = verify._laws(rows, np.array([4, 0, 6]), sampling)
    for i, row in enumerate((4, 0, 6)):
        one = process(rows[row].numpy(), sampling)
        for name in ("logp", "p", "kept_logmass", "entropy"):
            assert np.abs(getattr(many, name)[i] - getattr(one, name)).max() < 1e-12
        alone = verify._laws(rows, np.array([row]), sampling)
        assert np.array_equal(alone.p[0], many.p[i]) and np.array_equal(alone.logp[0], many.logp[i])


def test_at_temperature_zero_an_answer_stands_where_it_is_the_argmax(make_policy, near):
    policy, greedy = make_policy(), Sampling(24, 0.0)
    running = engine(policy)
    first, _ = running.rollout(asks(0), greedy, plan(4))
    running.drafters["previous"].learn(first)
    swap(running, near(policy, 0.1), "float32", version=1)
    second, _ = running.rollout(asks(1), greedy, plan(4))
    plain, _ = running.rollout(asks(1), greedy, PLAIN)
    assert all(np.array_equal(a.token_T, b.token_T) for a, b in zip(second, plain, strict=True))
    assert any((r.proposer_T == Proposer.PREVIOUS).any() for r in second)
    assert all(np.abs(weights(r) - 1).max() < 1e-6 for r in second)
