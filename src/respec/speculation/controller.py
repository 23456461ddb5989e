"""Chooses the plan of every decode round: predicts all plans, runs the best, probes the others seldom, and says why."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from respec.errors import ConfigError
from respec.speculation.acceptance import Acceptance, asked, fairly
from respec.speculation.choice import choose, hopeful
from respec.speculation.confidence import Bound, Confidence
from respec.speculation.cost_model import CostModel
from respec.speculation.decision import Decision, Kind, name_of
from respec.speculation.guard import Guard
from respec.speculation.machine import MachineSpeed
from respec.speculation.probing import Budget, Probe, Purses, why
from respec.speculation.residual import Residual
from respec.speculation.settings import Settings
from respec.speculation.solver import Candidate, Forecast, bucket, forecast
from respec.speculation.trial import FLOOR, Trials
from respec.speculation.view import View
from respec.types import PLAIN, Load, Plan, RoundRecord, Version


class Controller:
    """`plan` before every round, `observe` after it, `swap` when weights change. `plans` are those it may choose from; plain decoding
    is added. One controller serves one engine for as long as it lives.

    Raises ConfigError for plans it cannot weigh.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        cost: CostModel,
        acceptance: Acceptance,
        largest: int = 64,
        settings: Settings = Settings(),
        confidence: Confidence | None = None,
    ) -> None:
        self.plans = (PLAIN, *(plan for plan in dict.fromkeys(plans) if plan.n))
        deep = max(plan.s for plan in self.plans)
        if deep > acceptance.depth:
            raise ConfigError(
                f"a plan drafts to depth {deep}, acceptance is estimated to depth {acceptance.depth}; "
                f"give Acceptance(depth={deep})"
            )
        self.acceptance = acceptance
        self.settings = settings
        self.confidence = confidence
        self._cost = cost
        self._index = {plan: i for i, plan in enumerate(self.plans)}
        self._drafters = tuple(plan.drafter for plan in self.plans)
        self._residual = Residual(
            self.plans, largest, settings.spread, settings.memory, settings.noise, settings.common
        )
        self._machine = MachineSpeed()
        self.guard = Guard(settings.dwell)
        self._purses = Purses(settings.burn_in_share if settings.burn_in else settings.probe_share)
        self._total = Budget(1.0)
        self._version: Version | None = None
        self._round = self._seen = self._current = self._running = 0
        # rounds since the plan outside of probing changed, and since a probe ended; whether this round starts a drafter, or teaches acceptance alone
        self._held, self._rested = settings.dwell, 0
        self._starts = self._apart = False
        self._load: Load | None = None
        self._used = dict.fromkeys(self._drafters, 0)
        self._probe: Probe | None = None
        self._trials, self._floor = Trials(), 0.0
        self._view: View | None = None
        self._key: tuple[int, ...] = ()
        self._decisions: deque[Decision] = deque(maxlen=settings.decisions)

    @property
    def predicted(self) -> float:
        """Tokens/s that the plan given last promises, as it was seen then."""
        return float(self._view.goodput_P[self._running]) if self._view is not None else 0.0

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The latest decisions, oldest first: one each time the plan changed."""
        return tuple(self._decisions)

    def take_decisions(self) -> tuple[Decision, ...]:
        """The decisions made since this was last asked, which are then forgotten here: what a run folder keeps, step by step."""
        taken = tuple(self._decisions)
        self._decisions.clear()
        return taken

    def plan(self, load: Load) -> Plan:
        """The plan for the round that is about to start."""
        self._round += 1
        if load.version != self._version:
            self.swap(load.version)
        key = (*bucket(load), self._seen // self.settings.refresh)
        if key != self._key or self._view is None:
            self._key, self._view = key, self._look(load)
        chosen = self._choose(self._view)
        self._starts = self._drafters[chosen] != self._drafters[self._running] and self._view.start_P[chosen] > 0
        trial = self._probe is not None and self._probe.trial
        # what a trial was promised was a guess: held against its rounds, it would be taken for the machine's doing, for long
        self._running, self._load, self._apart = chosen, load, trial
        self._floor = FLOOR if trial else float(self._view.promise.floor_P[chosen])
        self._used[self._drafters[chosen]] = self._round
        return self.plans[chosen]

    def observe(self, record: RoundRecord) -> None:
        """Learns from a round that has been run."""
        index = self._index.get(record.plan)
        seconds = record.draft_s + record.verify_s + record.overhead_s
        if index is None or self._load is None or seconds <= 0:
            return
        self._seen += 1
        self._account(seconds)
        self.acceptance.observe(fairly(record), asked(self._load, record))
        promise, at = self._promised(record, index)
        if not (self._starts or self._apart):  # a drafter's first round pays for its start
            self._machine.observe(seconds, float(promise.seconds_P[at]))
            ratio = self._machine.factor * record.emitted / seconds / float(promise.rate_P[at])
            self._residual.observe(index, record.active, ratio, float(promise.luck_P[at]) ** 2)
        factor, _ = self._residual.at(record.active)
        plain_s = self._machine.factor * record.emitted / float(promise.rate_P[0] * factor[0])
        barred = self.guard.observe(record.plan.drafter, seconds, plain_s, self._apart or self._probe is not None)
        if barred or self._probe is not None:
            self._key = ()  # news, to be looked at before the next round

    def cut(self) -> Bound | None:
        """Where drafts under the plan given last are to be cut."""
        plan = self.plans[self._running]
        if self.confidence is None or self._view is None or plan.drafter not in self.confidence.drafters or plan.t > 1:
            return None
        return self.confidence.bound(plan.drafter, self._floor)

    @property
    def probing(self) -> bool:
        """Whether the plan given last is a probe."""
        return self._probe is not None

    @property
    def likely(self) -> str:
        """The drafter of the plan given last; where that is plain decoding, the one nearest to being worth it."""
        assert self._view is not None, "asked after `plan`"
        shut = [name == "off" or self.guard.bars(name) for name in self._drafters]
        return self._drafters[self._running or int(np.argmax(np.where(shut, 0.0, self._view.goodput_P)))]

    def share(self, plan: Plan, depth_B: Sequence[int], reason: str) -> None:
        """Under `plan` each sequence drafts to its own depth in the coming round, for the whole rollout's sake: the round teaches
        acceptance only. Recorded when there is a `reason`."""
        assert self._load is not None and self._view is not None, "called after `plan`"
        self._apart, self._used[plan.drafter] = True, self._round
        self._load = replace(self._load, remaining_B=tuple(depth + 1 for depth in depth_B))
        if reason:
            self._decide("share", self._view, self._index[plan], reason)

    def told(self) -> None:
        """Which drafters are shut, or what is believed of them, has changed from outside: to be looked at before the next round."""
        self._key = ()

    @property
    def so_far(self) -> tuple[int, float, float]:
        """Rounds of its life, the seconds of all of them, and those of probes."""
        return self._round, self._total.elapsed_s, self._total.spent_s

    def passed(self, seconds: float) -> None:
        """A round under the standing plan that nobody looked at: it counts as time, and teaches nothing."""
        self._round += 1
        self._account(seconds)

    def swap(self, version: Version) -> None:
        """Weights have changed: what was seen of acceptance counts less. Called by `plan` when it meets a new version."""
        if self._version is not None and version != self._version:
            for model in filter(None, (self.acceptance, self.confidence)):
                model.discount(self.settings.swap_keep)
        self._version, self._key = version, ()

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """What it has learned and how far it has come: plain values and arrays, for `restore`."""
        numbers, arrays = self._residual.state()
        return {
            "plans": [asdict(plan) for plan in self.plans], "cost": self._cost.to_dict(), "acceptance": self.acceptance.to_dict(),
            "residual": numbers, "machine": self._machine.state(), "guard": self.guard.state(), "used": self._used,
            "rounds": [self._round, self._seen], "purses": self._purses.state(), "total": asdict(self._total),
            "confidence": self.confidence.to_dict() if self.confidence is not None else None, "trials": asdict(self._trials),
        }, arrays  # fmt: skip

    def restore(self, state: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bool:
        """Takes over another's state, if it chose from the same plans; what it had learned of costs, if they were profiled alike."""
        if state["plans"] != [asdict(plan) for plan in self.plans]:
            return False
        self.acceptance = Acceptance.from_dict(state["acceptance"])
        if self.confidence is not None and state.get("confidence"):
            self.confidence.restore(state["confidence"])
        self._trials = Trials(**state.get("trials", {}))
        self._used, (self._round, self._seen) = state["used"], state["rounds"]
        self._purses, self._total = Purses.restored(state["purses"]), Budget(**state["total"])
        if state["cost"] == self._cost.to_dict():
            self._residual.restore(state["residual"], arrays)
            self._machine.restore(state["machine"])
            self.guard.restore(state["guard"])
        return True

    def predict(self, load: Load) -> tuple[Candidate, ...]:
        """Every plan's goodput under this load, as the controller sees it now, best first. Costs of switching from the current plan included."""
        return self._look(load).ranked(self.plans, self.settings.margin)

    def _look(self, load: Load) -> View:
        promise = forecast(load, self.plans, self.acceptance, self._cost, self.confidence)
        factor, error = self._residual.at(load.active)
        here = self._drafters[self._current]
        start = self._machine.factor * self._cost.starts(load.active, load.context, self._drafters)
        switch = start * np.array([name != here for name in self._drafters])
        seconds = promise.seconds_P * self._machine.factor / factor + switch / self.settings.dwell
        return View(load, promise.tokens_P / seconds, np.hypot(promise.error_P, error), start, promise)

    def _promised(self, record: RoundRecord, index: int) -> tuple[Forecast, int]:
        """What the models alone promise for this round, and the plan's place in it. The last look serves where it was at this load; after
        a probe, whose news belongs to the acceptance, the models are asked again."""
        if self._probe is None and self._view is not None and self._view.load.active == record.active:
            return self._view.promise, index
        load = Load(record.active, record.waiting, record.context, self._load.remaining_B if self._load else ())
        return forecast(load, (PLAIN, record.plan), self.acceptance, self._cost, self.confidence, self._floor), 1

    def _choose(self, view: View) -> int:
        if (unknown := self._trials.wanted(self.plans, self.confidence, self.guard.shuts)) is not None:
            return self._try(view, unknown)
        if self._probe is not None:
            if self._probe.left > 0 and self._may_probe(view, self._probe.plan, 1):
                self._probe.left -= 1
                return self._probe.plan
            self._probe = None
            self._rested = 0
        best, kind, reason = self._best(view)
        changed = best != self._current
        self._current = best
        self._held = 0 if changed else self._held + 1
        self._rested += 1
        promising = self._hopeful(view, best)
        if promising is not None:
            self._probe = Probe(promising, self.settings.probe - 1)
            idle = self._round - self._used[self._drafters[promising]]
            rate, error = float(view.goodput_P[promising]), float(view.error_P[promising])
            self._decide("probe", view, promising, why(self.plans[promising], self.settings.probe, rate, error, idle))
            return promising
        if changed or not self._decisions:
            first = not self._decisions
            self._decide("start" if first else kind, view, best, f"{reason}; {self._cost.trust}" if first else reason)
        elif self._running != best:
            self._decide("return", view, best, f"the probe is over: back to {name_of(self.plans[best])}")
        return best

    def _best(self, view: View) -> tuple[int, Kind, str]:
        """The plan to run, outside of probing."""
        barred = np.array([self.guard.bars(name) for name in self._drafters])
        if self._current and barred[self._current]:
            return 0, "guard", self.guard.reason(self._drafters[self._current], name_of(self.plans[self._current]))
        return choose(self.plans, view.goodput_P, barred, self._current, self._held, self.settings)

    def _hopeful(self, view: View, best: int) -> int | None:
        """The plan most worth a probe, if one is and the budget has room."""
        if min(self._held, self._rested) < self.settings.probe:
            return None
        shut = np.array([self.guard.shuts(name) for name in self._drafters])
        idle = np.array([self._round - self._used[name] for name in self._drafters])
        first = hopeful(view.goodput_P, view.error_P, shut, idle, best, self.settings)
        return first if first is not None and self._may_probe(view, first, self.settings.probe) else None

    def _try(self, view: View, plan: int) -> int:
        """A round of an opening trial, whatever the budget: it is short."""
        self._trials.begin(self._drafters[plan])
        if self._probe is None or not self._probe.trial:
            self._probe = Probe(plan, 0, trial=True)
            self._decide("probe", view, plan, f"trial of {name_of(self.plans[plan])}: what cutting gives is not known")
        return plan

    def _may_probe(self, view: View, plan: int, rounds: int) -> bool:
        return not self.guard.shuts(self._drafters[plan]) and self._purses.of(view.load.active).allows(
            rounds * float(view.promise.tokens_P[plan] / view.goodput_P[plan]) + float(view.start_P[plan])
        )

    def _account(self, seconds: float) -> None:
        if self._seen == self.settings.burn_in + 1:
            self._purses = Purses(self.settings.probe_share)
        for budget in (self._purses.of(self._load.active if self._load else 1), self._total):
            budget.elapsed_s += seconds
            budget.spent_s += seconds if self._probe is not None else 0.0

    def _decide(self, kind: Kind, view: View, chosen: int, reason: str) -> None:
        plan, load = self.plans[chosen], view.load
        best = view.ranked(self.plans, self.settings.margin)[:3]
        accept = self.acceptance.accept(plan.drafter, plan.t)[: plan.s] if plan.n else ()
        self._decisions.append(
            Decision(
                self._round, kind, load.active, load.waiting, load.context, load.version, plan, best, float(view.goodput_P[0]),
                tuple(map(float, accept)), self._total.elapsed_s, self._total.spent_s, reason,
            )
        )  # fmt: skip
