"""vLLM takes a head that we saved, and drafts with it. Needs `make peers`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import respec.models.load
from respec.bench.peers.process import ROLLOUT_PEERS, WORKERS, Worker, python_of
from respec.config import load_config
from respec.distillation import Recipe, distil_alone
from respec.drafter.learner import LearnerSettings
from respec.models.eagle import create_head, load_head, save_head
from respec.models.load import load_policy
from respec.report.live import open_view
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.types import Ask, Plan, Prompt, Sampling, Stream
from respec.weights.publish import publish

ROOT = Path(__file__).parents[3]
PEERS = ROOT / ".peers"
DEMO = Path(respec.models.load.__file__).parent / "demo"
DEPTH, NEW_TOKENS = 3, 64

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (PEERS / "vllm" / ".installed").exists(), reason="vLLM is not in .peers/vllm; `make peers` puts it there"
    ),
]


def accepted_by_vllm(head: Path, prompts: list[list[int]], log: Path) -> float:
    """Tokens a pass that vLLM gets from a head, decoding greedily."""
    kind = ROLLOUT_PEERS["vllm"]
    worker = Worker("vllm", python_of(kind, PEERS), WORKERS / kind.worker, log)
    options = dict(kind.options) | {"speculation": str(head), "depth": DEPTH, "eager": True}
    try:
        worker.ask("load", model=str(DEMO), threads=1, dtype="bfloat16", batch=len(prompts), context=256, **options)
        answer = worker.ask(
            "run", prompts=prompts, batch=len(prompts), new_tokens=NEW_TOKENS, eos=[], temperature=0.0, logprobs=False
        )
    finally:
        worker.close()
    assert answer["drafts"]
    return 1 + answer["accepted"] / answer["drafts"]


def test_vllm_drafts_with_a_head_of_ours_as_well_as_we_do(tmp_path: Path):
    small = (
        "task.train_size=64",
        "task.eval_size=8",
        "rollout.group_size=4",
        "run.threads=1",
        f"rollout.max_new_tokens={NEW_TOKENS}",
    )
    config = load_config(ROOT / "examples" / "demo.toml", small)
    with open_view("drafter", 1) as view:
        distil_alone(
            config, view, tmp_path / "trained", Recipe(tokens=6_000, steps=60, batch=16), LearnerSettings(depths=DEPTH)
        )
    policy = load_policy(config.model)
    save_head(create_head(policy.model, seed=1), tmp_path / "random")
    texts = [
        f"{a} + {b} - {c} + {a}\n" for a, b, c in ((3, 4, 1), (9, 2, 5), (1, 1, 7), (8, 6, 2), (5, 5, 5), (7, 3, 9))
    ]
    prompts = [policy.tokenizer(text)["input_ids"] for text in texts]  # pyright: ignore[reportCallIssue]
    trained, random = (
        accepted_by_vllm(tmp_path / name, prompts, tmp_path / f"{name}.log") for name in ("trained", "random")
    )
    drafter = EagleDrafter(load_head(tmp_path / "trained"), torch.bfloat16)
    engine = Engine(publish(policy, "auto", 0), policy.tokenizer, (), 0, len(prompts), drafters=[drafter])
    asks = [Ask(Prompt(row, "", tuple(ids)), Stream.BENCH, 0, 1) for row, ids in enumerate(prompts)]
    _, stats = engine.rollout(asks, Sampling(NEW_TOKENS, temperature=0.0), Plan("eagle", DEPTH, 1, DEPTH))
    # random weights agree with the target by chance; a head that is read wrongly (taps, rotation, norms, vocabulary) does no better
    assert trained > random + 0.5
    # greedy on both sides: what is left is rounding, and where the last draft is cut off
    assert trained == pytest.approx(stats.accepted_length, rel=0.1)
