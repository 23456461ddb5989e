"""The rollout engine: asks in, rollouts out, in canonical order; speculation changes how fast, never what (but in mode `lossy`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from respec.errors import StaleError, TaskError
from respec.models.decoder import Decoder, Spent
from respec.rollout.draft.protocol import CachingDrafter, Drafter, PolicyDrafter
from respec.rollout.kv_cache import KVCache, allocated, bytes_of, slots_within
from respec.rollout.lenient import Lenience
from respec.rollout.planner import Planner, planner_of
from respec.rollout.randomness import sequence_key
from respec.rollout.request import Request
from respec.rollout.session import Session, Setup
from respec.rollout.stats import stats_of
from respec.types import PLAIN, Ask, Mode, Partner, Plan, Rollout, RolloutStats, RoundRecord, Sampling

OnRound = Callable[[RoundRecord], None]
# Bytes: a smaller one is not worth taking its memory anew in each step.
LARGE_CACHE = 2**26


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
        self._seed = seed
        self._kv_budget = kv_budget
        self.drafters: Mapping[str, Drafter] = {drafter.name: drafter for drafter in drafters}
        # told after every round, of whatever rollout
        self.between_rounds: list[Callable[[], None]] = []
        self._setup = Setup(
            decoder, tokenizer, eos_token_ids, max_batch, prefill_chunk, self.drafters, mode, max_nodes, lenience
        )
        self._cache: KVCache | None = None

    @property
    def decoder(self) -> Decoder:
        """What decodes now."""
        return self._setup.decoder

    @property
    def version(self) -> int:
        """The policy version that decodes."""
        return self.decoder.version

    def swap(self, decoder: Decoder, draft_decoders: Mapping[str, Decoder] | None = None) -> None:
        """Takes a newer snapshot, between two decode rounds. Nothing computed by the old one is read again: see `Session`.

        `draft_decoders` are snapshots for the drafters that decode with the policy's own weights, by name. Raises StaleError for a
        snapshot that is not newer, or where one of those drafters would be left with the older weights.
        """
        if decoder.version <= self.version:
            raise StaleError(
                f"the engine decodes with policy version {self.version}; version {decoder.version} is not newer"
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
        self._setup.decoder = decoder

    def rest(self) -> None:
        """Lets the snapshot go, for whoever makes room for an update and will then swap, and the KV cache where it is large. What was drawn, and the drafters'
        histories, stay. Decoding before the swap raises StaleError."""
        self._setup.decoder = Spent(self.decoder.shape, self.version)
        if (
            self._cache is not None
            and self._cache.slots * bytes_of(self._cache.shape, self._cache.capacity) >= LARGE_CACHE
        ):
            self._cache = None

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
        session = None
        if requests:
            session = Session(self._setup, self._cache_for(requests, sampling), sampling, planner, partner)
            session.join(requests)
            try:
                while session.busy:
                    record, ended = session.round()
                    records.append(record)
                    done += ended
                    if on_round is not None:
                        on_round(record)
                    for tell in self.between_rounds:
                        tell()
            finally:
                session.close()
        done.sort(key=lambda request: request.order)
        rollouts = tuple(request.rollout() for request in done)
        planner.learn(rollouts)
        target = session.target if session is not None else None
        return rollouts, stats_of(done, target, records, time.perf_counter() - began)

    def open(self, slots: int, capacity: int, sampling: Sampling, plan: Plan | Planner = PLAIN) -> Session:
        """A session without end, for requests that come one by one: `slots` at once, or as many as the budget has room for, each of up to `capacity`
        tokens, prompt included. The others wait.

        Raises CacheError when the cache cannot be had.
        """
        cache = allocated(self.decoder.shape, self.places(slots, capacity), capacity + self._nodes)
        return Session(self._setup, cache, sampling, planner_of(plan))

    def places(self, wanted: int, capacity: int) -> int:
        """How many sequences of that many tokens the budget has room for, `wanted` at the utmost, the caches of drafters counted. Raises CacheError where
        there is none for one."""
        drafters = [drafter for drafter in self.drafters.values() if isinstance(drafter, CachingDrafter)]
        shapes = [self.decoder.shape, *(drafter.kv_shape for drafter in drafters)]
        return slots_within(self._kv_budget, shapes, wanted, capacity + self._nodes)

    @property
    def _nodes(self) -> int:
        """Tokens of a slot for drafts: one that branches lies behind the sequence node by node, however shallow it is."""
        return self._setup.max_nodes if self.drafters else 0

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
        slots = self.places(min(self._setup.max_batch, len(requests)), capacity)
        capacity += self._nodes
        if self._cache is None or self._cache.slots < slots or self._cache.capacity < capacity:
            self._cache = None  # the old one's memory goes before the new one's comes
            self._cache = allocated(self.decoder.shape, slots, capacity)
        return self._cache
