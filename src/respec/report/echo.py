"""The echo trap: an agent that learns to repeat itself. A group's samples come to the same reward, their turns to the same words, and nothing is
left to learn from (RAGEN, Wang et al. 2025, arXiv 2504.20073, section 4.2).

Seen before the reward falls: the spread of rewards within groups goes down while repetition within groups goes up. Where the reward goes up as
well, that is a task being mastered, and no alarm.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np
from jaxtyping import Float64

from respec.types import Rollout

WINDOW = 20
NGRAM = 4
# Standard normal deviate of Kendall's statistic. Without a trend one of 30,000 windows has it, and both signals are to have it.
TREND = 4.0
# Spread at the window's end over that at its beginning; repetition's rise.
FALLEN, RISEN = 0.5, 0.1
# A reward whose trend has this deviate is rising.
RISING = 2.0


def repetition(rollouts: Iterable[Rollout]) -> float:
    """Share of the 4-grams within turns that a prompt's group has seen before, in canonical order; what was said to it does not count."""
    seen_before = total = 0
    for _, group in groupby(rollouts, key=lambda rollout: rollout.key[:2]):
        seen: set[tuple[int, ...]] = set()
        for rollout in group:
            for turn in _turns(rollout):
                grams = [tuple(turn[i : i + NGRAM]) for i in range(len(turn) - NGRAM + 1)]
                total += len(grams)
                for gram in grams:
                    seen_before += gram in seen
                    seen.add(gram)
    return seen_before / total if total else 0.0


def echo_trap(history: Sequence[Mapping[str, float]]) -> list[str]:
    """A line for a person, at the step where the last WINDOW steps show the trap and those before it did not.

    False alarms, in 400 runs of 500 steps each: none where all three are independent noise, none where they are random walks that take the spread
    5 % and repetition 0.01 a step; 277 where they take them 20 % and 0.05, for what wanders so far in a window looks like the trap.
    """
    if not _trapped(history[-WINDOW:]) or _trapped(history[-WINDOW - 1 : -1]):
        return []
    spread, seen = (_ends(history[-WINDOW:], name) for name in ("group/spread", "rollout/repetition"))
    return [
        f"this looks like the echo trap: within {WINDOW} steps the spread of rewards in a group fell from {spread[0]:.3g} to {spread[1]:.3g} while "
        f"repetition rose from {seen[0]:.0%} to {seen[1]:.0%}, and the reward did not rise; take policy.algorithm = 'starpo_s', a lower "
        "policy.lr, a higher rollout.temperature, or more varied problems"
    ]


def _trapped(window: Sequence[Mapping[str, float]]) -> bool:
    names = ("group/spread", "rollout/repetition", "reward/mean")
    if len(window) < WINDOW or not all(name in step for step in window for name in names):
        return False
    (high, low), (few, many) = _ends(window, names[0]), _ends(window, names[1])
    if not (low <= FALLEN * high and many - few >= RISEN):
        return False
    spread, seen, reward = (trend(np.array([step[name] for step in window], float)) for name in names)
    return spread <= -TREND and seen >= TREND and reward < RISING


def trend(value_N: Float64[np.ndarray, "N"]) -> float:
    """Kendall's statistic of a rising order as a standard normal deviate (Mann 1945), ties counted as neither."""
    count = len(value_N)
    order = np.sign(value_N[None, :] - value_N[:, None])
    score = np.triu(order, 1).sum()
    return float(score / np.sqrt(count * (count - 1) * (2 * count + 5) / 18))


def _ends(window: Sequence[Mapping[str, float]], name: str) -> tuple[float, float]:
    """Means over the window's first and last quarter."""
    values, quarter = [step[name] for step in window], WINDOW // 4
    return float(np.mean(values[:quarter])), float(np.mean(values[-quarter:]))


def _turns(rollout: Rollout) -> list[list[int]]:
    """The tokens of each turn; of a plain completion, all of them."""
    if rollout.turn_T is None:
        return [rollout.token_T.tolist()]
    return [rollout.token_T[rollout.turn_T == turn].tolist() for turn in range(int(rollout.turn_T.max()) + 1)]
