"""The self-quantized drafter: the policy's own weights at 8 bits draft for the policy, so the draft is never stale (EfficientRollout,
arXiv 2606.18967).

It keeps no keys: it reads the target's, and writes those of its drafted tokens behind them in the same slots, from the pending token on.
The pass that verifies writes every one of these places before it reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

from respec.models.decoder import Decoder
from respec.rollout.draft.comb import Comb, Feed, by_steps, widths
from respec.rollout.draft.protocol import DraftContext
from respec.rollout.request import Request
from respec.rollout.tree import DraftTree
from respec.types import Plan, Proposer, Rollout


class SelfQuantDrafter:
    """Drafts with `decoder`, a snapshot of the version that the engine decodes with, whose keys have the target's shape and dtype.

    There is nothing to catch up with and nothing to forget: a request's pending token and the target's cache are all it reads.
    """

    name = "self_quant"

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def renew(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def propose(
        self, requests: Sequence[Request], plan: Plan, limits: Sequence[int], context: DraftContext
    ) -> list[DraftTree]:
        combs = [Comb(request, widths(plan, limit)) for request, limit in zip(requests, limits, strict=True)]
        drafting = [comb for comb in combs if comb.wants]
        if drafting:
            feeds = [Feed(comb.request.slot, comb.request.length - 1, [comb.request.pending]) for comb in drafting]
            by_steps(self._decoder, context.cache, drafting, feeds, context, chunk=len(feeds))
        return [comb.tree(Proposer.SELF_QUANT) for comb in combs]

    def finish(self, request: Request) -> None:
        """Nothing is held."""

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing: its weights are the policy's."""

    def drop(self) -> None:
        """Nothing is held."""
