"""What a GRPOTrainer asks of rollouts, in our terms; and what it may ask that we cannot give, said before anything is drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from respec.errors import ConfigError, ModelError
from respec.models.adapted import NAME
from respec.models.load import Policy, refuse
from respec.types import Sampling

Trainer = Any
"""trl's GRPOTrainer. trl itself is not imported here: who calls us has it."""


def refuse_trainer(trainer: Trainer) -> None:
    """Raises ConfigError for settings under which completions would not be what the trainer takes them for."""
    for wrong, why in (
        (
            trainer.accelerator.num_processes > 1,
            f"it runs in {trainer.accelerator.num_processes} processes, and our engine serves one: start the script by `python`, without a launcher",
        ),
        (trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled, "its weights are sharded (DeepSpeed, FSDP): train in one process without"),
        (trainer.use_vllm, "use_vllm = True starts a second engine: set it to False"),
        (
            trainer.use_transformers_continuous_batching,
            "use_transformers_continuous_batching = True asks for another engine: set it to False",
        ),
        (trainer._is_vlm, "its model reads images, and our engine reads text"),
        (bool(trainer.tools), "tools and environments are called by TRL's own generation: leave out rollout_func with them"),
        (
            trainer.repetition_penalty not in (None, 1.0),
            f"repetition_penalty = {trainer.repetition_penalty} makes the completions those of another policy: set it to 1.0",
        ),
        (
            bool(trainer.args.generation_kwargs),
            f"generation_kwargs {trainer.args.generation_kwargs} are for transformers' generate: set temperature, top_p, top_k, min_p and "
            "max_completion_length instead",
        ),
        (not trainer.temperature > 0, f"temperature = {trainer.temperature}: training needs one above 0"),
    ):  # fmt: skip
        if wrong:
            raise ConfigError(f"respec cannot draw this GRPOTrainer's completions: {why}")


def policy_of(trainer: Trainer) -> Policy:
    """The trainer's own model, not a copy, as the rest of respec knows one. Raises ModelError for a model that the engine does not handle."""
    model, name = trainer.accelerator.unwrap_model(trainer.model), str(trainer.model.config._name_or_path)
    if hasattr(model, "peft_config"):
        _refuse_adapters(model, name)
        model = model.get_base_model()
    refuse(model.config, name or "the trainer's model")
    tokenizer = trainer.processing_class
    return Policy(
        model, tokenizer, tuple(sorted(trainer.eos_token_ids)), tokenizer.pad_token_id, model.config.max_position_embeddings, name
    )  # fmt: skip


def sampling_of(trainer: Trainer, greedy: bool) -> Sampling:
    """How the trainer's completions are drawn; `greedy` takes the most probable token everywhere."""
    return Sampling(
        trainer.max_completion_length,
        0.0 if greedy else trainer.temperature,
        trainer.top_k or 0,
        1.0 if trainer.top_p is None else trainer.top_p,
        trainer.min_p or 0.0,
    )


def dtype_of(trainer: Trainer, model: PreTrainedModel) -> str:
    """The dtype that the trainer's forward pass multiplies in: so log-probabilities differ no more than those of its own generation."""
    if trainer.args.fp16:
        raise ConfigError(
            "the trainer multiplies in float16, which our kernels do not; train in bfloat16 (bf16=True), or name the engine's dtype: RespecRollouts(dtype='float32')"
        )
    return "bfloat16" if trainer.args.bf16 else str(model.dtype).removeprefix("torch.")


def row_of(token_ids: Sequence[int]) -> int:
    """The id of a prompt: TRL hands prompts on without their place in the dataset, so it is what they say. 62 bits."""
    said = ",".join(map(str, token_ids)).encode()
    return int.from_bytes(hashlib.blake2b(said, digest_size=8).digest()) >> 2


def written(model: torch.nn.Module) -> int:
    """Changes when weights are written in place or replaced; an optimizer that writes behind torch's back is not seen."""
    return hash(tuple((p.data_ptr(), p._version) for p in model.parameters()))


def _refuse_adapters(model: Any, name: str) -> None:
    config = model.peft_config.get(NAME)
    if config is None or config.peft_type != "LORA" or list(model.active_adapters) != [NAME]:
        raise ModelError(
            f"'{name}' has adapters {sorted(model.peft_config)} with {list(model.active_adapters)} in use; handled is one LoRA or DoRA adapter named "
            f"'{NAME}', as peft_config=LoraConfig(...) gives"
        )
    more = [
        key for key in ("modules_to_save", "layer_replication", "trainable_token_indices") if getattr(config, key, None)
    ]
    if config.bias != "none" or getattr(config, "lora_bias", False) or more:
        raise ModelError(
            f"the adapter of '{name}' has {', '.join(more) or 'biases'}; handled are LoRA and DoRA on linear layers, without biases"
        )
    odd = {
        type(m).__name__
        for m in model.modules()
        if hasattr(m, "lora_A") and not isinstance(m.base_layer, torch.nn.Linear)
    }
    if odd:
        raise ModelError(f"the adapter of '{name}' is on layers that are not linear ({', '.join(sorted(odd))})")
