"""Lenient verification of an old answer (SPEC-RL, arXiv 2509.23232): faster, and lossy. What comes out is not the target's law.

An old token y, drawn from q when it was sampled, is kept with probability min(1, l p(y) / q(y)), l >= 1; otherwise the token is
drawn anew from p itself, not from a residual. So a token comes out with probability min(q, l p) + r p, r = 1 - sum min(q, l p) being
the probability of drawing anew. At l = 1 this still is not p.

p over that law is the weight that makes an expectation under it one under p. It is exact for a draft that is independent of the
policy, given every token before. An answer drafted for the policy that it has trained is not: its tokens had a part in making p; and an answer
that was itself kept leniently was not drawn from the q recorded with it. Across training the weight is therefore an approximation, and a run
in this mode is not the run that plain decoding makes.

r needs q whole. A rollout records its most probable tokens and leaves the rest as one bucket, which makes sum min(q, l p) an upper bound,
r a lower bound and the weight of a recorded token an upper bound; a token of the bucket takes the bucket's weight. The bounds are equalities where
as many tokens are recorded as there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int32, Shaped

from respec.errors import ConfigError
from respec.types import LAW

# Divides where nothing of p is left for the bucket.
LEAST = float(np.finfo(np.float64).tiny)


@dataclass(frozen=True)
class Lenience:
    """`factor` is l; `recorded` says how many of the most probable tokens of every place's law are kept with a rollout (8 bytes each)."""

    factor: float
    recorded: int

    def __post_init__(self) -> None:
        refuse_lenience(self.factor)


@dataclass(frozen=True)
class Followed:
    """What an old answer says at the places of a draft, and the laws it recorded there. Made by drafter `previous`, read by verification.

    The first is the place after the pending token. There is one more than the draft has nodes, unless the answer ends before.
    """

    token_D: Shaped[np.ndarray, "D"]
    law_DK: Shaped[np.ndarray, "D K"]


def refuse_lenience(lenience: float) -> None:
    """Raises ConfigError for a lenience below 1 (or none at all): it would reject what exact verification keeps."""
    if not lenience >= 1:
        raise ConfigError(f"the lenience of lenient verification is {lenience}; it is at least 1")


def kept_probability(
    p: Float64[np.ndarray, "*N"], q: Float64[np.ndarray, "*N"], lenience: float
) -> Float64[np.ndarray, "*N"]:
    """min(1, l p / q), with which an old token stands; p and q are its probabilities now and when it was drawn (q > 0)."""
    return np.minimum(1.0, lenience * p / q)


def redrawn_mass(
    p: Float64[np.ndarray, "*N V"], q: Float64[np.ndarray, "*N V"], lenience: float
) -> Float64[np.ndarray, "*N"]:
    """r = 1 - sum min(q, l p): how probable it is that the token is drawn anew. It needs both laws whole, not only the token's entries.

    Summed as what each token of q lacks, so that it is above 0 wherever a token can have been refused.
    """
    return np.maximum(q - lenience * p, 0.0).sum(-1)


def output_law(p: Float64[np.ndarray, "V"], q: Float64[np.ndarray, "V"], lenience: float) -> Float64[np.ndarray, "V"]:
    """What comes out while the old answer is still being followed."""
    return np.minimum(q, lenience * p) + redrawn_mass(p, q, lenience) * p


def weight(
    p: Float64[np.ndarray, "*N"], q: Float64[np.ndarray, "*N"], lenience: float, redrawn: Float64[np.ndarray, "*N"]
) -> Float64[np.ndarray, "*N"]:
    """p / output_law = 1 / (min(q / p, l) + r) of tokens that came out (p > 0), kept or drawn anew alike.

    It holds at each place up to and including the first that was drawn anew; from there on the target draws, and the weight is 1.
    """
    return 1.0 / (np.minimum(q / p, lenience) + redrawn)


def record(p_RV: Float64[np.ndarray, "R V"], token_R: Int32[np.ndarray, "R"], count: int) -> Shaped[np.ndarray, "R K"]:
    """The `count` most probable tokens of each row, in dtype LAW; a token that came out takes the last place if it is not among them."""
    count = min(count, p_RV.shape[1])
    likely = np.sort(np.argpartition(-p_RV, count - 1, axis=1)[:, :count], axis=1)
    order = np.argsort(-np.take_along_axis(p_RV, likely, 1), axis=1, kind="stable")
    likely = np.take_along_axis(likely, order, 1)
    absent = (likely != token_R[:, None]).all(1)
    likely[absent, -1] = token_R[absent]
    law = np.empty(likely.shape, LAW)
    law["token"] = likely
    with np.errstate(divide="ignore"):
        law["logp"] = np.log(np.take_along_axis(p_RV, likely, 1))
    return law


def stands(
    p_RV: Float64[np.ndarray, "R V"],
    law_RK: Shaped[np.ndarray, "R K"],
    token_R: Int32[np.ndarray, "R"],
    lenience: float,
    accept_R: Float64[np.ndarray, "R"],
) -> Bool[np.ndarray, "R"]:
    """Whether each old token stands, given a number in (0, 1). `law_RK` was recorded with the tokens, which are in it."""
    rows = np.arange(len(token_R))
    q_R = np.exp(law_RK["logp"].astype(np.float64))[rows, (law_RK["token"] == token_R[:, None]).argmax(1)]
    return accept_R < kept_probability(p_RV[rows, token_R], q_R, lenience)


def weights_of(
    p_RV: Float64[np.ndarray, "R V"],
    law_RK: Shaped[np.ndarray, "R K"],
    token_R: Int32[np.ndarray, "R"],
    lenience: float,
) -> Float64[np.ndarray, "R"]:
    """The weights of tokens that came out while answers of these recorded laws were followed."""
    p_RS, q_RS = (
        np.concatenate([part, np.maximum(1.0 - part.sum(1, keepdims=True), LEAST)], axis=1)
        for part in (np.take_along_axis(p_RV, law_RK["token"], 1), np.exp(law_RK["logp"].astype(np.float64)))
    )
    here = law_RK["token"] == token_R[:, None]
    # the bucket is the last
    at = np.arange(len(token_R)), np.where(here.any(1), here.argmax(1), -1)
    return weight(p_RS[at], q_RS[at], lenience, redrawn_mass(p_RS, q_RS, lenience))
