"""How far a drafter's law q is from the target's p: pure functions of both, over the target's top tokens and one bucket for the rest.

The bucket makes the KL divergence a lower bound of that over the vocabulary, and the overlap Σ min(p, q) an upper bound.
`lk` is the negative log of the overlap; `e2e_tv` is one minus the expected share of a draft of k tokens that is accepted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LEAST_OVERLAP = 1e-6
LEAST_MASS = 1e-8


def with_tail(p_NK: Float[Tensor, "N K"]) -> Float[Tensor, "N K+1"]:
    """Probabilities of some tokens, and the mass of all others as one more."""
    return torch.cat([p_NK, (1.0 - p_NK.sum(dim=1, keepdim=True)).clamp_min(0.0)], dim=1)


def log_law(logit_ND: Float[Tensor, "N D"], index_NK: Int[Tensor, "N K"], temperature: float) -> Float[Tensor, "N K+1"]:
    """log q of the tokens `index_NK` (in the draft vocabulary; -1 for one that cannot be drafted, -inf), then of all others together."""
    logq_ND = torch.log_softmax(logit_ND.to(torch.promote_types(logit_ND.dtype, torch.float32)) / temperature, dim=1)
    known_NK = index_NK >= 0
    logq_NK = logq_ND.gather(1, index_NK.clamp_min(0)).masked_fill(~known_NK, -torch.inf)
    rest_N = 1.0 - logq_NK.exp().sum(dim=1, keepdim=True)
    return torch.cat([logq_NK, rest_N.clamp_min(LEAST_MASS).log()], dim=1)


def overlap(p_NB: Float[Tensor, "N B"], logq_NB: Float[Tensor, "N B"]) -> Float[Tensor, "N"]:
    """Σ min(p, q): the probability that the first draft stands in `rejection`; 1 - TV."""
    return torch.minimum(p_NB, logq_NB.exp()).sum(dim=1)


def race_match(p_NB: Float[Tensor, "N B"], logq_NB: Float[Tensor, "N B"]) -> Float[Tensor, "N"]:
    """Σ_i 1 / Σ_j max(p_j/p_i, q_j/q_i): the probability that one race ends alike under both laws, as in `matching` (Daliri et al. 2024,
    arXiv 2408.07978, whose bound (1 - TV) / (1 + TV) it keeps where there is no tail).

    The last bucket stands for many tokens. They are taken to be others under p than under q, and no match among them is counted: a lower bound.
    """
    tail_N = p_NB[:, -1:], logq_NB[:, -1:].exp()
    order = (logq_NB[:, :-1] - p_NB[:, :-1].log()).nan_to_num(nan=0.0).argsort(dim=1)
    p, q = p_NB[:, :-1].gather(1, order), logq_NB[:, :-1].exp().gather(1, order)
    # in order of q/p, the larger of the two quotients is p's for all up to i and q's for all after it
    below, above = p.cumsum(dim=1) + tail_N[0], q.flip(1).cumsum(dim=1).flip(1) - q + tail_N[1]
    possible = (p > 0) & (q > 0)
    return torch.where(possible, 1.0 / (below / p + above / q), 0.0).sum(dim=1)


def kl(p_NB: Float[Tensor, "N B"], logq_NB: Float[Tensor, "N B"]) -> Float[Tensor, "N"]:
    """KL(p ‖ q) in nats, p renormalised over what can be drafted; 0 where none of it can."""
    drafted_NB = logq_NB > -torch.inf
    within_NB = torch.where(drafted_NB, p_NB, 0.0)
    within_NB = within_NB / within_NB.sum(dim=1, keepdim=True).clamp_min(LEAST_MASS)
    return (torch.special.xlogy(within_NB, within_NB) - within_NB * torch.where(drafted_NB, logq_NB, 0.0)).sum(dim=1)


def tv(p_NB: Float[Tensor, "N B"], logq_NB: Float[Tensor, "N B"]) -> Float[Tensor, "N"]:
    """Total variation, 1 - Σ min(p, q)."""
    return 1.0 - overlap(p_NB, logq_NB)


def lk(p_NB: Float[Tensor, "N B"], logq_NB: Float[Tensor, "N B"]) -> Float[Tensor, "N"]:
    """-log Σ min(p, q), the overlap held at 1e-6 or more."""
    return -overlap(p_NB, logq_NB).clamp_min(LEAST_OVERLAP).log()


def e2e_tv(overlap_NK: Float[Tensor, "N k"], exists_NK: Bool[Tensor, "N k"]) -> Float[Tensor, "N"]:
    """1 - (1/k) Σ_j Π_{i≤j} (1 - TV_i) for drafts of k tokens; k counts only the depths that exist (the text may end before)."""
    stands_NK = torch.where(exists_NK, overlap_NK, 0.0).cumprod(dim=1)
    return 1.0 - stands_NK.sum(dim=1) / exists_NK.sum(dim=1).clamp_min(1)


BY_TOKEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"kl": kl, "tv": tv, "lk": lk}
LOSSES = (*BY_TOKEN, "e2e_tv")
