"""The sentinel put together with an engine: looks at draft weights at the door and at accepted tokens after every swap, turns off a drafter
whose drafts have collapsed, and brings its last good weights back.

It stands between the engine and whoever plans, static or adaptive. Drafts are verified, so what it guards is speed: no token changes in
`matching`, and no distribution in `rejection`. There the tokens do depend on who drafts; so what is off, what has come back and what is expected
goes into the checkpoint, and a run that is killed and resumed gives the same tokens (law 8) though the sentinel has stepped in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from respec.heads import Heads
from respec.models.eagle import EagleHead
from respec.models.eagle_check import facts_of
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.draft.eagle_probe import Inspector, what_is_wrong
from respec.rollout.draft.protocol import Drafter, PolicyDrafter
from respec.rollout.planner import Planner, planner_of
from respec.speculation.decision import Decision
from respec.speculation.pace import PacedController
from respec.speculation.sentinel import Sighting, Watch, asked
from respec.types import PLAIN, DraftCounts, Load, Plan, Rollout, RoundRecord, Sampling, Version

# What an adaptive server is told of weights that have come back, in sequences.
BELIEF = 32.0
# Completions are this far, in doublings of their length, before it no longer matters to acceptance how far.
OLDEST = 5


@dataclass(frozen=True)
class Admission:
    """Whether a head was taken at the door, and if not, the line that says why."""

    taken: bool
    line: str = ""


class Sentinel:
    """A planner around a planner, and the door of the `eagle` drafter. Drafters with weights that follow the policy are watched: `eagle`, and those
    that decode with the policy's own.

    `say` gets one line an alarm. `first` reads the head that the drafter began with, to come back to before there is a better one; at any
    time at most one snapshot is kept beside the one that drafts. With `remembers` there is a state to go on from, as `rejection` needs.
    """

    def __init__(
        self,
        planner: Plan | Planner,
        drafters: Mapping[str, Drafter],
        say: Callable[[str], None],
        first: Callable[[], EagleHead] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        remembers: bool = False,
    ) -> None:
        self.planner = planner_of(planner)
        self.controller = planner.controller if isinstance(planner, PacedController) else None
        self._drafters, self._say, self._remembers = drafters, say, remembers
        self._watch = {
            name: Watch() for name, d in drafters.items() if isinstance(d, PolicyDrafter) or name == EagleDrafter.name
        }
        eagle = drafters.get(EagleDrafter.name)
        self._heads = Heads(eagle, first, remembers) if isinstance(eagle, EagleDrafter) else None
        self._inspector = Inspector(clock)
        self._off: set[str] = set()
        # drafters that were given back their last good weights since the last swap
        self._second: set[str] = set()
        self._sampling: Sampling | None = None
        self._kind: tuple[float, int, float, float] = (1.0, 0, 1.0, 0.0)
        self._load: Load | None = None
        self._overruled = False
        self._round = 0
        self._alarms: list[str] = []
        self._decisions: list[Decision] = []

    @property
    def predicted(self) -> float:
        """Tokens/s that the plan given last promises; 0 where it was overruled."""
        return 0.0 if self._overruled else self.planner.predicted

    def under(self, sampling: Sampling) -> Sentinel:
        """Itself, told how the rollout that begins is sampled: greedy drafts are accepted otherwise than those at temperature 1."""
        self._sampling = sampling
        self._kind = (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)
        return self

    def admit(self, head: EagleHead, version: int, learned_from: int = 0, trusted: bool = False) -> Admission:
        """The door: `head` drafts from now on, unless something is wrong with it; then the one in use goes on. A head that is `trusted`, being
        from the run's own checkpoint, may have come any way from the one in use.
        """
        heads, facts = self._heads, facts_of(head)
        assert heads is not None, "there is no head to be followed"
        refused = heads.refusal(facts, version, trusted)
        if refused:
            line = f"sentinel: the head of version {version} was refused: {refused}; version {heads.now.version} goes on drafting"
            self._tell(line, EagleDrafter.name)
            return Admission(False, line)
        heads.take(head, version, learned_from, facts, did_well=EagleDrafter.name not in self._off | self._second)
        self._inspector.began()
        self._renewed(EagleDrafter.name)
        return Admission(True)

    def plan(self, load: Load) -> Plan:
        """The planner's plan; plain decoding in place of a drafter that is off."""
        self._round += 1
        if self._load is not None and load.version != self._load.version:
            for name in self._watch:
                self._renewed(name)
        self._load = load
        plan = self.planner.plan(load)
        self._overruled = plan.drafter in self._off
        return PLAIN if self._overruled else plan

    def depths(self) -> Sequence[int] | None:
        """The planner's, of its own plan."""
        return None if self._overruled else self.planner.depths()

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        self.planner.learn(rollouts)

    @property
    def cutter(self) -> PacedController | None:
        """The planner, where it is one that cuts."""
        return self.planner if isinstance(self.planner, PacedController) else None

    @property
    def shadow_depth(self) -> int:
        """The planner's; 0 of a static plan."""
        return self.planner.shadow_depth if isinstance(self.planner, PacedController) else 0

    def shadow(self, drafter: str, counts: DraftCounts) -> None:
        if isinstance(self.planner, PacedController):
            self.planner.shadow(drafter, counts)

    def observe(self, record: RoundRecord) -> None:
        """Tells the planner, and looks at the round's drafts."""
        self.planner.observe(record)
        name, watch, load = record.plan.drafter, self._watch.get(record.plan.drafter), self._load
        if watch is None or load is None:
            return
        self._inspector.elapsed_s += record.draft_s + record.verify_s + record.overhead_s
        if name == EagleDrafter.name and self._looked_into(watch, record.plan):
            return
        key = (record.plan.t, self._kind, self._age(load))
        seen = watch.observe(key, asked(load.remaining_B, self.planner.depths()), *record.fair_D)
        if seen is not None:
            what = (
                f"{name} had {seen.accepted} of {seen.tested} tokens accepted at depth {seen.depth} in {seen.rounds} rounds, where "
                f"{seen.expected:.0f} were expected; likely cause: {self._cause(name, seen)}"
            )
            self._failed(name, watch, what, record.plan)

    def take_alarms(self) -> list[str]:
        """The lines said since this was last asked."""
        taken, self._alarms = self._alarms, []
        return taken

    def take_decisions(self) -> tuple[Decision, ...]:
        """Its own decisions and the controller's since this was last asked, in the order of rounds."""
        theirs = self.controller.take_decisions() if self.controller is not None else ()
        taken, self._decisions = self._decisions, []
        return tuple(sorted((*theirs, *taken), key=lambda decision: decision.round))

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint: what is expected of each drafter, what is off, and the heads; nothing unless it remembers. What is looked into by
        the clock has no part in it: that finds memory gone wrong, which no resumed run has."""
        if not self._remembers:
            return {}
        seen = self._load.version if self._load is not None else Version(-1, -1)
        watches = {
            name: {
                "off": int(name in self._off), "second": int(name in self._second),
                "known": {key: torch.from_numpy(value) for key, value in watch.state().items()},
            }
            for name, watch in self._watch.items()
        }  # fmt: skip
        heads = {"heads": self._heads.state_dict()} if self._heads is not None else {}
        return {"round": self._round, "policy": seen.policy, "drafter": seen.drafter, "watch": watches, **heads}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up a saved state; an empty one changes nothing."""
        if not state:
            return
        self._round = int(state["round"])
        if state["policy"] >= 0:
            self._load = Load(0, 0, 0.0, (), Version(int(state["policy"]), int(state["drafter"])))
        if self._heads is not None:
            self._heads.load_state_dict(state["heads"])
        for name, kept in state["watch"].items():
            self._watch[name].load({key: value.numpy() for key, value in kept["known"].items()})
            if kept["off"]:
                self._switch(name, "it is off until the next swap")
        self._second = {name for name, kept in state["watch"].items() if kept["second"]}

    def _renewed(self, name: str) -> None:
        """New weights, of the drafter or of the policy: what was off is tried, what did well is the measure."""
        watch = self._watch[name]
        if name in self._off:
            watch.again()
            self._switch(name, None)
        else:
            watch.swapped()
        self._second.discard(name)

    def _looked_into(self, watch: Watch, plan: Plan) -> bool:
        """Whether something is wrong with the head's snapshot or its keys, whatever acceptance says."""
        if not self._inspector.round():
            return False
        heads, name = self._heads, EagleDrafter.name
        assert heads is not None
        drafter = heads.drafter
        if stale := drafter.stale():
            drafter.restore(drafter.snapshot)
            watch.again()
            self._tell(
                f"sentinel: {name} held keys of {stale} requests that an older head had made; likely cause: a swap that did not drop them; they are "
                "dropped, and it goes on", name,
            )  # fmt: skip
            return True
        found, lasting = self._inspector.look(drafter, heads.now.kept)
        if lasting:
            self._second.add(name)
        if found:
            self._failed(name, watch, found, plan)
        return bool(found)

    def _failed(self, name: str, watch: Watch, what: str, plan: Plan) -> None:
        """The last good weights come back; where there are none, or they failed too, the drafter is off."""
        heads = self._heads if name == EagleDrafter.name and name not in self._second else None
        good = heads.last_good() if heads is not None else None
        if heads is None or good is None:
            watch.doubt()
            line = f"sentinel: {what}; it is off until the next swap"
            self._switch(name, line)
        else:
            heads.restore(good)
            self._inspector.began()
            watch.again()
            self._second.add(name)
            self._believe(name, watch, plan)
            line = f"sentinel: {what}; version {good.version}, the last good one, drafts again"
        self._tell(line, name)

    def _cause(self, name: str, seen: Sighting) -> str:
        drafter, load = self._drafters[name], self._load
        if isinstance(drafter, EagleDrafter) and self._heads is not None:
            wrong = what_is_wrong(drafter.snapshot, self._heads.now.kept.answered)
            if wrong:
                return wrong
            if seen.accepted < 0.5 * seen.expected:
                return "weights of another head or policy, or hidden states of other layers, or in another order, than it was trained with"
            return "the policy has moved away from it"
        at = load.version.policy if load is not None else 0
        return f"its weights are not those of policy version {at}"

    def _switch(self, name: str, reason: str | None) -> None:
        """Off for a reason, on for none."""
        self._off.discard(name) if reason is None else self._off.add(name)
        if self.controller is not None:
            self.controller.guard.open(name) if reason is None else self.controller.guard.shut(name, reason)

    def _believe(self, name: str, watch: Watch, plan: Plan) -> None:
        """Weights that have come back are worth what they were: an adaptive server need not find out by probes."""
        if self.controller is not None:
            tested, accepted = watch.expected(plan.t)
            if tested:
                acceptance = self.controller.acceptance
                acceptance.discount(0.0, name)
                acceptance.observe_shadow(name, tested, accepted, BELIEF / tested[0], plan.t)

    def _age(self, load: Load) -> int:
        """Doublings of the mean number of tokens drawn so far. vLLM knows no more of what is left than its limit, and the mean of what is drawn."""
        if self._sampling is None:
            return 0
        drawn = self._sampling.max_new_tokens - sum(load.remaining_B) // max(len(load.remaining_B), 1)
        drawn = max(drawn, min(load.drawn_B, default=0))
        return min(OLDEST, max(drawn + 1, 1).bit_length() - 1)

    def _tell(self, line: str, name: str) -> None:
        self._alarms.append(line)
        load = self._load or Load(0, 0, 0.0, ())
        version = Version(load.version.policy, self._heads.drafter.version if self._heads is not None else 0)
        so_far = (
            self.controller.so_far if self.controller is not None else (self._round, self._inspector.elapsed_s, 0.0)
        )
        at, elapsed_s, probed_s = so_far
        chosen = PLAIN if name in self._off or not load.active else Plan(name)
        self._decisions.append(
            Decision(at, "sentinel", load.active, load.waiting, load.context, version, chosen, (), 0.0, (), elapsed_s, probed_s, line)
        )  # fmt: skip
        self._say(line)
        if isinstance(self.planner, PacedController):
            self.planner.told()
