"""Law 1 in episodes: with the same seeds, turns and what environments answer to them are the same with speculation on and off."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from respec.models.load import Policy
from respec.policy.pack import pack
from respec.rollout.draft.model import ModelDrafter
from respec.rollout.draft.ngram import NgramDrafter
from respec.rollout.draft.previous import PreviousDrafter
from respec.rollout.draft.protocol import Drafter
from respec.rollout.draft.self_quant import SelfQuantDrafter
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.engine import Engine
from respec.rollout.replay import replay
from respec.types import (
    ENVIRONMENT,
    PLAIN,
    Answer,
    Ask,
    Finish,
    Mode,
    Plan,
    Prompt,
    Proposer,
    Rollout,
    RoundRecord,
    Sample,
    Sampling,
    ScoredRollout,
    Stream,
)
from respec.weights.publish import publish, publish_draft
from respec.weights.swap import swap

SAMPLING = Sampling(max_new_tokens=120, temperature=0.7, max_turn_tokens=9)
EOS = 1
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16}


def asks(n: int = 5, group: int = 3) -> list[Ask]:
    rng = random.Random(3)
    prompts = [Prompt(row, "", tuple(rng.randrange(3, 48) for _ in range(rng.randint(1, 40)))) for row in range(n)]
    return [Ask(prompt, Stream.TRAIN, 0, group) for prompt in prompts]


def engine(policy: Policy, dtype: str, max_batch: int = 16, drafters: Sequence[Drafter] = (), mode: Mode = "matching"):
    decoder = publish(policy, dtype, 0)
    return Engine(decoder, policy.tokenizer, policy.eos_token_ids, 7, max_batch, 64, drafters, mode)


def drafter(name: str, policy: Policy, small: Policy, dtype: str) -> Drafter:
    """`small` is the policy of the model drafter: one near the target's."""
    make = {
        "ngram": lambda: NgramDrafter(1),
        "suffix": lambda: SuffixDrafter(1, 0.1, 10_000),
        "previous": lambda: PreviousDrafter(SuffixDrafter(1, 0.1, 10_000), 10_000),
        "model": lambda: ModelDrafter(publish(small, dtype, 0), small.tokenizer, policy.tokenizer, 48),
        "self_quant": lambda: SelfQuantDrafter(publish_draft(policy, dtype, 0)),
    }
    return make[name]()


class Echo:
    """An environment that answers a turn with some of its own tokens turned round and a few that depend on it, and ends after 3 to 6 turns."""

    def __init__(self) -> None:
        self.said: dict[tuple[int, int, int], list[str]] = {}
        self.ends: list[Finish] = []

    def answer(self, ask: Ask, sample: int, said: str, finish: Finish) -> Answer:
        turns = self.said.setdefault((ask.prompt.row, ask.draw, sample), [])
        turns.append(said)
        self.ends.append(finish)
        digest = hashlib.sha256(f"{ask.prompt.row}/{sample}/{said}".encode()).digest()
        tokens = tuple(3 + byte % 45 for byte in digest[: 1 + digest[9] % 7]) + ask.prompt.token_ids[:4]
        done = len(turns) == 3 + (ask.prompt.row + sample) % 4
        return Answer(() if done else tokens, len(turns) / 2, done, done and sample == 0)


def same(one: Sequence[Rollout], other: Sequence[Rollout]) -> bool:
    return len(one) == len(other) and all(
        np.array_equal(a.token_T, b.token_T)
        and np.array_equal(a.logprob_T, b.logprob_T)
        and np.array_equal(turns(a), turns(b))
        and np.array_equal(earned(a), earned(b))
        and (a.finish, a.text, a.solved) == (b.finish, b.text, b.solved)
        for a, b in zip(one, other, strict=True)
    )


def turns(rollout: Rollout) -> np.ndarray:
    assert rollout.turn_T is not None
    return rollout.turn_T


def earned(rollout: Rollout) -> np.ndarray:
    assert rollout.turn_reward_K is not None
    return rollout.turn_reward_K


def episodes(
    policy,
    dtype: str,
    plan: Plan = PLAIN,
    drafters: Sequence[Drafter] = (),
    max_batch: int = 16,
    sampling: Sampling = SAMPLING,
    mode: Mode = "matching",
) -> tuple[Rollout, ...]:
    made = engine(policy, dtype, max_batch, drafters, mode=mode)
    return made.rollout(asks(), sampling, plan, partner=Echo())[0]


@pytest.mark.parametrize("shape", [(6, 1, 6), (4, 3, 10)], ids=["chain", "tree"])
@pytest.mark.parametrize("name", ["ngram", "suffix", "previous", "model", "self_quant"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_episodes_are_those_of_plain_decoding(make_policy, near, dtype, name, shape):
    policy = make_policy(dtype=DTYPES[dtype])
    plain = episodes(policy, dtype)
    own = drafter(name, policy, near(policy), dtype)
    own.learn(plain)
    drafted = episodes(policy, dtype, Plan(name, *shape), [own])
    assert same(plain, drafted)
    assert [turns(r).tolist() for r in plain] == [turns(r).tolist() for r in drafted]
    assert sum(int((r.proposer_T != Proposer.TARGET).sum()) for r in drafted) > 4, "nothing drafted was kept"


def test_neither_the_batch_nor_the_cache_kept_over_a_turn_changes_a_token(make_policy):
    """A swap to the same weights throws every key away, after each round: all turns are then prefilled anew."""
    policy = make_policy(dtype=torch.bfloat16)
    whole = episodes(policy, "bfloat16")
    assert same(whole, episodes(policy, "bfloat16", max_batch=2))
    made = engine(policy, "bfloat16")

    def renew(record: RoundRecord) -> None:
        swap(made, policy, "bfloat16", made.version + 1)

    anew, _ = made.rollout(asks(), SAMPLING, on_round=renew, partner=Echo())
    assert same(whole, anew) and max(r.version_T.max() for r in anew) > 10


def test_a_turn_is_the_policy_s_own_and_what_is_said_is_not(make_policy):
    policy = make_policy()
    echo = Echo()
    made = engine(policy, "float32")
    rollouts, stats = made.rollout(asks(), SAMPLING, partner=echo)
    assert stats.tokens == sum(r.drawn for r in rollouts) < sum(len(r.token_T) for r in rollouts)
    for rollout in rollouts:
        said = echo.said[rollout.key]
        heard = turns(rollout) == ENVIRONMENT
        assert (rollout.logprob_T[heard] == 0).all() and (rollout.logprob_T[~heard] < 0).all()
        assert (rollout.proposer_T[heard] == Proposer.TARGET).all()
        assert len(earned(rollout)) == len(said) == turns(rollout).max() + 1
        np.testing.assert_array_equal(earned(rollout), np.arange(1, len(said) + 1) / 2)
        assert rollout.solved == (rollout.sample == 0 and rollout.finish == "done")
        for turn, text in enumerate(said):
            own = rollout.token_T[turns(rollout) == turn]
            assert len(own) <= 9 and text == policy.tokenizer.decode(own, skip_special_tokens=True)
            assert EOS not in own[:-1]
    assert {"eos", "length"} <= set(echo.ends)


def test_the_token_limit_is_for_all_turns_together(make_policy):
    policy = make_policy()
    short = Sampling(max_new_tokens=30, temperature=0.7, max_turn_tokens=9)
    rollouts = episodes(policy, "float32", sampling=short)
    assert max(len(r.token_T) for r in rollouts) <= 30
    assert {r.finish for r in rollouts} >= {"length"}
    for rollout in rollouts:
        assert turns(rollout)[-1] != ENVIRONMENT, "nothing was drawn after what was said last"


def test_a_stop_string_ends_a_turn_and_never_reaches_back_over_it(make_policy):
    policy = make_policy()
    echo = Echo()
    stops = Sampling(max_new_tokens=120, temperature=0.9, max_turn_tokens=20, stop=("a", "bc"))
    rollouts, _ = engine(policy, "float32").rollout(asks(), stops, partner=echo)
    assert "stop" in echo.ends
    assert not any("a" in text or "bc" in text for said in echo.said.values() for text in said)
    drafted = episodes(policy, "float32", Plan("ngram", 6, 1, 6), [NgramDrafter(1)], sampling=stops)
    assert same(rollouts, drafted)


def test_at_temperature_0_rejection_gives_the_same_episodes(make_policy, near):
    policy = make_policy()
    greedy = Sampling(max_new_tokens=120, temperature=0.0, max_turn_tokens=9)
    own = drafter("model", policy, near(policy), "float32")
    plain = episodes(policy, "float32", sampling=greedy)
    drafted = episodes(policy, "float32", Plan("model", 4, 1, 4), [own], sampling=greedy, mode="rejection")
    assert [r.token_T.tolist() for r in plain] == [r.token_T.tolist() for r in drafted]


def test_drafts_survive_a_turn_and_end_with_it(make_policy):
    """One request to a drafter from the first turn to the last; nothing is drafted past the end of a turn."""
    policy = make_policy()
    finished: list[int] = []
    trees: list[tuple[int, ...]] = []

    class Spy(SuffixDrafter):
        def finish(self, request) -> None:
            finished.append(len(request.rewards))
            super().finish(request)

        def propose(self, requests, plan, limits, context):
            made = super().propose(requests, plan, limits, context)
            trees.extend(tree.until(frozenset({EOS})).token_n for tree in made)
            return made

    spy = Spy(1, 0.1, 10_000)
    plain = episodes(policy, "float32")
    spy.learn(plain)
    rollouts = episodes(policy, "float32", Plan("suffix", 8, 1, 8), [spy])
    assert len(finished) == len(rollouts) and min(finished) >= 3
    assert any(EOS in tree for tree in trees) and all(EOS not in tree[:-1] for tree in trees)
    later = [r for r in rollouts if (r.proposer_T[turns(r) >= 1] == Proposer.SUFFIX).any()]
    assert later, "no token of a later turn was drafted"


def test_a_replay_takes_what_was_said_as_given(make_policy):
    policy = make_policy()
    rollouts = [r for r in episodes(policy, "float32") if r.prompt.row == 0]
    drafter = SuffixDrafter(1, 0.1, 10_000)
    drafter.learn(rollouts)
    counts = replay(drafter, [rollouts], 8, lambda: False)
    assert counts.accepted_D[0] > 0
    # a round adds what was accepted and a token of the policy's own, but where a draft ends with its turn: nothing that was said is counted
    drawn, ended = sum(r.drawn for r in rollouts), sum(len(earned(r)) for r in rollouts)
    assert drawn <= counts.asked_D[0] + sum(counts.accepted_D) <= drawn + ended


def test_what_was_said_is_read_by_the_learner_and_not_learned(make_policy):
    policy = make_policy()
    rollouts = episodes(policy, "float32")
    samples = [
        Sample(ScoredRollout(r, 0.0, {}), np.where(r.drawn_T, np.arange(len(r.token_T)) + 1.0, 0).astype(np.float32))
        for r in rollouts
    ]
    for batch in pack(samples, 400, 0.7):
        by_key = {r.key: r for r in rollouts}
        for s, key in enumerate(batch.key_S):
            rollout, mine = by_key[key], batch.sequence_C == s
            assert mine.sum() == rollout.drawn
            np.testing.assert_array_equal(batch.target_C[mine], rollout.token_T[rollout.drawn_T])
            np.testing.assert_array_equal(batch.advantage_C[mine], np.flatnonzero(rollout.drawn_T) + 1)
            np.testing.assert_array_equal(batch.rollout_logprob_C[mine], rollout.logprob_T[rollout.drawn_T])
            place = batch.predict_C[mine] - batch.start_S[s]
            np.testing.assert_array_equal(place, len(rollout.prompt.token_ids) - 1 + np.flatnonzero(rollout.drawn_T))
