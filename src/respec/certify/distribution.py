"""Check c: sampled tokens follow the model's own distribution. For `rejection`, and for engines that do not share seeds with us.

An engine that decodes in bfloat16 has a slightly other distribution p̂ than the reference p, and enough draws would show it. So a token x
counts p(x) / p̂(x), with p̂(x) as the engine recorded it: the expected count of any set of tokens is then n·p exactly, whatever p̂ (importance
sampling). What is tested is that tokens are drawn from what is recorded; that this is the model's is check d.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64

from respec.certify.chi_square import POWER, detectable_tv, statistic, survival
from respec.certify.finding import Finding
from respec.certify.reference import Judged, Reference
from respec.types import Rollout

LEVEL = 1e-4
BINS = 10
# Below this many expected draws a cell is no longer near its normal law in the far tail that LEVEL asks for.
FEWEST_EXPECTED = 10.0


def uniform_transforms(subject: str, judged: Judged) -> Finding:
    """Tokens at all places: their probability integral transforms, in three orders of the vocabulary, are uniform."""
    n, level = len(judged.logprob_N), LEVEL / len(judged.pit_N)
    weight_N, mass = np.exp(judged.logprob_N - judged.recorded_N), np.full(BINS, 1 / BINS)
    p, shift = dict[str, float](), dict[str, float]()
    for order, pit_N in judged.pit_N.items():
        count = np.bincount(np.minimum((pit_N * BINS).astype(int), BINS - 1), weight_N, BINS)
        count *= n / weight_N.sum()
        p[order] = survival(statistic(count, mass), BINS - 1)
        shift[order] = float(np.abs(count / n - mass).sum() / 2)
    detectable = detectable_tv(n, BINS - 1, level)
    figures = {
        "tokens": n, "level": LEVEL, "power": POWER, "detectable_tv": detectable,
        **{f"p_{order}": value for order, value in p.items()}, **{f"shift_{order}": value for order, value in shift.items()},
    }  # fmt: skip
    worst = min(p, key=lambda order: p[order])
    # written so that a NaN fails
    if all(value >= level for value in p.values()):
        sentence = f"{n} tokens fit (least p = {p[worst]:.2g}); a bias of TV {detectable:.3f} or more would show with probability {POWER}"
        return Finding("distribution", subject, "passed", sentence, figures)
    sentence = (
        f"{n} tokens do not fit: in the order '{worst}' {shift[worst]:.3f} of the mass has moved (p = {p[worst]:.1g}); the engine does not "
        "sample from the distribution that it records"
    )
    return Finding("distribution", subject, "failed", sentence, figures)


@dataclass(frozen=True)
class Cells:
    """One prompt's first tokens, counted in groups that are all expected often enough; a frequent token is a group of its own."""

    count_K: Float64[np.ndarray, "K"]
    mass_K: Float64[np.ndarray, "K"]


def cells(rollouts: Sequence[Rollout], p_V: Float64[np.ndarray, "V"]) -> Cells:
    """Weighted counts and masses of first tokens drawn from `p_V`. Groups are filled from the most probable token down."""
    n, order = len(rollouts), np.argsort(-p_V, kind="stable")
    reached = np.cumsum(p_V[order])
    starts = [0]
    # a group ends where it is full, unless what remains would not fill another
    while True:
        before = reached[starts[-1] - 1] if starts[-1] else 0.0
        end = int(np.searchsorted(reached, before + FEWEST_EXPECTED / n)) + 1
        if end >= len(p_V) or n * (1.0 - reached[end - 1]) < FEWEST_EXPECTED:
            break
        starts.append(end)
    token = np.array([rollout.token_T[0] for rollout in rollouts])
    weight = p_V[token] / np.exp([float(rollout.logprob_T[0]) for rollout in rollouts])
    count_V = np.bincount(token, weight * n / weight.sum(), len(p_V))[order]
    mass = np.diff(np.append(reached[np.array(starts[1:], int) - 1], 1.0), prepend=0.0)
    return Cells(np.add.reduceat(count_V, starts), mass)


def first_tokens(subject: str, rollouts: Sequence[Rollout], reference: Reference, temperature: float) -> Finding:
    """Counts of the first token after each of a few prompts, drawn many times: a bias in one context shows, which may cancel over all."""
    groups: dict[tuple[int, ...], list[Rollout]] = {}
    for rollout in rollouts:
        groups.setdefault(rollout.prompt.token_ids, []).append(rollout)
    counted = {known: cells(group, np.exp(reference.after(known, temperature))) for known, group in groups.items()}
    held = {known: one for known, one in counted.items() if len(one.mass_K) > 1}
    df = sum(len(one.mass_K) - 1 for one in held.values())
    if not df:
        sentence = "no prompt leaves a choice that so few draws would show; give other prompts"
        return Finding("first tokens", subject, "unchecked", sentence)
    n = sum(len(groups[known]) for known in held)
    p = survival(sum(statistic(one.count_K, one.mass_K) for one in held.values()), df)
    detectable = detectable_tv(n, df, LEVEL)
    figures = {
        "completions": n, "prompts": len(held), "df": df, "level": LEVEL, "power": POWER, "p": p, "detectable_tv": detectable
    }  # fmt: skip
    seen = f"{n} first tokens after {len(held)} prompts"
    if p >= LEVEL:
        sentence = f"{seen} fit (p = {p:.2g}); a bias of TV {detectable:.2f} or more at this place would show with probability {POWER}"
        return Finding("first tokens", subject, "passed", sentence, figures)
    return Finding(
        "first tokens", subject, "failed", f"{seen} do not fit the model's distribution (p = {p:.1g})", figures
    )
