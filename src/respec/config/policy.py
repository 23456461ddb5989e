"""The section of the policy learner."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from respec.config.room import Room


class PolicyConfig(Room):
    """The policy learner. `algorithm` is a preset of estimator x surrogate x aggregation x correction; a factor set here wins."""

    algorithm: Literal[
        "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo", "starpo", "starpo_s"
    ] = "grpo"
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
    epochs: int = Field(default=1, ge=1, description="passes over one step's samples")
    minibatches: int = Field(default=1, ge=1, description="optimizer steps per pass")
    tokens_per_microbatch: int = Field(
        default=4096, ge=1, description="gradient accumulation: packed tokens per forward pass"
    )
    logit_chunk: int = Field(default=1024, ge=1, description="completion tokens whose logits are held at once")
    mask_truncated: bool = Field(default=False, description="leave truncated completions out of the loss")
