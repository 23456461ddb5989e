"""What a controller believed when it last looked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from respec.speculation.solver import Candidate, Forecast, ranked
from respec.types import Load, Plan


@dataclass(frozen=True)
class View:
    """Goodput and error of every plan, seconds to start its drafter, under one load."""

    load: Load
    goodput_P: Float[np.ndarray, "P"]
    error_P: Float[np.ndarray, "P"]
    start_P: Float[np.ndarray, "P"]
    promise: Forecast = field(repr=False)

    def ranked(self, plans: Sequence[Plan], margin: float) -> tuple[Candidate, ...]:
        """Every plan's goodput, best first, plain decoding weighed with its `margin`."""
        seconds_P = self.promise.tokens_P / self.goodput_P
        return ranked(plans, self.goodput_P, self.error_P, self.promise.tokens_P, seconds_P, margin)
