"""What the certificate of a vLLM says of one that fails, and of what runs do not meet."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from respec import remote_certification
from respec.certify.finding import Finding
from respec.errors import VllmError
from respec.remote_certification import PUSHED, _found, _unlike_runs, pushed_drafter


def test_a_vllm_that_fails_at_drawing_is_a_finding_that_names_the_log_once(monkeypatch):
    def fails(*_: Any) -> Any:
        yield Finding("first tokens", "vLLM", "passed", "")
        raise VllmError("vLLM failed: RuntimeError: nan; the end of /v.log:\na\nb")

    monkeypatch.setattr(remote_certification, "_drafted", fails)
    nothing: Any = None
    found = _found(nothing, nothing, "vLLM, ngram", 0.02, Path("/v.log"))
    assert [f.outcome for f in found] == ["passed", "failed"]
    assert found[-1].sentence == "vLLM failed: RuntimeError: nan (/v.log)"


def test_only_failures_of_what_is_not_mended_are_said_to_be_unlike_runs():
    passed, failed = Finding("a", "b", "passed", "seen"), Finding("a", "b", "failed", "seen")
    assert _unlike_runs(passed) == passed
    assert (
        _unlike_runs(failed).sentence == "seen. Runs mend it (rollout.vllm.mend)"
        and _unlike_runs(failed).outcome == "failed"
    )


def test_a_drafter_is_pushed_with_every_matrix_moved_and_a_push_that_vllm_finds_wrong_is_a_finding():
    sent: list[Any] = []

    def push(weights: Any, version: int) -> None:
        sent.append(weights)
        if version == 2:
            raise VllmError("vLLM failed: RuntimeError: computes by others in lm_head; the end of /v.log:\na")

    weights = {"fc.weight": torch.ones(2, 2), "norm.weight": torch.ones(2)}
    engine: Any = SimpleNamespace(push_drafter=push, drafter_version=0)
    assert pushed_drafter(engine, "vLLM, eagle", weights).outcome == "passed"
    assert torch.equal(sent[0]["fc.weight"], PUSHED * torch.ones(2, 2)) and torch.equal(
        sent[0]["norm.weight"], torch.ones(2)
    )
    engine.drafter_version = 1
    found = pushed_drafter(engine, "vLLM, eagle", weights)
    assert found.outcome == "failed" and "computes by others in lm_head" in found.sentence
