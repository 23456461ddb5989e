"""The sections of the models that a policy is held to: a reference, a teacher."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from respec.config.room import Room

OwnDtype = Literal["auto", "bfloat16", "float32", "float64"]


class ReferenceConfig(Room):
    """KL(policy || reference), in the loss or in the reward. `path` is a folder, a run folder or a hub id; empty is the policy as it was before
    RL, after its warm-up. Estimators are in `policy/kl.py`, which says why the default depends on the place."""

    kl: float = Field(default=0.0, ge=0, description="coefficient; 0: off, and no reference is held")
    kl_in: Literal["loss", "reward"] = "loss"
    estimator: Literal["k1", "k2", "k3", "k3_weighted"] | None = Field(
        default=None, description="None: k3_weighted in the loss, k1 in the reward, whose gradients are right"
    )
    path: str = ""
    every: int = Field(default=0, ge=0, description="the policy becomes its own reference every so many steps; 0 never")
    dtype: OwnDtype = Field(default="auto", description="of the weights at `path`; auto: as they were saved")

    @property
    def chosen(self) -> str:
        """The estimator's name."""
        return self.estimator or ("k3_weighted" if self.kl_in == "loss" else "k1")


class TeacherConfig(Room):
    """On-policy distillation from a teacher of the same tokenizer: a folder, a run folder or a hub id; empty for none. Loss `sampled` makes the
    reverse KL of the drawn tokens their advantage; the others are over the whole vocabulary, in the loss."""

    path: str = ""
    loss: Literal["sampled", "reverse_kl", "forward_kl", "jsd"] = "sampled"
    weight: float = Field(default=1.0, gt=0, description="of the distillation")
    reward_weight: float = Field(default=1.0, ge=0, description="of the task's advantages; 0: distillation alone")
    beta: float = Field(default=0.5, gt=0, lt=1, description="of loss 'jsd': near 0 like forward_kl, near 1 reverse_kl")
    dtype: OwnDtype = Field(default="auto", description="of the teacher's weights; auto: as they were saved")
