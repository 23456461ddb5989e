"""Law 8 in episodes: an agent's run killed and started again gives the tokens, rewards and weights of one never killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

SETTINGS = {
    "run.steps": 4, "run.threads": 1, "task.train_size": 4, "task.eval_size": 4, "task.max_turns": 3, "rollout.prompts_per_step": 2,
    "rollout.group_size": 3, "rollout.max_new_tokens": 90, "checkpoint.every_steps": 2, "run.compare_plain_every": 2, "warmup.steps": 4,
    "warmup.train_size": 8, "eval.every": 0, "policy.lr": 1e-3, "speculation.drafter": "suffix",
}  # fmt: skip
# Each agent with what makes its episodes hang on more than its own text.
AGENTS = {
    "frozen_lake": {"task.params.slippery": "true"},
    "sokoban": {"task.solver_noise": 0.5, "rollout.max_new_tokens": 240},
}
TIMINGS = ("time/", "rollout/tokens_per_s", "rollout/speedup")


def command(agent: str, folder: Path) -> list[str]:
    settings = {**SETTINGS, **AGENTS[agent], "run.dir": folder}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    start = "from respec.cli import main; main()"
    return [sys.executable, "-c", start, "train", f"examples/{agent}.toml", *words]


def run(agent: str, folder: Path) -> None:
    done = subprocess.run(command(agent, folder), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def recorded(folder: Path) -> tuple[list[dict], dict[str, bytes]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if k != "time" and not k.startswith(TIMINGS)} for line in lines]
    return metrics, {path.name: path.read_bytes() for path in sorted((folder / "rollouts").iterdir())}


@pytest.mark.parametrize("agent", AGENTS)
def test_an_agent_killed_and_started_again_is_as_if_never_killed(agent, tmp_path):
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    run(agent, whole)
    process = subprocess.Popen(command(agent, folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics, deadline = folder / "metrics.jsonl", time.monotonic() + 500
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 3) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    run(agent, folder)
    assert recorded(folder) == recorded(whole)
    ours, theirs = (load_file(path / "checkpoints/000004/model.safetensors") for path in (folder, whole))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    steps = recorded(whole)[0][1:]
    assert [line["rollout/tokens_identical"] for line in steps if "rollout/tokens_identical" in line] == [1, 1]
    lines = [json.loads(line) for line in (whole / "rollouts/000004.jsonl").read_text().splitlines()]
    assert all(len(line["turn_reward"]) == max(line["turn"]) + 1 for line in lines)
    assert all((max(line["turn"]) > 0) == (-1 in line["turn"]) for line in lines), (
        "environments answer turns that are not the last"
    )
    assert any(max(line["turn"]) > 0 for line in lines)
    assert all(line["reward"] == round(sum(line["turn_reward"]), 5) for line in lines)
