"""Losses and gradients on one batch against TRL's own trainers, through the whole of our learner: estimator, surrogate, aggregation, packing.

TRL's numbers were written by golden/from_trl.py, in float64. Ours keeps advantages in float32: hence the tolerance, 2e-6 of a gradient's largest
component. Where TRL's definition is another, the test says how, and shows that nothing else differs.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3Config

from respec.config import PolicyConfig
from respec.models.load import Policy
from respec.models.packed_attention import use_packed_attention
from respec.policy.advantages import advantages
from respec.policy.presets import resolve
from respec.types import Prompt, Rollout, Sample, ScoredRollout, Stream

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TRL_PYTHON = ROOT / ".peers" / "hf" / "bin" / "python"
TRL: dict[str, Any] = json.loads((HERE / "data" / "trl.json").read_text())
CLOSE = 2e-6

# By the name of TRL's case. DAPO's loss is written out in its factors.
OURS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {"algorithm": "grpo"},
    "dr_grpo": {"algorithm": "dr_grpo"},
    "dapo": {"estimator": "group", "surrogate": "ppo_clip", "aggregation": "token_mean", "clip_high": 0.28},
    "gspo": {"algorithm": "gspo"},
    # TRL bounds the ratio by epsilon_high itself, ours is 1 + clip_high
    "cispo": {"algorithm": "cispo", "clip_high": TRL["cases"]["cispo"]["settings"]["epsilon_high"] - 1},
    "dual_clip": {"algorithm": "grpo", "dual_clip": TRL["cases"]["dual_clip"]["settings"]["delta"]},
}


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(HERE / "data" / "trl.safetensors")


@pytest.fixture
def policy() -> Policy:
    model = AutoModelForCausalLM.from_config(Qwen3Config(**TRL["model"]), dtype=torch.float64).eval()
    use_packed_attention(model)
    return Policy(model, None, (0,), 0, TRL["model"]["max_position_embeddings"])  # type: ignore[arg-type]


def part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def scored() -> list[ScoredRollout]:
    """TRL's batch. The log-probabilities of sampling play no part: `correction` is none."""
    result = []
    for row, (prompt, drawn, rewards) in enumerate(
        zip(TRL["prompts"], TRL["completions"], TRL["rewards"], strict=True)
    ):
        for sample, (tokens, reward) in enumerate(zip(drawn, rewards, strict=True)):
            zeros, counts = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
            finish = "eos" if tokens[-1] == 0 else "length"
            rollout = Rollout(
                Prompt(row, "", tuple(prompt)), Stream.TRAIN, 0, sample, np.array(tokens, np.int32), zeros, zeros, zeros, counts,
                counts.astype(np.uint8), counts, "", finish,
            )  # fmt: skip
            result.append(ScoredRollout(rollout, reward, {}))
    return result


@pytest.fixture
def learned(policy: Policy, golden: dict[str, torch.Tensor], learn_at: Callable[..., Any]) -> Callable[..., Any]:
    """`learned(settings, scale, moved)`: ours on TRL's batch. `scale` multiplies the advantages of sample i; not `moved`: at the old policy."""

    def learn(settings: Mapping[str, Any], scale: Callable[[int], float] = lambda _: 1.0, moved: bool = True) -> Any:
        items = advantages(scored(), resolve(PolicyConfig.model_validate(settings)).estimator)
        samples = [Sample(item.scored, item.advantage_T * np.float32(scale(i))) for i, item in enumerate(items)]
        old, theta = part(golden, "old/"), part(golden, "theta/")
        return learn_at(policy, settings, samples, TRL["temperature"], old, theta if moved else None, TRL["longest"])

    return learn


def hold(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor], factor: float = 1.0) -> None:
    """`ours` times `factor` is TRL's, to CLOSE of the whole gradient's largest component."""
    assert set(ours) == set(theirs)
    largest = max(float(value.abs().max()) for value in theirs.values())
    assert largest > 1e-3
    for name, value in theirs.items():
        torch.testing.assert_close(factor * ours[name], value, rtol=0, atol=CLOSE * largest)


@pytest.mark.parametrize("case", sorted(OURS))
def test_advantages_loss_and_gradient_are_trls(learned, golden: dict[str, torch.Tensor], case: str) -> None:
    theirs = TRL["cases"][case]
    config = PolicyConfig.model_validate(OURS[case])
    ours_N = [float(item.advantage_T[0]) for item in advantages(scored(), resolve(config).estimator)]
    np.testing.assert_allclose(ours_N, theirs["advantages"], rtol=CLOSE, atol=1e-7)
    ours = learned(OURS[case])
    assert ours.loss == pytest.approx(theirs["loss_moved"], rel=CLOSE, abs=CLOSE)
    hold(ours.gradient, part(golden, f"{case}/moved/"))


@pytest.mark.parametrize("case", ["grpo", "dr_grpo", "dapo"])
def test_truncated_completions_left_out(learned, golden: dict[str, torch.Tensor], case: str) -> None:
    """TRL gives a masked completion no loss and keeps it among the sequences it divides by; ours divides by those that are left. Means over
    tokens agree: both count the tokens that are left."""
    theirs = TRL["cases"][f"{case}_masked"]
    kept = sum(not item.rollout.truncated for item in scored())
    factor = 1.0 if case == "dapo" else kept / len(scored())
    assert 0 < kept < len(scored())
    ours = learned({**OURS[case], "mask_truncated": True})
    assert factor * ours.loss == pytest.approx(theirs["loss_moved"], rel=CLOSE, abs=CLOSE)
    hold(ours.gradient, part(golden, f"{case}_masked/moved/"), factor)


def test_rloo_on_policy(learned, golden: dict[str, torch.Tensor]) -> None:
    """Ours is REINFORCE with a constant divisor; TRL's has no divisor, and a clipped ratio of whole sequences, which is 1 here: its loss is
    another function with the same gradient."""
    theirs = TRL["cases"]["rloo"]
    ours_N = [float(item.advantage_T[0]) for item in advantages(scored(), "leave_one_out")]
    np.testing.assert_allclose(ours_N, theirs["advantages"], rtol=CLOSE, atol=1e-7)
    assert theirs["loss_old_policy"] == pytest.approx(-np.mean(ours_N), abs=1e-7)
    ours = learned({"algorithm": "rloo"}, moved=False)
    hold(ours.gradient, part(golden, "rloo/old_policy/"), TRL["longest"])


def test_rloo_off_policy(learned, policy: Policy, golden: dict[str, torch.Tensor]) -> None:
    """Away from the old policy TRL weighs a completion by its sequence's ratio and drops it where PPO clips; with the advantages weighed so,
    ours is the same."""
    ratio_S = sequence_ratios(policy, golden)
    advantage_S = [float(item.advantage_T[0]) for item in advantages(scored(), "leave_one_out")]

    def weight(i: int) -> float:
        clipped = ratio_S[i] > 1.2 if advantage_S[i] > 0 else ratio_S[i] < 0.8
        return 0.0 if clipped else ratio_S[i]

    assert 0 < sum(weight(i) == 0 for i in range(len(ratio_S))) < len(ratio_S)
    ours = learned({"algorithm": "rloo"}, weight)
    hold(ours.gradient, part(golden, "rloo/moved/"), TRL["longest"])


def token_logprobs(policy: Policy, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Each completion's, by transformers' model on one sequence after the other."""
    policy.model.load_state_dict(weights, strict=False)
    result = []
    for item in scored():
        prompt, tokens = item.rollout.prompt.token_ids, item.rollout.token_T.tolist()
        model = policy.model
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[
                0, len(prompt) - 1 : -1
            ]
        law = torch.log_softmax(logits / TRL["temperature"], dim=1)
        result.append(law[torch.arange(len(tokens)), torch.tensor(tokens)])
    return result


def sequence_ratios(policy: Policy, golden: Mapping[str, torch.Tensor]) -> list[float]:
    old, theta = (token_logprobs(policy, part(golden, f"{kind}/")) for kind in ("old", "theta"))
    return [float(torch.exp((new - before).sum())) for new, before in zip(theta, old, strict=True)]


def test_the_batch_meets_every_bound(policy: Policy, golden: dict[str, torch.Tensor]) -> None:
    old, theta = (token_logprobs(policy, part(golden, f"{kind}/")) for kind in ("old", "theta"))
    ratio_C = torch.exp(torch.cat(theta) - torch.cat(old))
    advantage_C = torch.from_numpy(np.concatenate([item.advantage_T for item in advantages(scored(), "group")]))
    good, bad = advantage_C > 0, advantage_C < 0
    assert (good & (ratio_C > 1.2) & (ratio_C < 1.28)).any(), "clip-higher differs from PPO's"
    assert (good & (ratio_C > 1.28)).any() and (bad & (ratio_C < 0.8)).any(), "both bounds"
    assert (bad & (ratio_C > 1.3)).any(), "dual clip"
    assert len({len(item.rollout.token_T) for item in scored()}) > 4, "ragged"


@pytest.mark.slow
@pytest.mark.skipif(not TRL_PYTHON.exists(), reason="`make peers` installs TRL")
def test_trl_still_says_so(tmp_path: Path) -> None:
    script = HERE / "golden" / "from_trl.py"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([TRL_PYTHON, script, tmp_path], check=True, capture_output=True, env=environment)
    again = json.loads((tmp_path / "trl.json").read_text())
    assert again["completions"] == TRL["completions"] and again["prompts"] == TRL["prompts"]
    for case, theirs in TRL["cases"].items():
        assert again["cases"][case]["loss_moved"] == pytest.approx(theirs["loss_moved"], rel=1e-9)
    written, kept = load_file(tmp_path / "trl.safetensors"), load_file(HERE / "data" / "trl.safetensors")
    assert set(written) == set(kept)
    for name, value in kept.items():
        torch.testing.assert_close(written[name], value, rtol=1e-9, atol=1e-12)
