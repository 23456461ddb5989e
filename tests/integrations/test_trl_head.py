"""A head that learns behind TRL's trainer: from rewards that TRL gives after the rollouts, without a trace in the policy; kept with its checkpoints."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from respec.config import ModelConfig
from respec.integrations.trl_lessons import rewards_of
from respec.models.eagle import create_head, load_head, save_head
from respec.models.load import load_policy

from .conftest import PROMPTS, Kept, grpo, quiet

pytest.importorskip("trl")


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    folder = tmp_path_factory.mktemp("head")
    save_head(create_head(load_policy(ModelConfig(path="builtin:demo")).model, None, 0, "builtin:demo"), folder)
    return folder


def learning(head, **drafter):
    return quiet(
        speculation={"drafter": "eagle", "s": 3, "drafter_path": head}, drafter={"learn": True, "share": 1, "lr": 0.002, **drafter}
    )  # fmt: skip


def test_a_head_learns_and_leaves_tokens_and_weights_of_the_policy_as_they_were(head, tmp_path):
    taught, plain = Kept(learning(head, judge_every=1)), Kept(quiet(speculation={"drafter": "off"}))
    settings = {"max_steps": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 1}
    # one after the other: a trainer seeds torch's generator when it is made
    with_head = grpo(tmp_path / "with", taught, **settings)
    with_head.train()
    without = grpo(tmp_path / "without", plain, **settings)
    without.train()
    assert taught.given == plain.given
    assert all(torch.equal(a, b) for a, b in zip(with_head.model.parameters(), without.model.parameters(), strict=True))
    assert with_head.model.training and with_head.model.config._attn_implementation == "sdpa"
    lines = [line for line in with_head.state.log_history if "loss" in line]
    # both generations of a step
    assert [line["respec/drafter/tokens"] for line in lines] == [
        sum(map(len, first["completion_ids"] + second["completion_ids"])) + sum(map(len, first["prompt_ids"] + second["prompt_ids"]))
        for first, second in zip(taught.given[::2], taught.given[1::2], strict=True)
    ]  # fmt: skip
    assert all(line["respec/drafter/gained"] > 0 and line["respec/drafter/failed"] == 0 for line in lines)
    assert lines[-1]["respec/drafter/overlap"] > lines[0]["respec/drafter/overlap"]
    # it lies beside the model, in the format that it was read in
    begun, kept = load_head(head), load_head(tmp_path / "with" / "drafter")
    assert not torch.equal(begun.fc.weight, kept.fc.weight)
    assert not (tmp_path / "without" / "drafter").exists()


def test_rewards_reach_the_rollouts_that_earned_them(head, tmp_path):
    """Weights by reward, of two reward functions with weights of their own, as TRL adds them up; in the order of the rollouts."""

    def odd(completion_ids, **columns):
        return [float(sum(ids) % 2) for ids in completion_ids]

    def longer(completion_ids, **columns):
        return [len(ids) / 20 for ids in completion_ids]

    rollouts = learning(head, weighting="reward")
    given, seen, kept = [], [], Kept(rollouts)
    trainer = grpo(tmp_path, kept, max_steps=2, more={"reward_funcs": [odd, longer]}, reward_weights=[1.0, 0.5])

    def before(_):
        lessons = rollouts._serving.lessons if rollouts._serving is not None else None
        if lessons is not None and not given:
            update = lessons.online.update
            learner: Any = lessons.online
            learner.update = lambda looked, step: seen.append(looked) or update(looked, step)
            given.append(True)

    kept.before = before
    trainer.train()
    (looked,) = seen
    weight_of = {tuple(e.token_L.tolist()): e.weight for e in looked.examples}
    earned = {
        (*ids, *completion): sum(completion) % 2 + 0.5 * len(completion) / 20
        for ids, completion in zip(kept.given[1]["prompt_ids"], kept.given[1]["completion_ids"], strict=True)
    }
    mean = np.mean([earned[tuple(e.token_L.tolist())] for e in looked.examples])
    assert len(looked.examples) == 8
    assert all(weight_of[key] == pytest.approx(earned[key] / mean, rel=1e-4) for key in weight_of)
    assert trainer.state.log_history[1]["respec/drafter/uniform"] == 0


def test_without_trls_log_of_rewards_all_weigh_alike():
    rewards, advantages = rewards_of(SimpleNamespace(), 3)
    assert rewards.tolist() == advantages.tolist() == [0, 0, 0]


def test_a_resumed_run_goes_on_with_the_head_and_its_learner(head, tmp_path):
    saved = {"save_strategy": "steps", "save_steps": 2, "prompts": [*PROMPTS, "2 + 2 =\n", "7 - 4 =\n"]}
    drafter = {"replay": 0.5, "share": 0.5}
    whole, stopped = Kept(learning(head, **drafter)), Kept(learning(head, **drafter))
    grpo(tmp_path / "whole", whole, max_steps=3, **saved).train()
    grpo(tmp_path / "stopped", stopped, max_steps=2, **saved).train()
    resumed = Kept(learning(head, **drafter))
    grpo(tmp_path / "stopped", resumed, max_steps=3, **saved).train(resume_from_checkpoint=True)
    assert whole.given == stopped.given + resumed.given
    ends = [load_head(tmp_path / name / "drafter") for name in ("whole", "stopped")]
    assert all(torch.equal(a, b) for a, b in zip(*(end.parameters() for end in ends), strict=True))
    # of a folder without one, the run begins with the head that was named, and says so
    said: list[str] = []
    again = learning(head, **drafter)
    again._say = said.append
    (tmp_path / "stopped/checkpoint-2/respec/optimizer.safetensors").unlink()
    grpo(tmp_path / "stopped", again, max_steps=3, **saved).train(
        resume_from_checkpoint=str(tmp_path / "stopped/checkpoint-2")
    )
    assert any("no drafter" in line for line in said)
