"""The online learner before a vLLM that only speaks the protocol: what it teaches is what vLLM is sent, after a kill as well."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.test_remote import FAKE, configured  # pyright: ignore[reportMissingImports]
from tests.test_remote_auto import START  # pyright: ignore[reportMissingImports]

from respec.config import Config, ModelConfig
from respec.drafting import first_head
from respec.models.eagle import create_head, save_head
from respec.models.load import Policy, load_policy
from respec.online import OnlineLearner, online_learner
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.vllm.engine import VllmEngine
from respec.rollout.vllm.process import Worker
from respec.rollout.vllm.worker.wire import Ready
from respec.sentinel import Sentinel
from respec.types import Ask, Plan, Prompt, Sampling, Stream

ASKS = [Ask(Prompt(0, "", (1, 2, 3)), Stream.TRAIN, 0, 2)]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(ModelConfig(path="builtin:demo"))


@pytest.fixture
def config(tmp_path: Path, policy: Policy) -> Config:
    save_head(create_head(policy.model, list(range(64))), tmp_path / "head")
    eagle = {"drafter": "eagle", "drafter_path": str(tmp_path / "head"), "s": 4}
    return configured(tmp_path, speculation=eagle, drafter={"learn": True})


@pytest.fixture
def begun(
    tmp_path: Path, policy: Policy, config: Config
) -> Iterator[Callable[..., tuple[VllmEngine, OnlineLearner, Sentinel]]]:
    """Makes an engine and a learner of its head, from a checkpoint's state or none."""
    workers: list[Worker] = []

    def make(state: Any = None) -> tuple[VllmEngine, OnlineLearner, Sentinel]:
        workers.append(Worker(sys.executable, tmp_path / "vllm.log", FAKE))
        workers[-1].ask(START, 60.0, Ready)
        tokenizer: Any = policy.tokenizer
        head = EagleDrafter(first_head(config.speculation, policy), torch.bfloat16, keeps=True)
        engine = VllmEngine(workers[-1], tokenizer, (), 0, 0, 30.0, 8, "eagle", 4, True, head=head)
        door = Sentinel(Plan("eagle", 4, 1, 4), engine.drafters, lambda line: None, remembers=True)
        learner = online_learner(config, policy, engine, door, lambda line: None, state)
        assert learner is not None
        return engine, learner, door

    yield make
    for worker in workers:
        worker.kill()


def test_a_head_that_was_taught_is_sent_before_the_next_draw_and_after_a_kill_it_is_the_same(begun):
    engine, learner, door = begun()
    engine.rollout(ASKS, Sampling(4), door.under(Sampling(4)))
    assert engine.drafter_version == 0, "vLLM was started with that one"
    with torch.no_grad():
        learner.head.fc.weight.mul_(1.02)
    assert door.admit(learner.head, 1, 1).taken
    engine.rollout(ASKS, Sampling(4), door.under(Sampling(4)))
    assert engine.drafter_version == 1
    again, _, _ = begun(learner.state_dict())
    again.rollout(ASKS, Sampling(4), Plan("eagle", 4, 1, 4))
    sent, was = (one.drafters["eagle"].snapshot.by_name for one in (again, engine))
    assert again.drafter_version == 1 and all(torch.equal(sent[name], weight) for name, weight in was.items())
