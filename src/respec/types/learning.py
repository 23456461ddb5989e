"""What is made of rollouts: rewards, samples, packed batches, and what an update did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int

from respec.types.drawing import Rollout


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with its reward. Made by `tasks.reward`, read by advantages.

    `reward` is the weighted sum of the applicable parts in `part`; a part that was not applicable is None.
    `fell_back` names the reward functions that failed here and were replaced by their configured fallback value. `token_reward_T` is what
    each token is rewarded with besides (a KL to a reference; None: nothing); it is not in `reward`, which is of the whole completion.
    """

    rollout: Rollout
    reward: float
    part: Mapping[str, float | None]
    fell_back: tuple[str, ...] = ()
    token_reward_T: Float32[np.ndarray, "T"] | None = None


@dataclass(frozen=True)
class Sample:
    """A scored rollout with the advantage of each token. Made by `policy.advantages`, read by `policy.pack`.

    Only where the loss holds the policy to a reference: `reference_T`, the token's log-probability under it. Only where there is a critic:
    `value_T`, what it expected before each token, and `return_T`, what it is to learn to expect.
    """

    scored: ScoredRollout
    advantage_T: Float32[np.ndarray, "T"]
    reference_T: Float32[np.ndarray, "T"] | None = None
    value_T: Float32[np.ndarray, "T"] | None = None
    return_T: Float32[np.ndarray, "T"] | None = None


@dataclass(frozen=True)
class Batch:
    """Sequences packed end to end, without padding. Made by `policy.pack`, read by the policy learner.

    N tokens of S sequences; C of them are completion tokens that the policy drew. `predict_C[i]` is the index in 0..N-1 of the token whose
    hidden state predicts completion token i; `sequence_C[i]` says which of the S sequences it belongs to. Log-probabilities are
    named after three policies, always: `rollout` (what sampled, truncation included), `old` (before the step), and the one being
    trained, `theta`, which the learner computes. `weight_C` multiplies each token's loss. `reference_C`: log-probabilities under the
    reference, 0 where there is none. `key_S`: the rollouts' canonical keys.
    """

    token_N: Int[torch.Tensor, "N"]
    position_N: Int[torch.Tensor, "N"]
    start_S: Int[torch.Tensor, "S+1"]
    predict_C: Int[torch.Tensor, "C"]
    target_C: Int[torch.Tensor, "C"]
    sequence_C: Int[torch.Tensor, "C"]
    advantage_C: Float[torch.Tensor, "C"]
    rollout_logprob_C: Float[torch.Tensor, "C"]
    kept_logmass_C: Float[torch.Tensor, "C"]
    weight_C: Float[torch.Tensor, "C"]
    temperature: float
    truncated_S: Bool[torch.Tensor, "S"]
    reference_C: Float[torch.Tensor, "C"]
    key_S: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class UpdateStats:
    """What one `policy.learner.update` did. Means over completion tokens unless the name says otherwise. `term`: by name, the mean of each
    term beside the surrogate."""

    loss: float
    grad_norm: float
    lr: float
    entropy: float
    clip_fraction: float
    ratio_mean: float
    mismatch_mean: float
    mismatch_max: float
    tokens: int
    minibatches: int
    wall_s: float
    term: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class CriticStats:
    """What one `policy.critic_learner.update` did. Means over completion tokens; `explained_variance` is of the values that the advantages
    were made with, before the update, and None where the returns do not vary. `wall_s`: those values and the update."""

    loss: float
    clip_fraction: float
    explained_variance: float | None
    value_mean: float
    return_mean: float
    grad_norm: float
    lr: float
    wall_s: float


@dataclass(frozen=True)
class Shown:
    """A completion to be imitated, in tokens, of which only those that are `own` are learned: an episode shown from its first turn to its last.

    Made by `tasks.episodes`, read by the warm-up.
    """

    token_ids: tuple[int, ...]
    own: tuple[bool, ...]


@dataclass(frozen=True)
class WarmupStats:
    """What `policy.warmup.warm_up` did. Losses are means over solution tokens (nats), `tokens` all tokens passed forward."""

    steps: int
    first_loss: float
    last_loss: float
    tokens: int
    wall_s: float


@dataclass(frozen=True)
class EvalResult:
    """Held-out evaluation under its own sampling settings. `reward_I` is in the order of the row ids, `task_accuracy` by task of a mixture."""

    accuracy: float
    standard_error: float
    items: int
    mean_length: float
    mean_entropy: float
    reward_I: Sequence[float]
    wall_s: float
    task_accuracy: Mapping[str, float] = field(default_factory=dict)
