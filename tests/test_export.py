"""`respec export`: a run's policy for other programs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from respec.cli import app
from respec.config import LoraConfig, ModelConfig
from respec.errors import ConfigError
from respec.models.adapted import adapter_weights
from respec.models.load import load_policy
from respec.policy.adapters import with_lora
from respec.weights.checkpoint import save_checkpoint


def command(*words: str | Path) -> str:
    return CliRunner().invoke(app, ["export", *map(str, words)], catch_exceptions=False).output


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder whose last checkpoint has an adapter that does something."""
    pytest.importorskip("peft")
    policy = load_policy(ModelConfig(path="builtin:demo", device="cpu"))
    with_lora(policy.model, LoraConfig(r=2), 0)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in adapter_weights(policy.model).values():
            weight.normal_(std=0.1)
    save_checkpoint(tmp_path / "run", 3, policy, {}, {"step": 3}, keep=1)
    (tmp_path / "run" / "config.toml").write_text("")
    return tmp_path / "run"


def test_merged_and_adapter(run: Path, tmp_path: Path):
    said = command(run, "--merged", tmp_path / "whole", "--adapter", tmp_path / "part", "--dtype", "bfloat16")
    assert str(tmp_path / "whole") in said and str(tmp_path / "part") in said
    checkpoint = run / "checkpoints" / "000003"
    ours, theirs = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "part", checkpoint))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not list((tmp_path / "part").glob("optimizer*"))
    merged = load_policy(ModelConfig(path=str(checkpoint), device="cpu")).model.state_dict()
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "whole").state_dict()
    assert all(torch.equal(read[name], weight.bfloat16()) for name, weight in merged.items())


def test_what_cannot_be_exported_is_refused_before_anything_is_written(run: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="needs --merged DIR"):
        command(run)
    with pytest.raises(ConfigError, match="exists already"):
        command(run, "--merged", tmp_path)
    with pytest.raises(ConfigError, match="holds no adapter"):
        command(tmp_path, "--merged", tmp_path / "new", "--adapter", tmp_path / "part")
    assert not (tmp_path / "new").exists() and not (tmp_path / "part").exists()
