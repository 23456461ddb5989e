"""Whole rollouts with a known truth: rows of known length, acceptance by depth, seconds of a machine; and ways to choose their depths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import das
import numpy as np

from respec.speculation.acceptance import Acceptance
from respec.speculation.cost_model import CostModel
from respec.speculation.sharing import Sharing
from respec.speculation.solver import solve
from respec.types import PLAIN, Load, Plan, Prompt, Rollout, Stream

LONGEST, CONTEXT = 256, 60.0
# P(accepted | tested) of an EAGLE-3 head for SmolLM2-135M on sums, and the seconds of its rounds on two cores: 19 rows' worth before the first.
ACCEPT_D = np.array([0.85, 0.82, 0.76, 0.78, 0.75, 0.8, 0.78, 0.78])
BASE_S, ROW_S, FIXED_S, EACH_S, STEP_S, BOTH_S = 8.5e-3, 0.45e-3, 0.86e-3, 0.035e-3, 0.46e-3, 0.0165e-3
COST = CostModel((), (BASE_S, 0.0, ROW_S, 0.0, 0.0), (0.0, 0.0, 0.0), {"eagle": (FIXED_S, EACH_S, STEP_S, BOTH_S)})
PLANS = (PLAIN, *(Plan("eagle", s, 1, s) for s in (1, 2, 3, 4, 6, 8)))

# (load, plan for all) -> plan, and depths if they are shared out
Way = Callable[[Load, Plan], tuple[Plan, Sequence[int] | None]]


def acceptance() -> Acceptance:
    """One that has seen the head long."""
    seen = Acceptance(len(ACCEPT_D), sequences=1e9, rounds=1e9, idle=1e9)
    tested = 1e5 * np.append(1.0, np.cumprod(ACCEPT_D)[:-1])
    seen.observe_shadow("eagle", tested.tolist(), (tested * ACCEPT_D).tolist(), weight=1.0)
    evidence = seen._of("eagle", 1)
    evidence.asked[:] = evidence.drafted[:] = 1e5
    evidence.parents[:] = evidence.tested
    return seen


def lengths(
    rng: np.random.Generator, rows: int, group: int, median: float, between: float, within: float, draws: int
) -> list[np.ndarray]:
    """`draws` epochs of log-normal answers, rows x group: logarithms of rows' medians differ by `between`, answers of a row by `within`."""
    middle = np.log(median) + between * rng.standard_normal((rows, 1))
    made = [np.exp(middle + within * rng.standard_normal((rows, group))) for _ in range(draws)]
    return [np.clip(np.rint(x), 4, LONGEST).astype(int) for x in made]


def finished(length_RG: np.ndarray) -> list[Rollout]:
    """Completions of these lengths, their tokens nought."""
    return [
        Rollout(Prompt(row, "", (1,)), Stream.TRAIN, 0, i, *(np.zeros(n, int) for _ in range(7)), "", "eos")  # type: ignore[arg-type]
        for row, group in enumerate(length_RG)
        for i, n in enumerate(group)
    ]


@dataclass(frozen=True)
class Spent:
    """What a rollout took."""

    seconds: float
    rounds: int
    drafted: int
    shared: int


def one_depth(load: Load, plan: Plan) -> tuple[Plan, None]:
    """The plan of highest goodput for all."""
    return plan, None


def by_price(history: Sequence[np.ndarray]) -> Way:
    """Depths as the adaptive server shares them out, these epochs having been seen."""
    sharing, seen = Sharing(PLANS, COST), acceptance()
    for epoch in history:
        sharing.learn(finished(epoch))

    def way(load: Load, plan: Plan) -> tuple[Plan, Sequence[int] | None]:
        found = sharing.look(load, plan, "eagle", seen)
        return (plan, None) if found is None else (found.plan, found.depth_B)

    return way


def by_das(history: Sequence[np.ndarray]) -> Way:
    """Depths by the corrected law of DAS, from each row's mean length."""
    mean, seen = np.concatenate(history, axis=1).mean(axis=1), acceptance()

    def way(load: Load, plan: Plan) -> tuple[Plan, Sequence[int] | None]:
        left = np.maximum(mean[list(load.row_B)] - np.array(load.drawn_B), 1.0)
        asked = plan if plan.n else Plan("eagle", 3, 1, 3)
        depth_B = das.depths(load, asked, seen, COST, left)
        return (asked, depth_B) if len(set(depth_B)) > 1 else (plan, None)

    return way


def roll(length_RG: np.ndarray, way: Way, seed: int) -> Spent:
    """One rollout, all sequences begun at once; without `way`'s depths each round takes the plan of highest goodput."""
    rng, seen = np.random.default_rng(seed), acceptance()
    length, row = length_RG.ravel(), np.repeat(np.arange(len(length_RG)), length_RG.shape[1])
    drawn, best = np.zeros(len(length), int), dict[int, Plan]()
    seconds, rounds, drafted, shared = 0.0, 0, 0, 0
    while (drawn < length).any():
        active = np.flatnonzero(drawn < length)
        b = len(active)
        load = Load(
            b, 0, CONTEXT, tuple((LONGEST - drawn[active]).tolist()), row_B=tuple(row[active].tolist()), drawn_B=tuple(drawn[active].tolist())
        )  # fmt: skip
        if b not in best:
            best[b] = solve(Load(b, 0, CONTEXT, ()), PLANS, seen, COST)[0].plan
        plan, depth_B = way(load, best[b])
        depth = np.full(b, plan.s) if depth_B is None else np.array(depth_B)
        stands = np.cumprod(rng.random((b, len(ACCEPT_D))) < ACCEPT_D, axis=1).sum(axis=1)
        drawn[active] += 1 + np.minimum(stands, depth)
        seconds += BASE_S + ROW_S * (b + depth.sum())
        if depth.any():
            seconds += FIXED_S + EACH_S * (depth > 0).sum() + STEP_S * depth.max() + BOTH_S * depth.sum()
        rounds, drafted, shared = rounds + 1, drafted + int(depth.sum()), shared + (depth_B is not None)
    return Spent(float(seconds), rounds, drafted, shared)
