"""Law 8 (local): a run killed at any moment and started again gives the tokens, metrics and weights of one never killed."""

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

from respec.report.records import read_decisions

SETTINGS = {
    "run.steps": 6, "run.threads": 1, "task.train_size": 8, "task.eval_size": 16, "rollout.prompts_per_step": 3, "rollout.group_size": 3,
    "rollout.max_new_tokens": 40, "checkpoint.every_steps": 2, "eval.every": 3, "eval.items": 8, "run.compare_plain_every": 2,
}  # fmt: skip
TIMINGS = ("time/", "rollout/tokens_per_s", "rollout/speedup")


def command(folder: Path, *extra: str) -> list[str]:
    sets = [f"{key}={value}" for key, value in {**SETTINGS, "run.dir": folder}.items()] + list(extra)
    return [sys.executable, "-c", "from respec.cli import main; main()", "train", "examples/demo.toml"] + [
        word for item in sets for word in ("--set", item)
    ]


def run(folder: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(folder, *extra), capture_output=True, text=True, timeout=240)


def recorded(folder: Path) -> tuple[list[dict], dict[str, bytes]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if k != "time" and not k.startswith(TIMINGS)} for line in lines]
    tokens = {path.name: path.read_bytes() for path in sorted((folder / "rollouts").iterdir())}
    return metrics, tokens


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    done = run(folder)
    assert done.returncode == 0, done.stderr
    return folder


def kill_and_go_on(folder: Path, at: int, *extra: str) -> None:
    """Kills a run once step `at` is recorded, and starts it again."""
    process = subprocess.Popen(command(folder, *extra), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > at) and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    again = run(folder, *extra)
    assert again.returncode == 0, again.stderr


@pytest.mark.parametrize("at", [1, 3, 5])
def test_killed_and_started_again_is_as_if_never_killed(whole, tmp_path, at):
    folder = tmp_path / "run"
    kill_and_go_on(folder, at)
    assert recorded(folder) == recorded(whole)
    ours, theirs = (load_file(path / "checkpoints/000006/model.safetensors") for path in (folder, whole))
    assert all((ours[name] == theirs[name]).all() for name in theirs)


LOSSY = ("speculation.drafter=previous", "speculation.mode=lossy", "speculation.recorded=8", "policy.lr=1e-3")


def test_in_lossy_mode_old_answers_are_followed_after_a_resume_too(tmp_path):
    """Two epochs and more: from step 3 on rows come a second time."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    done = run(whole, *LOSSY)
    assert done.returncode == 0, done.stderr
    assert "speculation.mode is lossy" in done.stdout and "tokens identical" not in done.stdout
    kill_and_go_on(folder, 5, *LOSSY)
    ours, theirs = recorded(folder), recorded(whole)
    assert ours == theirs
    metrics = theirs[0][1:]
    assert all("rollout/tokens_identical" not in line for line in metrics)
    assert all(line["rollout/weight_mean"] == line["rollout/weight_max"] == 1 for line in metrics[:2])
    assert all(line["rollout/weight_max"] > 1 and line["rollout/weight_mean"] > 0 for line in metrics[3:])
    assert json.loads((whole / "summary.json").read_text())["tokens_identical"] is None


BUDGETED = (
    "policy.algorithm=dapo", "policy.aggregation=budget", "policy.correction=tis", "policy.token_budget=250", "collect.overlong_cache=10",
)  # fmt: skip


def test_dynamic_sampling_and_a_budget_go_on_where_they_were(tmp_path):
    """The walk through the data is ahead of what the steps alone tell, and samples wait; comparisons stay identical, draw by draw."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    done = run(whole, *BUDGETED)
    assert done.returncode == 0, done.stderr
    kill_and_go_on(folder, 3, *BUDGETED)
    ours, theirs = recorded(folder), recorded(whole)
    assert ours == theirs
    metrics = theirs[0][1:]
    assert all(line["collect/dropped_groups"] > 0 for line in metrics) and any(
        line["collect/draws"] > 1 for line in metrics
    )
    # what the run that went on from step 2 trained on in step 3 had waited in the checkpoint
    assert metrics[1]["collect/left_tokens"] == metrics[2]["collect/carried_tokens"] > 0
    assert all(line["policy/tokens"] == 250 for line in metrics)
    assert json.loads((whole / "summary.json").read_text())["tokens_identical"] is True
    one, other = (load_file(path / "checkpoints/000006/model.safetensors") for path in (folder, whole))
    assert all((one[name] == other[name]).all() for name in one)


PPO = (
    "policy.algorithm=ppo", "rollout.group_size=1", "rollout.prompts_per_step=6", "policy.minibatches=2", "policy.lr=1e-3",
    "critic.head_start=1", "critic.lr=1e-3", "run.compare_plain_every=0",
)  # fmt: skip


def test_the_critic_goes_on_where_it_was(tmp_path):
    """PPO on groups of one: tokens, the critic's metrics, its weights and its optimizer."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    done = run(whole, *PPO)
    assert done.returncode == 0, done.stderr
    kill_and_go_on(folder, 3, *PPO)
    assert recorded(folder) == recorded(whole)
    lines = recorded(whole)[0][1:]
    assert [line["policy/minibatches"] for line in lines] == [0, 2, 2, 2, 2, 2]
    assert all("critic/loss" in line and "group/no_spread_share" not in line for line in lines)
    for file in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(path / "checkpoints/000006" / file) for path in (folder, whole))
        assert ours.keys() == theirs.keys() and all((ours[name] == theirs[name]).all() for name in theirs)
    assert any(name.startswith("critic/exp_avg.") for name in theirs)


DISTILLED = (
    "teacher.loss=reverse_kl", "teacher.reward_weight=0.0", "policy.lr=1e-3", "policy.decay=cosine", "policy.warmup_steps=2", "eval.every=0",
    "policy.aggregation=token_mean",
)  # fmt: skip


def test_distillation_goes_on_with_its_teacher(whole, tmp_path):
    """The teacher is the last policy of another run; the rate follows a schedule over the whole run."""
    ours, theirs = tmp_path / "killed", tmp_path / "whole"
    taught = (f"teacher.path={whole}", *DISTILLED)
    done = run(theirs, *taught)
    assert done.returncode == 0, done.stderr
    kill_and_go_on(ours, 3, *taught)
    assert recorded(ours) == recorded(theirs)
    one, other = (load_file(path / "checkpoints/000006/model.safetensors") for path in (ours, theirs))
    assert all((one[name] == other[name]).all() for name in one)
    gaps = [line["distill/reverse_kl"] for line in recorded(theirs)[0][1:]]
    assert all(gap > 0 for gap in gaps)


def test_a_group_of_one_is_refused_where_groups_are_compared(tmp_path):
    done = run(tmp_path / "run", "rollout.group_size=1")
    assert done.returncode == 2 and "as estimator 'group' does; use 2 or more (got 1)" in done.stderr


LORA = (
    "policy.lora.r=4", "policy.lora.dora=true", "policy.lr=1e-2", "policy.gradient_checkpointing=true", "run.steps=4", "task.eval_size=4",
    "eval.every=0", "policy.estimator=batch_whitened",
)  # fmt: skip


def test_an_adapter_is_taken_up_where_it_was_and_the_run_ends_with_it_in_its_folder(tmp_path):
    pytest.importorskip("peft")
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    done = run(whole, *LORA)
    assert done.returncode == 0, done.stderr
    kill_and_go_on(folder, 3, *LORA)
    assert recorded(folder) == recorded(whole)
    ours, theirs = (load_file(path / "adapter" / "adapter_model.safetensors") for path in (folder, whole))
    assert all((ours[name] == theirs[name]).all() for name in theirs)
    assert any(weight.any() for name, weight in theirs.items() if "lora_B" in name)
    step = whole / "checkpoints" / "000004"
    assert sum(file.stat().st_size for file in step.iterdir()) < 14e6 / 3, "no weights of the base"
    compared = [line for line in recorded(whole)[0] if "rollout/tokens_identical" in line]
    assert len(compared) == 2 and all(line["rollout/tokens_identical"] == 1.0 for line in compared)


def test_an_engine_that_is_behind_has_the_same_weights_after_a_resume(tmp_path):
    """Weights go to the engine after steps 4 and 6; the run is killed and taken up between."""
    whole, folder = tmp_path / "whole", tmp_path / "killed"
    behind = ("rollout.sync_every=4", "policy.lr=1e-3")
    assert run(whole, *behind).returncode == 0
    kill_and_go_on(folder, 3, *behind)
    ours, theirs = recorded(folder), recorded(whole)
    assert ours == theirs
    gaps = [line["policy/mismatch_mean"] for line in theirs[0][1:]]
    assert gaps[0] < min(gaps[1:4]) and gaps[4] < min(gaps[1:4])


def test_a_finished_run_stands_and_says_how_it_went(whole):
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["finished"] and summary["tokens_identical"] is True and summary["steps"] == 6
    assert (whole / "report.html").stat().st_size > 100_000
    again = run(whole)
    assert again.returncode == 0 and "going on from step 6" in again.stdout


def test_the_controller_goes_on_with_what_it_knew(tmp_path):
    """Its rounds are counted on over the stop."""
    auto = ("speculation.drafter=auto", "speculation.s=4", "run.compare_plain_every=0", "eval.every=0")
    for steps in (2, 4):
        done = run(tmp_path / "run", *auto, f"run.steps={steps}")
        assert done.returncode == 0, done.stderr
    rounds = [[d["round"] for d in read_decisions(tmp_path / "run", step)] for step in (1, 2, 3, 4)]
    assert rounds[0] and rounds[2] and min(rounds[2]) > max(rounds[0] + rounds[1])


def test_speculation_off_learns_the_very_same_policy(whole, tmp_path):
    plain = tmp_path / "plain"
    done = run(plain, "speculation.drafter=off")
    assert done.returncode == 0, done.stderr
    one, other = (load_file(path / "checkpoints/000006/model.safetensors") for path in (whole, plain))
    assert all((one[name] == other[name]).all() for name in one)


def test_one_interrupt_ends_the_step_and_says_how_to_go_on(tmp_path):
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command(folder, "run.steps=500"), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    metrics = folder / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and len(metrics.read_text().splitlines()) > 1) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, out
    assert "stopping after this step" in out and "Go on with" in out
    steps = len(metrics.read_text().splitlines()) - 1
    assert (folder / "checkpoints" / f"{steps:06d}" / "manifest.json").exists()


def test_another_configuration_in_the_same_folder_is_refused(whole):
    done = run(whole, "policy.lr=1.0")
    assert done.returncode == 2 and "policy.lr" in done.stderr and "Traceback" not in done.stderr
