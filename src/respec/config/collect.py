"""The section of collecting: which of the groups that a step draws are learned from, and how long answers are judged."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from respec.config.room import Room


class CollectConfig(Room):
    """What becomes of a step's groups between their rewards and their advantages."""

    filter: Literal["none", "spread", "top_spread"] | None = Field(
        default=None,
        description="groups learned from: all, those whose rewards differ (others are drawn in place of the rest), or the `share` whose rewards "
        "differ most; None: the algorithm's own",
    )
    share: float = Field(default=0.25, gt=0, le=1, description="of the groups, that filter 'top_spread' keeps")
    max_draws: int = Field(
        default=10, ge=1, description="times a step draws prompts until it has enough; then it goes on with what it has"
    )
    carry_steps: int = Field(
        default=1, ge=0, description="steps that samples left over by policy.token_budget wait before they are thrown away"
    )  # fmt: skip
    overlong_cache: int = Field(
        default=0, ge=0, description="tokens before overlong_max in which the reward falls by overlong_weight; 0: no penalty"
    )  # fmt: skip
    overlong_max: int | None = Field(default=None, ge=1, description="tokens; None takes rollout.max_new_tokens")
    overlong_weight: float = Field(default=1.0, ge=0)
