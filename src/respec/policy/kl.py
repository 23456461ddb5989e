"""How far the policy is from a reference, estimated from the tokens that were drawn: k1, k2, k3 of Schulman (2020,
http://joschu.net/blog/kl-approx.html), for KL(theta || reference) a token.

Where an estimator is put decides what its *gradient* is, whatever its value's bias. With s = d log theta and tokens drawn by theta:

    estimator   in the loss, E[d k]                       in the reward, E[k s]
    k1          0: E[s] = 0                               d KL(theta || reference)
    k2          d KL(theta || reference)                  another one
    k3          d KL(reference || theta), the other way   d KL(theta || reference) - d KL(reference || theta)

So k2 is the one of the three for the loss and k1 the one for the reward. Off policy (a second mini-batch, stale rollouts) none of them is
right in the loss; `k3_weighted` is, and on policy it has k2's gradient token by token: s k3 + d k3 = -s log(reference / theta).

This is for one token's law. In the loss every token answers for its own law at the places that the policy came to; summed in the reward of a
completion it is the KL of the two laws of whole completions, the choice of places included. All take log-probabilities of the same tokens: of the policy being trained, before the step, of the reference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from respec.policy.losses import Tokens

KLEstimator = Callable[[Tokens, Tokens, Tokens], Tokens]


def k1(theta_C: Tokens, old_C: Tokens, reference_C: Tokens) -> Tokens:
    """log theta / reference: unbiased, of either sign. In the loss its gradient is zero on average: it adds noise and holds nothing."""
    return theta_C - reference_C


def k2(theta_C: Tokens, old_C: Tokens, reference_C: Tokens) -> Tokens:
    """(log theta / reference)² / 2: biased, but on policy its gradient is that of the KL."""
    return (theta_C - reference_C).square() / 2


def k3(theta_C: Tokens, old_C: Tokens, reference_C: Tokens) -> Tokens:
    """r - 1 - log r with r = reference / theta: unbiased and never negative (GRPO, arXiv 2402.03300, equation 4). Its gradient is that of the
    KL the other way round, KL(reference || theta), which covers the reference instead of staying within it."""
    gap_C = reference_C - theta_C
    return torch.expm1(gap_C) - gap_C


def k3_weighted(theta_C: Tokens, old_C: Tokens, reference_C: Tokens) -> Tokens:
    """theta / old times k3, the weight with its gradient (DeepSeek-V3.2, arXiv 2512.02556): value and gradient are
    unbiased, on policy and off."""
    return torch.exp(theta_C - old_C) * k3(theta_C, old_C, reference_C)


KL_ESTIMATORS: dict[str, KLEstimator] = {"k1": k1, "k2": k2, "k3": k3, "k3_weighted": k3_weighted}
