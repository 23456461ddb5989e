"""vLLM behind the protocol of our own engine: asks in, rollouts out, in canonical order, every step under what a planner says.

What differs: vLLM verifies by rejection, so speculation leaves the distribution as it is, not the tokens; a plan is a chain, and applies one step
after it is given, since vLLM drafts at the end of a step; seconds are of whole steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

from respec.errors import ConfigError, StaleError, TaskError, VllmError
from respec.rollout.engine import OnRound
from respec.rollout.planner import DepthPlanner, Planner, planner_of
from respec.rollout.randomness import sequence_key
from respec.rollout.request import Request
from respec.rollout.stopping import Stopping
from respec.rollout.vllm.process import Worker
from respec.rollout.vllm.worker.wire import Asked, Completion, Depth, Done, Draw, Drawn, Held, Push, Round, Sleep, Wake
from respec.types import (
    PLAIN,
    Ask,
    Load,
    Partner,
    Plan,
    Proposer,
    Rollout,
    RolloutStats,
    RoundRecord,
    Sampling,
    Version,
)

PROPOSERS = {"ngram": Proposer.NGRAM, "suffix": Proposer.SUFFIX, "model": Proposer.MODEL, "eagle": Proposer.EAGLE}
# vLLM takes seeds of 63 bits.
SEEDS = np.uint64(2**63 - 1)


class VllmEngine:
    """Draws with a worker's vLLM, which holds the policy's weights of `version`. `push` is called by the weight door only.

    `drafter` is the one that vLLM was started with, "off" for none, and drafts `depth` tokens at most; where it cannot be `steered` from step
    to step, it drafts as many always. `drafters` is empty: none is of ours.
    """

    def __init__(
        self,
        worker: Worker,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: tuple[int, ...],
        seed: int,
        version: int,
        limit_s: float,
        max_batch: int,
        drafter: str = "off",
        depth: int = 0,
        steered: bool = False,
        sleeps: bool = False,
    ) -> None:
        self._worker, self._tokenizer, self._eos, self._seed = worker, tokenizer, eos_token_ids, seed
        self._version, self._limit_s, self.max_batch = version, limit_s, max_batch
        self.drafter, self.depth, self.steered = drafter, depth, steered
        self.drafters: Mapping[str, Any] = {}
        self._sleeps, self._asleep = sleeps, False

    @property
    def version(self) -> int:
        """The policy version that decodes."""
        return self._version

    def push(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Gives vLLM newer weights, by the names that a checkpoint has them under; its prefix cache is dropped with the old ones.

        Raises StaleError for weights that are not newer, VllmError when vLLM then says that it holds others.
        """
        if version <= self._version:
            raise StaleError(f"vLLM decodes with policy version {self._version}; version {version} is not newer")
        self._awake()
        path = self._worker.folder / f"{version}.safetensors"
        save_file(dict(weights), path, {"version": str(version)})
        try:
            held = self._worker.ask(Push(str(path), version), self._limit_s, Held).version
        finally:
            path.unlink(missing_ok=True)
        if held != version:
            raise VllmError(f"vLLM was given the weights of version {version} and says it holds those of {held}")
        self._version = version

    def rest(self) -> None:
        """Lets vLLM give its memory back until it is next asked for something, where the build can. Weights wait in the machine's memory, a drafter's
        with them, so none are lost."""
        if self._sleeps and not self._asleep:
            self._worker.ask(Sleep(), self._limit_s, Done)
            self._asleep = True

    def _awake(self) -> None:
        if self._asleep:
            self._worker.ask(Wake(), self._limit_s, Done)
            self._asleep = False

    def rollout(
        self,
        asks: Sequence[Ask],
        sampling: Sampling,
        plan: Plan | Planner = PLAIN,
        on_round: OnRound | None = None,
        partner: Partner | None = None,
        endless: bool = False,
    ) -> tuple[tuple[Rollout, ...], RolloutStats]:
        """Draws `group` completions of each ask, every step under `plan` or what a planner says before it. `endless` ones end at their length alone.

        The tokens are a function of the seeds, the weights and what is in flight together: vLLM's kernels round by the batch. Raises VllmError when
        vLLM fails or holds other weights, TaskError for an empty prompt, ConfigError for what vLLM cannot do.
        """
        _refuse(asks, sampling, partner)
        began, planner = time.perf_counter(), planner_of(plan)
        requests = self._requests(asks)
        if not requests:
            return (), _stats((), [], 0.0, 0)
        conversation = _Conversation(self, planner, requests, sampling, on_round)
        self._awake()
        eos = () if endless else self._eos
        self._worker.tell(self._draw(requests, sampling, eos, conversation.first()))
        while isinstance(said := self._worker.hear(self._limit_s, Round, Drawn), Round):
            self._worker.tell(Depth(conversation.next(said)))
        if said.version != self._version or len(said.completions) != len(requests):
            raise VllmError(
                f"vLLM drew {len(said.completions)} completions with the weights of version {said.version}; asked for were {len(requests)} of "
                f"version {self._version}"
            )
        stopping = Stopping(self._tokenizer, eos, sampling)
        proposer = PROPOSERS.get(self.drafter, Proposer.TARGET)
        for request, completion in zip(requests, said.completions, strict=True):
            self._fill(request, completion, proposer, stopping)
        rollouts = tuple(request.rollout() for request in requests)
        planner.learn(rollouts)
        wall_s = time.perf_counter() - began
        return rollouts, _stats(requests, conversation.records, wall_s, said.prompt_tokens, conversation.prefill_s)

    def _requests(self, asks: Sequence[Ask]) -> list[Request]:
        ordered = sorted(asks, key=lambda ask: (ask.prompt.row, ask.draw))
        keys = [(ask, sample) for ask in ordered for sample in range(ask.group)]
        return [
            Request(ask, sample, sequence_key(self._seed, ask.stream, ask.draw, ask.prompt.row, sample), order)
            for order, (ask, sample) in enumerate(keys)
        ]

    def _draw(self, requests: Sequence[Request], sampling: Sampling, eos: tuple[int, ...], depth: int) -> Draw:
        asked = [
            Asked(
                list(request.ask.prompt.token_ids), request.under(sampling).max_new_tokens, request.under(sampling).temperature,
                int(request.key[0] & SEEDS),
            )
            for request in requests
        ]  # fmt: skip
        ends = sorted({*eos, *sampling.stop_token_ids})
        return Draw(self._version, asked, list(sampling.stop), ends, depth)

    def _fill(self, request: Request, completion: Completion, proposer: Proposer, stopping: Stopping) -> None:
        """Takes the tokens over up to where our own rules end the completion: a draft may have gone on past it."""
        for token, logprob, entropy, step, drafted in zip(
            completion.tokens, completion.logprobs, completion.entropies, completion.rounds, completion.drafted, strict=True
        ):  # fmt: skip
            by = proposer if drafted else Proposer.TARGET
            request.append(token, logprob, 0.0, entropy, self._version, by, step)
            if stopping.check(request):
                break
        else:
            # a stop string of special tokens, which vLLM sees and a decoded tail does not
            request.finish = "stop"
        request.text = stopping.text(request)


class _Conversation:
    """The steps of one draw: what the planner is asked and told, and what is answered to vLLM."""

    def __init__(
        self,
        engine: VllmEngine,
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
        active = min(left, engine.max_batch)
        load = Load(active, left - active, context, (limit,) * active, Version(engine.version))
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


def _refuse(asks: Sequence[Ask], sampling: Sampling, partner: Partner | None) -> None:
    if partner is not None:
        raise ConfigError("episodes cannot be drawn by vLLM here; set rollout.engine = 'native'")
    if any(s.top_k or s.top_p < 1 or s.min_p for s in (sampling, *(ask.sampling or sampling for ask in asks))):
        raise ConfigError(
            "vLLM tells log-probabilities of the truncated distribution alone, from which the policy's own cannot be had; leave out top_k, top_p and "
            "min_p, or set rollout.engine = 'native'"
        )
    for ask in asks:
        if not ask.prompt.token_ids:
            raise TaskError(
                f"the prompt of row {ask.prompt.row} has no tokens; the policy needs at least one to go on from"
            )


def _stats(
    done: Sequence[Request], records: Sequence[RoundRecord], wall_s: float, prompt_tokens: int, prefill_s: float = 0.0
) -> RolloutStats:
    verify_s = sum(record.verify_s for record in records)
    return RolloutStats(
        wall_s=wall_s, prefill_s=prefill_s, draft_s=0.0, verify_s=verify_s, overhead_s=max(0.0, wall_s - prefill_s - verify_s),
        prompt_tokens=prompt_tokens, tokens=sum(request.drawn for request in done), drafted=sum(r.drafted for r in records),
        accepted=sum(r.accepted for r in records), sequence_rounds=sum(r.active for r in records), round_R=tuple(records),
    )  # fmt: skip
