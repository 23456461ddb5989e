"""Which plan makes the most tokens a second: a pure function of load, acceptance and cost, over all plans at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from respec.speculation.acceptance import Acceptance, Outlook
from respec.speculation.confidence import FLOORS, Confidence
from respec.speculation.cost_model import CostModel
from respec.types import Load, Plan

# A plan must promise this much over plain decoding to be worth leaving it.
MARGIN = 0.03
# Batch sizes up to this are buckets of their own; above, twelve buckets to an octave.
FINE = 16


@dataclass(frozen=True)
class Candidate:
    """A plan's promise under a load. `goodput` in tokens a second, `error` its relative standard error against plain decoding's,
    `tokens` and `seconds` those of one round of the whole batch."""

    plan: Plan
    goodput: float
    error: float
    tokens: float
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """The same for P plans, as arrays, before switching. `luck_P` is the relative standard deviation of one round's tokens, `floor_P` the chance
    below which drafts are cut (see `confidence`)."""

    tokens_P: Float[np.ndarray, "P"]
    seconds_P: Float[np.ndarray, "P"]
    error_P: Float[np.ndarray, "P"]
    luck_P: Float[np.ndarray, "P"]
    floor_P: Float[np.ndarray, "P"]

    @property
    def rate_P(self) -> Float[np.ndarray, "P"]:
        return self.tokens_P / self.seconds_P


def forecast(
    load: Load,
    plans: Sequence[Plan],
    acceptance: Acceptance,
    cost: CostModel,
    confidence: Confidence | None = None,
    floor: float | None = None,
) -> Forecast:
    """Tokens and seconds of one round of each plan. Tokens include the bonus token and stop at each sequence's remaining budget. Chains of
    drafters that `confidence` knows are cut at `floor`, or, where none is given, where that makes most tokens a second."""
    room = room_by_depth(load, acceptance.depth)
    outlooks = {key: acceptance.outlook(*key, room) for key in {(plan.drafter, plan.t) for plan in plans if plan.n}}
    tokens, error, spread, nodes = (
        np.array(values) for values in zip(*(_expected(p, outlooks) for p in plans), strict=True)
    )
    depth = np.array([float(plan.s) for plan in plans])
    rows = load.active * (1 + nodes)
    seconds = cost.seconds(load.active, rows, load.context, [plan.drafter for plan in plans], depth)
    whole = Forecast(
        load.active * tokens,
        seconds,
        error / tokens,
        spread / tokens / np.sqrt(max(load.active, 1)),
        np.zeros(len(plans)),
    )
    return whole if confidence is None else _cut(whole, load, plans, confidence, room, cost, floor)


def _cut(
    whole: Forecast,
    load: Load,
    plans: Sequence[Plan],
    confidence: Confidence,
    room_D: Float[np.ndarray, "D"],
    cost: CostModel,
    floor: float | None,
) -> Forecast:
    """The forecast with chains cut, each plan's at its own best floor, or all at one."""
    found = {name: confidence.promise(name) for name in {plan.drafter for plan in plans if plan.n and plan.t == 1}}
    for name, promise in found.items():
        if promise is None:
            continue
        index = np.array([i for i, plan in enumerate(plans) if plan.drafter == name and plan.t == 1])
        last = np.array([plans[i].s for i in index]) - 1
        more_FP, rows_FP, square_FP = (
            x[:, last] * room_D[last] for x in (promise.tokens_FS, promise.rows_FS, promise.square_FS)
        )
        # a step is taken for all as long as one goes on
        steps_FP = np.cumsum(1 - (1 - promise.drafted_FD) ** load.active, axis=1)[:, last]
        rows = load.active * (1 + rows_FP.ravel())
        seconds_FP = cost.seconds(load.active, rows, load.context, [name] * len(rows), steps_FP.ravel())
        seconds_FP = seconds_FP.reshape(rows_FP.shape)
        allowed = np.isin(FLOORS, floor)[:, None] if floor is not None else True
        best = np.argmax(np.where(allowed, (1 + more_FP) / seconds_FP, 0.0), axis=0), np.arange(len(index))
        tokens = 1 + more_FP[best]
        spread = np.sqrt(np.maximum(square_FP[best] - more_FP[best] ** 2, 0.0)) / tokens
        whole.tokens_P[index], whole.seconds_P[index] = load.active * tokens, seconds_FP[best]
        whole.error_P[index] = spread / np.sqrt(promise.chains)
        whole.luck_P[index] = spread / np.sqrt(max(load.active, 1))
        whole.floor_P[index] = FLOORS[best[0]]
    return whole


def _expected(plan: Plan, outlooks: Mapping[tuple[str, int], Outlook]) -> tuple[float, float, float, float]:
    """Tokens of a sequence and round, their standard error, their spread, and the nodes to verify."""
    if not plan.n:
        return 1.0, 0.0, 0.0, 0.0
    outlook = outlooks[plan.drafter, plan.t]
    s = min(plan.s, len(outlook.tokens_S) - 1)
    # a tree has all its nodes wherever it has a first one
    nodes = outlook.nodes_S[s] if plan.t == 1 else plan.n * outlook.nodes_S[1]
    return outlook.tokens_S[s], outlook.error_S[s], outlook.spread_S[s], nodes


def room_by_depth(load: Load, depth: int) -> Float[np.ndarray, "D"]:
    """Share of sequences whose budget has room for tokens at depths 1..D and the bonus token after them. Full where no budget is given."""
    if not load.remaining_B:
        return np.ones(depth)
    return (np.array(load.remaining_B)[:, None] > np.arange(1, depth + 1)).mean(axis=0)


def goodput(
    plan: Plan, load: Load, acceptance: Acceptance, cost: CostModel, dwell: int = 1, switch_s: float = 0.0
) -> float:
    """Tokens a second: Σ_B tokens / (T_draft + T_verify + T_overhead + switch_s / dwell); `dwell` in rounds."""
    promise = forecast(load, (plan,), acceptance, cost)
    return float(promise.tokens_P[0] / (promise.seconds_P[0] + switch_s / dwell))


def solve(
    load: Load,
    plans: Sequence[Plan],
    acceptance: Acceptance,
    cost: CostModel,
    dwell: int = 1,
    switch_s: Sequence[float] | None = None,
    margin: float = MARGIN,
) -> tuple[Candidate, ...]:
    """All plans, best first; plain decoding first when nothing beats it by `margin`. `switch_s`: seconds to start each plan, by plan."""
    promise = forecast(load, plans, acceptance, cost)
    switch = np.zeros(len(plans)) if switch_s is None else np.asarray(switch_s, float)
    seconds = promise.seconds_P + switch / dwell
    return ranked(plans, promise.tokens_P / seconds, promise.error_P, promise.tokens_P, seconds, margin)


def ranked(
    plans: Sequence[Plan],
    goodput_P: Float[np.ndarray, "P"],
    error_P: Float[np.ndarray, "P"],
    tokens_P: Float[np.ndarray, "P"],
    seconds_P: Float[np.ndarray, "P"],
    margin: float,
) -> tuple[Candidate, ...]:
    """Candidates by goodput, plain decoding weighed with its `margin`."""
    weighed = goodput_P * np.array([1.0 if plan.n else 1.0 + margin for plan in plans])
    return tuple(
        Candidate(plans[i], float(goodput_P[i]), float(error_P[i]), float(tokens_P[i]), float(seconds_P[i]))
        for i in np.argsort(-weighed, kind="stable")
    )


def bucket(load: Load) -> tuple[int, int]:
    """Loads that are alike enough to share a prediction."""
    batch = load.active if load.active <= FINE else round(12 * math.log2(load.active))
    return batch, round(4 * math.log2(load.context + 16))
