"""vLLM behind our protocol, over a worker whose tokens can be foretold: what comes out is what our own engine's rollouts are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from respec.errors import ConfigError, StaleError, TaskError, VllmError
from respec.rollout.randomness import sequence_key
from respec.types import PLAIN, Ask, Plan, Prompt, Proposer, Sampling, Stream

PLAN = Plan("ngram", 3, 1, 3)


def test_rollouts_come_in_canonical_order_each_drawn_by_its_own_seed(engine, asks):
    rollouts, stats = engine().rollout(asks, Sampling(8))
    assert [r.key for r in rollouts] == sorted(r.key for r in rollouts) and len(rollouts) == 6
    seeds = [int(sequence_key(0, Stream.TRAIN, 0, r.prompt.row, r.sample)[0]) % 2**63 for r in rollouts]
    assert [int(r.token_T[0]) for r in rollouts] == [seed % 97 for seed in seeds]
    assert stats.tokens == 48 and stats.prompt_tokens == 18 and stats.accepted == 0
    assert all(r.finish == "length" and (r.kept_logmass_T == 0).all() and (r.version_T == 0).all() for r in rollouts)


def test_a_step_verifies_what_was_planned_before_the_step_ahead_of_it(engine, asks):
    rollouts, stats = engine().rollout(asks, Sampling(9), PLAN)
    assert [record.plan for record in stats.round_R] == [PLAIN, PLAN, PLAN]
    assert [record.accepted_D for record in stats.round_R] == [(), (6, 6, 6), (6, 6, 6)]
    assert stats.round_R[0].verify_s == 0.0 and stats.prefill_s > 0
    # one token by the prompt, then four a step, of which the last is the target's own
    mine = [Proposer.TARGET, *([Proposer.NGRAM] * 3 + [Proposer.TARGET]) * 2]
    assert all(r.proposer_T.tolist() == mine and r.round_T.tolist() == [0] + [1] * 4 + [2] * 4 for r in rollouts)
    assert stats.accepted_length == pytest.approx(54 / 18)


def test_a_planner_is_asked_before_every_step_and_told_of_those_without_prompts(engine, asks):
    class Heard:
        predicted = 5.0

        def __init__(self) -> None:
            self.loads, self.seen = [], []

        def plan(self, load):
            self.loads.append(load.active)
            return PLAN if len(self.loads) == 1 else PLAIN

        def observe(self, record):
            self.seen.append(record.plan)

    heard, shown = Heard(), []
    engine().rollout(asks, Sampling(7), heard, shown.append)
    assert heard.loads == [6, 6, 6, 6] and heard.seen == [PLAN, PLAIN, PLAIN] and len(shown) == 4


def test_a_draft_that_goes_on_past_the_end_is_cut_where_plain_decoding_stops(engine, asks):
    plain, _ = engine().rollout(asks[:1], Sampling(8))
    end = int(plain[0].token_T[2])
    cut, _ = engine(eos=(end,)).rollout(asks[:1], Sampling(8), PLAN)
    assert cut[0].token_T.tolist() == plain[0].token_T[:3].tolist() and cut[0].finish == "eos"
    assert len(cut[0].logprob_T) == len(cut[0].entropy_T) == 3


def test_newer_weights_are_pushed_and_stamp_what_is_drawn_after_them(engine, asks):
    made = engine()
    made.push({"w": torch.ones(2)}, 3)
    rollouts, _ = made.rollout(asks, Sampling(3))
    assert made.version == 3 and all((r.version_T == 3).all() for r in rollouts)
    with pytest.raises(StaleError, match="version 3 is not newer"):
        made.push({"w": torch.ones(2)}, 3)
    assert not list(made._worker.folder.glob("*.safetensors")), "the snapshot's memory is given back"


def test_weights_that_vllm_does_not_hold_are_noticed_at_the_push_and_at_the_draw(engine, asks):
    with pytest.raises(VllmError, match="the policy's weights of version 1 and says it holds those of 0"):
        engine("keeps old weights").push({"w": torch.ones(2)}, 1)
    with pytest.raises(
        VllmError, match=r"versions \(1, 0\) \(policy, drafter\); asked for were 6 of versions \(0, 0\)"
    ):
        engine("stamps another version").rollout(asks, Sampling(3))


def test_a_drafter_that_cannot_be_steered_drafts_always_and_is_not_left_off(engine, asks):
    made = engine(drafter="suffix", steered=False)
    rollouts, stats = made.rollout(asks, Sampling(6), Plan("suffix", 2, 1, 2))
    assert stats.round_R[1].plan == Plan("suffix", 4, 1, 4) and Proposer.SUFFIX in rollouts[0].proposer_T
    with pytest.raises(ConfigError, match="cannot leave off drafting with 'suffix'"):
        made.rollout(asks, Sampling(6), PLAIN)


def test_what_vllm_cannot_do_is_refused_before_it_is_asked(engine, asks):
    made = engine()
    with pytest.raises(ConfigError, match="top_k"):
        made.rollout(asks, Sampling(4, top_k=5))
    with pytest.raises(ConfigError, match="drafts with 'suffix', vLLM was started with drafter 'ngram'"):
        made.rollout(asks, Sampling(4), Plan("suffix", 2, 1, 2))
    with pytest.raises(TaskError, match="no tokens"):
        engine().rollout([Ask(Prompt(0, "", ()), Stream.TRAIN, 0, 1)], Sampling(4))
    assert made.rollout([], Sampling(4))[0] == ()


def test_log_probabilities_and_entropies_come_token_by_token(engine, asks):
    rollouts, _ = engine().rollout(asks, Sampling(5))
    assert all(np.allclose(r.logprob_T, -0.5) and np.allclose(r.entropy_T, 0.5) for r in rollouts)
