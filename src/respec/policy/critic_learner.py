"""The critic's learner: what it expects of a step's completions, before the policy moves, and its own AdamW on what they got."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Float64
from torch import Tensor

from respec.config import Config
from respec.errors import CheckpointError, ConfigError
from respec.models.load import Policy
from respec.models.moments import moments, set_moments
from respec.policy.critic import KINDS
from respec.policy.logprobs import token_logprobs
from respec.policy.optim import adamw, checked_step, learning_rate
from respec.policy.pack import bins, by_temperature, lay_out, length_of
from respec.policy.presets import resolve
from respec.policy.valued import OFF_POLICY, VALUED
from respec.types import Batch, CriticStats, Rollout, Sample


@dataclass(frozen=True)
class _Part:
    """A micro-batch with what the critic expected of its completion tokens, and what it is to expect."""

    batch: Batch
    value_C: Float[Tensor, "C"]
    return_C: Float[Tensor, "C"]


class CriticLearner:
    """Trains a critic made from `policy` as it stands. Holds its optimizer and two counters; nothing else survives an update.

    Raises ConfigError for a kind that cannot be had, or a correction beside an estimator that corrects by itself.
    """

    def __init__(self, policy: Policy, config: Config) -> None:
        critic, learner = config.critic, config.policy
        algorithm = resolve(learner)
        self._off_policy = algorithm.estimator in OFF_POLICY
        if self._off_policy and algorithm.correction != "none":
            raise ConfigError(
                f"policy.estimator '{algorithm.estimator}' weighs tokens by old / rollout itself, and policy.correction '{algorithm.correction}' "
                "would do it again; set policy.correction to 'none'"
            )
        self.config = critic
        self._policy, self._temperature = policy, config.rollout.temperature
        self._budget, self._logit_chunk = learner.tokens_per_microbatch, learner.logit_chunk
        self._epochs, self._minibatches = critic.epochs or learner.epochs, critic.minibatches or learner.minibatches
        self._schedule_steps = config.run.steps * self._epochs * self._minibatches
        self._critic = KINDS[critic.kind](policy.model, critic, config.run.seed)
        self._optimizer = adamw(self._critic, critic.weight_decay, critic.betas)
        self._named = {name: p for name, p in self._critic.named_parameters() if p.requires_grad}
        self._updates = self._optimizer_steps = 0
        self._looked_s = 0.0

    @property
    def alone(self) -> bool:
        """Whether the step under way is one in which the policy waits for the critic (critic warm-up)."""
        return self._updates < self.config.head_start

    @torch.no_grad()
    def values(self, rollouts: Sequence[Rollout]) -> tuple[Float64[np.ndarray, "T+1"], ...]:
        """For each rollout, in their order, the values of the states before its tokens and of the one after the last."""
        began = time.perf_counter()
        found: list[np.ndarray] = [np.empty(0)] * len(rollouts)
        for indices in bins([length_of(rollout) for rollout in rollouts], self._budget):
            batch = self._laid_out([rollouts[i] for i in indices])
            value_N = self._critic(batch).double().cpu().numpy()
            for i, end in zip(indices, batch.start_S[1:].tolist(), strict=True):
                found[i] = value_N[end - len(rollouts[i].token_T) - 1 : end]
        self._looked_s = time.perf_counter() - began
        return tuple(found)

    @torch.no_grad()
    def log_ratios(self, rollouts: Sequence[Rollout]) -> tuple[Float64[np.ndarray, "T"], ...]:
        """log(old / rollout) of each token, at the temperature it was drawn at, by one more forward pass of the policy; zeros for an estimator that does
        not read them."""
        if not self._off_policy:
            return tuple(np.zeros(len(rollout.token_T)) for rollout in rollouts)
        found: list[np.ndarray] = [np.empty(0)] * len(rollouts)
        for temperature, alike in by_temperature(rollouts, self._temperature).items():
            for places in bins([length_of(rollouts[i]) for i in alike], self._budget):
                indices = [alike[place] for place in places]
                members = [rollouts[i] for i in indices]
                batch = dataclasses.replace(self._laid_out(members), temperature=temperature)
                old_C, _ = token_logprobs(self._policy.model, batch, self._logit_chunk)
                ends = np.cumsum([len(rollout.token_T) for rollout in members])[:-1]
                for i, old_T in zip(indices, np.split(old_C.double().cpu().numpy(), ends), strict=True):
                    found[i] = old_T - rollouts[i].logprob_T
        return tuple(found)

    def update(self, samples: Sequence[Sample]) -> CriticStats:
        """Learns the samples' returns, from the values that they carry. Raises NonFiniteError before the optimizer step that would
        have spread it."""
        began = time.perf_counter()
        minibatches = self._split(samples)
        losses, norms, clipped, lr = list[float](), list[float](), list[Tensor](), 0.0
        try:
            for epoch in range(self._epochs):
                for index, parts in enumerate(minibatches):
                    tokens, loss = sum(len(part.return_C) for part in parts), 0.0
                    for part in parts:
                        value_C = self._critic(part.batch)[part.batch.predict_C]
                        loss_C, clipped_C = value_loss(value_C, part.value_C, part.return_C, self.config.value_clip)
                        share = loss_C.sum() / tokens
                        share.backward()
                        loss += share.item()
                        clipped.append(clipped_C)
                    lr = self._rate(epoch * len(minibatches) + index)
                    norms.append(checked_step(self._optimizer, lr, self.config.grad_clip, loss, "critic update"))
                    losses.append(loss)
                    self._optimizer_steps += 1
        finally:
            self._optimizer.zero_grad()
        self._updates += 1
        value_C, return_C = (flat_C.astype(np.float64) for flat_C in _learned(samples))
        return CriticStats(
            loss=float(np.mean(losses)),
            clip_fraction=float(torch.cat(clipped).double().mean()),
            explained_variance=explained_variance(value_C, return_C),
            value_mean=float(value_C.mean()),
            return_mean=float(return_C.mean()),
            grad_norm=float(np.mean(norms)),
            lr=lr,
            wall_s=self._looked_s + time.perf_counter() - began,
        )

    def state_dict(self) -> dict[str, Tensor | int]:
        """The trained weights, the optimizer's moments and the counters: flat, for safetensors and JSON.

        The tensors share memory with critic and optimizer: write or copy them before the next update.
        """
        state: dict[str, Tensor | int] = {"updates": self._updates, "optimizer_steps": self._optimizer_steps}
        state |= {f"weight.{name}": parameter.detach() for name, parameter in self._named.items()}
        return state | moments(self._optimizer, self._named)

    def load_state_dict(self, state: Mapping[str, Tensor | int]) -> None:
        """Takes up a saved state; the learner then goes on bit for bit. Raises CheckpointError if it is of another critic."""
        taken = {key: value for key, value in state.items() if isinstance(value, Tensor)}
        steps = int(state.get("optimizer_steps", -1))
        weights = {name: taken.pop(key) for name in self._named if (key := f"weight.{name}") in taken}
        own = {name: parameter.shape for name, parameter in self._named.items()}
        if steps < 0 or "updates" not in state or own != {name: weight.shape for name, weight in weights.items()}:
            raise CheckpointError(
                "the checkpoint's critic is not the one that [critic] and the model make; resume with the configuration, the model and the "
                "version of respec that wrote it"
            )
        self._updates, self._optimizer_steps = int(state["updates"]), steps
        set_moments(self._optimizer, self._named, taken, steps)
        with torch.no_grad():
            for name, weight in weights.items():
                self._named[name].copy_(weight)

    def _rate(self, index: int) -> float:
        step, cfg = self._updates * self._epochs * self._minibatches + index, self.config
        return learning_rate(step, self._schedule_steps, cfg.lr, cfg.warmup_steps, cfg.decay, cfg.min_lr_ratio)

    def _split(self, samples: Sequence[Sample]) -> list[list[_Part]]:
        """Mini-batches of equal share, shuffled by the update's number when there are several; packed once for all epochs."""
        order, parts = np.arange(len(samples)), min(self._minibatches, len(samples))
        if parts > 1:
            order = np.random.default_rng(self._updates).permutation(len(samples))
        return [self._packed([samples[i] for i in sorted(share)]) for share in np.array_split(order, parts)]

    def _packed(self, samples: Sequence[Sample]) -> list[_Part]:
        lengths = [length_of(sample.scored.rollout) for sample in samples]
        return [self._part([samples[i] for i in indices]) for indices in bins(lengths, self._budget)]

    def _part(self, samples: Sequence[Sample]) -> _Part:
        rollouts = [sample.scored.rollout for sample in samples]
        batch = self._laid_out(rollouts, [rollout.drawn_T for rollout in rollouts])
        value_C, return_C = (torch.from_numpy(flat_C).to(self._critic.line.weight) for flat_C in _learned(samples))
        return _Part(batch, value_C, return_C)

    def _laid_out(self, rollouts: Sequence[Rollout], drawn: Sequence[np.ndarray] = ()) -> Batch:
        prompts, completions = [r.prompt.token_ids for r in rollouts], [r.token_T for r in rollouts]
        batch = lay_out(prompts, completions, self._temperature, drawn=drawn)
        device = self._critic.line.weight.device
        return dataclasses.replace(batch, **{k: v.to(device) for k, v in vars(batch).items() if isinstance(v, Tensor)})


def critic_learner(
    config: Config, policy: Policy, state: Mapping[str, Tensor | int] | None = None
) -> CriticLearner | None:
    """The critic of an algorithm whose estimator needs one, going on from a checkpoint's `state`; None for any other."""
    if resolve(config.policy).estimator not in VALUED:
        return None
    learner = CriticLearner(policy, config)
    if state is not None:
        learner.load_state_dict(state)
    return learner


def value_loss(
    value_C: Float[Tensor, "C"], before_C: Float[Tensor, "C"], return_C: Float[Tensor, "C"], clip: float
) -> tuple[Float[Tensor, "C"], Bool[Tensor, "C"]]:
    """Per token max((V - R)², (V' - R)²) / 2, V' no further than `clip` from the value before the update; and where V' took the gradient away.

    As in OpenAI Baselines' PPO2 (Engstrom et al. 2020, arXiv 2005.12729, section 3). clip 0: without V'.
    """
    loss_C = 0.5 * (value_C - return_C) ** 2
    if not clip:
        return loss_C, torch.zeros_like(loss_C, dtype=torch.bool)
    near_C = before_C + (value_C - before_C).clamp(-clip, clip)
    bounded_C = 0.5 * (near_C - return_C) ** 2
    return torch.maximum(loss_C, bounded_C), bounded_C.detach() > loss_C.detach()


def explained_variance(value_C: Float64[np.ndarray, "C"], return_C: Float64[np.ndarray, "C"]) -> float | None:
    """1 - Var(R - V) / Var(R): 1 for a perfect critic, 0 for one that says the same everywhere, below 0 for a harmful one; None without variance."""
    spread = float(return_C.var())
    return 1.0 - float((return_C - value_C).var()) / spread if spread > 0 else None


def _learned(samples: Sequence[Sample]) -> tuple[Float32[np.ndarray, "C"], Float32[np.ndarray, "C"]]:
    """What the critic expected of the samples' tokens, and what it is to expect. Raises ConfigError for samples that no critic has seen."""
    value = [s.value_T[s.scored.rollout.drawn_T] for s in samples if s.value_T is not None]
    returns = [s.return_T[s.scored.rollout.drawn_T] for s in samples if s.return_T is not None]
    if not len(value) == len(returns) == len(samples) > 0:
        raise ConfigError(
            "critic update: the samples carry no values; make them with advantages(scored, estimator, critic)"
        )
    return np.concatenate(value), np.concatenate(returns)
