"""A peer's samples are judged: `generate`'s own pass, those of a peer that samples at another temperature do not.

Power: 2048 tokens show a bias of total variation 0.06 or more with probability 0.99 (`detectable_tv`); the temperature moves 0.2 and more.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from respec.bench.peers.process import WORKERS
from respec.bench.peers.samples import as_rollouts, judge_peer
from respec.bench.rollout_peers import verdict
from respec.certify.reference import Reference
from respec.types import Prompt

PROMPTS = [Prompt(row, "", (2 + row, 7, 3 * row + 1)) for row in range(4)]


@pytest.fixture
def generate(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """The worker of `generate` in this process, on a tiny model with a sharp distribution."""
    monkeypatch.syspath_prepend(str(WORKERS))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=128, initializer_range=0.3, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    model.save_pretrained(tmp_path)
    from generate_worker import Generate  # pyright: ignore[reportMissingImports]

    peer = Generate()
    peer.load({"model": str(tmp_path), "dtype": "float32", "threads": 1})
    yield peer, Reference(model)
    for name in ("generate_worker", "wire"):
        sys.modules.pop(name, None)


class InThisProcess:
    """A worker that is asked without a wire. `spoil` works on what it answers."""

    name = "peer"

    def __init__(self, peer: Any, spoil=lambda answer: answer) -> None:
        self.peer, self.spoil = peer, spoil

    def ask(self, what: str, **values: Any) -> dict[str, Any]:
        return self.spoil(getattr(self.peer, what)(values))


def outcomes(worker: Any, reference: Reference) -> dict[str, str]:
    findings = judge_peer(worker, "float32", PROMPTS, reference)
    return {finding.check: finding.outcome for finding in findings}


def test_generate_samples_from_the_model(generate):
    peer, reference = generate
    found = outcomes(InThisProcess(peer), reference)
    assert found == {"distribution": "passed", "first tokens": "passed", "log-probabilities": "passed"}


def test_a_peer_at_another_temperature_does_not_fit(generate):
    peer, reference = generate
    real = peer.model.generate
    peer.model.generate = lambda **values: real(**values | {"temperature": 0.5})
    found = outcomes(InThisProcess(peer), reference)
    # what it records is the model's, what it draws is not
    assert found["distribution"] == found["first tokens"] == "failed" and found["log-probabilities"] == "passed"


def test_a_peer_that_records_other_log_probabilities_does_not_fit(generate):
    peer, reference = generate

    def shift(answer):
        return answer | {"logprobs": [[value - 0.01 for value in row] for row in answer["logprobs"]]}

    assert outcomes(InThisProcess(peer, shift), reference)["log-probabilities"] == "failed"


def test_an_end_token_ends_a_completion_of_the_static_batch(generate):
    peer, _ = generate
    answer = peer.run(
        {
            "prompts": [list(p.token_ids) for p in PROMPTS] * 8,
            "batch": 16,
            "new_tokens": 40,
            "eos": [1],
            "logprobs": True,
        }
    )
    rollouts = as_rollouts(PROMPTS * 8, answer)
    ended = [r for r in rollouts if r.token_T[-1] == 1]
    assert ended and all(1 not in r.token_T[:-1] for r in rollouts)
    assert all(len(r.token_T) == 40 for r in rollouts if r.token_T[-1] != 1)
    assert all(len(r.logprob_T) == len(r.token_T) for r in rollouts)


def test_nothing_failed_and_something_passed_is_a_fit():
    def found(*outcomes: str) -> list[dict[str, str]]:
        return [{"outcome": outcome} for outcome in outcomes]

    assert verdict(found("passed", "unchecked")) is True
    assert verdict(found("passed", "failed")) is False
    assert verdict(found("unchecked")) is None and verdict(None) is None
