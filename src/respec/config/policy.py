"""The section of the policy learner."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from respec.config.room import Room

LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraConfig(Room):
    """Low-rank adapters: trained in place of the weights, W + alpha / r * B A. All linear layers of the body by default."""

    r: int = Field(default=16, ge=1, description="rank")
    alpha: float = Field(default=32.0, gt=0, description="scale: the adapter counts alpha / r")
    dropout: float = Field(default=0.0, description="0 only")
    targets: tuple[str, ...] = Field(
        default=LINEAR_LAYERS, min_length=1, description="patterns of linear layers, like q_proj or layers.1*.mlp.*"
    )
    dora: bool = Field(default=False, description="learn each output's magnitude apart from its direction")

    @field_validator("dropout")
    @classmethod
    def _no_dropout(cls, dropout: float) -> float:
        if dropout:
            raise ValueError(
                "must be 0: with dropout, recomputed log-probabilities would be those of another policy than the one that was sampled"
            )
        return dropout


class PolicyConfig(Room):
    """The policy learner. `algorithm` is a preset of estimator x surrogate x aggregation x correction; a factor set here wins."""

    algorithm: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo", "dapo", "c3po", "ppo", "starpo", "starpo_s"
    ] = "grpo"  # fmt: skip
    estimator: str | None = None
    surrogate: str | None = None
    aggregation: str | None = None
    correction: str | None = None
    lr: float = Field(default=1e-5, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    grad_clip: float = Field(default=1.0, gt=0)
    clip_low: float | None = Field(default=None, ge=0, description="ratio at least 1 - this; None: the algorithm's own")
    clip_high: float | None = Field(default=None, ge=0, description="ratio at most 1 + this; None: the algorithm's own")
    dual_clip: float | None = Field(
        default=None, gt=1, description="bounds the loss of bad tokens: no more than this times the advantage"
    )
    correction_cap: float = Field(default=2.0, gt=0)
    loss_constant: int | None = Field(
        default=None, ge=1, description="tokens: divisor of aggregation 'constant'; None takes rollout.max_new_tokens"
    )
    token_budget: int | None = Field(
        default=None, ge=1, description="completion tokens that a step trains on; what is left over goes to the next. None: all there are"
    )  # fmt: skip
    epochs: int = Field(default=1, ge=1, description="passes over one step's samples")
    minibatches: int = Field(default=1, ge=1, description="optimizer steps per pass")
    tokens_per_microbatch: int = Field(
        default=4096, ge=1, description="gradient accumulation: packed tokens per forward pass"
    )
    activations_mb: float | None = Field(
        default=None,
        gt=0,
        description="MiB that a micro-batch keeps for its backward pass: they get smaller to stay within, and a sequence that alone keeps more is "
        "computed twice. None: on a CPU micro-batches of 256 MiB",
    )
    logit_chunk: int = Field(default=1024, ge=1, description="completion tokens whose logits are held at once")
    mask_truncated: bool = Field(default=False, description="leave truncated completions out of the loss")
    entropy_bonus: float = Field(default=0.0, ge=0, description="times the entropy a token (nats), off the loss")
    entropy_floor: float = Field(
        default=0.0, ge=0, description="nats a token: a line is shown when entropy falls below; 0: never"
    )
    freeze: tuple[str, ...] = Field(
        default=(), description="patterns of weights not to train, like embed_tokens or layers.0.*"
    )
    lora: LoraConfig | None = Field(default=None, description="[policy.lora]: train adapters; None: the weights")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of the learner's matrix products; weights, sums and optimizer stay float32"
    )
    gradient_checkpointing: Literal["auto"] | bool = Field(
        default="auto", description="compute activations twice instead of keeping them; auto: where memory is short"
    )
    optimizer: Literal["adamw", "adamw_8bit", "paged_adamw_8bit"] = Field(
        default="adamw", description="8-bit moments, paged out of a full GPU: from bitsandbytes"
    )
