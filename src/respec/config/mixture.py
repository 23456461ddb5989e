"""What decides which of a task's rows come when: stages of a mixture, and measured difficulty."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from respec.config.room import Room

SamplingColumn = Literal["temperature", "max_new_tokens", "top_p", "min_p"]


class StageConfig(Room):
    """From step `from_step` on, the tasks of a mixture have these weights; one that is not named has none."""

    from_step: int = Field(ge=1)
    weights: dict[str, float]


class DifficultyConfig(Room):
    """Rows whose measured reward lies in a band are preferred: too easy and too hard ones are passed over, for a while."""

    low: float = Field(description="least running mean reward of the rows that are preferred")
    high: float = Field(description="greatest one")
    rate: float = Field(default=0.5, gt=0, le=1, description="of a row's newest mean reward in its running mean")
    patience: int = Field(
        default=4, ge=1, description="a row outside the band is asked again after being passed over this often"
    )

    @model_validator(mode="after")
    def _in_order(self) -> DifficultyConfig:
        if self.low > self.high:
            raise ValueError(f"the band is empty: low {self.low:g} is above high {self.high:g}; exchange them")
        return self
