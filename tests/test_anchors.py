"""Reference and teacher in a run: what is refused, what a reference is after a resume, and that a killed run goes on as if it never was (law 8)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from respec.anchors import Anchors
from respec.config import Config, ModelConfig, parse_config
from respec.errors import CheckpointError, ModelError
from respec.models.load import Policy, load_policy
from respec.naming import fallen, of_terms
from respec.report.metrics import checked
from respec.types import Prompt

PROMPTS = [Prompt(0, "", (1, 2, 3)), Prompt(1, "", (1, 2, 3, 4, 5))]


def save(folder: Path, words: str = "abcdefgh", context: int = 64, dtype: torch.dtype = torch.float32) -> Path:
    shape = LlamaConfig(
        vocab_size=12, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=context,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(shape, dtype=dtype).save_pretrained(folder)
    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="b", pad_token="a", unk_token="a").save_pretrained(
        folder
    )
    return folder


def configured(path: Path, **sections: Any) -> Config:
    tree = {
        "model": {"path": str(path), "device": "cpu"},
        "task": {"dataset": "chain_sum"},
        "rollout": {"max_new_tokens": 20},
    }
    return parse_config({**tree, **sections})


def anchored(path: Path, **sections: Any) -> tuple[Anchors, Policy]:
    policy = load_policy(ModelConfig(path=str(path), device="cpu"))
    return Anchors(configured(path, **sections), policy, PROMPTS), policy


def step_on(policy: Policy) -> None:
    """A change of the policy's weights, as an update would make."""
    with torch.no_grad():
        for weight in policy.model.parameters():
            weight += 0.25


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("what", ["reference", "teacher"])
def test_models_that_do_not_belong_are_refused(tmp_path: Path, what: str) -> None:
    policy = save(tmp_path / "policy")
    others = {
        "tokenizer": (save(tmp_path / "words", words="abcdehgf"), rf"{what}\.path: .*another tokenizer.*2 tokens differ, first 'f'"),
        "length": (save(tmp_path / "short", context=24), rf"{what}\.path: .*reads 24 tokens, prompts and completions are up to 25"),
        "nothing": (tmp_path / "nothing here", rf"the {what} of {what}\.path cannot be loaded: .*no folder"),
    }  # fmt: skip
    for path, said in others.values():
        with pytest.raises(ModelError, match=said):
            anchored(policy, **{what: {"path": str(path), **({"kl": 0.1} if what == "reference" else {})}})


def test_a_teacher_is_frozen_and_keeps_its_own_dtype(tmp_path: Path) -> None:
    policy, teacher = save(tmp_path / "policy"), save(tmp_path / "teacher", dtype=torch.bfloat16)
    for dtype, expected in (("auto", torch.bfloat16), ("float32", torch.float32)):
        found, _ = anchored(policy, teacher={"path": str(teacher), "dtype": dtype})
        model = found.terms.teacher
        assert model is not None and model.dtype == expected and not model.training
        assert not any(weight.requires_grad for weight in model.parameters())


def test_off_there_is_nothing(tmp_path: Path) -> None:
    found, _ = anchored(save(tmp_path / "policy"), reference={"path": str(tmp_path / "not looked at")})
    found.settle(tmp_path, 0)
    found.move(1)
    assert not found.terms.on and not (tmp_path / "reference").exists()
    assert found.charge(()) == ((), {}) and found.teach(()) == ((), {})


def test_estimators_with_another_gradient_are_named(tmp_path: Path) -> None:
    policy = save(tmp_path / "policy")
    for kl_in, estimator, said in (("loss", "k1", "holds the policy to nothing"), ("reward", "k3", "k1 has")):
        found, _ = anchored(policy, reference={"kl": 0.1, "kl_in": kl_in, "estimator": estimator})
        assert len(found.notes) == 1 and said in found.notes[0]
    for kl_in, estimator in (("loss", None), ("loss", "k3"), ("reward", None)):
        found, _ = anchored(
            policy, reference={"kl": 0.1, "kl_in": kl_in, **({"estimator": estimator} if estimator else {})}
        )
        assert not found.notes


def test_a_reference_outlives_the_rotation_of_checkpoints(tmp_path: Path) -> None:
    """It is the policy of the run's start, however far the policy has gone and whatever checkpoints are left."""
    path, run = save(tmp_path / "policy"), tmp_path / "run"
    found, policy = anchored(path, reference={"kl": 0.1})
    step_on(policy)  # a warm-up
    start = weights(policy.model)
    found.settle(run, 0)
    for step in range(1, 6):
        step_on(policy)
        found.move(step)
        found.keep(run)
    resumed, policy = anchored(path, reference={"kl": 0.1})
    step_on(policy)
    step_on(policy)  # what a checkpoint of step 5 would have loaded is of no matter
    resumed.settle(run, 5)
    for anchors in (found, resumed):
        assert anchors._reference is not None and same(weights(anchors._reference), start)


@pytest.mark.parametrize("saved_at", [3, 4, 5])
def test_a_rebased_reference_is_that_of_the_last_multiple(tmp_path: Path, saved_at: int) -> None:
    path, run, settings = save(tmp_path / "policy"), tmp_path / "run", {"kl": 0.1, "every": 2}
    found, policy = anchored(path, reference=settings)
    found.settle(run, 0)
    passed = {0: weights(policy.model)}
    for step in range(1, saved_at + 1):
        step_on(policy)
        found.move(step)
        passed[step] = weights(policy.model)
    found.keep(run)
    resumed, policy = anchored(path, reference=settings)
    policy.model.load_state_dict(passed[saved_at])
    resumed.settle(run, saved_at)
    for anchors in (found, resumed):
        assert anchors._reference is not None
        assert same(weights(anchors._reference), passed[saved_at - saved_at % 2])


def test_references_of_all_checkpoints_that_may_be_left_are_there(tmp_path: Path) -> None:
    """A checkpoint each step, of which two are kept; killed between a reference and its checkpoint, the last two must still be served."""
    run = tmp_path / "run"
    found, policy = anchored(save(tmp_path / "policy"), reference={"kl": 0.1, "every": 1}, checkpoint={"keep": 2})
    found.settle(run, 0)
    for step in range(1, 6):
        step_on(policy)
        found.move(step)
        found.keep(run)
        left = {int(folder.name) for folder in (run / "reference" / "checkpoints").iterdir()}
        assert {max(0, step - 2), max(0, step - 1), step} <= left and len(left) <= 3


def test_a_lost_reference_is_said_to_be(tmp_path: Path) -> None:
    found, _ = anchored(save(tmp_path / "policy"), reference={"kl": 0.1})
    with pytest.raises(CheckpointError, match="reference"):
        found.settle(tmp_path / "run", 3)


def test_a_given_reference_is_not_copied_into_the_run(tmp_path: Path) -> None:
    path = save(tmp_path / "policy")
    found, policy = anchored(path, reference={"kl": 0.1, "path": str(path)})
    start = weights(policy.model)
    step_on(policy)
    found.settle(tmp_path / "run", 0)
    assert found._reference is not None and same(weights(found._reference), start)
    assert not (tmp_path / "run").exists()


def test_entropy_is_warned_of_when_it_falls_below_the_floor_and_not_again() -> None:
    def said(now: float, before: float, floor: float) -> int:
        return len(fallen({"policy/entropy": now}, before, floor))

    assert said(0.1, float("inf"), 0.2) == 1 and said(0.1, 0.3, 0.2) == 1
    assert said(0.1, 0.15, 0.2) == said(0.3, 0.1, 0.2) == said(0.0, 1.0, 0.0) == 0


def test_every_term_has_its_metric() -> None:
    terms = {"kl": 1.0, "entropy_bonus": 2.0, "reverse_kl": 3.0, "forward_kl": 4.0, "jsd": 5.0, "asked_s": 6.0}
    assert sorted(checked(of_terms(terms, {"asked_s": 1.0})).values()) == [1.0, 2.0, 3.0, 4.0, 5.0, 7.0]
    assert of_terms({}, {}) == {}


SETTINGS = {
    "run.steps": 4, "run.threads": 1, "task.train_size": 8, "task.eval_size": 8, "rollout.prompts_per_step": 3, "rollout.group_size": 3,
    "rollout.max_new_tokens": 40, "checkpoint.every_steps": 3, "eval.every": 0, "run.compare_plain_every": 0, "policy.lr": 1e-3,
    "speculation.drafter": "off", "policy.entropy_bonus": 0.01,
}  # fmt: skip
REBASED = {"reference.kl": 0.5, "reference.every": 2, "teacher.path": "builtin:demo"}
CHARGED = {
    "reference.kl": 0.5,
    "reference.kl_in": "reward",
    "teacher.path": "builtin:demo",
    "teacher.loss": "jsd",
    "teacher.dtype": "float32",
}


def command(folder: Path, **extra: Any) -> list[str]:
    words = [
        word for key, value in {**SETTINGS, **extra, "run.dir": folder}.items() for word in ("--set", f"{key}={value}")
    ]
    return [sys.executable, "-c", "from respec.cli import main; main()", "train", "examples/demo.toml", *words]


def trained(folder: Path, **extra: Any) -> list[dict[str, float]]:
    """A run to its end; what it recorded but times."""
    done = subprocess.run(command(folder, **extra), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time", "rollout/tokens_per_s"))} for line in lines]


def test_law_8_a_killed_run_is_held_to_what_it_was_held_to(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    process = subprocess.Popen(command(killed, **REBASED), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 200
    while not (killed / "checkpoints" / "000003").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    lines = trained(whole, **REBASED)
    assert trained(killed, **REBASED) == lines
    ours, theirs = (load_file(folder / "checkpoints/000004/model.safetensors") for folder in (killed, whole))
    assert same(ours, theirs)
    assert all({"policy/kl", "policy/entropy_bonus", "distill/reverse_kl"} <= set(line) for line in lines[1:])
    # steps 1 and 3 begin with the reference itself, 2 and 4 one update away from it
    kl = [line["policy/kl"] for line in lines[1:]]
    assert max(kl[0], kl[2]) < 1e-6 < 1e-4 < min(kl[1], kl[3])


def test_a_run_charged_in_the_reward_beside_a_teacher_over_the_vocabulary(tmp_path: Path) -> None:
    lines = trained(tmp_path / "run", **CHARGED, **{"run.steps": 2})
    assert all({"policy/kl", "distill/jsd"} <= set(line) for line in lines[1:])
    # the decoder's dtype is not the trainer's, so a little is seen from the start
    assert abs(lines[1]["policy/kl"]) < 5e-3 and lines[1]["distill/jsd"] < 1e-7 < lines[2]["distill/jsd"]
