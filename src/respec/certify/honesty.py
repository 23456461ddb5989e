"""Check d, law 2: recorded log-probabilities are the target's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from respec.certify.finding import Finding
from respec.certify.reference import Judged, Reference
from respec.types import Rollout

# Mean difference to the float32 log-probabilities, in nats, that training asks for.
LAW = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.02}
# Tokens on which transformers' own rounding is measured.
MEASURED = 1024


def allowed_mean(reference: Reference, rollouts: Sequence[Rollout], temperature: float, dtype: torch.dtype) -> float:
    """The mean difference that is no engine's fault: the law's, or what transformers' own pass in this dtype is off by on these
    completions, if that is more (a large vocabulary and open text lose more to bfloat16 than the law has in mind)."""
    if dtype == torch.float32:
        return LAW[dtype]
    step = -(-sum(len(rollout.token_T) for rollout in rollouts) // MEASURED)
    few = rollouts[::step]
    exact = reference.judge(few, temperature).logprob_N
    return max(LAW[dtype], float(np.abs(reference.rounded(dtype).judge(few, temperature).logprob_N - exact).mean()))


def honest_logprobs(subject: str, judged: Judged, dtype: torch.dtype, allowed: float) -> Finding:
    """The mean difference to the recomputed log-probability is small, over drafted tokens and over the target's own apart."""
    apart = np.abs(judged.recorded_N - judged.logprob_N)
    name = str(dtype).removeprefix("torch.")
    kinds = {"all": apart, "drafted": apart[judged.drafted_N], "own": apart[~judged.drafted_N]}
    mean = {kind: float(values.mean()) for kind, values in kinds.items() if len(values)}
    figures = {
        "tokens": len(apart), "drafted": int(judged.drafted_N.sum()), "allowed_mean": allowed, "law_mean": LAW[dtype],
        "max": float(apart.max()), **{f"mean_{kind}": value for kind, value in mean.items()},
    }  # fmt: skip
    seen = f"|recorded - recomputed| has mean {mean['all']:.2g} and maximum {apart.max():.2g} nats over {len(apart)} tokens"
    # written so that a NaN fails
    if all(value <= allowed for value in mean.values()):
        sentence = f"{seen}; the mean may be {allowed:.2g} in {name}"
        if mean["all"] > LAW[dtype]:
            sentence += f", as transformers' own is, but training wants {LAW[dtype]:g}: think of float32"
        return Finding("log-probabilities", subject, "passed", sentence, figures)
    worst = max(mean, key=lambda kind: mean[kind])
    which = {"all": "all", "drafted": "drafted", "own": "the target's own"}[worst]
    sentence = f"{seen}; over {which} tokens the mean is {mean[worst]:.2g}, more than {name} explains ({allowed:.2g})"
    return Finding("log-probabilities", subject, "failed", sentence, figures)
