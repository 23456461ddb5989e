"""An engine that is given only every k-th update's weights: what it has meanwhile is kept, so that a run taken up again draws from the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from respec.models.load import Policy

Weights = dict[str, torch.Tensor]


class Behind:
    """The weights that the engine decodes with, copied where the learner may be ahead of them; `state` is that of a checkpoint, or empty.

    With `every` 1 the engine always has the policy's own: nothing is copied, and the state is empty.
    """

    def __init__(self, every: int, state: Mapping[str, Any]) -> None:
        self._every = every
        self._weights: Weights = dict(state.get("weights", {}))
        self._version = int(state.get("version", 0))

    def due(self, step: int, last: int) -> bool:
        """Whether the engine is to get the weights of this step: each `every` steps, and at the run's last, which is evaluated."""
        return step % self._every == 0 or step == last

    def keep(self, policy: Policy, version: int) -> None:
        """To be told when the engine has got the policy's weights, before the learner changes them."""
        if self._every > 1:
            self._weights = {name: weight.clone() for name, weight in _trained(policy).items()}
            self._version = version

    @contextmanager
    def lent(self, policy: Policy, step: int) -> Iterator[int]:
        """For as long, the policy has the engine's weights; gives their version. `step`: the one of the policy's own."""
        if not self._weights:
            self.keep(policy, step)
            yield step
            return
        own = {name: weight.clone() for name, weight in _trained(policy).items()}
        _put(policy, self._weights)
        try:
            yield self._version
        finally:
            _put(policy, own)

    def state_dict(self) -> dict[str, Any]:
        return {"version": self._version, "weights": self._weights} if self._weights else {}


def _trained(policy: Policy) -> Weights:
    return {name: weight.detach() for name, weight in policy.model.named_parameters() if weight.requires_grad}


def _put(policy: Policy, weights: Weights) -> None:
    for name, weight in _trained(policy).items():
        weight.copy_(weights[name])
