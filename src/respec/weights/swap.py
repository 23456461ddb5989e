"""The one door by which new weights reach the engine."""

from __future__ import annotations

from typing import Protocol

from respec.models.decoder import Decoder
from respec.models.load import Policy
from respec.weights.publish import publish


class Swappable(Protocol):
    """What takes a snapshot of newer weights, and lets nothing computed by the older be read again."""

    def swap(self, decoder: Decoder) -> None: ...


def swap(engine: Swappable, policy: Policy, dtype: str, version: int) -> None:
    """Publishes the policy's weights and hands them over, between two decode rounds.

    Raises StaleError when `version` is not newer than the engine's.
    """
    engine.swap(publish(policy, dtype, version))
