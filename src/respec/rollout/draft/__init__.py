"""Drafters: one a file, one protocol."""

from __future__ import annotations

from respec.config import SpeculationConfig
from respec.rollout.draft.ngram import NgramDrafter
from respec.rollout.draft.protocol import Drafter
from respec.rollout.draft.suffix import SuffixDrafter


def make_drafters(config: SpeculationConfig) -> tuple[Drafter, ...]:
    """The configured drafters; none for plain decoding."""
    wanted = {"off": (), "auto": config.candidates}.get(config.drafter, (config.drafter,))
    return tuple(_make(name, config) for name in wanted)


def _make(name: str, config: SpeculationConfig) -> Drafter:
    if name == "ngram":
        return NgramDrafter(config.min_match)
    return SuffixDrafter(config.min_match, config.min_confidence, config.history_tokens)
