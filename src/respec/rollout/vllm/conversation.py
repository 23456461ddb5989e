"""The steps of one draw by vLLM: what the planner is asked and told of them, and what is answered to vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from respec.errors import ConfigError
from respec.rollout.engine import OnRound
from respec.rollout.planner import DepthPlanner
from respec.rollout.request import Request
from respec.rollout.vllm.worker.wire import Round
from respec.types import PLAIN, Load, Plan, RoundRecord, Sampling, Version


class Drafting(Protocol):
    """What is to be known of the engine: how it can draft, and by which policy."""

    drafter: str
    depth: int
    steered: bool
    max_batch: int

    @property
    def version(self) -> int: ...


class Conversation:
    """vLLM tells a step, and is told how deep the next is to draft."""

    def __init__(
        self,
        engine: Drafting,
        planner: DepthPlanner,
        requests: Sequence[Request],
        sampling: Sampling,
        on_round: OnRound | None,
    ) -> None:
        self._engine, self._planner, self._on_round = engine, planner, on_round
        self._sampling, self._requests = sampling, requests
        self.records: list[RoundRecord] = []
        self.prefill_s = 0.0
        # the plan of the drafts that the step under way verifies, and of those that it makes
        self._verified, self._drafting = PLAIN, PLAIN
        self._prompt = float(np.mean([len(request.ask.prompt.token_ids) for request in requests]))
        self._predicted = 0.0

    def first(self) -> int:
        """How deep the step that reads the prompts is to draft."""
        return self._plan(len(self._requests), float(np.mean([request.length for request in self._requests])))

    def next(self, said: Round) -> int:
        """Takes a step's record; says how deep the next is to draft."""
        whole = 0.0 if said.fresh else said.seconds
        self.prefill_s += said.seconds - whole
        record = RoundRecord(
            active=said.active, waiting=said.waiting, plan=self._verified, drafted=sum(said.drafted), accepted=sum(said.accepted),
            emitted=said.emitted, draft_s=0.0, verify_s=whole, overhead_s=0.0, context=said.context, predicted=self._predicted,
            drafted_D=tuple(said.drafted), tested_D=_tested(said.drafted, said.accepted), accepted_D=tuple(said.accepted),
        )  # fmt: skip
        self.records.append(record)
        if not said.fresh:
            self._planner.observe(record)
        if self._on_round is not None:
            self._on_round(record)
        self._verified = self._drafting
        return self._plan(said.left, said.context) if said.left else 0

    def _plan(self, left: int, context: float) -> int:
        """Asks the planner about the load as far as it is known: that so many completions are not finished."""
        engine, limit = self._engine, self._sampling.max_new_tokens
        active, drawn = min(left, engine.max_batch), max(0, round(context - self._prompt))
        load = Load(
            active, left - active, context, (limit,) * active, Version(engine.version), drawn_B=(drawn,) * active
        )
        self._drafting, self._predicted = self._planner.plan(load), self._planner.predicted
        if self._drafting.n and self._drafting.drafter != engine.drafter:
            raise ConfigError(
                f"the plan drafts with '{self._drafting.drafter}', vLLM was started with drafter '{engine.drafter}'"
            )
        if not engine.steered and engine.drafter != "off":
            if not self._drafting.n:
                raise ConfigError(
                    f"vLLM cannot leave off drafting with '{engine.drafter}' while it runs; set run.compare_plain_every = 0, or take drafter 'ngram'"
                )
            self._drafting = Plan(engine.drafter, engine.depth, 1, engine.depth)
        return self._drafting.s if self._drafting.n else 0


def _tested(drafted_D: Sequence[int], accepted_D: Sequence[int]) -> tuple[int, ...]:
    """Sequences whose draft was that deep with all above it accepted: vLLM counts the two apart, and the smaller is taken."""
    return tuple(
        drafted if depth == 0 else min(drafted, accepted_D[depth - 1]) for depth, drafted in enumerate(drafted_D)
    )
