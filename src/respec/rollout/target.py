"""The target at work on a cache: prefill, and the pass that verifies. Where a drafter reads hidden states, they go to it from here."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from respec.models.decoder import Decoder
from respec.rollout.draft.protocol import FeatureDrafter
from respec.rollout.kv_cache import KVCache
from respec.rollout.request import Request
from respec.rollout.tree import FlatTrees


@dataclass
class Target:
    """A decoder over a cache, for one rollout. `readers` are the drafters that read its hidden states; they share their taps.

    `prefill_s` and `prompt_tokens` count what prefill has cost.
    """

    decoder: Decoder
    cache: KVCache
    chunk: int
    readers: Sequence[FeatureDrafter]
    prefill_s: float = 0.0
    prompt_tokens: int = 0

    @property
    def taps(self) -> tuple[int, ...]:
        return self.readers[0].taps if self.readers else ()

    def prefill(self, requests: Sequence[Request], copies: Sequence[tuple[Request, Request]] = ()) -> None:
        """Writes the keys of all but the pending token, in passes of at most `chunk` tokens.

        `copies` are (origin, request) of one prompt: the request takes the origin's keys for the prompt instead of a prefill of its own.
        """
        began = time.perf_counter()
        known = [request.known[:-1] for request in requests]
        for request, tokens in zip(requests, known, strict=True):
            self.cache.length[request.slot] = len(tokens)
        read = self._read(requests, known)
        self.prefill_s += time.perf_counter() - began
        self.prompt_tokens += sum(map(len, known))
        seen = {id(request): taps for request, taps in zip(requests, read, strict=True)}
        for origin, request in copies:
            shared = len(request.ask.prompt.token_ids) - 1
            self.cache.fork(origin.slot, request.slot, shared)
            taps = seen.get(id(origin))
            if taps is not None:
                self._tell(request, 0, taps[:shared])
        for request, taps in zip(requests, read, strict=True):
            if taps is not None:
                self._tell(request, 0, taps)

    def prefill_on(self, requests: Sequence[Request]) -> None:
        """Writes the keys of what requests have been told since their last round, all but the pending token, behind those they have."""
        began = time.perf_counter()
        starts = [int(self.cache.length[request.slot]) for request in requests]
        told = [request.known[start:-1] for request, start in zip(requests, starts, strict=True)]
        for request, start, taps in zip(requests, starts, self._read(requests, told, starts), strict=True):
            self.cache.length[request.slot] = request.length - 1
            if taps is not None:
                self._tell(request, start, taps)
        self.prefill_s += time.perf_counter() - began
        self.prompt_tokens += sum(map(len, told))

    def read_again(self, requests: Sequence[Request]) -> None:
        """Gives the readers the hidden states they lack of these requests: one pass over the tokens, which writes the same keys again."""
        missing = [r for r in requests if any(reader.observed(r) < r.length - 1 for reader in self.readers)]
        known = [request.known[:-1] for request in missing]
        for request, taps in zip(missing, self._read(missing, known), strict=True):
            if taps is not None:
                self._tell(request, 0, taps)

    def verify(self, flat: FlatTrees) -> tuple[Float[Tensor, "M V"], Float[Tensor, "M taps*hidden"] | None]:
        """Logits after every pending token and draft node, and the hidden states at them."""
        self.cache.hold(flat.position_M if flat.branches is None else flat.branches.write_M)
        done = self.decoder.hidden(flat.token_M, flat.slot_M, flat.position_M, self.cache, flat.branches, self.taps)
        return self.decoder.logits(done.hidden), done.taps

    def show(
        self,
        requests: Sequence[Request],
        taps: Float[Tensor, "M taps*hidden"],
        flat: FlatTrees,
        paths: Sequence[Sequence[int]],
        counts: Sequence[int],
    ) -> None:
        """The hidden states at the positions that a round has just added to each request: its pending token's, and those of its path.

        Taken all at once: a plain round of many sequences has no time for a tensor operation each.
        """
        rows = [
            row
            for start, path, count in zip(flat.start_B.tolist(), paths, counts, strict=True)
            for row in (start, *(start + 1 + node for node in path))[:count]
        ]
        kept = taps if len(rows) == len(taps) else taps[torch.tensor(rows, device=taps.device)]
        for request, part in zip(requests, kept.split(list(counts)), strict=True):
            self._tell(request, int(self.cache.length[request.slot]) - len(part), part)

    def _tell(self, request: Request, start: int, taps: Float[Tensor, "T taps*hidden"]) -> None:
        for reader in self.readers:
            held = reader.observed(request)
            if start <= held:
                reader.observe(request, held, taps[held - start :])

    def _read(
        self, requests: Sequence[Request], known: Sequence[Sequence[int]], starts: Sequence[int] | None = None
    ) -> list[Tensor | None]:
        """Passes over these tokens of each request, which begin at `starts` (None: at its beginning)."""
        begins = [0] * len(known) if starts is None else starts
        lengths = [len(tokens) for tokens in known]
        tokens = np.array([token for part in known for token in part], np.int64)
        slots = np.repeat(np.array([request.slot for request in requests], np.int64), lengths)
        positions = (
            np.concatenate([np.arange(s, s + n) for s, n in zip(begins, lengths, strict=True)])
            if lengths
            else np.zeros(0, np.int64)
        )
        read = []
        self.cache.hold(positions)
        for start in range(0, len(tokens), self.chunk):
            part = slice(start, start + self.chunk)
            done = self.decoder.hidden(tokens[part], slots[part], positions[part], self.cache, None, self.taps)
            read.append(done.taps)
        whole = [taps for taps in read if taps is not None]
        return list(torch.cat(whole).split(lengths)) if whole else [None] * len(requests)
