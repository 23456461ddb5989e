"""Check d, law 2: recorded log-probabilities are the target's."""

from __future__ import annotations

import numpy as np
import torch

from respec.certify.finding import Finding
from respec.certify.protocol import HONEST
from respec.certify.reference import Judged


def honest_logprobs(subject: str, judged: Judged, dtype: torch.dtype) -> Finding:
    """The mean difference to the recomputed log-probability is small, over drafted tokens and over the target's own apart."""
    apart = np.abs(judged.recorded_N - judged.logprob_N)
    allowed = HONEST[dtype]
    name = str(dtype).removeprefix("torch.")
    kinds = {"all": apart, "drafted": apart[judged.drafted_N], "own": apart[~judged.drafted_N]}
    mean = {kind: float(values.mean()) for kind, values in kinds.items() if len(values)}
    figures = {
        "tokens": len(apart), "drafted": int(judged.drafted_N.sum()), "allowed_mean": allowed,
        "max": float(apart.max()), **{f"mean_{kind}": value for kind, value in mean.items()},
    }  # fmt: skip
    seen = f"|recorded - recomputed| has mean {mean['all']:.2g} and maximum {apart.max():.2g} nats over {len(apart)} tokens"
    # written so that a NaN fails
    if all(value <= allowed for value in mean.values()):
        return Finding(
            "log-probabilities", subject, "passed", f"{seen} (allowed for {name}: mean {allowed:g})", figures
        )
    worst = max(mean, key=lambda kind: mean[kind])
    which = {"all": "all", "drafted": "drafted", "own": "the target's own"}[worst]
    sentence = f"{seen}; over {which} tokens the mean is {mean[worst]:.2g}, more than {name} explains ({allowed:g})"
    return Finding("log-probabilities", subject, "failed", sentence, figures)
