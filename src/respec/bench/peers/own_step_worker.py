"""Whole RL steps of ours, one a request, in a process of their own, so that their memory can be told. Run by our own interpreter."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from respec.adaptive import make_planner
from respec.bench.peers.wire import Request, Wire, distinct_words, peak_memory
from respec.config import ModelConfig, PolicyConfig, SpeculationConfig
from respec.drafting import make_drafters
from respec.models.load import Policy, load_policy
from respec.policy.advantages import advantages
from respec.policy.learner import PolicyLearner
from respec.policy.presets import resolve
from respec.rollout.engine import Engine
from respec.rollout.planner import Planner
from respec.types import Ask, Plan, Prompt, Sampling, ScoredRollout, Stream
from respec.weights.publish import publish
from respec.weights.swap import swap


@dataclass(frozen=True)
class Setup:
    """The stages of a step, and what each step asks for."""

    policy: Policy
    engine: Engine
    planner: Plan | Planner
    learner: PolicyLearner
    config: PolicyConfig
    prompts: tuple[Prompt, ...]
    group: int
    sampling: Sampling


def main() -> None:
    """Sets up at the first request, and takes a step at each one after it."""
    wire = Wire()
    request, steps = wire.receive(), 0
    if request is None:
        return
    try:
        setup = set_up(request)
        wire.send({"versions": {"torch": torch.__version__}})
        while wire.receive() is not None:
            wire.send(step(setup, steps))
            steps += 1
    except Exception as error:
        wire.fail(error)


def set_up(request: Request) -> Setup:
    torch.set_num_threads(request["threads"])
    policy = load_policy(ModelConfig(path=request["model"], device="cpu"))
    tokenizer: Any = policy.tokenizer
    prompts = tuple(Prompt(i, text, tuple(tokenizer(text)["input_ids"])) for i, text in enumerate(request["prompts"]))
    sampling, batch = Sampling(request["new_tokens"]), request["group"] * len(prompts)
    decoder, speculation = publish(policy, "auto", 0), SpeculationConfig(drafter=request["speculation"])
    drafters = make_drafters(speculation, policy, "auto")
    # no token ends a completion: both sides draw as many
    engine = Engine(decoder, policy.tokenizer, (), 0, batch, drafters=drafters)
    context = len(prompts[0].token_ids) + sampling.max_new_tokens // 4
    planner = make_planner(speculation, decoder, policy.tokenizer, drafters, batch, context, lambda _: None)
    config = PolicyConfig(lr=request["lr"], dtype=request.get("learner", "float32"))
    learner = PolicyLearner(policy, config, request["steps"], sampling.max_new_tokens)
    return Setup(policy, engine, planner, learner, config, prompts, request["group"], sampling)


def step(setup: Setup, done: int) -> dict[str, Any]:
    """Rollouts, rewards, advantages, update, weights to the engine, histories to its drafters, after `done` such steps."""
    began = time.perf_counter()
    asks = [Ask(prompt, Stream.TRAIN, done, setup.group) for prompt in setup.prompts]
    rollouts, stats = setup.engine.rollout(asks, setup.sampling, setup.planner)
    rewards = distinct_words([rollout.text for rollout in rollouts])
    scored = [ScoredRollout(r, value, {"words": value}) for r, value in zip(rollouts, rewards, strict=True)]
    samples = advantages(scored, resolve(setup.config).estimator)
    setup.engine.rest()
    update = setup.learner.update(samples, setup.sampling.temperature)
    swap(setup.engine, setup.policy, "auto", version=done + 1)
    for drafter in setup.engine.drafters.values():
        drafter.learn(rollouts)
    return {
        "seconds": time.perf_counter() - began, "generation_s": stats.wall_s, "training_s": update.wall_s, "tokens": stats.tokens,
        "accepted_length": stats.accepted_length, "entropy": float(np.concatenate([r.entropy_T for r in rollouts]).mean()),
        "peak_bytes": peak_memory(),
    }  # fmt: skip


if __name__ == "__main__":
    main()
