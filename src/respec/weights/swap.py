"""The one door by which new weights reach the engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from respec.models.decoder import Decoder
from respec.models.load import Policy
from respec.weights.outside import Outside, by_name
from respec.weights.publish import publish, publish_draft

# how the snapshots of drafters are made that decode with the policy's own weights, by the drafter's name
DRAFTS = {"self_quant": publish_draft}


class Swappable(Protocol):
    """What takes a snapshot of newer weights, and lets nothing computed by the older be read again."""

    drafters: Mapping[str, Any]

    def swap(self, decoder: Decoder, draft_decoders: Mapping[str, Decoder] | None = None) -> None: ...


def swap(engine: Swappable | Outside, policy: Policy, dtype: str, version: int) -> None:
    """Publishes the policy's weights and hands them over, between two decode rounds, with the snapshots that its drafters need. An engine outside
    of this process gets them by name.

    Raises StaleError when `version` is not newer than the engine's.
    """
    if isinstance(engine, Outside):
        engine.push(by_name(policy, dtype), version)
        return
    drafts = {name: make(policy, dtype, version) for name, make in DRAFTS.items() if name in engine.drafters}
    engine.swap(publish(policy, dtype, version), drafts)
