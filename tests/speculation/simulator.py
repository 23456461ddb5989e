"""A machine of which everything is known: rounds are drawn from a stated truth, so that a controller can be held against an oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from respec.speculation.controller import Controller
from respec.speculation.cost_model import CostSample
from respec.types import PLAIN, Load, Plan, RoundRecord

CONTEXT = 200.0
# P(accepted | tested) of a drafter's nodes by round; the same at every depth.
Curve = Callable[[int], float]


class World(Protocol):
    """What a controller is let loose on."""

    plans: tuple[Plan, ...]

    def rate(self, active: int, plan: Plan, round: int) -> float:
        """Expected tokens a second."""
        ...

    def run(self, active: int, plan: Plan, round: int) -> RoundRecord:
        """One round, drawn at random."""
        ...


@dataclass
class Machine:
    """A processor with room for eight rows, and drafters of known acceptance and availability.

    `accept`: by drafter; `available`: P(a node | path accepted); `draft_s`: seconds a sequence and depth. `noise`: relative standard deviation
    of a round's seconds; `slow(round)` multiplies them, the same for every plan.
    """

    accept: Mapping[str, Curve]
    seed: int
    depths: tuple[int, ...] = (1, 2, 4, 7)
    available: float = 0.95
    draft_s: float = 1e-4
    noise: float = 0.05
    slow: Callable[[int], float] = lambda round: 1.0

    def __post_init__(self) -> None:
        self.plans = (PLAIN, *(Plan(name, s, 1, s) for name in self.accept for s in self.depths))
        self._rng = np.random.default_rng(self.seed)

    def step_s(self, active: int, rows: float, plan: Plan) -> tuple[float, float, float]:
        """Draft, verification, overhead."""
        verify = 0.02 + 1.1e-3 * max(rows - 8, 0.0) + 2e-4 * active + 1e-7 * active * CONTEXT
        return (self.draft_s * active * plan.s if plan.n else 0.0), verify, 1e-3 + 2e-5 * active

    def rate(self, active: int, plan: Plan, round: int) -> float:
        a = self.accept[plan.drafter](round) if plan.n else 0.0
        go_on = (a * self.available) ** np.arange(plan.s + 1)
        # the target verifies a node wherever there is one, accepted path or not
        rows = active * (1 + sum(self.available**d for d in range(1, plan.s + 1)))
        return active * float(go_on.sum()) / (sum(self.step_s(active, rows, plan)) * self.slow(round))

    def run(self, active: int, plan: Plan, round: int) -> RoundRecord:
        a = self.accept[plan.drafter](round) if plan.n else 0.0
        drafted, tested, accepted = [], [], []
        nodes = path = active
        for _ in range(plan.s):
            on_path = int(self._rng.binomial(path, self.available))
            nodes = on_path + int(self._rng.binomial(nodes - path, self.available))
            path = int(self._rng.binomial(on_path, a))
            drafted.append(nodes)
            tested.append(on_path)
            accepted.append(path)
        luck = self.slow(round) * float(np.exp(self.noise * self._rng.standard_normal()))
        draft_s, verify_s, overhead_s = (x * luck for x in self.step_s(active, active + sum(drafted), plan))
        return RoundRecord(
            active, 0, plan, sum(drafted), sum(accepted), active + sum(accepted), draft_s, verify_s, overhead_s,
            CONTEXT, tuple(drafted), tuple(tested), tuple(accepted),
        )  # fmt: skip

    def profile(self) -> list[CostSample]:
        """What a profile of this machine measures, without noise."""
        return [
            CostSample(b, b * (1 + plan.s), context, plan.drafter, plan.s, *self.step_s(b, b * (1 + plan.s), plan))
            for b in (1, 2, 4, 8, 16, 32, 64)
            for plan in self.plans
            for context in (CONTEXT,)
        ]


@dataclass(frozen=True)
class Replay:
    """What a controller did with a trace. `share_R`: expected goodput over the oracle's, by round; `predicted_slower` counts rounds that
    were no probe and whose plan was predicted slower than plain decoding."""

    share_R: np.ndarray
    plans_R: tuple[Plan, ...]
    probe_share: float
    switches: int
    predicted_slower: int

    @property
    def regret(self) -> float:
        return 1 - float(self.share_R.mean())


def replay(controller: Controller, world: World, active_R: Sequence[int], watch: bool = False) -> Replay:
    """Runs the trace. Switches are changes of plan outside of probes; with `watch`, every round's plan is held against the predictions."""
    share, plans, slower = [], [], 0
    probe_s = total_s = 0.0
    for round, active in enumerate(active_R):
        load = Load(int(active), 0, CONTEXT, ())
        plan = controller.plan(load)
        probing = controller.decisions[-1].kind == "probe"
        if watch and not probing:
            rate = {candidate.plan: candidate.goodput for candidate in controller.predict(load)}
            slower += rate[plan] < rate[PLAIN] * (1 - 1e-9)
        record = world.run(int(active), plan, round)
        controller.observe(record)
        seconds = record.draft_s + record.verify_s + record.overhead_s
        total_s, probe_s = total_s + seconds, probe_s + probing * seconds
        share.append(world.rate(active, plan, round) / max(world.rate(active, p, round) for p in world.plans))
        plans.append(plan)
    switches = sum(decision.kind in ("switch", "off", "guard") for decision in controller.decisions)
    return Replay(np.array(share), tuple(plans), probe_s / total_s, switches, slower)


def falling(rounds: int, largest: int = 64, rollouts: int = 4) -> list[int]:
    """Rollouts of which each starts full and thins out, with a long tail."""
    length = rounds // rollouts
    return [max(1, round(largest * (1 - i / length) ** 2.5)) for _ in range(rollouts) for i in range(length)]


def peaks(rounds: int, largest: int = 64, count: int = 6) -> list[int]:
    """Batches that rise and fall again, as in multi-turn and asynchronous runs, to peaks of different heights."""
    x = np.arange(rounds) / rounds * count
    height = largest ** (0.6 + 0.4 * np.cos(2 * np.floor(x)))
    return [max(1, int(b)) for b in height ** np.sin(np.pi * (x % 1))]
