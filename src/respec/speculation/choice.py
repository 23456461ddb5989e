"""The plan to run, given what every plan promises: law 5 first, then the most tokens a second, with some loyalty to what runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from respec.speculation.decision import Kind, name_of
from respec.speculation.settings import Settings
from respec.types import Plan


def choose(
    plans: Sequence[Plan],
    rate_P: Float[np.ndarray, "P"],
    barred_P: Bool[np.ndarray, "P"],
    now: int,
    held: int,
    settings: Settings,
) -> tuple[int, Kind, str]:
    """The best of `plans` (the first is plain decoding), the kind of change that it is, and why.

    `rate_P`: predicted tokens/s; `barred_P`: those that may not be chosen; `now`: the plan that runs, for `held` rounds already.
    """
    plain, name = float(rate_P[0]), name_of(plans[now])
    # law 5: nothing is run that is predicted slower than plain decoding; leaving it takes the margin
    fit = (rate_P >= (1 + settings.margin) * plain) & ~barred_P
    fit[now] |= bool(rate_P[now] >= plain)
    fit[0] = True
    score = np.where(fit, rate_P, -np.inf)
    score[now] *= 1 + (settings.stick if now else 0.0)
    best = int(np.argmax(score))
    if now and not fit[now]:
        gone = f"{name} is predicted at {rate_P[now]:.4g} tokens/s, plain decoding at {plain:.4g}"
        return best, "switch" if best else "off", gone
    if best == now or held < settings.dwell:
        return now, "switch", f"nothing beats {name} ({rate_P[now]:.4g} tokens/s) by enough"
    if not best:
        return 0, "off", f"nothing beats plain decoding ({plain:.4g} tokens/s) by {settings.margin:.0%}"
    gain = rate_P[best] / rate_P[now] - 1
    return (
        best,
        "switch",
        f"{name_of(plans[best])} is predicted at {rate_P[best]:.4g} tokens/s, {gain:.0%} more than {name}",
    )


def hopeful(
    rate_P: Float[np.ndarray, "P"],
    error_P: Float[np.ndarray, "P"],
    shut_P: Bool[np.ndarray, "P"],
    idle_P: Int[np.ndarray, "P"],
    best: int,
    settings: Settings,
) -> int | None:
    """The plan most worth a probe, if one is: what may beat `best`, else of a drafter long idle (`idle_P` rounds). Never one that is shut."""
    hope = np.where(shut_P, -np.inf, rate_P * (1 + settings.hope * error_P))
    hope[best] = -np.inf
    first = int(np.argmax(hope))
    if hope[first] <= rate_P[best] * (1 + settings.stick):
        idle = np.where(shut_P, -1, idle_P)
        longest = max(settings.reprobe, int(idle[1:].max(initial=0)))
        hope[(idle < longest) | (np.arange(len(hope)) == 0)] = -np.inf
        first = int(np.argmax(hope))
    return first if hope[first] > -np.inf else None
