"""Decoding under way: requests join between two rounds, are decoded together, and leave as each of them ends."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from respec.errors import CacheError
from respec.models.decoder import Decoder
from respec.rollout.cutting import beside, fates, judge, shortened
from respec.rollout.draft.protocol import DraftContext, Drafter, FeatureDrafter
from respec.rollout.kv_cache import KVCache
from respec.rollout.lenient import Lenience
from respec.rollout.onlooker import Onlooker
from respec.rollout.planner import DepthPlanner, cutter_of
from respec.rollout.request import Request
from respec.rollout.scheduler import Scheduler
from respec.rollout.stats import reaching
from respec.rollout.stopping import Stopping
from respec.rollout.target import Target
from respec.rollout.tree import NOTHING, DraftTree, flatten
from respec.rollout.turns import converse
from respec.rollout.verify import Verdict
from respec.rollout.verify_each import verify_each
from respec.types import Cut, Mode, Partner, Plan, Proposer, RoundRecord, Sampling


@dataclass
class Setup:
    """What an engine decodes with: `decoder` is another after each swap, the rest stays. Fields as in `Engine`."""

    decoder: Decoder
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    max_batch: int
    chunk: int
    drafters: Mapping[str, Drafter]
    mode: Mode
    max_nodes: int
    lenience: Lenience | None

    @property
    def readers(self) -> list[FeatureDrafter]:
        return [drafter for drafter in self.drafters.values() if isinstance(drafter, FeatureDrafter)]


class Session:
    """Requests in `cache`, sampled under `sampling` where they have no settings of their own, every round drafted as `planner` says.

    A token depends on its request's key and context alone, so it does not matter who else is there, nor who comes or goes. What
    `Engine.swap` brings decodes from the next round on; then the keys of requests under way are made anew.
    """

    def __init__(
        self, setup: Setup, cache: KVCache, sampling: Sampling, planner: DepthPlanner, partner: Partner | None = None
    ) -> None:
        self.target = Target(setup.decoder, cache, setup.chunk, setup.readers)
        self._setup, self._sampling, self._planner, self._partner = setup, sampling, planner, partner
        self._scheduler = Scheduler((), cache, setup.max_batch)
        self._stopping = Stopping(setup.tokenizer, setup.eos_token_ids, sampling, partner is not None)
        self._onlooker, self._cutter = Onlooker(setup.drafters, planner), cutter_of(planner, setup.mode)
        self._rounds = 0

    @property
    def busy(self) -> bool:
        """Whether there is anything to decode."""
        return bool(self._scheduler.waiting or self._scheduler.active)

    @property
    def active(self) -> Sequence[Request]:
        """The requests being decoded, as they stand after the last round."""
        return self._scheduler.active

    def join(self, requests: Iterable[Request]) -> None:
        """They wait for a slot from now on, in this order."""
        self._scheduler.waiting.extend(requests)

    def round(self) -> tuple[RoundRecord, list[Request]]:
        """Lets in who can be, and decodes one round; returns what it was like and who has ended in it. There must be someone."""
        scheduler, drafters = self._scheduler, self._setup.drafters
        self._refresh()
        self._admit()
        record = self._decode()
        self._planner.observe(record)
        if self._partner is not None:
            converse(self._partner, scheduler.active, self.target, self._stopping, self._sampling, self._rounds)
        self._rounds += 1
        ended = scheduler.retire()
        self._onlooker.look(scheduler.active, ended, record.plan.drafter)
        for request in ended:
            for drafter in drafters.values():
                drafter.finish(request)
            request.text = self._stopping.text(request)
        return record, ended

    def cancel(self, request: Request) -> None:
        """Takes a request out, between two rounds, wherever it stands; nothing if it has ended."""
        if self._scheduler.remove(request):
            for drafter in self._setup.drafters.values():
                drafter.finish(request)

    def forget(self) -> None:
        """Drops what drafters and onlooker keep of requests, as at the end of a rollout; what is still needed is made again."""
        for drafter in self._setup.drafters.values():
            drafter.drop()
        self._onlooker = Onlooker(self._setup.drafters, self._planner)

    def close(self) -> None:
        """An end at any moment leaves neither slots taken nor half-made drafts."""
        for request in [*self._scheduler.active, *self._scheduler.waiting]:
            self._scheduler.remove(request)
        self.forget()

    def _refresh(self) -> None:
        """After a swap: rebuilds, by the prefill path, the keys that an older policy version made, and the hidden states with them."""
        target, version = self.target, self._setup.decoder.version
        target.decoder = self._setup.decoder
        stale = [request for request in self.active if target.cache.version[request.slot] != version]
        for request in stale:
            target.cache.reset(request.slot, version)
        for reader in target.readers if stale else ():
            reader.drop()
        target.prefill(stale)

    def _admit(self) -> None:
        """Lets waiting requests in. The samples of a prompt share one prefill: the others copy the keys of one that has them."""
        scheduler, fresh = self._scheduler, list[Request]()
        source = {(r.ask.prompt.row, r.ask.draw): r for r in scheduler.active}
        copies: list[tuple[Request, Request]] = []
        while scheduler.can_admit:
            request = scheduler.admit(self._setup.decoder.version)
            key = (request.ask.prompt.row, request.ask.draw)
            if key in source:
                copies.append((source[key], request))
            else:
                source[key] = request
                fresh.append(request)
        self.target.prefill(fresh, copies)

    def _decode(self) -> RoundRecord:
        """One decode round: plan, draft, one forward pass over every pending token and its draft, verify."""
        began = time.perf_counter()
        active, target, planner, cutter = self.active, self.target, self._planner, self._cutter
        load = self._scheduler.load(self._sampling, self._setup.decoder.version)
        plan = planner.plan(load)
        planned_at = time.perf_counter()
        cut = cutter.cut() if cutter is not None and plan.n else None
        trees = self._stopping.cut(active, self._draft(plan, planner.depths(), cut))
        drafted_at = time.perf_counter()
        flat = flatten(active, trees)
        logits, taps = target.verify(flat)
        under_B = [request.under(self._sampling) for request in active]
        mode = self._setup.mode if plan.n else "matching"
        verdicts = verify_each(trees, flat, logits, mode, under_B, self._setup.lenience)
        verified_at = time.perf_counter()
        counts = [
            self._emit(request, tree, verdict) for request, tree, verdict in zip(active, trees, verdicts, strict=True)
        ]
        self._keep(verdicts, counts)
        if taps is not None:
            target.show(active, taps, flat, [verdict.path for verdict in verdicts], counts)
        deepest, (tested, stands) = [max(tree.depth_n, default=0) for tree in trees], fates(trees, verdicts)
        if cutter is not None and cut is not None:
            cutter.judged(judge((plan.drafter, *cut.beside), trees, verdicts))
        return RoundRecord(
            active=len(active), waiting=len(self._scheduler.waiting), plan=plan, drafted=sum(len(tree.token_n) for tree in trees),
            accepted=sum(min(len(verdict.path), count) for verdict, count in zip(verdicts, counts, strict=True)),
            emitted=sum(counts), draft_s=drafted_at - planned_at, verify_s=verified_at - drafted_at,
            overhead_s=time.perf_counter() - verified_at + planned_at - began, context=load.context,
            predicted=planner.predicted,
            drafted_D=reaching(deepest), accepted_D=reaching(stands), tested_D=reaching(tested), cut=shortened(trees),
        )  # fmt: skip

    def _draft(self, plan: Plan, depths: Sequence[int] | None, cut: Cut | None) -> Sequence[DraftTree]:
        active, sampling = self.active, self._sampling
        if not plan.n:
            return [NOTHING] * len(active)
        if plan.n > self._setup.max_nodes:
            raise CacheError(f"the plan has {plan.n} nodes, the engine was made for {self._setup.max_nodes}")
        drafter = self._setup.drafters[plan.drafter]
        if isinstance(drafter, FeatureDrafter):
            self.target.read_again(active)
        # the bonus token takes the last place
        limits = [request.remaining(sampling) - 1 for request in active]
        if depths is not None:
            limits = list(map(min, limits, depths))
        # in `matching` a draft's law is only a guess, and the first request's is a better one than that of a session made long ago
        under = active[0].under(sampling) if self._setup.mode == "matching" else sampling
        trees = drafter.propose(active, plan, limits, DraftContext(under, self._setup.mode, self.target.cache, cut))
        return trees if cut is None else beside(self._setup.drafters, plan.drafter, active, limits, trees, cut)

    def _emit(self, request: Request, tree: DraftTree, verdict: Verdict) -> int:
        """Appends the accepted tokens and the target's own, up to where the completion ends; says how many."""
        draws = verdict.draws
        for depth in range(len(verdict.path) + 1):
            proposer = tree.proposer if depth < verdict.kept else Proposer.TARGET
            request.append(
                int(draws.token[depth]), float(draws.logprob[depth]), float(draws.kept_logmass[depth]),
                float(draws.entropy[depth]), self._setup.decoder.version, proposer, self._rounds, *verdict.weighed(depth),
            )  # fmt: skip
            if self._stopping.check(request):
                return depth + 1
        return len(verdict.path) + 1

    def _keep(self, verdicts: Sequence[Verdict], counts: Sequence[int]) -> None:
        """Keeps the keys of pending tokens and accepted paths; what lies past the new length was drafted in vain, and is never read."""
        cache = self.target.cache
        slots, sources, targets = list[int](), list[int](), list[int]()
        for request, verdict, count in zip(self.active, verdicts, counts, strict=True):
            first = int(cache.length[request.slot]) + 1
            for depth, node in enumerate(verdict.path[: count - 1]):
                if node != depth:
                    slots.append(request.slot)
                    sources.append(first + node)
                    targets.append(first + depth)
            cache.length[request.slot] += count
        cache.move(*(np.array(part, np.int64) for part in (slots, sources, targets)))
