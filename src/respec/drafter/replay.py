"""The replay buffer: examples that a head has not learned from yet, and older ones to learn from again, in bounded memory.

It goes to disk with the checkpoint. It could not be rebuilt: the hidden states are of policies whose weights are gone by then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from respec.drafter.examples import Example

MB = 1e6


class Replay:
    """Holds at most `megabytes` of examples; the oldest leave first, learned from or not. A draw gives all that are new, and `again` older
    ones for each of them (0: older ones are not kept).
    """

    def __init__(self, megabytes: float, again: float = 0.0) -> None:
        self._bound, self._again = megabytes * MB, again
        self._old: list[Example] = []
        self._new: list[Example] = []

    def __len__(self) -> int:
        return len(self._old) + len(self._new)

    @property
    def megabytes(self) -> float:
        """What it holds."""
        return sum(example.size for example in (*self._old, *self._new)) / MB

    def add(self, examples: Sequence[Example]) -> int:
        """Takes new examples; returns how many have left without having been learned from."""
        self._new += examples
        excess = self.megabytes * MB - self._bound
        lost = 0
        while excess > 0:
            lost += not self._old
            excess -= (self._old or self._new).pop(0).size
        return lost

    def draw(self, seed: int | Sequence[int]) -> list[Example]:
        """The new examples, which are old from now on, and a choice of the older ones that depends on the seed alone."""
        wanted = min(len(self._old), round(self._again * len(self._new)))
        chosen = np.random.default_rng(seed).choice(len(self._old), wanted, replace=False) if wanted else ()
        drawn = self._new + [self._old[i] for i in sorted(chosen)]
        self.pass_over()
        return drawn

    def pass_over(self) -> None:
        """Makes the new examples old ones without learning from them."""
        self._old = [*self._old, *self._new] if self._again else []
        self._new = []

    def state_dict(self) -> dict[str, Tensor | int]:
        """Flat, for safetensors: the examples' tensors end to end, and their lengths."""
        kept = [*self._old, *self._new]
        if not kept:
            return {}
        return {
            "new": len(self._new),
            "token": torch.cat([e.token_L for e in kept]),
            "taps": torch.cat([e.taps_LT for e in kept]),
            "ids": torch.cat([e.token_CK for e in kept]),
            "p": torch.cat([e.p_CK for e in kept]),
            "sizes": torch.tensor([[e.length, e.prompt, len(e.token_CK), e.version] for e in kept]),
            "weight": torch.tensor([e.weight for e in kept], dtype=torch.float64),
        }

    def load_state_dict(self, state: Mapping[str, Tensor | int], device: torch.device) -> None:
        """Takes up a saved state."""
        self._old, self._new = [], []
        if not state:
            return
        tensor = {key: value.to(device) for key, value in state.items() if isinstance(value, Tensor)}
        length, prompt, count, version = zip(*tensor["sizes"].tolist(), strict=True)
        columns = (
            tensor["token"].split(length), tensor["taps"].split(length), prompt, tensor["ids"].split(count),
            tensor["p"].split(count), tensor["weight"].tolist(), version,
        )  # fmt: skip
        # copies, so that memory goes when an example does
        kept = [
            Example(t.clone(), h.clone(), n, i.clone(), p.clone(), *rest)
            for t, h, n, i, p, *rest in zip(*columns, strict=True)
        ]
        old = len(kept) - int(state["new"])
        self._old, self._new = kept[:old], kept[old:]
