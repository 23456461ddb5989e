"""A drafter's weights pushed to the real vLLM: what it drafts with afterwards is what was sent. Needs `make peers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.test_remote import PYTHON, configured, real  # pyright: ignore[reportMissingImports]

import respec.models.load
from respec.certify.reference import Reference
from respec.config import ModelConfig, load_config
from respec.distillation import Recipe, distil_alone
from respec.drafter.learner import LearnerSettings
from respec.errors import VllmError
from respec.models.eagle import create_head, load_head, save_head
from respec.models.load import Policy, load_policy
from respec.remote import start_vllm, worker_of
from respec.report.live import open_view
from respec.rollout.vllm.engine import VllmEngine
from respec.types import Ask, Load, Plan, Prompt, Rollout, RoundRecord, Sampling, Stream
from respec.weights.outside import by_name
from respec.weights.swap import swap

DEMO = Path(respec.models.load.__file__).parent / "demo"
GREEDY, DEPTH = Sampling(48, temperature=0.0), 4
TEXTS = ("1 + 2 + 3 + 4\n", "7 - 2 + 7 - 2 + 7\n", "9 + 9 - 1 + 5\n", "8 - 6 + 2 - 8\n")

pytestmark = [pytest.mark.slow, real]


@pytest.fixture
def policy() -> Policy:
    policy = load_policy(ModelConfig(path="builtin:demo"))
    policy.model.set_attn_implementation("sdpa")
    return policy


@pytest.fixture
def asks(policy: Policy) -> list[Ask]:
    tokenizer: Any = policy.tokenizer
    return [Ask(Prompt(i, t, tuple(tokenizer(t)["input_ids"])), Stream.TRAIN, 0, 2) for i, t in enumerate(TEXTS)]


@contextmanager
def drawing(folder: Path, policy: Policy, version: int = 0, **speculation: Any) -> Iterator[VllmEngine]:
    """A real vLLM in float32, where rounding hides nothing."""
    exact = {"path": "builtin:demo", "dtype": "float32"}
    config = configured(folder, str(PYTHON), model=exact, speculation={"s": DEPTH} | speculation)
    with worker_of(config) as worker:
        assert worker is not None
        yield start_vllm(config, policy, worker, version, 128, 1, lambda line: None)


@torch.no_grad()
def move(policy: Policy) -> None:
    """Every matrix of the policy is another, embeddings and tied head included; one in 20 of its greedy tokens is."""
    noise = torch.Generator().manual_seed(3)
    for weight in policy.model.parameters():
        if weight.ndim == 2:
            weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=noise)


def off_by(policy: Policy, rollouts: Sequence[Rollout]) -> float:
    """Nats between what vLLM says of its tokens and what the trainer does, in the mean."""
    judged = Reference(policy.model).judge(rollouts, 1.0)
    return float(np.abs(judged.recorded_N - judged.logprob_N).mean())


def same(one: Sequence[Rollout], other: Sequence[Rollout]) -> bool:
    return all(np.array_equal(a.token_T, b.token_T) for a, b in zip(one, other, strict=True))


class Alternating:
    """Plans of other depths from step to step, none among them."""

    predicted = 0.0

    def __init__(self, drafter: str) -> None:
        self._drafter, self.planned = drafter, 0
        self.seen: list[RoundRecord] = []

    def plan(self, load: Load) -> Plan:
        self.planned += 1
        depth = (4, 0, 2, 2, 0, 0, 3)[self.planned % 7]
        return Plan(self._drafter, depth, 1, depth) if depth else Plan()

    def observe(self, record: RoundRecord) -> None:
        self.seen.append(record)

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing."""


def test_a_draft_model_follows_the_policy_by_the_weights_that_are_pushed_to_it(tmp_path, policy, asks):
    """The policy is its own draft model: at temperature 0 all drafts are accepted for as long as both have the same weights."""
    plan = Plan("model", DEPTH, 1, DEPTH)
    with drawing(tmp_path, policy, drafter="model", draft_model=str(DEMO)) as engine:
        assert engine.steered
        plain, _ = engine.rollout(asks, GREEDY)
        same_weights, full = engine.rollout(asks, GREEDY, plan)
        alternating = Alternating("model")
        turned, _ = engine.rollout(asks, GREEDY, alternating)
        assert same(plain, same_weights) and same(plain, turned)
        assert full.accepted == full.drafted and full.accepted_length > DEPTH
        depths = {record.plan.s if record.plan.n else 0 for record in alternating.seen}
        assert depths == {0, 2, 3, 4} and all(len(r.drafted_D) <= r.plan.s for r in alternating.seen)
        move(policy)
        swap(engine, policy, "float32", 1)
        left_behind, less = engine.rollout(asks, GREEDY, plan)
        engine.push_drafter(by_name(policy, "float32"), 1)
        followed, again = engine.rollout(asks, GREEDY, plan)
        assert engine.drafter_version == 1 and same(left_behind, followed)
        assert less.accepted < less.drafted and again.accepted == again.drafted
        drawn, _ = engine.rollout(asks, Sampling(48), plan)
        assert off_by(policy, drawn) < 1e-4
        with pytest.raises(VllmError, match="vLLM failed"):
            engine.push_drafter({"model.norm.weight": torch.ones(3)}, 2)


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of a head with random weights and of one that has learned a little, by name."""
    folder = tmp_path_factory.mktemp("heads")
    small = (
        "task.train_size=64",
        "task.eval_size=8",
        "rollout.group_size=4",
        "run.threads=1",
        "rollout.max_new_tokens=48",
    )
    config = load_config(Path("examples/demo.toml"), small)
    with open_view("drafter", 1) as view:
        distil_alone(
            config, view, folder / "trained", Recipe(tokens=6_000, steps=60, batch=16), LearnerSettings(depths=DEPTH)
        )
    trained = load_head(folder / "trained")
    random = create_head(load_policy(config.model).model, trained.draft_token.tolist(), seed=1)
    save_head(random, folder / "random")
    return lambda name: folder / name


def test_a_head_that_is_pushed_drafts_as_in_a_vllm_that_was_started_with_it(tmp_path, policy, asks, heads):
    """To the bit, before the policy moves and after, though its embedding is the policy's own to begin with: neither push lands in the other."""
    plan, later = Plan("eagle", DEPTH, 1, DEPTH), Sampling(48)
    with drawing(tmp_path / "one", policy, drafter="eagle", drafter_path=heads("random")) as engine:
        _, little = engine.rollout(asks, later, plan)
        engine.drafters["eagle"].adopt(load_head(heads("trained")), 1)
        pushed, better = engine.rollout(asks, later, plan)
        assert engine.drafter_version == 1 and better.accepted > 2 * little.accepted
        assert off_by(policy, pushed) < 1e-4
        plain, _ = engine.rollout(asks, GREEDY)
        turned, _ = engine.rollout(asks, GREEDY, Alternating("eagle"))
        assert same(plain, turned)
        moved = load_policy(ModelConfig(path="builtin:demo"))
        moved.model.set_attn_implementation("sdpa")
        move(moved)
        swap(engine, moved, "float32", 1)
        after, drafts = engine.rollout(asks, later, plan)
        assert off_by(moved, after) < 1e-4
    with drawing(tmp_path / "two", policy, drafter="eagle", drafter_path=heads("trained")) as engine:
        started, as_good = engine.rollout(asks, later, plan)
        assert same(pushed, started) and as_good.accepted == better.accepted
    with drawing(tmp_path / "three", moved, version=1, drafter="eagle", drafter_path=heads("trained")) as engine:
        started, as_good = engine.rollout(asks, later, plan)
        assert same(after, started) and as_good.accepted == drafts.accepted


ARCTIC = list(PYTHON.parents[1].glob("lib/python3*/site-packages/arctic_inference"))


@pytest.mark.skipif(not ARCTIC, reason="vLLM's suffix decoding needs arctic-inference, which its environment has not")
def test_suffix_decoding_is_told_how_deep_to_draft(tmp_path, policy, asks):
    with drawing(tmp_path, policy, drafter="suffix") as engine:
        plain, _ = engine.rollout(asks, GREEDY)
        turned, stats = engine.rollout(asks, GREEDY, Alternating("suffix"))
        assert same(plain, turned) and stats.accepted
