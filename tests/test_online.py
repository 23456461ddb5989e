"""The online learner: a head that follows the policy leaves the policy's learning bit for bit as it is, and the run a speculator."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from respec.config import ModelConfig
from respec.models.eagle import EagleHead, create_head, load_head, save_head
from respec.models.load import load_policy

SETTINGS = {
    "run.steps": 3, "run.threads": 1, "task.train_size": 8, "task.eval_size": 8, "rollout.prompts_per_step": 4, "rollout.group_size": 4,
    "rollout.max_new_tokens": 40, "checkpoint.every_steps": 1, "checkpoint.keep": 4, "eval.every": 0, "run.compare_plain_every": 1,
}  # fmt: skip


def run(folder: Path, **extra: object) -> list[dict[str, float]]:
    settings = {**SETTINGS, "run.dir": folder, **extra}
    words = [word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
    done = subprocess.run(
        [sys.executable, "-c", "from respec.cli import main; main()", "train", "examples/demo.toml", *words],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> tuple[Path, EagleHead]:
    folder = tmp_path_factory.mktemp("head")
    made = create_head(load_policy(ModelConfig(path="builtin:demo")).model, None, 0, "builtin:demo")
    save_head(made, folder)
    return folder, made


def test_a_head_that_learns_changes_neither_tokens_nor_weights_of_the_policy(head, tmp_path):
    folder, start = head
    eagle = {"speculation__drafter": "eagle", "speculation__s": 3, "speculation__drafter_path": folder}
    learning = {**eagle, "drafter__learn": "true", "drafter__lr": 0.002, "drafter__share": 1, "drafter__judge_every": 1}
    learned = run(tmp_path / "learned", **learning)
    beside = run(tmp_path / "beside", **learning, drafter__async_steps=1, checkpoint__every_steps=0)
    plain = run(tmp_path / "plain", speculation__drafter="off")
    # law 7: the policy's weights after three steps
    theirs = load_file(tmp_path / "plain" / "checkpoints/000003/model.safetensors")
    for name, lines in (("learned", learned), ("beside", beside)):
        ours = load_file(tmp_path / name / "checkpoints/000003/model.safetensors")
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        assert all(line["rollout/tokens_identical"] == 1 for line in lines[1:])
        assert [line["reward/mean"] for line in lines[1:]] == [line["reward/mean"] for line in plain[1:]]
    # it has learned, and what it learned is what the run leaves behind
    overlap = [line["drafter/overlap"] for line in learned[1:]]
    assert overlap[-1] > overlap[0] + 0.05
    assert all(line["drafter/gained"] > 0 for line in learned[1:])
    kept, its = (load_head(tmp_path / name / "drafter") for name in ("learned", "beside"))
    assert not torch.equal(kept.fc.weight, start.fc.weight)
    # beside generation the same updates are made of the same rollouts; they reach the drafts a step later, and so does what is said of them
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), its.parameters(), strict=True))
    assert [line["drafter/age"] for line in learned[1:]] == [0.0, 1.0, 1.0]
    assert [line["drafter/age"] for line in beside[1:]] == [0.0, 1.0, 2.0]
    assert ["drafter/loss" in line for line in beside[1:]] == [False, True, True]


# every part of the learner that has a state of its own
WHOLE = {
    "speculation__drafter": "eagle", "speculation__s": 3, "drafter__learn": "true", "drafter__lr": 0.002, "drafter__every": 2,
    "drafter__share": 0.6, "drafter__replay": 0.5, "drafter__warmup_steps": 2, "run__compare_plain_every": 0,
}  # fmt: skip


def test_a_stopped_run_learns_the_same_head_as_one_that_never_stopped(head, tmp_path):
    """Law 8, of the drafter: stopped between two updates, with rollouts seen and not yet learned from."""
    run(tmp_path / "whole", **WHOLE, speculation__drafter_path=head[0], run__steps=4)
    run(tmp_path / "stopped", **WHOLE, speculation__drafter_path=head[0], run__steps=3)
    left = load_file(tmp_path / "stopped" / "checkpoints/000003/optimizer.safetensors")
    assert {"drafter/replay/taps", "drafter/gate/best"} <= left.keys()
    lines = run(tmp_path / "stopped", **WHOLE, speculation__drafter_path=head[0], run__steps=4)
    assert lines[-1]["step"] == 4 and lines[-1]["drafter/updated"] == 1
    whole, stopped = (load_file(tmp_path / name / "drafter/model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    assert not torch.equal(whole["fc.weight"], head[1].fc.weight)
