"""The doctor: it says what is so, and what to do where something is not."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from respec import doctor


def finding(what: str) -> doctor.Finding:
    return next(item for item in doctor.examine() if item.what == what)


class Leaky(nn.Module):
    """A layer whose rows hear of each other."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + x.shape[0] * 2.0**-10


def test_each_finding_is_whole_and_plain() -> None:
    findings = doctor.examine()
    assert len({item.what for item in findings}) == len(findings)
    for item in findings:
        assert item.found and item.state in ("ok", "slow", "missing")
        assert item.state != "missing" or item.advice, "what is missing comes with what to do"
    json.dumps([dataclasses.asdict(item) for item in findings])


def test_processor_names_cores_and_threads() -> None:
    found = finding("processor").found
    assert "cores" in found and f"{torch.get_num_threads()} threads" in found


def test_rows_that_hear_of_each_other_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PackedLinear", Leaky)
    item = finding("exactness")
    assert item.state == "missing" and "bfloat16 among 1, 2" in item.found and "torch build" in item.advice


def test_a_dtype_that_is_exact_is_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_differing_rows", lambda dtype: [2] if dtype == torch.bfloat16 else [])
    item = finding("exactness")
    assert item.state == "missing" and "bfloat16 among 2 rows" in item.found and "float32" in item.advice


def test_without_a_compiler_the_slow_path_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.kernels, "available", lambda: (False, "no C compiler found"))
    item = finding("native kernels")
    assert (item.state, item.found) == ("slow", "no C compiler found") and "gcc" in item.advice


def test_without_prepacking_the_slow_path_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "can_prepack", lambda dtype: dtype == torch.float32)
    item = finding("prepacked linear layers")
    assert item.state == "slow" and "float32" in item.found and "bfloat16" not in item.found


@pytest.mark.parametrize(("dtype", "state"), [(torch.bfloat16, "ok"), (torch.float32, "slow")])
def test_the_decoding_dtype_is_what_auto_takes(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, state: str) -> None:
    monkeypatch.setattr(doctor, "decode_dtype", lambda name, device: dtype)
    item = finding("decoding dtype")
    assert item.state == state and str(dtype).removeprefix("torch.") in item.found


def test_a_driver_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(torch.version, "cuda", None)
    item = finding("GPU")
    assert item.state == "slow" and "CUDA build" in item.advice
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert finding("GPU").state == "ok"
