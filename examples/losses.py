"""The losses alone: a policy's from log-probabilities and advantages, a drafter's from two laws. They are pure functions of tensors.

python examples/losses.py
"""

import torch

from respec import AGGREGATIONS, DRAFTER_LOSSES, SURROGATES
from respec.drafter.losses import log_law, with_tail
from respec.policy.losses import Bounds, Counts

# C completion tokens end to end: two sequences, of three tokens and of two
theta_C = torch.tensor([-0.9, -1.2, -0.3, -2.0, -0.5], requires_grad=True)  # log-probabilities, in nats
old_C, sequence_C = torch.tensor([-1.0, -1.0, -0.4, -1.9, -0.7]), torch.tensor([0, 0, 0, 1, 1])
advantage_C, bounds = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0]), Bounds(0.2, 0.28, 2.0)
for name, surrogate in SURROGATES.items():
    terms = surrogate(theta_C, old_C, advantage_C, sequence_C, bounds)
    loss = (AGGREGATIONS["token_mean"](sequence_C, Counts(2, 5, 3)) * terms.loss_C).sum()
    (gradient_C,) = torch.autograd.grad(loss, theta_C)
    print(f"{name}: loss {loss.item():+.4f}, gradient {[round(value, 3) for value in gradient_C.tolist()]}")

logit_ND = torch.randn(4, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)  # a drafter's, N places
p_NK, index_NK = torch.tensor([[0.6, 0.2, 0.1]]).expand(4, 3), torch.tensor([[5, 9, 30]]).expand(4, 3)  # its target's
for name, distance in DRAFTER_LOSSES.items():
    print(f"{name}: {distance(with_tail(p_NK), log_law(logit_ND, index_NK, temperature=1.0)).mean().item():.4f}")
