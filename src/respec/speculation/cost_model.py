"""Seconds of one decode round, from few parameters fitted to samples: never falling in any argument.

A forward pass over M rows is flat while weights are being read and affine once they are being multiplied; attention reads the
keys of B sequences and multiplies them by M rows. Non-negative least squares over features that never fall in B, M or the context
gives a surface that never falls in them either, however few the samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from respec.errors import RespecError

FOLDS = 5


class CostError(RespecError):
    """Samples that no cost model can be fitted to."""


@dataclass(frozen=True)
class CostSample:
    """One measured round: `active` sequences, `rows` fed to the target (sequences plus drafted nodes), mean keys a sequence. Seconds.

    `start_s` is what a drafter's first round took longer than its later ones: it reads what it missed.
    """

    active: int
    rows: int
    context: float
    drafter: str = "off"
    s: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    overhead_s: float = 0.0
    start_s: float = 0.0


@dataclass(frozen=True)
class CostModel:
    """T(B, M, context, drafter, s) = verify + draft + overhead, in seconds. Made by `fit`, read by the solver.

    `knots` are the numbers of rows where the forward pass may bend. `draft` holds a, b, c, d of a + b·B + c·s + d·B·s for each
    drafter, `start` a, b of a + b·B·context, the seconds it takes to begin. `held_out_error` is the median relative error of the whole
    round on samples left out of the fit. What live rounds say beside it is the controller's residual.
    """

    knots: tuple[int, ...]
    verify: tuple[float, ...]
    overhead: tuple[float, ...]
    draft: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    held_out_error: float = math.nan
    start: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def trust(self) -> str:
        """How far it is to be trusted, for a person."""
        if math.isnan(self.held_out_error):
            return "costs were fitted to too few samples to tell how well"
        return f"costs are off by {self.held_out_error:.1%} (median, on samples left out of the fit)"

    def starts(self, active: int, context: float, drafter_P: Sequence[str]) -> Float[np.ndarray, "P"]:
        """Seconds that each drafter takes to begin in the middle of these sequences, once."""
        none = (0.0, 0.0)
        fixed, by_key = np.array([self.start.get(name, none) for name in drafter_P]).T
        return fixed + by_key * active * context

    def seconds(
        self, active: int, rows_P: Float[np.ndarray, "P"], context: float, drafter_P: Sequence[str], s_P: np.ndarray
    ) -> Float[np.ndarray, "P"]:
        """Seconds of a round of each of P plans. A drafter never measured costs what the dearest does."""
        active_P = np.full(len(rows_P), float(active))
        weights = np.array([self.drafting(name) for name in drafter_P])
        return self.forward(active_P, rows_P, context) + (_draft_features(active_P, s_P) * weights).sum(axis=1)

    def forward(
        self, active_P: Float[np.ndarray, "P"], rows_P: Float[np.ndarray, "P"], context: float
    ) -> Float[np.ndarray, "P"]:
        """Seconds of verification and overhead, by batch and rows."""
        verify = _verify_features(active_P, rows_P, context, self.knots) @ np.array(self.verify)
        return verify + _overhead_features(active_P, rows_P) @ np.array(self.overhead)

    def drafting(self, drafter: str) -> tuple[float, ...]:
        """a, b, c, d of the seconds a + b·B + c·s + d·B·s; those of the dearest for a drafter never measured."""
        if drafter == "off" or not self.draft:
            return (0.0,) * 4
        return self.draft[drafter] if drafter in self.draft else tuple(np.max([*self.draft.values()], axis=0))

    def to_dict(self) -> dict[str, Any]:
        return {
            "knots": list(self.knots),
            "verify": list(self.verify),
            "overhead": list(self.overhead),
            "draft": {name: list(weights) for name, weights in self.draft.items()},
            "start": {name: list(weights) for name, weights in self.start.items()},
            "held_out_error": None if math.isnan(self.held_out_error) else self.held_out_error,
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> CostModel:
        error = data["held_out_error"]
        return CostModel(
            tuple(data["knots"]),
            tuple(data["verify"]),
            tuple(data["overhead"]),
            {name: tuple(weights) for name, weights in data["draft"].items()},
            math.nan if error is None else error,
            {name: tuple(weights) for name, weights in data["start"].items()},
        )


def fit(samples: Sequence[CostSample]) -> CostModel:
    """The model of least squared relative error with no negative weight. Its error is measured on every fifth sample, left out in turn.

    Raises CostError when there is nothing to fit.
    """
    if not samples or any(sample.verify_s <= 0 for sample in samples):
        raise CostError(
            f"a cost model needs samples with positive verification times, got {len(samples)} samples; "
            "profile the engine again"
        )
    errors = list[float]()
    if len(samples) >= 2 * FOLDS:
        for fold in range(FOLDS):
            model = _fit([sample for i, sample in enumerate(samples) if i % FOLDS != fold])
            errors += relative_errors(model, samples[fold::FOLDS])
    return replace(_fit(samples), held_out_error=float(np.median(errors)) if errors else math.nan)


def relative_errors(model: CostModel, samples: Sequence[CostSample]) -> list[float]:
    """|predicted - measured| / measured of each sample's whole round."""
    errors = list[float]()
    for sample in samples:
        measured = sample.draft_s + sample.verify_s + sample.overhead_s
        predicted = _predict(model, sample)
        errors.append(abs(predicted - measured) / measured)
    return errors


def nonnegative_least_squares(
    feature_NF: Float[np.ndarray, "N F"], target_N: Float[np.ndarray, "N"]
) -> Float[np.ndarray, "F"]:
    """argmin |A x - y| over x >= 0, by active sets (Lawson and Hanson 1974, algorithm NNLS)."""
    scale = np.linalg.norm(feature_NF, axis=0)
    scale[scale == 0] = 1.0
    a = feature_NF / scale
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], bool)
    for _ in range(10 * a.shape[1]):
        gradient = np.where(free, -np.inf, a.T @ (target_N - a @ x))
        entering = int(np.argmax(gradient))
        if gradient[entering] <= 1e-10 * np.linalg.norm(target_N):
            break
        free[entering] = True
        while True:
            z = np.zeros_like(x)
            z[free] = np.linalg.lstsq(a[:, free], target_N, rcond=None)[0]
            below = free & (z <= 0)
            if not below.any():
                break
            # as far towards z as nobody turns negative; who reaches zero leaves
            x += np.min(x[below] / (x[below] - z[below])) * (z - x)
            free &= x > 1e-15
            x[~free] = 0.0
        x = z
    return x / scale


def _fit(samples: Sequence[CostSample]) -> CostModel:
    active, rows, context, s = (
        np.array(values, float)
        for values in zip(*((x.active, x.rows, x.context, x.s) for x in samples), strict=True)
    )  # fmt: skip
    total = np.array([x.draft_s + x.verify_s + x.overhead_s for x in samples])
    knots = tuple(k for k in (2**i for i in range(2, 20)) if rows.min() < k < rows.max())

    def solve(features: np.ndarray, seconds: Sequence[float], chosen: slice | np.ndarray = slice(None)) -> tuple:
        # divided by the whole round's seconds: a millisecond matters more in a short round
        weights = features[chosen] / total[chosen, None], np.array(seconds)[chosen] / total[chosen]
        return tuple(map(float, nonnegative_least_squares(*weights)))

    drafted = {
        name: np.array([x.drafter == name for x in samples]) for name in sorted({x.drafter for x in samples} - {"off"})
    }
    return CostModel(
        knots,
        solve(_verify_features(active, rows, context, knots), [x.verify_s for x in samples]),
        solve(_overhead_features(active, rows), [x.overhead_s for x in samples]),
        {
            name: solve(_draft_features(active, s), [x.draft_s for x in samples], its) for name, its in drafted.items()
        },
        start={
            name: solve(_start_features(active, context), [x.start_s for x in samples], its) for name, its in drafted.items()
        },
    )  # fmt: skip


def _verify_features(active_N: np.ndarray, rows_N: np.ndarray, context: Any, knots: tuple[int, ...]) -> np.ndarray:
    """Constant; B; M; keys read (B·context) and multiplied (M·context); M up to each knot, M beyond each knot."""
    columns = [np.ones_like(rows_N), active_N, rows_N, active_N * context, rows_N * context]
    columns += [np.minimum(rows_N, knot) for knot in knots] + [np.maximum(rows_N - knot, 0.0) for knot in knots]
    return np.stack(columns, axis=1)


def _overhead_features(active_N: np.ndarray, rows_N: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(rows_N), active_N, rows_N], axis=1)


def _draft_features(active_N: np.ndarray, s_N: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(active_N), active_N, s_N, active_N * s_N], axis=1)


def _start_features(active_N: np.ndarray, context_N: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(active_N), active_N * context_N], axis=1)


def _predict(model: CostModel, sample: CostSample) -> float:
    rows, s = np.array([float(sample.rows)]), np.array([float(sample.s)])
    return float(model.seconds(sample.active, rows, sample.context, (sample.drafter,), s)[0])
