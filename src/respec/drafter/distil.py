"""Offline distillation: a head learns from the policy's own completions before it drafts (the paper's warm start)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedModel

from respec.drafter.agreement import Agreement
from respec.drafter.examples import capture
from respec.drafter.judge import judge
from respec.drafter.learner import DrafterLearner, LearnerSettings
from respec.drafter.schedule import rate
from respec.models.eagle import EagleHead
from respec.types import Mode, Rollout, Sampling

OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class DistilStats:
    """What a distillation did. On the held-out completions: `acceptance_K` by depth and `agreement` by mode at the end, `before_K` before it
    began; `accepted_length` are the tokens a round that `acceptance_K` promises (see `Judgement.expected_length`).
    """

    steps: int
    first_loss: float
    last_loss: float
    tokens: int
    before_K: tuple[float, ...]
    acceptance_K: tuple[float, ...]
    agreement: Mapping[Mode, Agreement]
    accepted_length: float
    wall_s: float


def draft_vocabulary(rollouts: Sequence[Rollout], size: int, vocabulary: int) -> tuple[int, ...] | None:
    """The `size` tokens that completions use most (ties to the lower id); None, for all, when there are no more."""
    if size >= vocabulary:
        return None
    count_V = np.bincount(np.concatenate([rollout.token_T for rollout in rollouts]), minlength=vocabulary)
    return tuple(sorted(np.lexsort((np.arange(vocabulary), -count_V))[:size].tolist()))


def distil(
    model: PreTrainedModel,
    head: EagleHead,
    rollouts: Sequence[Rollout],
    held_out: Sequence[Rollout],
    sampling: Sampling,
    settings: LearnerSettings,
    steps: int,
    batch: int,
    seed: int = 0,
    on_step: OnStep | None = None,
    on_pass: Callable[[int], None] | None = None,
) -> DistilStats:
    """Trains `head` in place for `steps` steps of `batch` completions, drawn in permutations of `rollouts`; the rate goes up, then down a cosine.

    `sampling` is what the rollouts were drawn with. `on_step(steps done, loss)` is called after each; before the first, `on_pass`
    with the number of completions whose features have been taken.
    """
    began = time.perf_counter()
    examples = capture(model, head.shape.taps, rollouts, sampling, tokens_per_pass=settings.tokens, on_pass=on_pass)
    judged = capture(model, head.shape.taps, held_out, sampling, tokens_per_pass=settings.tokens)
    learner = DrafterLearner(head, settings)
    before = judge(head, judged, settings.depths, settings.temperature, settings.tokens, ())
    warmup = max(1, min(20, steps // 10))
    order, losses, tokens = np.random.default_rng(seed), list[float](), 0
    queue: list[int] = []
    for step in range(steps):
        while len(queue) < min(batch, len(examples)):
            queue += order.permutation(len(examples)).tolist()
        chosen, queue = queue[:batch], queue[batch:]
        stats = learner.step([examples[i] for i in chosen], rate(step, steps, settings.lr, warmup, "cosine", 0.05))
        losses.append(stats.loss)
        tokens += stats.tokens
        if on_step is not None:
            on_step(step + 1, stats.loss)
    after = judge(head, judged, settings.depths, settings.temperature, settings.tokens)
    first, last = (losses[0], losses[-1]) if losses else (0.0, 0.0)
    return DistilStats(
        len(losses), first, last, tokens, tuple(before.overlap_K.tolist()), tuple(after.overlap_K.tolist()),
        after.agreement, after.expected_length, time.perf_counter() - began,
    )  # fmt: skip
