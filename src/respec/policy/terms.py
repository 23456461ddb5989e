"""What stands beside the surrogate: KL to a reference, an entropy bonus, distillation from a teacher. In the loss, in the reward, or in the
advantages; each a pure function of what frozen models say of the tokens that were drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float32
from transformers import PreTrainedModel

from respec.models.packed_attention import packed_hidden
from respec.policy.divergence import Head, divergence
from respec.policy.kl import KL_ESTIMATORS
from respec.policy.logprobs import token_logprobs
from respec.policy.losses import Tokens
from respec.policy.pack import bins, lay_out, length_of
from respec.types import Batch, Sample, ScoredRollout

PerToken = Float32[np.ndarray, "T"]


@dataclass(frozen=True)
class LossTerms:
    """The terms in the loss, each off at 0. `kl` times estimator `estimator`; `entropy` nats' worth of bonus; `distil` times the divergence
    `divergence` from `teacher` (None: none), `beta` the weight of the teacher in `jsd`."""

    kl: float = 0.0
    estimator: str = "k3_weighted"
    entropy: float = 0.0
    distil: float = 0.0
    divergence: str = "reverse_kl"
    beta: float = 0.5
    teacher: PreTrainedModel | None = None

    @property
    def on(self) -> bool:
        """Whether every token teaches something, with or without an advantage."""
        return bool(self.kl or self.entropy or (self.distil and self.teacher is not None))


NO_TERMS = LossTerms()


def in_loss(
    terms: LossTerms, batch: Batch, theta_C: Tokens, old_C: Tokens, entropy_C: Tokens, student: Head, chunk: int
) -> dict[str, tuple[float, Tokens]]:
    """By name, each term's coefficient in the loss and its value a token, with gradient. Log-probabilities are without truncation.

    `entropy_C` must carry its gradient where there is a bonus. The teacher passes over the batch here, without gradient, and is kept no longer.
    """
    found: dict[str, tuple[float, Tokens]] = {}
    if terms.kl:
        reference_C = batch.reference_C.to(theta_C)
        found["kl"] = terms.kl, KL_ESTIMATORS[terms.estimator](theta_C, old_C, reference_C)
    if terms.entropy:
        found["entropy_bonus"] = -1.0, terms.entropy * entropy_C
    if terms.distil and terms.teacher is not None:
        with torch.no_grad():
            hidden_NE = packed_hidden(terms.teacher, batch.token_N, batch.position_N, batch.start_S)
        teacher = Head(hidden_NE.index_select(0, batch.predict_C), terms.teacher.get_parameter("lm_head.weight"))
        value_C = divergence(terms.divergence, teacher, student, batch.temperature, chunk, terms.beta)
        found[terms.divergence] = terms.distil, value_C
    return found


def charged(
    scored: Sequence[ScoredRollout], reference_R: Sequence[PerToken], kl: float, estimator: str
) -> tuple[ScoredRollout, ...]:
    """KL in the reward: each token's reward is -kl times the estimator, of the log-probabilities it was drawn with.

    Estimators that take rewards by token read them as they are; those that take one reward a completion, their sum (RLOO, arXiv 2402.14740,
    section 2; REINFORCE++, arXiv 2501.03262, equation 8).
    """
    return tuple(
        dataclasses.replace(item, token_reward_T=-kl * estimated(item, reference_T, estimator))
        for item, reference_T in zip(scored, reference_R, strict=True)
    )


def estimated(item: ScoredRollout, other_T: PerToken, estimator: str) -> PerToken:
    """A KL estimator of what was drawn against another model's log-probabilities of it; 0 where an environment spoke."""
    drawn_T, other = torch.from_numpy(item.rollout.logprob_T), torch.from_numpy(other_T)
    found_T = KL_ESTIMATORS[estimator](drawn_T, drawn_T, other).numpy().astype(np.float32)
    return np.where(item.rollout.drawn_T, found_T, np.float32(0))


def taught(
    samples: Sequence[Sample], teacher_R: Sequence[PerToken], weight: float, reward_weight: float
) -> tuple[Sample, ...]:
    """On-policy distillation by sampled reverse KL: reward_weight A - weight log(rollout / teacher), token by token, is the advantage
    (Thinking Machines, "On-Policy Distillation", 2025, with discount 0: a token answers for its own law alone).

    It is k1 put in the reward, whose gradient is that of KL(theta || teacher) at each place that the policy came to.
    """
    return tuple(
        dataclasses.replace(
            sample,
            advantage_T=reward_weight * sample.advantage_T - weight * estimated(sample.scored, teacher_T, "k1"),
        )
        for sample, teacher_T in zip(samples, teacher_R, strict=True)
    )


@torch.no_grad()
def logprobs_under(
    model: PreTrainedModel, scored: Sequence[ScoredRollout], temperature: float, budget: int, chunk: int
) -> tuple[PerToken, ...]:
    """Log-probability of each completion token under a frozen model, at the temperature that tokens were drawn at, without truncation.

    Packed as in the learner: at most `budget` tokens a forward pass, logits of at most `chunk` at once.
    """
    rollouts = [item.rollout for item in scored]
    found: dict[int, PerToken] = {}
    degree_R = [temperature if r.sampling is None else r.sampling.temperature for r in rollouts]
    for indices, degree in _alike(degree_R, [length_of(r) for r in rollouts], budget):
        members = [rollouts[i] for i in indices]
        batch = lay_out([r.prompt.token_ids for r in members], [r.token_T for r in members], degree)
        moved = {key: value.to(model.device) for key, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        logprob_C, _ = token_logprobs(model, dataclasses.replace(batch, **moved), chunk)
        parts = logprob_C.float().cpu().split([len(r.token_T) for r in members])
        found |= {i: part.numpy() for i, part in zip(indices, parts, strict=True)}
    return tuple(found[i] for i in range(len(rollouts)))


def _alike(degree_R: Sequence[float], length_R: Sequence[int], budget: int) -> Iterator[tuple[Sequence[int], float]]:
    """Micro-batches of one temperature each, and that."""
    for degree in dict.fromkeys(degree_R):
        members = [i for i, its in enumerate(degree_R) if its == degree]
        for indices in bins([length_R[i] for i in members], budget):
            yield [members[i] for i in indices], degree
