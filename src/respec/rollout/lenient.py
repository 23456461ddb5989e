"""Lenient verification of an old answer (SPEC-RL, arXiv 2509.23232): faster, and lossy. What comes out is not the target's law.

An old token y, drawn from q when it was sampled, is kept with probability min(1, l p(y) / q(y)), l >= 1; otherwise the token is
drawn anew from p itself, not from a residual. So a token comes out with probability min(q, l p) + r p, r = 1 - sum min(q, l p) being
the probability of drawing anew. At l = 1 this still is not p.

p over that law is the weight that makes an expectation under it one under p. It is exact for a draft that is independent of the
policy, given every token before. An answer drafted for the policy that it has trained is not: its tokens had a part in making p. Across training
the weight is therefore an approximation, and a run in this mode is not the run that plain decoding makes.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float64

from respec.errors import ConfigError


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
    """r = 1 - sum min(q, l p): how probable it is that the token is drawn anew. It needs both laws whole, not only the token's entries."""
    return float(max(0.0, 1.0 - np.minimum(q, lenience * p).sum()))


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
