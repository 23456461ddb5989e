"""vLLM behind our protocol, over a worker whose tokens can be foretold: what comes out is what our own engine's rollouts are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from respec.config import ModelConfig
from respec.errors import ConfigError, StaleError, TaskError, VllmError
from respec.models.eagle import EagleHead, create_head
from respec.models.load import load_policy
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.randomness import sequence_key
from respec.rollout.vllm.engine import VllmEngine
from respec.sentinel import Sentinel
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
            self.loads, self.seen, self.drawn = [], [], []

        def plan(self, load):
            self.loads.append(load.active)
            self.drawn += set(load.drawn_B)
            return PLAN if len(self.loads) == 1 else PLAIN

        def observe(self, record):
            self.seen.append(record.plan)

    heard, shown = Heard(), []
    engine().rollout(asks, Sampling(7), heard, shown.append)
    assert heard.loads == [6, 6, 6, 6] and heard.seen == [PLAN, PLAIN, PLAIN] and len(shown) == 4
    # prompts of three tokens; the fake says that contexts are of nine
    assert heard.drawn == [0, 6, 6, 6]


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


@pytest.fixture(scope="module")
def policy():
    return load_policy(ModelConfig(path="builtin:demo"))


def head_of(policy, seed: int) -> EagleHead:
    return create_head(policy.model, list(range(64)), seed=seed)


@pytest.fixture
def following(engine, policy, monkeypatch):
    """An engine whose drafter is a head of ours, and what was pushed to its vLLM: versions and weights."""
    pushed: list[tuple[int, dict[str, torch.Tensor]]] = []
    whole = VllmEngine.push_drafter

    def noted(self, weights, version):
        pushed.append((version, dict(weights)))
        whole(self, weights, version)

    monkeypatch.setattr(VllmEngine, "push_drafter", noted)
    head = EagleDrafter(head_of(policy, 0), torch.bfloat16, keeps=True)
    return engine(drafter="eagle", head=head), head, pushed


def test_weights_of_a_drafter_go_by_the_same_door_under_a_version_of_their_own(engine, asks):
    made = engine(drafter="model")
    made.push_drafter({"w": torch.ones(2)}, 4)
    made.push({"w": torch.ones(2)}, 3)
    rollouts, _ = made.rollout(asks, Sampling(3))
    assert (made.version, made.drafter_version) == (3, 4) and (rollouts[0].version_T == 3).all()
    made.push_drafter({"w": torch.ones(2)}, 2)
    assert made.drafter_version == 2, "one that did better may come back"
    assert not list(made._worker.folder.glob("*.safetensors"))


def test_a_drafter_that_vllm_does_not_hold_is_noticed_at_the_push_and_at_the_draw(engine, asks):
    with pytest.raises(VllmError, match="the drafter's weights of version 1 and says it holds those of 0"):
        engine("keeps old weights").push_drafter({"w": torch.ones(2)}, 1)
    with pytest.raises(
        VllmError, match=r"versions \(0, 1\) \(policy, drafter\); asked for were 6 of versions \(0, 0\)"
    ):
        engine("stamps another drafter").rollout(asks, Sampling(3))
    with pytest.raises(VllmError, match="vLLM has none that has any"):
        engine("has no drafter").push_drafter({"w": torch.ones(2)}, 1)


def test_vllm_drafts_with_the_head_that_came_in_last_or_came_back(following, policy, asks):
    made, head, pushed = following
    made.rollout(asks, Sampling(3))
    assert not pushed, "it was started with that one"
    first, newer = head.snapshot, head_of(policy, 1)
    head.adopt(newer, 5)
    made.rollout(asks, Sampling(3))
    made.rollout(asks, Sampling(3))
    ((version, weights),) = pushed
    assert version == made.drafter_version == 5
    assert set(weights) == {name for name, _ in newer.named_parameters()} - {"embed_tokens.weight"}
    assert torch.equal(weights["fc.weight"], newer.fc.weight.detach().bfloat16())
    head.restore(first)
    head.version = 0
    made.push({"w": torch.ones(2)}, 1)
    assert (made.version, made.drafter_version) == (1, 0), "a head that has come goes with the policy"
    assert torch.equal(pushed[-1][1]["fc.weight"], head_of(policy, 0).fc.weight.detach().bfloat16())


def test_what_the_sentinel_admits_and_remembers_is_what_vllm_drafts_with(following, engine, policy, asks):
    made, head, _ = following
    door = Sentinel(
        Plan("eagle", 4, 1, 4), made.drafters, lambda line: None, lambda: head_of(policy, 0), remembers=True
    )
    newer = head_of(policy, 0)
    with torch.no_grad():
        newer.fc.weight.mul_(1.01)
    assert door.admit(newer, 1).taken
    rollouts, _ = made.rollout(asks, Sampling(6), door.under(Sampling(6)))
    assert made.drafter_version == 1 and Proposer.EAGLE in rollouts[0].proposer_T
    again = EagleDrafter(head_of(policy, 0), torch.bfloat16, keeps=True)
    resumed = engine(drafter="eagle", head=again)
    late = Sentinel(
        Plan("eagle", 4, 1, 4), resumed.drafters, lambda line: None, lambda: head_of(policy, 0), remembers=True
    )
    late.load_state_dict(door.state_dict())
    resumed.rollout(asks, Sampling(6), late.under(Sampling(6)))
    kept, was = again.snapshot.by_name, head.snapshot.by_name
    assert resumed.drafter_version == 1 and kept is not None and was is not None
    assert all(torch.equal(weight, was[name]) for name, weight in kept.items())


def test_a_head_that_is_off_is_not_drafted_with(following, policy, asks):
    made, _, _ = following
    door = Sentinel(Plan("eagle", 4, 1, 4), made.drafters, lambda line: None, lambda: head_of(policy, 0))
    door._switch("eagle", "it is off until the next swap")
    _, stats = made.rollout(asks, Sampling(6), door.under(Sampling(6)))
    assert stats.drafted == 0
