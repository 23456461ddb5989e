"""What the models of cost and acceptance get wrong, learned from measured rates: a Gaussian field over plans and batch sizes.

rate = predicted · (1 + f(plan, log2 batch)). A priori f is smooth: a part that all plans share (the machine is slow today), one that the
plans of a drafter share, one of each plan that its neighbours in (s, t, n) share partly; all vary slowly with the batch. A measurement is
a linear one of f with noise, so the posterior is exact (a Kalman filter), with neighbours, fading and uncertainty in one rule. Time pulls f
back to its prior (Ornstein-Uhlenbeck), so what has long been idle becomes uncertain again, and worth a probe.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from respec.types import Plan

# Shares of the prior variance that is not common to all plans: common to a drafter's, and each plan's own.
DRAFTER, OWN = 4 / 7, 3 / 7
# Octaves of batch size over which f keeps most of its value.
OCTAVES = 2.0
# A measurement further off than this many standard deviations is taken to be just that far off: machines hiccup.
CLIP = 3.0
# Rounds between two steps of time; a step costs as much as a measurement.
STEP = 16


class Residual:
    """`spread` is the standard deviation of f a priori, `memory` the rounds after which it has forgotten 1 - 1/e of what it learned,
    `noise` the relative standard deviation of one round's time to begin with; it is then measured. `common`: the share of f's variance that
    all plans have in common."""

    def __init__(
        self, plans: Sequence[Plan], largest: int, spread: float, memory: float, noise: float, common: float = 0.3
    ) -> None:
        self._nodes = max(2, math.ceil(math.log2(max(largest, 2))) + 1)
        self._prior = spread**2 * _kernel(plans, self._nodes, common)
        self._cov = self._prior.copy()
        self._mean = np.zeros(len(self._prior))
        self._shape = (len(plans), self._nodes)
        self._keep = math.exp(-STEP / memory)
        self._rounds = 0
        self.noise = noise

    def at(self, active: int) -> tuple[Float[np.ndarray, "P"], Float[np.ndarray, "P"]]:
        """1 + f of every plan at this batch, and the standard error of its contrast with the first plan, plain decoding: what is common
        to both decides nothing."""
        low, share = self._place(active)
        weights = np.array([1 - share, share])
        mean = self._mean.reshape(self._shape)[:, low : low + 2] @ weights
        cov = self._cov.reshape(*self._shape, *self._shape)[:, low : low + 2]
        own = np.einsum("pipj,i,j->p", cov[:, :, :, low : low + 2], weights, weights)
        plain = np.einsum("pij,i,j->p", cov[:, :, 0, low : low + 2], weights, weights)
        return np.maximum(1 + mean, 0.05), np.sqrt(np.maximum(own + plain[0] - 2 * plain, 0.0))

    def observe(self, plan: int, active: int, ratio: float, token_variance: float) -> None:
        """One round of this plan came at `ratio` times the predicted rate; `token_variance` is the relative variance that the luck of
        acceptance gives it, beside the noise of the machine."""
        low, share = self._place(active)
        cells, weights = plan * self._nodes + np.array([low, low + 1]), np.array([1 - share, share])
        gain = self._cov[:, cells] @ weights
        known = float(gain[cells] @ weights)
        surprise = ratio - 1 - float(self._mean[cells] @ weights)
        scale = math.sqrt(known + self.noise**2 + token_variance)
        surprise = min(max(surprise, -CLIP * scale), CLIP * scale)
        self.noise = math.sqrt(0.99 * self.noise**2 + 0.01 * max(surprise**2 - known - token_variance, 1e-4))
        variance = known + self.noise**2 + token_variance
        self._mean += gain * (surprise / variance)
        self._cov -= np.outer(gain, gain / variance)
        self._rounds += 1
        if self._rounds % STEP == 0:
            self.loosen(self._keep)

    def loosen(self, keep: float) -> None:
        """Goes back towards the prior: `keep` of 1 forgets nothing."""
        self._mean *= keep
        self._cov += (1 - keep**2) * (self._prior - self._cov)

    def state(self) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        """What was learned: numbers and arrays, for `restore`."""
        return {"rounds": self._rounds, "noise": self.noise}, {"mean": self._mean, "cov": self._cov}

    def restore(self, numbers: Mapping[str, float], arrays: Mapping[str, np.ndarray]) -> None:
        """Takes over what a field over the same plans and batches had learned; ValueError for another."""
        if arrays["cov"].shape != self._cov.shape:
            raise ValueError(f"a field of {arrays['cov'].shape} values is not one of {self._cov.shape}")
        self._mean, self._cov = arrays["mean"].copy(), arrays["cov"].copy()
        self._rounds, self.noise = int(numbers["rounds"]), float(numbers["noise"])

    def _place(self, active: int) -> tuple[int, float]:
        """The node below this batch size, and how far it is on the way to the next."""
        x = min(math.log2(max(active, 1)), self._nodes - 1)
        low = min(int(x), self._nodes - 2)
        return low, x - low


def _kernel(plans: Sequence[Plan], nodes: int, common: float) -> Float[np.ndarray, "K K"]:
    """Prior covariance of f at unit spread, plan by plan, node by node within."""
    place = np.array([(plan.s, 2 * math.log2(max(plan.n, 1)), 2 * math.log2(max(plan.t, 1))) for plan in plans])
    near = np.exp(-((place[:, None] - place[None]) ** 2).sum(axis=-1) / 4)
    same = np.array([[a.drafter == b.drafter for b in plans] for a in plans], float)
    octave = np.arange(nodes)
    along = np.exp(-np.abs(octave[:, None] - octave[None]) / OCTAVES)
    return np.kron(common + (1 - common) * same * (DRAFTER + OWN * near), along)
