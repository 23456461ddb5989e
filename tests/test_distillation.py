"""`respec drafter train`: from a configuration to a drafter that is saved, reported, and drafts in the engine."""

from __future__ import annotations

from pathlib import Path

import torch
from typer.testing import CliRunner

from respec.cli.drafter import drafter
from respec.config import ModelConfig
from respec.drafter.agreement import read_agreement
from respec.errors import ConfigError, ModelError
from respec.models.eagle import load_head
from respec.models.load import load_policy
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.types import PLAIN, Ask, Plan, Prompt, Sampling, Stream
from respec.weights.publish import publish

DEMO = str(Path(__file__).parents[1] / "examples" / "demo.toml")
SMALL = [
    "task.train_size=16", "task.eval_size=4", "rollout.group_size=2", "rollout.max_new_tokens=24", "run.threads=1",
]  # fmt: skip


def train(to: Path, *more: str, sets: tuple[str, ...] = ()):
    words = [word for item in (*SMALL, *sets) for word in ("--set", item)]
    return CliRunner().invoke(
        drafter,
        ["train", DEMO, "--to", str(to), "--steps", "12", "--tokens", "600", "--batch", "8", "--s", "2", *words, *more],
    )


def test_a_drafter_is_trained_saved_reported_and_drafts(tmp_path: Path):
    done = train(tmp_path / "one", "--vocabulary", "40")
    assert done.exit_code == 0, done.output
    assert "tokens a round expected of chains 2 deep" in done.output and "saved to" in done.output
    head = load_head(tmp_path / "one")
    assert head.shape.draft_vocabulary == 40
    # how it drafts lies beside it: what a controller begins with
    seen = read_agreement(tmp_path / "one")
    assert set(seen) == {"matching", "rejection"}
    assert all(0 < part.stood_K[1] < part.stood_K[0] < part.tested_K[0] for part in seen.values())
    policy = load_policy(ModelConfig(path="builtin:demo"))
    engine = Engine(
        publish(policy, "auto", 0),
        policy.tokenizer,
        policy.eos_token_ids,
        0,
        4,
        drafters=[EagleDrafter(head, torch.float32)],
    )
    asks = [Ask(Prompt(0, "", tuple(policy.tokenizer("3 + 4 - 2\n")["input_ids"])), Stream.BENCH, 0, 4)]
    plain, _ = engine.rollout(asks, Sampling(24), PLAIN)
    drafted, stats = engine.rollout(asks, Sampling(24), Plan("eagle", 3, 1, 3))
    assert [r.token_T.tolist() for r in plain] == [r.token_T.tolist() for r in drafted]
    assert stats.accepted

    again = train(tmp_path / "two", "--start", str(tmp_path / "one"))
    assert again.exit_code == 0, again.output
    assert load_head(tmp_path / "two").shape.draft_vocabulary == 40


def test_what_cannot_be_trained_is_said_before_anything_is_drawn(tmp_path: Path):
    assert isinstance(train(tmp_path, sets=("task.eval_size=0",)).exception, ConfigError)
    assert isinstance(train(tmp_path, "--start", str(tmp_path / "nowhere")).exception, ModelError)
    assert isinstance(train(tmp_path, "--loss", "mse").exception, ConfigError)


def test_help_has_an_example():
    told = CliRunner().invoke(drafter, ["train", "--help"]).output
    assert "Example: respec drafter train examples/demo.toml --to" in told
