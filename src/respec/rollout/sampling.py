"""The target sampler: an exponential race.

The token drawn is argmin over v of E_v / p_v, with E_v ~ Exp(1) keyed by the position and by v, and p the processed
distribution (temperature, then top-k, top-p and min-p). The race need not touch the whole vocabulary: the `RACE` most probable tokens run one
by one and the rest as one arrival at the rate of their total mass, which, if it wins, is resolved by inverse CDF with a number of its own.
That is exact because independent exponential arrivals superpose. Ties go to the lowest id; a token without mass is never drawn.

`draw_reference` is the definition, in float64; `kernels.draw` does the same natively on the logits' own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float32, Float64, Int32, Int64, UInt64
from torch import Tensor

from respec.errors import NonFiniteError
from respec.models import kernels
from respec.rollout.randomness import uniform
from respec.types import Sampling

RACE = 64
WHOLE_RACE_UP_TO = 256


@dataclass(frozen=True)
class Draws:
    """One draw a row; the fields are those of `types.Rollout`."""

    token: Int32[np.ndarray, "R"]
    logprob: Float32[np.ndarray, "R"]
    kept_logmass: Float32[np.ndarray, "R"]
    entropy: Float32[np.ndarray, "R"]

    def take(self, rows: Sequence[int]) -> Draws:
        """Some of the rows, in the order given."""
        at = np.array(rows)
        return Draws(self.token[at], self.logprob[at], self.kept_logmass[at], self.entropy[at])

    @classmethod
    def join(cls, parts: Sequence[Draws]) -> Draws:
        """The rows of several, one after the other."""
        fields = ("token", "logprob", "kept_logmass", "entropy")
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in fields))


def racers(vocabulary: int) -> int:
    """How many tokens race one by one: all of a small vocabulary, the `RACE` most probable of a large one."""
    return vocabulary if vocabulary <= WHOLE_RACE_UP_TO else RACE


def draw(logits: Float[Tensor, "R V"], key: UInt64[np.ndarray, "R"], sampling: Sampling) -> Draws:
    """Draws one token a row from the processed distribution. Raises NonFiniteError on a NaN."""
    if logits.device.type == "cpu" and logits.dtype in kernels.DTYPES and kernels.available()[0]:
        draws = Draws(*kernels.draw(
            logits, np.ascontiguousarray(key), sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, racers(logits.shape[1])
        ))  # fmt: skip
    else:
        draws = draw_reference(logits.double().cpu().numpy(), key, sampling)
    refuse_non_finite(draws.logprob)
    return draws


def refuse_non_finite(values: Float[np.ndarray, "R"]) -> None:
    """Raises NonFiniteError for log-probabilities or entropies, one a row, that come of diverged weights."""
    if not np.isfinite(values).all():
        row = int(np.flatnonzero(~np.isfinite(values))[0])
        raise NonFiniteError(
            f"the policy's logits are not finite (row {row} of {len(values)}); the weights may have diverged: "
            "lower policy.lr, or go back to an earlier checkpoint"
        )


def draw_reference(logits: Float64[np.ndarray, "R V"], key: UInt64[np.ndarray, "R"], sampling: Sampling) -> Draws:
    """The sampler's definition, one row at a time."""
    rows = [_draw_row(row, key[i : i + 1], sampling) for i, row in enumerate(logits)]
    token, logprob, kept, entropy = zip(*rows, strict=True)
    return Draws(np.array(token, np.int32), *(np.array(values, np.float32) for values in (logprob, kept, entropy)))


@dataclass(frozen=True)
class Processed:
    """One row's laws: `logp` at the sampling temperature, `p` normalised after top-k, top-p and min-p; the rest as in `types.Rollout`."""

    logp: Float64[np.ndarray, "V"]
    p: Float64[np.ndarray, "V"]
    kept_logmass: float
    entropy: float


def process(logits: Float64[np.ndarray, "V"], sampling: Sampling) -> Processed:
    """The distributions that a row of logits stands for.

    A token stays under top-p while the mass before it has not reached top_p of what top-k left; under min-p while its probability is at
    least min_p of the largest. At temperature 0 the distribution is a point mass on the (lowest) argmax, the log-probabilities
    those of temperature 1.
    """
    x = logits / sampling.temperature if sampling.temperature > 0 else logits
    shifted = x - x.max()
    logp = shifted - np.log(np.exp(shifted).sum())
    full = np.exp(logp)
    entropy = float(-(full * np.where(full > 0, logp, 0.0)).sum())
    if sampling.temperature == 0:
        point = np.zeros_like(x)
        point[int(x.argmax())] = 1.0
        return Processed(logp, point, 0.0, entropy)
    if not truncates(sampling):
        return Processed(logp, full / full.sum(), 0.0, entropy)
    order = np.lexsort((np.arange(len(x)), -x))
    if sampling.top_k:
        order = order[: sampling.top_k]
    within = full[order].sum() if sampling.top_k else 1.0
    before = np.cumsum(full[order]) - full[order]
    stays = (before < sampling.top_p * within) & (full[order] >= sampling.min_p * full[order[0]]) & (full[order] > 0)
    stays[0] = True
    kept = np.zeros_like(full)
    kept[order[stays]] = full[order[stays]]
    mass = kept.sum()
    return Processed(logp, kept / mass, float(np.log(min(1.0, mass))), entropy)


def truncates(sampling: Sampling) -> bool:
    """Whether anything but the temperature shapes the distribution."""
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def race(p: Float64[np.ndarray, "V"], key: UInt64[np.ndarray, "1"], first: int) -> Int64[np.ndarray, "k"]:
    """The `first` earliest of the whole vocabulary's arrivals E_v / p_v: the first is a draw from p, all are one without replacement.

    Tokens without mass never arrive, so there may be fewer.
    """
    racing = np.flatnonzero(p > 0)
    arrival = -np.log(uniform(key, racing.astype(np.uint64))) / p[racing]
    if first == 1 and len(racing):
        return racing[[arrival.argmin()]]
    nearest = np.argpartition(arrival, first)[:first] if first < len(arrival) else np.arange(len(arrival))
    return racing[nearest[np.lexsort((nearest, arrival[nearest]))]]


def _draw_row(
    logits: Float64[np.ndarray, "V"], key: UInt64[np.ndarray, "1"], sampling: Sampling
) -> tuple[int, float, float, float]:
    vocabulary, law = len(logits), process(logits, sampling)
    logp, p = law.logp, law.p
    if sampling.temperature == 0:
        winner = int(p.argmax())
        return winner, float(logp[winner]), 0.0, law.entropy
    racing = np.flatnonzero(p > 0)
    whole = truncates(sampling) or racers(vocabulary) == vocabulary
    if not whole:
        racing = np.sort(np.lexsort((np.arange(vocabulary), -logits))[: racers(vocabulary)])
        racing = racing[p[racing] > 0]
    arrival = -np.log(uniform(key, racing.astype(np.uint64))) / p[racing]
    winner = int(racing[arrival.argmin()])
    rest = np.ones(vocabulary, bool)
    rest[racing] = False
    tail = np.where(rest, p, 0.0)
    first, second = uniform(key, np.array([vocabulary, vocabulary + 1], np.uint64))
    if not whole and tail.sum() > 0 and -np.log(first) / tail.sum() < arrival.min():
        reached = np.cumsum(tail)
        target = second * reached[-1]
        winner = int(np.flatnonzero((reached >= target) & (tail > 0))[0])
    return winner, float(logp[winner]), law.kept_logmass, law.entropy
