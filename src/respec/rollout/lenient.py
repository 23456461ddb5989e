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
from jaxtyping import Float64, Shaped

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


def redrawn_mass(p: Float64[np.ndarray, "V"], q: Float64[np.ndarray, "V"], lenience: float) -> float:
    """r = 1 - sum min(q, l p): how probable it is that the token is drawn anew. It needs both laws whole, not only the token's entries.

    Summed as what each token of q lacks, so that it is above 0 wherever a token can have been refused.
    """
    return float(np.maximum(q - lenience * p, 0.0).sum())


def output_law(p: Float64[np.ndarray, "V"], q: Float64[np.ndarray, "V"], lenience: float) -> Float64[np.ndarray, "V"]:
    """What comes out while the old answer is still being followed."""
    return np.minimum(q, lenience * p) + redrawn_mass(p, q, lenience) * p


def weight(
    p: Float64[np.ndarray, "*N"], q: Float64[np.ndarray, "*N"], lenience: float, redrawn: float
) -> Float64[np.ndarray, "*N"]:
    """p / output_law = 1 / (min(q / p, l) + r) of tokens that came out (p > 0), kept or drawn anew alike.

    It holds at each place up to and including the first that was drawn anew; from there on the target draws, and the weight is 1.
    """
    return 1.0 / (np.minimum(q / p, lenience) + redrawn)


def record(p: Float64[np.ndarray, "V"], token: int, count: int) -> Shaped[np.ndarray, "K"]:
    """The `count` most probable tokens of p, in dtype LAW; the token that came out takes the last place if it is not among them."""
    count = min(count, len(p))
    likely = np.argpartition(-p, count - 1)[:count]
    likely = likely[np.lexsort((likely, -p[likely]))]
    if token not in likely:
        likely[-1] = token
    law = np.empty(count, LAW)
    law["token"] = likely
    with np.errstate(divide="ignore"):
        law["logp"] = np.log(p[likely])
    return law


def stands(
    p: Float64[np.ndarray, "V"], law: Shaped[np.ndarray, "K"], token: int, lenience: float, accept: float
) -> bool:
    """Whether an old token stands, given a number in (0, 1). `law` is what was recorded with it, so it is in there."""
    q_1 = np.exp(law["logp"][law["token"] == token].astype(np.float64))
    return bool(accept < kept_probability(p[[token]], q_1, lenience)[0])


def weight_of(p: Float64[np.ndarray, "V"], law: Shaped[np.ndarray, "K"], token: int, lenience: float) -> float:
    """The weight of a token that came out while an answer of this recorded law was followed."""
    p_S, q_S = (
        np.append(part, max(1.0 - part.sum(), LEAST)) for part in (p[law["token"]], np.exp(law["logp"].astype(np.float64)))
    )  # fmt: skip
    at = np.append(np.flatnonzero(law["token"] == token), -1)[0]
    return float(weight(p_S[at], q_S[at], lenience, redrawn_mass(p_S, q_S, lenience)))
