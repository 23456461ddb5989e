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
    learned = run(tmp_path / "learned", **eagle, drafter__learn="true", drafter__lr=0.002)
    plain = run(tmp_path / "plain", speculation__drafter="off")
    # law 7: the policy's weights after three steps
    ours, theirs = (
        load_file(tmp_path / name / "checkpoints/000003/model.safetensors") for name in ("learned", "plain")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert all(line["rollout/tokens_identical"] == 1 for line in learned[1:])
    assert [line["reward/mean"] for line in learned[1:]] == [line["reward/mean"] for line in plain[1:]]
    # it has learned, and what it learned is what the run leaves behind
    overlap = [line["drafter/overlap"] for line in learned[1:]]
    assert overlap[-1] > overlap[0] + 0.05
    kept = load_head(tmp_path / "learned" / "drafter")
    assert not torch.equal(kept.fc.weight, start.fc.weight)


def test_a_stopped_run_goes_on_with_the_head_it_had(head, tmp_path):
    eagle = {
        "speculation__drafter": "eagle",
        "speculation__drafter_path": head[0],
        "drafter__learn": "true",
        "drafter__lr": 0.002,
    }
    run(tmp_path / "run", **eagle)
    first = load_head(tmp_path / "run" / "drafter")
    lines = run(tmp_path / "run", **{**eagle, "run.steps": 4})
    assert lines[-1]["step"] == 4
    moved = (load_head(tmp_path / "run" / "drafter").fc.weight - first.fc.weight).abs().max()
    assert 0 < moved < (first.fc.weight - head[1].fc.weight).abs().max()
