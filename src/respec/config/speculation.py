"""The section of the adaptive server: drafters, plans, and how drafts are verified."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from respec.config.room import Room
from respec.types import Mode, Plan

DrafterName = Literal["ngram", "suffix", "previous", "model", "self_quant", "eagle"]


class SpeculationConfig(Room):
    """How rollouts are drafted. `auto`: a controller chooses before every round among the plans of `candidates`, plain decoding
    included; a drafter's name: one static plan of (s, t, n); `off`: plain decoding.
    """

    drafter: Literal["auto", "off", "ngram", "suffix", "previous", "model", "self_quant", "eagle"] = "auto"
    candidates: tuple[DrafterName, ...] = Field(
        default=("suffix", "ngram"), min_length=1, description="the drafters that auto may choose"
    )
    drafter_path: Path | None = Field(
        default=None, description="the EAGLE-3 head of drafter 'eagle': a folder that `respec drafter train` wrote"
    )
    draft_model: str = Field(
        default="", description="the small model of drafter 'model': a folder or a hub id, with the policy's tokenizer"
    )
    mode: Mode = Field(
        default="matching",
        description="matching: the tokens of plain decoding; rejection: their distribution (under auto the tokens then depend on timing); "
        "lossy: neither, old answers of drafter 'previous' are kept leniently",
    )
    lenience: float = Field(default=1.3, ge=1, description="lossy: an old token is kept with min(1, lenience * p / q)")
    recorded: int = Field(default=64, ge=1, description="lossy: tokens of q kept at every place, 8 bytes each")
    s: int = Field(default=8, ge=1, le=64, description="longest draft")
    t: int = Field(default=1, ge=1, le=64, description="branches of a draft at a token; 1 is a chain")
    n: int = Field(default=0, ge=0, le=64, description="drafted tokens in all; 0 takes s")
    min_match: int = Field(default=1, ge=1, description="shortest context that may propose")
    min_confidence: float = Field(
        default=0.3, ge=0, le=1, description="a draft stops where its estimated path probability falls below"
    )
    per_request_depth: bool = Field(
        default=False,
        description="auto: requests that earlier epochs' lengths expect to be long draft deeper, since they end the rollout. Off: sums of 2 to 16 "
        "terms on SmolLM2-135M took 6 % fewer rounds, 1 % more rows and 0.999 of the time, by the costs of two cores",
    )
    cut: bool = Field(
        default=True,
        description="auto, in matching, drafter 'eagle': a draft ends where its next token is not likely enough to be accepted to be worth a row "
        "of the target's pass, sequence by sequence; how likely that has to be depends on the batch",
    )
    history_tokens: int = Field(
        default=4_000_000, ge=0, description="token budget of the suffix index; oldest rows leave first"
    )

    @model_validator(mode="after")
    def _needs(self) -> SpeculationConfig:
        if "eagle" in self.wanted and self.drafter_path is None:
            raise ValueError(
                "drafter 'eagle' needs speculation.drafter_path, a head for this policy; `respec drafter train` makes one"
            )
        if "model" in self.wanted and not self.draft_model:
            raise ValueError("drafter 'model' needs speculation.draft_model, a small model with the policy's tokenizer")
        if self.mode == "lossy" and self.drafter != "previous":
            raise ValueError(
                f"mode 'lossy' follows old answers, which drafter 'previous' alone proposes, got drafter '{self.drafter}'; set "
                "speculation.drafter = 'previous', or speculation.mode to 'matching' or 'rejection'"
            )
        return self

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names of the drafters to be made; none for plain decoding."""
        return {"off": (), "auto": self.candidates}.get(self.drafter, (self.drafter,))

    def plan(self) -> Plan:
        """The static plan; plain decoding for `auto`, whose plans a controller makes."""
        return Plan() if self.drafter in ("off", "auto") else Plan(self.drafter, self.s, self.t, self.n or self.s)
