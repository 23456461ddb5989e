"""What the certificate of a vLLM says of one that fails, and of what runs do not meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from respec import remote_certification
from respec.certify.finding import Finding
from respec.errors import VllmError
from respec.remote_certification import _found, _unlike_runs


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
