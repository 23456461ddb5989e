"""The policy learner: one `update` takes one step's samples through mini-batches and inner epochs of AdamW."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from respec.config import PolicyConfig
from respec.errors import CheckpointError, ConfigError, NonFiniteError, TaskError
from respec.models.gradients import added_in_place, begin
from respec.models.heap import kept_heap
from respec.models.load import Policy
from respec.models.moments import moments, set_moments
from respec.models.products import fast_float32
from respec.policy.corrections import CORRECTIONS
from respec.policy.divergence import Head
from respec.policy.logprobs import Watch, token_logprobs, token_pass
from respec.policy.losses import AGGREGATIONS, SURROGATES, Counts
from respec.policy.optim import adamw, checked_step, learning_rate
from respec.policy.pack import pack
from respec.policy.presets import bounds_of, resolve
from respec.policy.recomputation import free_activations, is_wanted, recomputing, tokens_within
from respec.policy.terms import NO_TERMS, LossTerms, in_loss
from respec.types import Batch, Sample, UpdateStats

__all__ = ["PolicyLearner", "token_logprobs"]


@dataclass(frozen=True)
class _MiniBatch:
    """The micro-batches of one optimizer step, and what all of them together are divided by."""

    micro: tuple[Batch, ...]
    counts: Counts


@dataclass(frozen=True)
class _Pass:
    """What one forward (and backward) pass over a micro-batch gave. `theta_C`, `old_C` are the log-probabilities."""

    loss: float
    learned: bool
    theta_C: torch.Tensor
    entropy_C: torch.Tensor
    ratio_C: torch.Tensor
    clipped_C: torch.Tensor
    term: dict[str, torch.Tensor]


class PolicyLearner:
    """Trains `policy.model` in place. Holds the optimizer and two counters; nothing else survives an update.

    `total_steps` (RL steps) spans the learning-rate schedule. `max_new_tokens` is the divisor of aggregation `constant` when
    `config.loss_constant` is None. `terms` stand beside the surrogate. Raises ConfigError for unknown factors, or for `constant` or
    `budget` without a divisor.
    """

    def __init__(
        self,
        policy: Policy,
        config: PolicyConfig,
        total_steps: int,
        max_new_tokens: int | None = None,
        terms: LossTerms = NO_TERMS,
    ):
        self._model, self._terms = policy.model, terms
        self._config = config
        self._algorithm = resolve(config)
        self._bounds = bounds_of(config)
        divisor = config.loss_constant or max_new_tokens
        if self._algorithm.aggregation == "constant" and not divisor:
            raise ConfigError(
                "policy.aggregation 'constant' divides by policy.loss_constant, which is not set; set it to a number of tokens, "
                "for example rollout.max_new_tokens"
            )
        self._constant = divisor or 1
        if self._algorithm.aggregation == "budget" and not config.token_budget:
            raise ConfigError(
                "policy.aggregation 'budget' divides by policy.token_budget, which is not set; set it to the completion tokens that a step "
                "is to train on"
            )
        self._products = torch.bfloat16 if config.dtype == "bfloat16" else None
        self._budget = config.activations_mb and config.activations_mb * 2**20
        self._tokens = tokens_within(self._budget, policy.model, config.tokens_per_microbatch, self._products)
        self._optimizer = adamw(policy.model, config.weight_decay, config.betas, config.optimizer)
        self._named = {name: p for name, p in policy.model.named_parameters() if p.requires_grad}
        self._schedule_steps = total_steps * config.epochs * config.minibatches
        self._updates = 0
        self._optimizer_steps = 0

    @fast_float32()
    @added_in_place()
    @kept_heap()
    def update(
        self,
        samples: Sequence[Sample],
        temperature: float,
        on_progress: Callable[[int, int], None] | None = None,
        watch: Watch | None = None,
    ) -> UpdateStats:
        """Learns from one step's samples (in canonical order), drawn at `temperature`.

        `on_progress(done, all)` counts sequences over all epochs. Samples that cannot move the weights (no advantage anywhere and
        no term beside the surrogate, or left out as truncated) are passed forward without gradients: entropy, mismatch, ratio and
        clip fraction are over every completion token all the same; the loss's counts include the former, not the latter. Entropy and mismatch are
        the old policy's. A mini-batch of such samples alone takes no optimizer step. `watch` looks on at one forward pass over every
        sample, of the old policy: the first, however many epochs and mini-batches there are.
        Raises TaskError without samples, NonFiniteError before the optimizer step that would have spread it.
        """
        began = time.perf_counter()
        if not samples:
            raise TaskError("policy update: this step has no samples to learn from; see that each step draws prompts")
        minibatches = self._split(samples, temperature)
        epochs = self._config.epochs
        # With one step to take, theta is still the old policy when its log-probabilities are computed for the loss.
        single = epochs * len(minibatches) == 1
        before = None if single else [[self._forward(batch, watch) for batch in mini.micro] for mini in minibatches]
        passes: list[_Pass] = []
        losses: list[float] = []
        norms: list[float] = []
        lr, done = 0.0, 0
        try:
            for epoch in range(epochs):
                for index, mini in enumerate(minibatches):
                    first = len(passes)
                    begin(self._named.values())
                    for k, batch in enumerate(mini.micro):
                        old_C = None if before is None else before[index][k][0]
                        passes.append(self._learn(batch, mini.counts, old_C, watch if single else None))
                        done += len(batch.truncated_S)
                        if on_progress is not None:
                            on_progress(done, epochs * len(samples))
                    losses.append(sum(item.loss for item in passes[first:]))
                    lr = self._rate(epoch * len(minibatches) + index)
                    if any(item.learned for item in passes[first:]):
                        norms.append(
                            checked_step(self._optimizer, lr, self._config.grad_clip, losses[-1], "policy update")
                        )
                        self._optimizer_steps += 1
        finally:
            self._optimizer.zero_grad()
            free_activations(self._model, self._tokens)
        self._updates += 1

        batches = [batch for mini in minibatches for batch in mini.micro]
        if before is None:
            old = [(item.theta_C, item.entropy_C) for item in passes]
        else:
            old = [item for mini in before for item in mini]
        gap_C = torch.cat([(o - b.rollout_logprob_C.to(o)).abs() for (o, _), b in zip(old, batches, strict=True)])
        return UpdateStats(
            loss=float(np.mean(losses)),
            grad_norm=float(np.mean(norms)) if norms else 0.0,
            lr=lr,
            entropy=float(torch.cat([entropy_C for _, entropy_C in old]).mean()),
            clip_fraction=float(torch.cat([item.clipped_C for item in passes]).double().mean()),
            ratio_mean=float(torch.cat([item.ratio_C for item in passes]).mean()),
            mismatch_mean=float(gap_C.mean()),
            mismatch_max=float(gap_C.max()),
            tokens=len(gap_C),
            minibatches=len(norms),
            wall_s=time.perf_counter() - began,
            term={name: float(torch.cat([p.term[name] for p in passes]).mean()) for name in passes[0].term},
        )

    def state_dict(self) -> dict[str, torch.Tensor | int]:
        """Optimizer moments by parameter name, and counters: flat, for safetensors and JSON.

        The tensors share memory with the optimizer: write or copy them before the next update.
        """
        state: dict[str, torch.Tensor | int] = {"updates": self._updates, "optimizer_steps": self._optimizer_steps}
        return state | moments(self._optimizer, self._named)

    def load_state_dict(self, state: dict[str, torch.Tensor | int]) -> None:
        """Takes up a saved state; the learner then goes on bit for bit. Raises CheckpointError if it does not fit the model."""
        taken = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
        steps = int(state.get("optimizer_steps", -1))
        if steps < 0 or "updates" not in state:
            raise CheckpointError(
                "the learner's state does not fit: it has no counters; resume with the version of respec that wrote it"
            )
        set_moments(self._optimizer, self._named, taken, steps)
        self._updates, self._optimizer_steps = int(state["updates"]), steps

    def _rate(self, index: int) -> float:
        step = self._updates * self._config.epochs * self._config.minibatches + index
        cfg = self._config
        return learning_rate(step, self._schedule_steps, cfg.lr, cfg.warmup_steps, cfg.decay, cfg.min_lr_ratio)

    def _split(self, samples: Sequence[Sample], temperature: float) -> list[_MiniBatch]:
        """Mini-batches of equal share, shuffled by the update's number when there are several; packed once for all epochs."""
        order = np.arange(len(samples))
        parts = min(self._config.minibatches, len(samples))
        if parts > 1:
            order = np.random.default_rng(self._updates).permutation(len(samples))
        result = []
        for share in np.array_split(order, parts):
            members = [samples[i] for i in sorted(share)]
            kept = [sample for sample in members if not self._left_out(sample)]
            # Apart, so that a whole micro-batch of samples that teach nothing can do without a backward pass.
            teaching = [sample for sample in kept if self._terms.on or sample.advantage_T.any()]
            idle = [s for s in members if self._left_out(s) or not (self._terms.on or s.advantage_T.any())]
            tokens = max(1, sum(s.scored.rollout.drawn for s in kept))
            share_of_budget = (self._config.token_budget or 1) / parts
            counts = Counts(max(1, len(kept)), tokens, self._constant, share_of_budget)
            batches = pack(teaching, self._tokens, temperature) + pack(idle, self._tokens, temperature)
            result.append(_MiniBatch(tuple(self._placed(batch) for batch in batches), counts))
        return result

    def _left_out(self, sample: Sample) -> bool:
        return self._config.mask_truncated and sample.scored.rollout.truncated

    def _placed(self, batch: Batch) -> Batch:
        device = self._model.device
        moved = {k: v.to(device) for k, v in vars(batch).items() if isinstance(v, torch.Tensor) and v.device != device}
        return dataclasses.replace(batch, **moved)

    @torch.no_grad()
    def _forward(self, batch: Batch, watch: Watch | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._logprobs(batch, watch)[:2]

    def _logprobs(self, batch: Batch, watch: Watch | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Log-probabilities under the truncation of sampling, entropies, and the hidden states of both.

        The mass kept by top-k / top-p / min-p is the one recorded by the engine: exact for the policy that sampled, taken as a
        constant while theta moves within the update.
        """
        spread = self._terms.entropy > 0
        again = is_wanted(
            self._config.gradient_checkpointing, self._model, len(batch.token_N), self._products, self._budget
        )
        with recomputing(self._model, again and torch.is_grad_enabled()):
            logprob_C, entropy_C, hidden_CE = token_pass(
                self._model, batch, self._config.logit_chunk, watch, spread, self._products
            )
        return logprob_C - batch.kept_logmass_C.to(logprob_C), entropy_C, hidden_CE

    def _learn(self, batch: Batch, counts: Counts, old_C: torch.Tensor | None, watch: Watch | None) -> _Pass:
        """One micro-batch's share of the mini-batch's loss, its gradient added to the weights' gradients."""
        kept_C = torch.ones_like(batch.advantage_C, dtype=torch.bool)
        if self._config.mask_truncated:
            kept_C = ~batch.truncated_S[batch.sequence_C]
        active_C = kept_C & (batch.advantage_C != 0)
        learns = bool((kept_C if self._terms.on else active_C).any())
        with torch.set_grad_enabled(learns):
            theta_C, entropy_C, hidden_CE = self._logprobs(batch, watch)
            old_C = theta_C.detach() if old_C is None else old_C
            advantage_C = torch.where(active_C, batch.advantage_C, 0.0).to(theta_C)
            terms = SURROGATES[self._algorithm.surrogate](theta_C, old_C, advantage_C, batch.sequence_C, self._bounds)
            weight_C = AGGREGATIONS[self._algorithm.aggregation](batch.sequence_C, counts).to(theta_C)
            rollout_C = batch.rollout_logprob_C.to(theta_C)
            correct = CORRECTIONS[self._algorithm.correction]
            weight_C = weight_C * correct(old_C, rollout_C, batch.sequence_C, self._bounds)
            # 1 but for tokens that followed an old answer in mode `lossy`
            weight_C = weight_C * batch.weight_C.to(theta_C)
            loss, found = (weight_C * terms.loss_C).sum(), dict[str, tuple[float, torch.Tensor]]()
            if self._terms.on:
                found = self._beside(batch, theta_C, old_C, entropy_C, hidden_CE)
                # Corrections are of the surrogate; what reference and teacher say holds wherever the policy came to.
                share_C = AGGREGATIONS[self._algorithm.aggregation](batch.sequence_C, counts) * batch.weight_C * kept_C
                loss = loss + sum(factor * (share_C.to(value_C) * value_C).sum() for factor, value_C in found.values())
        if not torch.isfinite(loss):
            raise NonFiniteError(
                f"policy update: the loss of a micro-batch of {len(batch.truncated_S)} sequences is {loss.item()}; no step was "
                "taken on it and the weights are as before. Look at the model's weights and this step's rewards"
            )
        if learns:
            loss.backward()
        values = {name: value_C.detach() for name, (_, value_C) in found.items()}
        return _Pass(loss.item(), learns, theta_C.detach(), entropy_C.detach(), terms.ratio_C, terms.clipped_C, values)

    def _beside(
        self, batch: Batch, theta_C: torch.Tensor, old_C: torch.Tensor, entropy_C: torch.Tensor, hidden_CE: torch.Tensor
    ) -> dict[str, tuple[float, torch.Tensor]]:
        """The terms in the loss, of laws without truncation: by name, the coefficient and the value a token."""
        kept_C = batch.kept_logmass_C.to(theta_C)
        student = Head(hidden_CE, self._model.get_parameter("lm_head.weight"))
        return in_loss(
            self._terms, batch, theta_C + kept_C, old_C + kept_C, entropy_C, student, self._config.logit_chunk
        )
