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
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import OnRound
from respec.rollout.planner import Planner, planner_of
from respec.rollout.randomness import sequence_key
from respec.rollout.request import Request
from respec.rollout.stopping import Stopping
from respec.rollout.vllm.conversation import Conversation
from respec.rollout.vllm.process import Worker
from respec.rollout.vllm.worker.wire import Asked, Completion, Depth, Done, Draw, Drawn, Held, Push, Round, Sleep, Wake
from respec.types import (
    PLAIN,
    Ask,
    Partner,
    Plan,
    Proposer,
    Rollout,
    RolloutStats,
    RoundRecord,
    Sampling,
)

PROPOSERS = {"ngram": Proposer.NGRAM, "suffix": Proposer.SUFFIX, "model": Proposer.MODEL, "eagle": Proposer.EAGLE}
# vLLM takes seeds of 63 bits.
SEEDS = np.uint64(2**63 - 1)


class VllmEngine:
    """Draws with a worker's vLLM, which holds the policy's weights of `version`. `push` is called by the weight door only.

    `drafter` is the one that vLLM was started with, "off" for none, and drafts `depth` tokens at most; where it cannot be `steered` from step
    to step, it drafts as many always. `head` is what its `eagle` was started with, and keeps its weights by name: vLLM follows it, from one draw to
    the next. It is the one drafter of ours that there is, and never drafts itself.
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
        head: EagleDrafter | None = None,
    ) -> None:
        self._worker, self._tokenizer, self._eos, self._seed = worker, tokenizer, eos_token_ids, seed
        self._version, self._limit_s, self.max_batch = version, limit_s, max_batch
        self.drafter, self.depth, self.steered = drafter, depth, steered
        self.drafters: Mapping[str, Any] = {} if head is None else {head.name: head}
        self._head, self._drafting = head, None if head is None else head.snapshot
        self._drafter_version = 0
        self._sleeps, self._asleep = sleeps, False

    @property
    def version(self) -> int:
        """The policy version that decodes."""
        return self._version

    @property
    def drafter_version(self) -> int:
        """That of the drafter's weights in vLLM; 0 for those it was started with, and for a drafter without any."""
        return self._drafter_version

    def push(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Gives vLLM newer weights, by the names that a checkpoint has them under; its prefix cache is dropped with the old ones.

        Raises StaleError for weights that are not newer, VllmError when vLLM then says that it holds others.
        """
        if version <= self._version:
            raise StaleError(f"vLLM decodes with policy version {self._version}; version {version} is not newer")
        self._version = self._send(weights, version, drafter=False)
        self._follow()

    def push_drafter(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Gives vLLM's drafter other weights, a head's or a draft model's by the names of its checkpoint; what stays may be left out. A version may be
        an older one that did better.

        Raises VllmError when vLLM then computes by others, or says that it holds others, and where its drafter has none.
        """
        self._drafter_version = self._send(weights, version, drafter=True)

    def _follow(self) -> None:
        """Has vLLM draft by the head that has come in by the sentinel's door, or come back."""
        head = self._head
        if head is None or head.snapshot is self._drafting:
            return
        assert head.snapshot.by_name is not None, "a head that vLLM follows keeps its weights by name"
        self.push_drafter(head.snapshot.by_name, head.version)
        self._drafting = head.snapshot

    def _send(self, weights: Mapping[str, torch.Tensor], version: int, drafter: bool) -> int:
        """Hands weights over by a file, in memory where there is room for files; the version that vLLM then holds."""
        self._awake()
        kind = "drafter" if drafter else "policy"
        path = self._worker.folder / f"{kind}-{version}.safetensors"
        save_file({name: weight.contiguous() for name, weight in weights.items()}, path, {"version": str(version)})
        try:
            said = self._worker.ask(Push(str(path), version, drafter), self._limit_s, Held)
        finally:
            path.unlink(missing_ok=True)
        held = said.drafter if drafter else said.version
        if held != version:
            raise VllmError(
                f"vLLM was given the {kind}'s weights of version {version} and says it holds those of {held}"
            )
        return held

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
        conversation = Conversation(self, planner, requests, sampling, on_round)
        self._awake()
        self._follow()
        eos = () if endless else self._eos
        self._worker.tell(self._draw(requests, sampling, eos, conversation.first()))
        while isinstance(said := self._worker.hear(self._limit_s, Round, Drawn), Round):
            self._worker.tell(Depth(conversation.next(said)))
        held, wanted = (said.version, said.drafter), (self._version, self._drafter_version)
        if held != wanted or len(said.completions) != len(requests):
            raise VllmError(
                f"vLLM drew {len(said.completions)} completions with the weights of versions {held} (policy, drafter); asked for were {len(requests)} of "
                f"versions {wanted}"
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
        return Draw(self._version, self._drafter_version, asked, list(sampling.stop), ends, depth)

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
