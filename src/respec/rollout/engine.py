"""The rollout engine: asks in, rollouts out, in canonical order; speculation changes how fast, never what (but in mode `lossy`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from respec.errors import CacheError, StaleError, TaskError
from respec.models.decoder import Decoder
from respec.rollout.draft.protocol import CachingDrafter, DraftContext, Drafter, FeatureDrafter, PolicyDrafter
from respec.rollout.kv_cache import KVCache, allocated, slots_within
from respec.rollout.lenient import Lenience
from respec.rollout.onlooker import Onlooker
from respec.rollout.planner import DepthPlanner, Planner, planner_of
from respec.rollout.randomness import sequence_key
from respec.rollout.request import Request
from respec.rollout.scheduler import Scheduler
from respec.rollout.stats import reaching, stats_of
from respec.rollout.stopping import Stopping
from respec.rollout.target import Target
from respec.rollout.tree import NOTHING, DraftTree, flatten
from respec.rollout.turns import converse
from respec.rollout.verify import Verdict
from respec.rollout.verify_each import verify_each
from respec.types import (
    PLAIN,
    Ask,
    Load,
    Mode,
    Partner,
    Plan,
    Proposer,
    Rollout,
    RolloutStats,
    RoundRecord,
    Sampling,
    Version,
)

OnRound = Callable[[RoundRecord], None]


class Engine:
    """Decodes with a snapshot of the policy; `swap` is called by the weight door only.

    `max_batch` sequences are decoded at once; prompts are prefilled in passes of at most `prefill_chunk` tokens. `max_nodes` bounds
    the draft nodes of one sequence, whatever the plan; `kv_budget` the bytes of keys (None: unbounded). Mode `lossy` takes a `lenience`; its plain rounds are as in the other modes.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: tuple[int, ...],
        seed: int,
        max_batch: int,
        prefill_chunk: int = 256,
        drafters: Sequence[Drafter] = (),
        mode: Mode = "matching",
        max_nodes: int = 64,
        lenience: Lenience | None = None,
        kv_budget: int | None = None,
    ) -> None:
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._eos = eos_token_ids
        self._seed = seed
        self._max_batch = max_batch
        self._chunk = prefill_chunk
        self._mode: Mode = mode
        self._max_nodes, self._lenience, self._kv_budget = max_nodes, lenience, kv_budget
        self.drafters: Mapping[str, Drafter] = {drafter.name: drafter for drafter in drafters}
        self._readers = [drafter for drafter in drafters if isinstance(drafter, FeatureDrafter)]
        self._cache: KVCache | None = None

    @property
    def version(self) -> int:
        """The policy version that decodes."""
        return self._decoder.version

    def swap(self, decoder: Decoder, draft_decoders: Mapping[str, Decoder] | None = None) -> None:
        """Takes a newer snapshot, between two decode rounds. Nothing computed by the old one is read again: see `_refresh`.

        `draft_decoders` are snapshots for the drafters that decode with the policy's own weights, by name. Raises StaleError for a
        snapshot that is not newer, or where one of those drafters would be left with the older weights.
        """
        if decoder.version <= self._decoder.version:
            raise StaleError(
                f"the engine decodes with policy version {self._decoder.version}; version {decoder.version} is not newer"
            )
        given = draft_decoders or {}
        renewed = {name: drafter for name, drafter in self.drafters.items() if isinstance(drafter, PolicyDrafter)}
        for name in renewed:
            if name not in given or given[name].version != decoder.version:
                raise StaleError(
                    f"drafter '{name}' decodes with the policy's weights and was given none of version {decoder.version}"
                )
        for name, drafter in renewed.items():
            drafter.renew(given[name])
        self._decoder = decoder

    def rollout(
        self,
        asks: Sequence[Ask],
        sampling: Sampling,
        plan: Plan | Planner = PLAIN,
        on_round: OnRound | None = None,
        partner: Partner | None = None,
    ) -> tuple[tuple[Rollout, ...], RolloutStats]:
        """Draws `group` completions of each ask, every round under `plan` or what a planner says before it.

        `on_round` is called after every decode round, for progress. With a `partner` the completions are episodes: a sequence that ends
        its turn hears its environment's answer and goes on, its keys and drafts kept. Raises TaskError for an empty prompt, NonFiniteError for diverged
        weights, CacheError when the cache cannot be had or a plan has more nodes than `max_nodes`.
        """
        began = time.perf_counter()
        planner = planner_of(plan)
        requests, done, records = self._requests(asks), list[Request](), list[RoundRecord]()
        target = None
        if requests:
            target = Target(self._decoder, self._cache_for(requests, sampling), self._chunk, self._readers)
            scheduler = Scheduler(requests, target.cache, self._max_batch)
            stopping = Stopping(self._tokenizer, self._eos, sampling, partner is not None)
            onlooker = Onlooker(self.drafters, planner)
            try:
                while scheduler.waiting or scheduler.active:
                    self._refresh(scheduler.active, target)
                    self._admit(scheduler, target)
                    record = self._round(scheduler, target, sampling, planner, stopping, len(records))
                    records.append(record)
                    planner.observe(record)
                    if partner is not None:
                        converse(partner, scheduler.active, target, stopping, sampling, len(records) - 1)
                    ended = scheduler.retire()
                    onlooker.look(scheduler.active, ended, record.plan.drafter)
                    for request in ended:
                        for drafter in self.drafters.values():
                            drafter.finish(request)
                        request.text = stopping.text(request)
                        done.append(request)
                    if on_round is not None:
                        on_round(record)
            finally:
                # an interrupted rollout leaves neither slots taken nor half-made drafts
                for request in scheduler.active:
                    target.cache.release(request.slot)
                for drafter in self.drafters.values():
                    drafter.drop()
        done.sort(key=lambda request: request.order)
        rollouts = tuple(request.rollout() for request in done)
        planner.learn(rollouts)
        return rollouts, stats_of(done, target, records, time.perf_counter() - began)

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
        capacity = max(request.length + request.under(sampling).max_new_tokens for request in requests)
        # a branching draft lies behind the sequence node by node, however shallow it is
        capacity += self._max_nodes if self.drafters else 0
        shapes = [self._decoder.shape, *(d.kv_shape for d in self.drafters.values() if isinstance(d, CachingDrafter))]
        slots = slots_within(self._kv_budget, shapes, min(self._max_batch, len(requests)), capacity)
        if self._cache is None or self._cache.slots < slots or self._cache.capacity < capacity:
            self._cache = None  # the old one's memory goes before the new one's comes
            self._cache = allocated(self._decoder.shape, slots, capacity)
        return self._cache

    def _refresh(self, active: Sequence[Request], target: Target) -> None:
        """After a swap: rebuilds, by the prefill path, the keys that an older policy version made, and the hidden states with them."""
        target.decoder = self._decoder
        stale = [request for request in active if target.cache.version[request.slot] != self._decoder.version]
        for request in stale:
            target.cache.reset(request.slot, self._decoder.version)
        for reader in self._readers if stale else ():
            reader.drop()
        target.prefill(stale)

    def _admit(self, scheduler: Scheduler, target: Target) -> None:
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
        target.prefill(fresh, copies)

    def _round(
        self,
        scheduler: Scheduler,
        target: Target,
        sampling: Sampling,
        planner: DepthPlanner,
        stopping: Stopping,
        index: int,
    ) -> RoundRecord:
        """One decode round: plan, draft, one forward pass over every pending token and its draft, verify."""
        began = time.perf_counter()
        active = scheduler.active
        load = self._load(scheduler, sampling)
        plan = planner.plan(load)
        planned_at = time.perf_counter()
        trees = stopping.cut(self._draft(active, target, sampling, plan, planner.depths()))
        drafted_at = time.perf_counter()
        flat = flatten(active, trees)
        logits, taps = target.verify(flat)
        under_B, mode = [request.under(sampling) for request in active], self._mode if plan.n else "matching"
        verdicts = verify_each(trees, flat, logits, mode, under_B, self._lenience)
        verified_at = time.perf_counter()
        counts = [
            self._emit(request, tree, verdict, stopping, index)
            for request, tree, verdict in zip(active, trees, verdicts, strict=True)
        ]
        self._keep(active, verdicts, counts, target.cache)
        if taps is not None:
            target.show(active, taps, flat, [verdict.path for verdict in verdicts], counts)
        deepest = [max(tree.depth_n, default=0) for tree in trees]
        stands = [len(verdict.path) for verdict in verdicts]
        return RoundRecord(
            active=len(active), waiting=len(scheduler.waiting), plan=plan, drafted=sum(len(tree.token_n) for tree in trees),
            accepted=sum(min(len(verdict.path), count) for verdict, count in zip(verdicts, counts, strict=True)),
            emitted=sum(counts), draft_s=drafted_at - planned_at, verify_s=verified_at - drafted_at,
            overhead_s=time.perf_counter() - verified_at + planned_at - began, context=load.context,
            predicted=planner.predicted,
            drafted_D=reaching(deepest), accepted_D=reaching(stands),
            tested_D=reaching([min(depth, accepted + 1) for depth, accepted in zip(deepest, stands, strict=True)]),
        )  # fmt: skip

    def _load(self, scheduler: Scheduler, sampling: Sampling) -> Load:
        active = scheduler.active
        return Load(
            active=len(active), waiting=len(scheduler.waiting), context=float(np.mean([request.length for request in active])),
            remaining_B=tuple(request.remaining(sampling) for request in active), version=Version(self._decoder.version),
            row_B=tuple(request.ask.prompt.row for request in active), drawn_B=tuple(len(request.tokens) for request in active),
        )  # fmt: skip

    def _draft(
        self, active: Sequence[Request], target: Target, sampling: Sampling, plan: Plan, depths: Sequence[int] | None
    ) -> Sequence[DraftTree]:
        if not plan.n:
            return [NOTHING] * len(active)
        if plan.n > self._max_nodes:
            raise CacheError(f"the plan has {plan.n} nodes, the engine was made for {self._max_nodes}")
        drafter = self.drafters[plan.drafter]
        if isinstance(drafter, FeatureDrafter):
            target.read_again(active)
        # the bonus token takes the last place
        limits = [request.remaining(sampling) - 1 for request in active]
        if depths is not None:
            limits = list(map(min, limits, depths))
        return drafter.propose(active, plan, limits, DraftContext(sampling, self._mode, target.cache))

    def _emit(self, request: Request, tree: DraftTree, verdict: Verdict, stopping: Stopping, index: int) -> int:
        """Appends the accepted tokens and the target's own, up to where the completion ends; says how many."""
        draws = verdict.draws
        for depth in range(len(verdict.path) + 1):
            proposer = tree.proposer if depth < verdict.kept else Proposer.TARGET
            request.append(
                int(draws.token[depth]), float(draws.logprob[depth]), float(draws.kept_logmass[depth]),
                float(draws.entropy[depth]), self._decoder.version, proposer, index, *verdict.weighed(depth),
            )  # fmt: skip
            if stopping.check(request):
                return depth + 1
        return len(verdict.path) + 1

    def _keep(
        self, active: Sequence[Request], verdicts: Sequence[Verdict], counts: Sequence[int], cache: KVCache
    ) -> None:
        """Keeps the keys of pending tokens and accepted paths; what lies past the new length was drafted in vain, and is never read."""
        slots, sources, targets = list[int](), list[int](), list[int]()
        for request, verdict, count in zip(active, verdicts, counts, strict=True):
            first = int(cache.length[request.slot]) + 1
            for depth, node in enumerate(verdict.path[: count - 1]):
                if node != depth:
                    slots.append(request.slot)
                    sources.append(first + node)
                    targets.append(first + depth)
            cache.length[request.slot] += count
        cache.move(*(np.array(part, np.int64) for part in (slots, sources, targets)))
