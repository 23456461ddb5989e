"""Check c: sampled tokens follow the model's own distribution. For `rejection`, and for engines that do not share seeds with us."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from respec.certify.chi_square import POWER, detectable_tv, statistic, survival
from respec.certify.finding import Finding
from respec.certify.reference import Judged, Reference
from respec.types import Rollout

LEVEL = 1e-4
BINS = 10
# Below this many expected draws a cell is no longer near its normal law in the far tail that LEVEL asks for.
FEWEST_EXPECTED = 10.0


def rounding_of(judged: Judged, allowed: float) -> float:
    """How far rounding alone moves the distribution: the root of its chi-square divergence a token, near that of the mean square
    difference of log-probabilities. At most twice the mean that is allowed for: the rest is not rounding."""
    apart = float(np.sqrt(np.mean((judged.recorded_N - judged.logprob_N) ** 2)))
    return min(2 * allowed, apart)  # in this order a NaN gives the bound


def uniform_transforms(subject: str, judged: Judged, rounding: float) -> Finding:
    """Tokens at all places: their probability integral transforms, in three orders of the vocabulary, are uniform."""
    n, level = len(judged.logprob_N), LEVEL / len(judged.pit_N)
    figures: dict[str, float | int | None] = {"tokens": n, "level": LEVEL, "power": POWER, "rounding": rounding}
    mass = np.full(BINS, 1 / BINS)
    for order, pit_N in judged.pit_N.items():
        count = np.bincount(np.minimum((pit_N * BINS).astype(int), BINS - 1), minlength=BINS)
        figures[f"p_{order}"] = survival(statistic(count, mass), BINS - 1, n * rounding**2)
        figures[f"shift_{order}"] = float(np.abs(count / n - mass).sum() / 2)
    detectable = detectable_tv(n, BINS - 1, level, rounding)
    figures["detectable_tv"] = detectable
    worst = min(judged.pit_N, key=lambda order: figures[f"p_{order}"] or 0.0)
    p, shift = figures[f"p_{worst}"] or 0.0, figures[f"shift_{worst}"]
    power = f"a bias of TV {detectable:.3f} or more would show with probability {POWER}"
    if p >= level:
        return Finding(
            "distribution", subject, "passed", f"{n} tokens fit the model's distribution (least p = {p:.2g}); {power}", figures
        )  # fmt: skip
    sentence = f"{n} tokens do not fit the model's distribution: in the order '{worst}' {shift:.3f} of the mass has moved (p = {p:.1g})"
    return Finding("distribution", subject, "failed", sentence, figures)


@dataclass(frozen=True)
class Cells:
    """One prompt's first tokens, counted in groups that are all expected often enough; a frequent token is a group of its own."""

    count_K: Int64[np.ndarray, "K"]
    mass_K: Float64[np.ndarray, "K"]


def cells(first: Sequence[int], p_V: Float64[np.ndarray, "V"]) -> Cells:
    """Counts and masses for tokens `first`, drawn from `p_V`. Groups are filled from the most probable token down."""
    n, order = len(first), np.argsort(-p_V, kind="stable")
    reached = np.cumsum(p_V[order])
    starts = [0]
    # a group ends where it is full, unless what remains would not fill another
    while True:
        before = reached[starts[-1] - 1] if starts[-1] else 0.0
        end = int(np.searchsorted(reached, before + FEWEST_EXPECTED / n)) + 1
        if end >= len(p_V) or n * (1.0 - reached[end - 1]) < FEWEST_EXPECTED:
            break
        starts.append(end)
    count_V = np.bincount(first, minlength=len(p_V))[order]
    mass = np.diff(np.append(reached[np.array(starts[1:], int) - 1], 1.0), prepend=0.0)
    return Cells(np.add.reduceat(count_V, starts), mass)


def first_tokens(
    subject: str, rollouts: Sequence[Rollout], reference: Reference, temperature: float, rounding: float
) -> Finding:
    """Counts of the first token after each of a few prompts, drawn many times: a bias in one context shows, which would cancel over all."""
    groups: dict[tuple[int, ...], list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt.token_ids, []).append(rollout)
    held = [
        cells([int(r.token_T[0]) for r in group], reference.first_token(group[0].prompt, temperature))
        for group in groups.values()
    ]
    held = [one for one in held if len(one.mass_K) > 1]
    df = sum(len(one.mass_K) - 1 for one in held)
    if not df:
        return Finding(
            "first tokens",
            subject,
            "unchecked",
            "no prompt leaves a choice that so few draws would show; give other prompts",
        )
    n = int(sum(one.count_K.sum() for one in held))
    p = survival(sum(statistic(one.count_K, one.mass_K) for one in held), df, n * rounding**2)
    detectable = detectable_tv(n, df, LEVEL, rounding)
    figures = {
        "completions": n,
        "prompts": len(held),
        "cells": df,
        "level": LEVEL,
        "power": POWER,
        "p": p,
        "detectable_tv": detectable,
    }
    if p >= LEVEL:
        sentence = (
            f"{n} first tokens after {len(held)} prompts fit (p = {p:.2g}); a bias of TV {detectable:.2f} at this place would show "
            f"with probability {POWER}"
        )
        return Finding("first tokens", subject, "passed", sentence, figures)
    sentence = f"{n} first tokens after {len(held)} prompts do not fit the model's distribution (p = {p:.1g})"
    return Finding("first tokens", subject, "failed", sentence, figures)
