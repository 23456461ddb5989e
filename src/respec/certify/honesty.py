"""Check d, law 2: recorded log-probabilities are the target's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float64, Int64

from respec.certify.finding import Finding
from respec.certify.reference import Judged, Reference
from respec.types import Rollout

# Mean difference to the float32 log-probabilities, in nats, that training asks for.
LAW = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.02}
# Tokens on which transformers' own rounding is measured.
MEASURED = 1024
# Standard errors that a mean may be above the one that it is held against.
SURE = 3.0


def allowed_mean(reference: Reference, rollouts: Sequence[Rollout], temperature: float, dtype: torch.dtype) -> float:
    """The mean difference that is no engine's fault: the law's, or what transformers' own pass in this dtype is off by on these
    completions and `sampling_margin` of it, if that is more (a large vocabulary and open text lose more to bfloat16 than the law has in mind)."""
    if dtype == torch.float32:
        return LAW[dtype]
    step = -(-sum(len(rollout.token_T) for rollout in rollouts) // MEASURED)
    # those of a prompt side by side, as they are judged
    prompts = list(dict.fromkeys(rollout.prompt.token_ids for rollout in rollouts[::step]))
    few = sorted(rollouts[::step], key=lambda rollout: prompts.index(rollout.prompt.token_ids))
    exact = reference.judge(few, temperature).logprob_N
    apart = np.abs(reference.rounded(dtype).judge(few, temperature).logprob_N - exact)
    margin = sampling_margin(apart, np.array([len(rollout.token_T) for rollout in few]), len(rollouts))
    return max(LAW[dtype], float(apart.mean()) + margin)


def sampling_margin(apart_N: Float64[np.ndarray, "N"], length_R: Int64[np.ndarray, "R"], drawn: int) -> float:
    """By how much the mean difference of an engine over `drawn` completions may be above that of transformers over R of them, `apart_N` token by token,
    when both round alike: without it such an engine would fail every other time.

    Both means are of samples. Tokens of a completion share keys, so completions are what is independent: with s the spread of what one has above the
    mean, per token of a usual one, the means are s / sqrt(R) and s / sqrt(drawn) off, their difference s * sqrt(1/R + 1/drawn); less
    in truth, since the two have completions in common. `SURE` of that is exceeded once in 700 times, and a certificate asks some twenty times.
    """
    if len(length_R) < 2:
        return 0.0
    above_R = np.add.reduceat(apart_N, np.cumsum(length_R) - length_R) - apart_N.mean() * length_R
    spread = above_R.std(ddof=1) / length_R.mean()
    return float(SURE * spread * np.sqrt(1 / len(length_R) + 1 / drawn))


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
