"""Loading: what comes back, and a reason for every refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from respec.config import ModelConfig
from respec.errors import ModelError
from respec.models.load import load_policy

SHAPE: dict[str, Any] = {
    "vocab_size": 12,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 48,
}


def save(folder: Path, config: PreTrainedConfig, words: int = 12, tokenizer: bool = True) -> ModelConfig:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    if tokenizer:
        backend = Tokenizer(WordLevel({f"w{i}": i for i in range(words)}, unk_token="w0"))
        PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="w3", pad_token="w0", unk_token="w0"
        ).save_pretrained(folder)
    return ModelConfig(path=str(folder), device="cpu")


def edit(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("family", [LlamaConfig, Qwen2Config, Qwen3Config])
def test_the_three_families_load(tmp_path: Path, family: type) -> None:
    config = save(tmp_path, family(**SHAPE, eos_token_id=5))
    policy = load_policy(config)
    assert policy.model.dtype == torch.float32 and not policy.model.training
    assert policy.model.config._attn_implementation == "respec_packed"
    assert policy.eos_token_ids == (3, 5)  # the tokenizer's and the generation config's
    assert policy.pad_token_id == 0 and policy.context_length == 48
    assert load_policy(config.model_copy(update={"dtype": "float64"})).model.dtype == torch.float64
    assert load_policy(config.model_copy(update={"dtype": "bfloat16"})).model.dtype == torch.float32


def test_what_is_saved_again_knows_nothing_of_us(tmp_path: Path) -> None:
    policy = load_policy(save(tmp_path / "a", Qwen3Config(**SHAPE)))
    policy.model.save_pretrained(tmp_path / "b")
    assert "respec" not in (tmp_path / "b" / "config.json").read_text()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b")
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(tokens).logits, policy.model(tokens).logits)


@pytest.mark.parametrize("rope", [{"rope_type": "linear", "factor": 2.0}, {"rope_type": "yarn", "factor": 2.0}])
def test_static_rope_scaling_is_allowed(tmp_path: Path, rope: dict) -> None:
    load_policy(save(tmp_path, LlamaConfig(**SHAPE, rope_parameters={"rope_theta": 1e4, **rope})))


def test_rope_that_follows_the_length_is_refused(tmp_path: Path) -> None:
    rope = {"rope_theta": 1e4, "rope_type": "dynamic", "factor": 2.0}
    with pytest.raises(ModelError, match=r"rotary positions by 'dynamic'.*handled are default, linear, llama3, yarn"):
        load_policy(save(tmp_path, LlamaConfig(**SHAPE, rope_parameters=rope)))


def test_other_families_are_refused(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=12, n_embd=16, n_layer=1, n_head=2)
    with pytest.raises(ModelError, match="family 'gpt2'; handled are llama, qwen2, qwen3"):
        load_policy(save(tmp_path, config))


def test_sliding_windows_are_refused_only_when_used(tmp_path: Path) -> None:
    window: dict[str, Any] = {"sliding_window": 8, "max_window_layers": 1}
    load_policy(save(tmp_path / "off", Qwen2Config(**SHAPE, use_sliding_window=False, **window)))
    with pytest.raises(ModelError, match="sliding-window attention in some layers"):
        load_policy(save(tmp_path / "on", Qwen2Config(**SHAPE, use_sliding_window=True, **window)))


def test_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    config = save(tmp_path, Qwen3Config(**SHAPE))
    edit(tmp_path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match="quantized checkpoint"):
        load_policy(config)


def test_places_without_a_model_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("respec.models.hub.reachable", lambda: False)
    with pytest.raises(ModelError, match="there is no folder '/nowhere/model', and it is not a hub id"):
        load_policy(ModelConfig(path="/nowhere/model"))
    with pytest.raises(ModelError, match="no folder 'nobody/nothing-here'; the hub cannot be reached"):
        load_policy(ModelConfig(path="nobody/nothing-here"))
    with pytest.raises(ModelError, match="holds no model transformers can read"):
        load_policy(ModelConfig(path=str(tmp_path)))
    with pytest.raises(ModelError, match="no built-in model 'builtin:other'"):
        load_policy(ModelConfig(path="builtin:other"))


@pytest.mark.parametrize("family", [LlamaConfig, Qwen3Config])
def test_a_missing_tokenizer_is_named(tmp_path: Path, family: type) -> None:
    with pytest.raises(ModelError, match="has no tokenizer that can be loaded"):
        load_policy(save(tmp_path, family(**SHAPE), tokenizer=False))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="the tokenizer knows 20 tokens, the model only 12"):
        load_policy(save(tmp_path, Qwen3Config(**SHAPE), words=20))


def test_damaged_and_incomplete_weights_are_refused(tmp_path: Path) -> None:
    config = save(tmp_path, Qwen3Config(**SHAPE))
    edit(tmp_path / "config.json", num_hidden_layers=3, layer_types=["full_attention"] * 3)
    with pytest.raises(ModelError, match=r"lacks 11 of the model's weights \(first: model\.layers\.2"):
        load_policy(config)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelError, match=r"weights of .* cannot be loaded"):
        load_policy(config)


def test_a_model_without_eos_is_refused(tmp_path: Path) -> None:
    config = save(tmp_path, Qwen3Config(**SHAPE, eos_token_id=None))
    edit(tmp_path / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="no EOS token"):
        load_policy(config)


def test_padding_is_eos_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    config = save(tmp_path, Qwen3Config(**SHAPE))
    edit(tmp_path / "tokenizer_config.json", pad_token=None)
    assert load_policy(config).pad_token_id == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_cuda_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no CUDA"):
        load_policy(save(tmp_path, Qwen3Config(**SHAPE)).model_copy(update={"device": "cuda"}))
