"""The products that flow between stages: one frozen dataclass each, with its maker and its readers.

Ragged lists carry a suffix: `_P` over prompts, `_G` over the samples of one prompt's group, `_T` over a completion's tokens, `_R` over a
rollout's decode rounds. Everything after the engine reads rollouts in canonical order (row, draw, sample), never as they finished.
"""

from respec.types.drawing import (
    ENVIRONMENT,
    LAW,
    PLAIN,
    Ask,
    Delta,
    Finish,
    Message,
    Mode,
    Plan,
    Prompt,
    Proposer,
    Rollout,
    Sampling,
    Stream,
    Version,
)
from respec.types.learning import (
    Batch,
    CriticStats,
    EvalResult,
    Sample,
    ScoredRollout,
    Shown,
    UpdateStats,
    WarmupStats,
)
from respec.types.rounds import Cut, DraftCounts, Leads, Load, RolloutStats, RoundRecord
from respec.types.turns import Answer, Partner

__all__ = [
    "ENVIRONMENT",
    "LAW",
    "PLAIN",
    "Answer",
    "Ask",
    "Batch",
    "CriticStats",
    "Cut",
    "Delta",
    "DraftCounts",
    "EvalResult",
    "Finish",
    "Leads",
    "Load",
    "Message",
    "Mode",
    "Partner",
    "Plan",
    "Prompt",
    "Proposer",
    "Rollout",
    "RolloutStats",
    "RoundRecord",
    "Sample",
    "Sampling",
    "ScoredRollout",
    "Shown",
    "Stream",
    "UpdateStats",
    "Version",
    "WarmupStats",
]
