"""Pearson's chi-square test and what it can detect.

Counts of n draws in cells of mass c_i, drawn from masses d_i instead, have a statistic near the noncentral chi-square law of shift
n·Σ (d_i - c_i)² / c_i. By Cauchy-Schwarz that is at least n·(2·TV)², TV the total variation between the two over the cells: so a
shift that is detected is a TV that is detected, whatever the direction.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float64

POWER = 0.99


def statistic(count_K: Float64[np.ndarray, "K"], mass_K: Float64[np.ndarray, "K"]) -> float:
    """Pearson's statistic of (weighted) counts in cells whose masses sum to one."""
    expected = count_K.sum() * mass_K
    return float(((count_K - expected) ** 2 / expected).sum())


def survival(x: float, df: int, shift: float = 0.0) -> float:
    """P(X > x) of the chi-square law with `df` degrees of freedom and noncentrality `shift`.

    The noncentral law is a Poisson(shift / 2) mixture of central ones with df + 2j (Johnson, Kotz and Balakrishnan 1995, ch. 29).
    """
    if x <= 0:
        return 1.0
    half = shift / 2
    j = torch.arange(int(half + 12 * math.sqrt(half) + 40), dtype=torch.float64)
    weight = torch.exp(torch.special.xlogy(j, torch.tensor(half, dtype=torch.float64)) - half - torch.lgamma(j + 1))
    tail = torch.special.gammaincc(df / 2 + j, torch.full_like(j, x / 2))
    return float((weight * tail).sum())


def critical(df: int, level: float) -> float:
    """The value that a statistic of the central law exceeds with probability `level`."""
    return _crossing(lambda x: survival(x, df) < level)


def detectable_tv(n: int, df: int, level: float, power: float = POWER) -> float:
    """The smallest total variation over the cells that n draws detect with `power` at `level`, whatever its direction."""
    x = critical(df, level)
    shift = _crossing(lambda shift: survival(x, df, shift) > power)
    return min(1.0, math.sqrt(shift / n) / 2)


def _crossing(past: Callable[[float], bool]) -> float:
    """The smallest x > 0 at which `past` turns true, to twelve digits."""
    low, high = 0.0, 1.0
    while not past(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if past(middle) else (middle, high)
    return high
