"""Were a run's tokens drawn from the policy? In every mode that is lossless, the log-probabilities and entropies they carry say so.

Given all before it, a token drawn from p has a surprise -log p(token) whose expectation is p's entropy. The difference of the two adds up to a
martingale, whatever the prompts, drafts and weights: over many tokens its mean is 0 within a standard error that its own squares tell. A
verifier that keeps drafts too readily, or a cache that is wrong where a draft was rejected, draws other tokens than those it stamps,
and the mean moves away from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from respec.types import Rollout, Sampling

# Of so many standard errors, chance makes one run in a million; steps are looked at again and again, so the level is not that alone.
ALARM = 6.0
# Below so many tokens the sum is not normal yet.
LEAST = 5_000


@dataclass(frozen=True)
class Surprise:
    """Over `tokens` tokens: the sum of -log p - entropy, nats, and the sum of its squares."""

    tokens: float = 0.0
    total: float = 0.0
    square: float = 0.0

    def __add__(self, other: Surprise) -> Surprise:
        return Surprise(self.tokens + other.tokens, self.total + other.total, self.square + other.square)

    @property
    def mean(self) -> float:
        """Nats a token; 0 in expectation."""
        return self.total / self.tokens if self.tokens else 0.0

    @property
    def z(self) -> float:
        """In standard errors."""
        return self.total / self.square**0.5 if self.square else 0.0

    @property
    def alarming(self) -> bool:
        return self.tokens >= LEAST and abs(self.z) > ALARM

    def news(self, before: Surprise) -> list[str]:
        """A line for a person, where this alarms and what was known before did not."""
        if before.alarming or not self.alarming:
            return []
        return [
            f"the rollouts are not the policy's own draws: their tokens are by {self.mean:+.4f} nats more surprising than its entropy says, "
            f"{abs(self.z):.0f} standard errors of {self.tokens:.0f} tokens; run `respec certify`, and set speculation.drafter = 'off' until it passes"
        ]


def surprise(rollouts: Iterable[Rollout], sampling: Sampling) -> Surprise:
    """Of rollouts drawn so. Nothing at temperature 0 or under top-k, top-p and min-p, where the entropy is not that of what was drawn from."""
    rollouts = list(rollouts)
    under = {sampling, *(rollout.sampling for rollout in rollouts if rollout.sampling is not None)}
    if any(s.temperature == 0 or s.top_k or s.top_p < 1 or s.min_p for s in under):
        return Surprise()
    parts = [(-r.logprob_T.astype(np.float64) - r.entropy_T)[r.drawn_T] for r in rollouts if len(r.token_T)]
    gap_N = np.concatenate(parts) if parts else np.zeros(0)
    return Surprise(float(len(gap_N)), float(gap_N.sum()), float((gap_N**2).sum()))


def recorded(metrics: Mapping[str, float]) -> Surprise:
    """A step's, from what was recorded of it."""
    mean, square = metrics.get("rollout/surprise"), metrics.get("rollout/surprise_square")
    if mean is None or square is None:
        return Surprise()
    tokens = metrics["rollout/tokens"]
    return Surprise(tokens, mean * tokens, square * tokens)
