"""Adapters on disk: peft reads what we write, we read what peft writes, and what does not belong together is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from respec.config import LoraConfig, ModelConfig
from respec.errors import ModelError
from respec.models.adapted import adapter_weights, is_adapted, plain_state, weight_of
from respec.models.load import Policy, load_policy
from respec.policy.adapters import with_lora
from respec.weights.export import save_model, save_trained

peft = pytest.importorskip("peft")
TOKENS = torch.arange(1, 20)[None]


def demo(path: str | Path = "builtin:demo") -> Policy:
    return load_policy(ModelConfig(path=str(path), dtype="float64", device="cpu"))


@pytest.fixture(params=[False, True], ids=["lora", "dora"])
def shaken(request, tmp_path: Path) -> Policy:
    """A policy on a folder of its own, with an adapter that does something."""
    save_model(demo(), tmp_path / "base")
    policy = demo(tmp_path / "base")
    with_lora(policy.model, LoraConfig(r=4, dora=request.param), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in adapter_weights(policy.model).values():
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
    return policy


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def test_a_layer_multiplies_by_its_merged_weight(shaken):
    layer = shaken.model.get_submodule("model.layers.0.mlp.up_proj")
    x = torch.randn(7, layer.in_features, dtype=torch.float64)
    assert not torch.allclose(layer(x), layer.base_layer(x), atol=1e-2)
    assert torch.allclose(layer(x), x @ weight_of(layer).T, atol=1e-12)


def test_merged_folder_adapter_folder_and_model_are_one_policy(shaken, tmp_path):
    save_model(shaken, tmp_path / "merged")
    save_trained(shaken, tmp_path / "adapter")
    merged, read = demo(tmp_path / "merged"), demo(tmp_path / "adapter")
    assert not is_adapted(read.model) and all(p.requires_grad for p in read.model.parameters())
    want = dict(plain_state(shaken.model))
    for policy in (merged, read):
        have = policy.model.state_dict()
        assert have.keys() == want.keys() and all(torch.equal(have[name], want[name]) for name in want)
    assert (logits(shaken.model) - logits(merged.model)).abs().max() < 1e-5
    assert not any(file.name.startswith("model") for file in (tmp_path / "adapter").iterdir())


def test_peft_reads_what_we_write(shaken, tmp_path):
    save_trained(shaken, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(demo(tmp_path / "base").model, str(tmp_path / "adapter"))
    assert torch.equal(logits(theirs), logits(shaken.model))


def test_we_read_what_peft_writes(tmp_path):
    save_model(demo(), tmp_path / "base")
    base = demo(tmp_path / "base").model
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_dropout=0.1)
    theirs = peft.get_peft_model(base, config, autocast_adapter_dtype=False).eval()
    theirs.save_pretrained(str(tmp_path / "theirs"))
    said = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    said["base_model_name_or_path"] = str(tmp_path / "base")
    (tmp_path / "theirs" / "adapter_config.json").write_text(json.dumps(said))
    assert (logits(demo(tmp_path / "theirs").model) - logits(theirs)).abs().max() < 1e-5


def test_what_does_not_belong_together_is_refused(shaken, tmp_path):
    folder = tmp_path / "adapter"
    save_trained(shaken, folder)
    said = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(said.replace('"bias": "none"', '"bias": "all"'))
    with pytest.raises(ModelError, match="bias all; handled are LoRA and DoRA"):
        demo(folder)
    (folder / "adapter_config.json").write_text(said.replace('"r": 4', '"r": 5'))
    with pytest.raises(ModelError, match="other layers, rank or dtype"):
        demo(folder)
    (folder / "adapter_config.json").write_text(said)
    with torch.no_grad():
        shaken.model.get_parameter("model.norm.weight").mul_(1.01)
    save_model(shaken, tmp_path / "base")
    with pytest.raises(ModelError, match="trained on other weights"):
        demo(folder)
    weights = load_file(folder / "adapter_model.safetensors")
    save_file(weights, folder / "adapter_model.safetensors")
    demo(folder)  # a file that does not say what it was trained on, as peft's do not
