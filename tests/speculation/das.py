"""Depth by request as in DAS (arXiv 2511.13841), its budget formula corrected: what sharing by prices is held against.

A budget of γ_i drafted nodes over the rest of request i, L_i tokens long, saves it k L_i (1 - exp(-α γ_i / L_i)) rounds: α says how well
drafting begins, the ceiling k what share of rounds any amount of it can save.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from respec.speculation.acceptance import Acceptance, Outlook
from respec.speculation.cost_model import CostModel
from respec.speculation.solver import MARGIN
from respec.types import Load, Plan


def depths(
    load: Load,
    plan: Plan,
    acceptance: Acceptance,
    cost: CostModel,
    length_B: Float[np.ndarray, "B"] | None = None,
    margin: float = MARGIN,
) -> tuple[int, ...]:
    """How deep each active sequence should draft this round, in the order of `load.remaining_B`; at most as deep as its budget.

    `length_B`: tokens each is expected to draw still; the budget that is left when it is not given. The plan's own depth for all, where
    sequences wait (every slot is then worth the same), and where telling them apart saves less than `margin` of the time.
    """
    length = np.array(load.remaining_B if length_B is None else length_B, float)
    uniform = np.full(load.active, plan.s if plan.n else 0)
    if plan.n and not load.waiting and len(length) == load.active > 1:
        outlook = acceptance.outlook(plan.drafter, plan.t, np.ones(acceptance.depth))
        base_s, node_s = _marginal(load, plan, outlook, cost)
        _, budget = budgets(length, *saving(outlook), base_s, node_s)
        # rounds are shared: a budget is spent evenly over those that its request takes part in
        fine = np.interp(budget / np.maximum(length, 1.0), _nodes_per_token(outlook), np.arange(acceptance.depth + 1))
        tailored = [np.minimum(rounded(fine), plan.s).astype(int) for rounded in (np.floor, np.rint, np.ceil)]
        best = min(tailored, key=lambda depth: rollout_seconds(depth, length, outlook, base_s, node_s))
        if rollout_seconds(best, length, outlook, base_s, node_s) < (1 - margin) * rollout_seconds(
            uniform, length, outlook, base_s, node_s
        ):
            uniform = best
    if len(load.remaining_B) == load.active:
        uniform = np.minimum(uniform, np.maximum(np.array(load.remaining_B, int) - 1, 0))
    return tuple(uniform.tolist())


def budgets(
    length_B: Float[np.ndarray, "B"], ceiling: float, efficiency: float, base_s: float, node_s: float
) -> tuple[float, Float[np.ndarray, "B"]]:
    """The number of rounds N and the nodes γ_i of each request that minimise base_s · N + node_s · Σ γ_i.

    All requests still running decode in the same rounds, so ending in N rounds takes L_i - N saved ones of each longer request:

        k L_i (1 - exp(-α γ_i / L_i)) = L_i - N    =>    γ_i(N) = -(L_i / α) ln(1 - (L_i - N) / (k L_i)),  L_i > N, else 0.

    This is finite only for N > (1 - k) max L: below a ceiling k < 1 no budget buys fewer rounds. Σ γ_i is convex in N, with slope

        dγ_i/dN = -(L_i / α) / (N - (1 - k) L_i),

    so the best N is where base_s = (node_s / α) Σ_{L_i > N} L_i / (N - (1 - k) L_i), the one root of a function that falls in N, found
    by bisection; or N = max L, when even the first node is not worth it. With k = 1 and every L_i > N it is N = node_s Σ L_i / (α base_s) and
    γ_i = -(L_i / α) ln(N / L_i): the closed form that holds only then.
    """
    longest = float(length_B.max())

    def worth(rounds: float) -> float:
        """What one round fewer costs in nodes, in seconds."""
        long = length_B[length_B > rounds]
        return node_s / efficiency * float((long / (rounds - (1 - ceiling) * long)).sum())

    low, high = (1 - ceiling) * longest, longest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if worth(middle) > base_s else (low, middle)
    saved = np.maximum(length_B - high, 0.0) / (ceiling * length_B)
    return high, -length_B / efficiency * np.log1p(-saved)


def saving(outlook: Outlook) -> tuple[float, float]:
    """The ceiling k and the efficiency α of the law above, from what is expected by depth.

    A round of depth s yields g_s tokens for one pass: 1 - 1/g_s of the passes are saved, for nodes_s/g_s nodes a token. g at unlimited
    depth continues the last step geometrically.
    """
    tokens = outlook.tokens_S
    step = np.diff(tokens)
    go_on = min(float(step[-1] / step[-2]), 0.98) if len(step) > 1 and step[-2] > 0 else 0.0
    ceiling = 1 - 1 / float(tokens[-1] + step[-1] * go_on / (1 - go_on))
    saved = np.minimum((1 - 1 / tokens[1:]) / max(ceiling, 1e-9), 1 - 1e-9)
    efficiency = float(np.median(-np.log1p(-saved) / np.maximum(_nodes_per_token(outlook)[1:], 1e-9)))
    return max(ceiling, 1e-9), max(efficiency, 1e-9)


def rollout_seconds(
    depth_B: Int[np.ndarray, "B"], length_B: Float[np.ndarray, "B"], outlook: Outlook, base_s: float, node_s: float
) -> float:
    """Expected time to the end of the longest request, each drafting to its depth in all its rounds."""
    rounds = length_B / outlook.tokens_S[depth_B]
    return base_s * float(rounds.max()) + node_s * float((rounds * (1 + outlook.nodes_S[depth_B])).sum())


def _nodes_per_token(outlook: Outlook) -> Float[np.ndarray, "D+1"]:
    return outlook.nodes_S / outlook.tokens_S


def _marginal(load: Load, plan: Plan, outlook: Outlook, cost: CostModel) -> tuple[float, float]:
    """Seconds of a round of one row, and of each row more on the way to the whole batch drafting to the plan's depth."""
    nodes = float(outlook.nodes_S[min(plan.s, len(outlook.nodes_S) - 1)])
    many = load.active * (1 + nodes)
    one = cost.seconds(1, np.array([1.0]), load.context, ("off",), np.zeros(1))[0]
    full = cost.seconds(load.active, np.array([many]), load.context, (plan.drafter,), np.array([float(plan.s)]))[0]
    node_s = max(float(full - one), 1e-9) / (many - 1)
    return max(float(one) - node_s, 1e-9), node_s
