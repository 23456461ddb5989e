"""What our rollouts cannot give a GRPOTrainer is said before anything is drawn, with what was found and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from respec.config import parse_section
from respec.config.speculation import SpeculationConfig
from respec.errors import ConfigError, ModelError
from respec.integrations.trl import RespecRollouts
from respec.integrations.trl_terms import dtype_of, refuse_trainer, row_of

from .conftest import grpo, quiet

pytest.importorskip("trl")


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty = 1.2"),
        ({"generation_kwargs": {"num_beams": 4}}, "num_beams"),
        ({"use_transformers_continuous_batching": True}, "continuous_batching"),
    ],
    ids=str,
)
def test_settings_that_would_draw_otherwise_are_refused(tmp_path, settings, said):
    with pytest.raises(ConfigError, match=said):
        grpo(tmp_path, quiet(), max_steps=1, **settings).train()


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("use_vllm", True, "use_vllm"),
        ("is_fsdp_enabled", True, "sharded"),
        ("tools", [print], "tools"),
        ("_is_vlm", True, "images"),
    ],
)
def test_what_a_test_machine_has_not_is_refused_by_the_same_door(tmp_path, name, value, said):
    trainer = grpo(tmp_path, quiet())
    refuse_trainer(trainer)
    setattr(trainer, name, value)
    with pytest.raises(ConfigError, match=said):
        refuse_trainer(trainer)


def test_several_processes_are_refused(tmp_path, monkeypatch):
    trainer = grpo(tmp_path, quiet())
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ConfigError, match="2 processes"):
        refuse_trainer(trainer)


def test_a_model_of_another_family_is_refused(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(
        GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=112, n_positions=64, bos_token_id=1, eos_token_id=1)
    )
    with pytest.raises(ModelError, match="gpt2"):
        grpo(tmp_path, quiet(), model=model, max_steps=1).train()


def test_adapters_that_cannot_be_merged_are_refused(tmp_path):
    from peft import IA3Config, LoraConfig

    for config, said in (
        (LoraConfig(target_modules=["q_proj"], modules_to_save=["down_proj"]), "modules_to_save"),
        (IA3Config(target_modules=["k_proj"], feedforward_modules=[]), "LoRA"),
    ):
        with pytest.raises(ModelError, match=said):
            grpo(tmp_path, quiet(), max_steps=1, more={"peft_config": config}).train()


def test_rollouts_serve_one_trainer(tmp_path):
    rollouts = quiet()
    grpo(tmp_path / "one", rollouts, max_steps=1).train()
    with pytest.raises(ConfigError, match="another trainer"):
        grpo(tmp_path / "two", rollouts, max_steps=1).train()
    with pytest.raises(ConfigError, match="nothing has been drawn"):
        _ = quiet().version


@pytest.mark.parametrize(
    "speculation, drafter, said",
    [
        ({"drafter": "sufix"}, {}, "speculation.drafter"),
        ({"drafter_pth": "head"}, {}, "did you mean 'drafter_path'"),
        ({"drafter": "suffix", "mode": "rejection"}, {}, "matching"),
        ({}, {"learn": True}, "eagle"),
        ({}, {"lr": -1}, "drafter.lr"),
    ],
    ids=str,
)
def test_settings_of_ours_are_checked_when_they_are_given(speculation, drafter, said):
    with pytest.raises(ConfigError, match=said):
        RespecRollouts(speculation, drafter)
    assert parse_section(SpeculationConfig, made := SpeculationConfig(), "speculation") is made


def test_the_engine_multiplies_in_what_the_trainer_does(tmp_path):
    trainer = grpo(tmp_path, quiet())
    assert dtype_of(trainer, trainer.model) == "float32"
    trainer.args.bf16 = True
    assert dtype_of(trainer, trainer.model) == "bfloat16"
    trainer.args.bf16, trainer.args.fp16 = False, True
    with pytest.raises(ConfigError, match="float16"):
        dtype_of(trainer, trainer.model)


def test_a_prompt_is_known_by_its_tokens():
    """Rows fit the 64 bits that random numbers are keyed by, and no two of these are alike (by chance with 1e-11)."""
    rows = {row_of([i, j]) for i in range(100) for j in range(100)} | {row_of([1, 23]), row_of([12, 3])}
    assert len(rows) == 10_000 and all(0 <= row < 2**62 for row in rows)
    assert row_of([5, 6]) == row_of((5, 6)) != row_of([6, 5])


@pytest.mark.slow
def test_smollm2_trains_in_bfloat16_as_trl_is_set_by_default(tmp_path):
    """TRL's defaults but for lengths: bf16 and gradient checkpointing, a chat template; `auto` plans."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = Path("models/smollm2")
    if not folder.is_dir():
        pytest.skip("models/smollm2 is not there: respec fetch smollm2 --to models/smollm2")
    rollouts = quiet(speculation={"drafter": "auto"}, max_batch=8)
    trainer = grpo(
        tmp_path, rollouts, model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        prompts=[[{"role": "user", "content": f"What is {i} + {i}?"}] for i in range(2, 6)],
        more={"processing_class": AutoTokenizer.from_pretrained(folder)}, max_completion_length=32, max_steps=1, bf16=True, gradient_checkpointing=True,
    )  # fmt: skip
    before = trainer.model.get_input_embeddings().weight.detach().clone()
    trainer.train()
    assert rollouts._serving is not None and rollouts._serving.dtype == "bfloat16"
    assert not torch.equal(before, trainer.model.get_input_embeddings().weight)
