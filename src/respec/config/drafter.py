"""The section of the drafter's online learner."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from respec.config.room import Room


class DrafterConfig(Room):
    """The online learner of drafter `eagle`: its head follows the policy. Loss and weights are named in `drafter/`."""

    learn: bool = Field(default=False, description="train the head on every step's rollouts")
    share: float = Field(
        default=0.05,
        gt=0,
        le=1,
        description="of the rollouts, drawn anew each step, that are learned from: what learning costs",
    )
    every: int = Field(default=1, ge=1, description="an update each so many steps, on 1/every of what there is since")
    gate: float = Field(
        default=0.0, ge=0, lt=1,
        description="update only when overlap has fallen this far below its best, beyond what the policy's entropy explains; 0: always",
    )  # fmt: skip
    async_steps: int = Field(
        default=0, ge=0, le=1, description="1: an update runs beside the next generation, which drafts with the head before it"
    )  # fmt: skip
    threads: int = Field(default=1, ge=1, description="CPU threads of an update that runs beside")
    loss: Literal["kl", "tv", "lk", "e2e_tv"] = "e2e_tv"
    weighting: Literal["uniform", "reward", "rank", "advantage+"] = "uniform"
    reward_min: float = Field(default=0.0, description="the least reward there can be, for weighting 'reward'")
    lr: float = Field(default=2e-4, gt=0)
    warmup_steps: int = Field(default=0, ge=0, description="RL steps")
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    depths: int = Field(default=3, ge=1, le=16, description="unrolled steps; heads draft deeper than they learned to")
    minibatches: int = Field(default=1, ge=1, description="optimizer steps an update")
    grad_clip: float = Field(default=0.5, gt=0)
    replay: float = Field(default=0.0, ge=0, description="older rollouts to learn from again for each new one")
    replay_mb: float = Field(
        default=256.0, gt=0, description="memory of the replay buffer; the oldest rollouts leave first"
    )
    features: Literal["bfloat16", "float32"] = Field(default="bfloat16", description="of hidden states in the buffer")
    judge_every: int = Field(
        default=10, ge=0, description="steps between measurements of the head on what it has just learned; 0: never"
    )
