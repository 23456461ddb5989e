"""Keeps a controller's thinking to a small share of the time it decides about: where rounds are short, it looks at some of them only."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from respec.speculation.confidence import Bound
from respec.speculation.controller import Controller
from respec.speculation.decision import Decision
from respec.speculation.sharing import Shared, Sharing
from respec.types import DraftCounts, Leads, Load, Plan, Rollout, RoundRecord

# Sequences that what is seen of idle drafters is remembered over: fewer than of those in use, since it is to show the tail of this rollout.
SEEN = 100.0


class PacedController:
    """A controller that looks at a round when its load has changed, when it was told of news, when it is probing, or when it has time:
    `share` of all seconds so far, and `grace_s` to begin with. Between looks the plan stands, and rounds are only counted. `sharing`, where given, says when
    requests draft to depths of their own.

    A look costs some 200 microseconds; rounds of a small model on a CPU take four times that.
    """

    def __init__(
        self,
        controller: Controller,
        share: float = 0.01,
        grace_s: float = 0.05,
        clock: Callable[[], float] = time.perf_counter,
        sharing: Sharing | None = None,
    ) -> None:
        self.controller = controller
        self._sharing = sharing
        self._shared: Shared | None = None
        self._share, self._clock = share, clock
        self._elapsed_s, self._thought_s = 0.0, -grace_s
        self._load: Load | None = None
        self._standing = Plan()
        self._bound: Bound | None = None
        self._looks, self._news = True, False

    @property
    def predicted(self) -> float:
        """Tokens/s that the standing plan promised when it was last looked at."""
        return self.controller.predicted

    def plan(self, load: Load) -> Plan:
        """The plan for the round that is about to start."""
        before = self._load
        changed = before is None or (load.active, load.version) != (before.active, before.version)
        due = self._thought_s <= self._share * self._elapsed_s
        self._looks, self._news = changed or self._news or self.controller.probing or due, False
        if self._looks:
            began = self._clock()
            self._load, self._standing = load, self.controller.plan(load)
            self._share_out(load)
            self._thought_s += self._clock() - began
        return self._standing

    def told(self) -> None:
        """See Controller.told: the next round is looked at, whatever the time."""
        self._news = True
        self.controller.told()

    def depths(self) -> tuple[int, ...] | None:
        """How deep each sequence of the load looked at last may draft; None: as deep as the plan."""
        return self._shared.depth_B if self._shared is not None else None

    @property
    def cutter(self) -> PacedController:
        """Itself: it says where drafts are cut."""
        return self

    def cut(self) -> Bound | None:
        """Where drafts under the plan given last are to be cut, as it was looked at last."""
        if self._looks:
            self._bound = self.controller.cut()
        return self._bound

    def judged(self, leads: Sequence[Leads]) -> None:
        """Learns from the leads of a round that was looked at."""
        if self._looks and self.controller.confidence is not None:
            began = self._clock()
            self.controller.confidence.learn(leads)
            self._thought_s += self._clock() - began

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """A rollout has ended; these are all of its completions."""
        if self._sharing is not None:
            self._sharing.learn(rollouts)

    @property
    def shadow_depth(self) -> int:
        """Idle look-up drafters are to guess so deep."""
        return self.controller.acceptance.depth

    def shadow(self, drafter: str, counts: DraftCounts) -> None:
        """What an idle drafter's guesses of late came to."""
        self.controller.acceptance.observe_shadow(
            drafter,
            counts.tested_D,
            counts.accepted_D,
            1.0,
            1,
            counts.asked_D,
            counts.drafted_D,
            counts.parents_D,
            SEEN,
        )

    def _share_out(self, load: Load) -> None:
        """Depths for the requests one by one, where that pays."""
        before, self._shared = self._shared, None
        if self._sharing is None or self.controller.probing:
            return
        shared = self._sharing.look(load, self._standing, self.controller.likely, self.controller.acceptance)
        if shared is not None:
            self.controller.share(shared.plan, shared.depth_B, "" if before is not None else shared.reason)
            self._standing, self._shared = shared.plan, shared

    def observe(self, record: RoundRecord) -> None:
        """Learns from a round that was looked at."""
        seconds = record.draft_s + record.verify_s + record.overhead_s
        self._elapsed_s += seconds
        if self._looks:
            began = self._clock()
            self.controller.observe(record)
            self._thought_s += self._clock() - began
        else:
            self.controller.passed(seconds)

    def take_decisions(self) -> tuple[Decision, ...]:
        """See Controller.take_decisions."""
        return self.controller.take_decisions()
