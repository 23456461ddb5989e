"""The rollout engine: asks in, rollouts out, in canonical order; speculation changes how fast, never what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from transformers import PreTrainedTokenizerBase

from respec.errors import CacheError, StaleError, TaskError
from respec.models.decoder import Decoder
from respec.rollout.draft.protocol import Drafter
from respec.rollout.kv_cache import KVCache
from respec.rollout.randomness import Lane, sequence_key, token_key
from respec.rollout.request import Request
from respec.rollout.sampling import Draws, draw
from respec.rollout.scheduler import Scheduler
from respec.rollout.stopping import Stopping
from respec.rollout.verify import accepted_prefix
from respec.types import PLAIN, Ask, Plan, Proposer, Rollout, RolloutStats, RoundRecord, Sampling

OnRound = Callable[[RoundRecord], None]


@dataclass
class _Clock:
    """Seconds and counts of one rollout, by stage."""

    prefill_s: float = 0.0
    prompt_tokens: int = 0
    records: list[RoundRecord] = field(default_factory=list)


class Engine:
    """Decodes with a snapshot of the policy; `swap` is called by the weight door only.

    `max_batch` sequences are decoded at once; prompts are prefilled in passes of at most `prefill_chunk` tokens.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: tuple[int, ...],
        seed: int,
        max_batch: int,
        prefill_chunk: int = 256,
        drafter: Drafter | None = None,
    ) -> None:
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._eos = eos_token_ids
        self._seed = seed
        self._max_batch = max_batch
        self._chunk = prefill_chunk
        self.drafter = drafter
        self._cache: KVCache | None = None

    @property
    def version(self) -> int:
        """The policy version that decodes."""
        return self._decoder.version

    def swap(self, decoder: Decoder) -> None:
        """Takes a newer snapshot, between two decode rounds. Nothing computed by the old one is read again: see `_refresh`.

        Raises StaleError for a snapshot that is not newer.
        """
        if decoder.version <= self._decoder.version:
            raise StaleError(
                f"the engine decodes with policy version {self._decoder.version}; version {decoder.version} is not newer"
            )
        self._decoder = decoder

    def rollout(
        self, asks: Sequence[Ask], sampling: Sampling, plan: Plan = PLAIN, on_round: OnRound | None = None
    ) -> tuple[tuple[Rollout, ...], RolloutStats]:
        """Draws `group` completions of each ask. `on_round` is called after every decode round, for progress.

        Raises TaskError for an empty prompt, NonFiniteError for diverged weights, CacheError when the cache cannot be had.
        """
        began = time.perf_counter()
        requests = self._requests(asks)
        drafter = self.drafter if plan.n else None
        clock, done = _Clock(), list[Request]()
        if requests:
            cache = self._cache_for(requests, sampling)
            scheduler = Scheduler(requests, cache, self._max_batch)
            stopping = Stopping(self._tokenizer, self._eos, sampling)
            try:
                while scheduler.waiting or scheduler.active:
                    self._refresh(scheduler.active, cache, clock)
                    self._admit(scheduler, cache, clock)
                    record = self._round(scheduler, cache, sampling, plan, drafter, stopping, len(clock.records))
                    clock.records.append(record)
                    for request in scheduler.retire():
                        if drafter is not None:
                            drafter.finish(request)
                        request.text = stopping.text(request)
                        done.append(request)
                    if on_round is not None:
                        on_round(record)
            finally:
                # an interrupted rollout leaves neither slots taken nor half-made drafts
                for request in scheduler.active:
                    cache.release(request.slot)
                if drafter is not None:
                    drafter.drop()
        done.sort(key=lambda request: request.order)
        return tuple(request.rollout() for request in done), _stats(done, clock, time.perf_counter() - began)

    def _requests(self, asks: Sequence[Ask]) -> list[Request]:
        for ask in asks:
            if not ask.prompt.token_ids:
                raise TaskError(
                    f"the prompt of row {ask.prompt.row} has no tokens; the policy needs at least one to go on from"
                )
        ordered = sorted(asks, key=lambda ask: (ask.prompt.row, ask.draw))
        keys = [(ask, sample) for ask in ordered for sample in range(ask.group)]
        return [
            Request(ask, sample, sequence_key(self._seed, ask.stream, ask.draw, ask.prompt.row, sample), order)
            for order, (ask, sample) in enumerate(keys)
        ]

    def _cache_for(self, requests: Sequence[Request], sampling: Sampling) -> KVCache:
        """The cache of the last rollout if it is large enough, else a new one."""
        slots = min(self._max_batch, len(requests))
        capacity = max(request.length for request in requests) + sampling.max_new_tokens
        if self._cache is None or self._cache.slots < slots or self._cache.capacity < capacity:
            self._cache = None  # the old one's memory goes before the new one's comes
            try:
                self._cache = KVCache(self._decoder.shape, slots, capacity)
            except RuntimeError as error:
                raise CacheError(
                    f"no memory for a KV cache of {slots} sequences of {capacity} tokens: {error}; lower rollout.max_batch or "
                    "rollout.max_new_tokens"
                ) from error
        return self._cache

    def _refresh(self, active: Sequence[Request], cache: KVCache, clock: _Clock) -> None:
        """Rebuilds, by the prefill path, the keys of sequences that an older policy version made."""
        stale = [request for request in active if cache.version[request.slot] != self._decoder.version]
        for request in stale:
            cache.reset(request.slot, self._decoder.version)
        self._prefill(stale, cache, clock)

    def _admit(self, scheduler: Scheduler, cache: KVCache, clock: _Clock) -> None:
        """Lets waiting requests in. The samples of a prompt share one prefill: the others copy the keys of one that has them."""
        fresh: list[Request] = []
        source = {(r.ask.prompt.row, r.ask.draw): r for r in scheduler.active}
        copies: list[tuple[Request, Request]] = []
        while scheduler.can_admit:
            request = scheduler.admit(self._decoder.version)
            key = (request.ask.prompt.row, request.ask.draw)
            if key in source:
                copies.append((source[key], request))
            else:
                source[key] = request
                fresh.append(request)
        self._prefill(fresh, cache, clock)
        for origin, request in copies:
            cache.fork(origin.slot, request.slot, len(request.ask.prompt.token_ids) - 1)

    def _prefill(self, requests: Sequence[Request], cache: KVCache, clock: _Clock) -> None:
        """Writes the keys of all but the pending token."""
        began = time.perf_counter()
        tokens, slots, positions = [], [], []
        for request in requests:
            known = [*request.ask.prompt.token_ids, *request.tokens][:-1]
            tokens += known
            slots += [request.slot] * len(known)
            positions += range(len(known))
            cache.length[request.slot] = len(known)
        flat = [np.array(values, np.int64) for values in (tokens, slots, positions)]
        for start in range(0, len(tokens), self._chunk):
            token_M, slot_M, position_M = (values[start : start + self._chunk] for values in flat)
            self._decoder.hidden(token_M, slot_M, position_M, cache)
        clock.prefill_s += time.perf_counter() - began
        clock.prompt_tokens += len(tokens)

    def _round(
        self,
        scheduler: Scheduler,
        cache: KVCache,
        sampling: Sampling,
        plan: Plan,
        drafter: Drafter | None,
        stopping: Stopping,
        index: int,
    ) -> RoundRecord:
        """One decode round: draft, one forward pass over every pending token and its draft, draw, verify."""
        began = time.perf_counter()
        active = scheduler.active
        drafts = self._draft(active, sampling, plan, drafter)
        drafted_at = time.perf_counter()
        draws = self._verify_pass(active, drafts, cache, sampling)
        verified_at = time.perf_counter()
        proposer = drafter.proposer if drafter is not None else Proposer.TARGET
        accepted = emitted = start = 0
        for request, draft in zip(active, drafts, strict=True):
            stop = start + len(draft) + 1
            stands = accepted_prefix(draft, draws.token[start:stop])
            count = self._emit(request, draws, start, stands, proposer, stopping, index)
            # what lies past this length was drafted in vain, and is never read
            cache.length[request.slot] += count
            accepted += min(stands, count)
            emitted += count
            start = stop
        return RoundRecord(
            active=len(active), waiting=len(scheduler.waiting), plan=plan, drafted=sum(map(len, drafts)), accepted=accepted,
            emitted=emitted, draft_s=drafted_at - began, verify_s=verified_at - drafted_at,
            overhead_s=time.perf_counter() - verified_at,
        )  # fmt: skip

    def _draft(
        self, active: Sequence[Request], sampling: Sampling, plan: Plan, drafter: Drafter | None
    ) -> Sequence[Sequence[int]]:
        if drafter is None:
            return [()] * len(active)
        # the bonus token takes the last place
        limits = [request.remaining(sampling) - 1 for request in active]
        return drafter.propose(active, plan, limits)

    def _verify_pass(
        self, active: Sequence[Request], drafts: Sequence[Sequence[int]], cache: KVCache, sampling: Sampling
    ) -> Draws:
        """The target's own draw after the pending token and after each drafted one, flat, request by request."""
        rows = np.array([len(draft) + 1 for draft in drafts])
        tokens = np.array(
            [token for r, draft in zip(active, drafts, strict=True) for token in (r.pending, *draft)], np.int64
        )
        depth = np.arange(len(tokens)) - np.repeat(np.cumsum(rows) - rows, rows)
        slots = np.repeat(np.array([request.slot for request in active], np.int64), rows)
        positions = np.repeat(np.array([request.length - 1 for request in active], np.int64), rows) + depth
        index = np.repeat(np.array([len(request.tokens) for request in active], np.int64), rows) + depth
        keys = token_key(np.repeat(np.concatenate([request.key for request in active]), rows), index, Lane.TARGET)
        hidden = self._decoder.hidden(tokens, slots, positions, cache)
        return draw(self._decoder.logits(hidden), keys, sampling)

    def _emit(
        self,
        request: Request,
        draws: Draws,
        start: int,
        stands: int,
        proposer: Proposer,
        stopping: Stopping,
        index: int,
    ) -> int:
        """Appends the accepted tokens and the target's own, up to where the completion ends; says how many."""
        for depth in range(stands + 1):
            at = start + depth
            request.append(
                int(draws.token[at]), float(draws.logprob[at]), float(draws.kept_logmass[at]), float(draws.entropy[at]),
                self._decoder.version, proposer if depth < stands else Proposer.TARGET, index,
            )  # fmt: skip
            if stopping.check(request):
                return depth + 1
        return stands + 1


def _stats(done: Iterable[Request], clock: _Clock, wall_s: float) -> RolloutStats:
    records = clock.records
    return RolloutStats(
        wall_s=wall_s,
        prefill_s=clock.prefill_s,
        draft_s=sum(record.draft_s for record in records),
        verify_s=sum(record.verify_s for record in records),
        overhead_s=sum(record.overhead_s for record in records),
        prompt_tokens=clock.prompt_tokens,
        tokens=sum(len(request.tokens) for request in done),
        drafted=sum(record.drafted for record in records),
        accepted=sum(record.accepted for record in records),
        sequence_rounds=sum(record.active for record in records),
        round_R=tuple(records),
    )
