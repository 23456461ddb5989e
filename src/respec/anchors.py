"""The frozen models of a run, reference and teacher: loaded, asked what they say of a step's tokens, and the reference kept for a resume."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PreTrainedModel

from respec.config import Config, ModelConfig
from respec.errors import ModelError
from respec.models.load import Policy, load_policy
from respec.policy.terms import LossTerms, PerToken, charged, estimated, logprobs_under, taught
from respec.standalone import model_of
from respec.types import Prompt, Sample, ScoredRollout
from respec.weights.checkpoint import FOLDER, load_checkpoint, save_checkpoint, verify

REFERENCE = "reference"
# Estimators whose gradient is not that of KL(policy || reference) where they are put.
OTHER_GRADIENT = {
    ("loss", "k1"): "has no gradient on average and holds the policy to nothing; k3_weighted has the KL's",
    ("reward", "k2"): "has not the KL's gradient; k1 has",
    ("reward", "k3"): "has not the KL's gradient; k1 has",
    ("reward", "k3_weighted"): "is k3, which has not the KL's gradient; k1 has",
}


class Anchors:
    """A run's reference and teacher, each None where the configuration has none. Weights are never changed, but a reference is replaced.

    A reference without a path is the policy as it was before RL, or at the last multiple of `reference.every` steps (ProRL, arXiv 2505.24864,
    section 2.3). It lies in the run folder under `reference`, apart from the checkpoints that are rotated, one for each that is kept.
    Raises ModelError for one that cannot be loaded, has another tokenizer, or too short a context for `prompts` and their completions.
    """

    def __init__(self, config: Config, policy: Policy, prompts: Sequence[Prompt]):
        self._config, self._policy = config, policy
        needed = max((len(p.token_ids) for p in prompts), default=0) + config.rollout.max_new_tokens
        asked, teaching = config.reference, config.teacher
        self._reference = _load("reference", asked.path, asked.dtype, config, policy, needed) if asked.kl else None
        self._teacher = _load("teacher", teaching.path, teaching.dtype, config, policy, needed)
        self._base, self._is_kept = 0, True

    @property
    def terms(self) -> LossTerms:
        """What the learner adds to its loss."""
        asked, teaching = self._config.reference, self._config.teacher
        return LossTerms(
            kl=asked.kl if asked.kl_in == "loss" else 0.0,
            estimator=asked.chosen,
            entropy=self._config.policy.entropy_bonus,
            distil=teaching.weight if self._teacher is not None and teaching.loss != "sampled" else 0.0,
            divergence=teaching.loss if teaching.loss != "sampled" else "reverse_kl",
            beta=teaching.beta,
            teacher=self._teacher,
        )

    @property
    def notes(self) -> list[str]:
        """A line for an estimator whose gradient is not what a user would think."""
        asked = self._config.reference
        why = OTHER_GRADIENT.get((asked.kl_in, asked.chosen)) if asked.kl else None
        return [f"reference.estimator {asked.chosen} in the {asked.kl_in} {why}"] if why else []

    def settle(self, run_dir: Path, step: int) -> None:
        """Takes the reference of a run that is at `step`, whose policy is by now the one of that step."""
        asked = self._config.reference
        if not asked.kl:
            return
        self._base = step - step % asked.every if asked.every else 0
        if self._base == 0 and asked.path:
            return
        self._reference = frozen_copy(self._policy.model)
        if self._base < step:
            folder = run_dir / REFERENCE / FOLDER / f"{self._base:06d}"
            load_checkpoint(verify(folder, self._base), dataclasses.replace(self._policy, model=self._reference))
        self._is_kept = self._base < step
        self.keep(run_dir)

    def keep(self, run_dir: Path) -> None:
        """Writes the reference where a resume will look for it, if it is not there yet; to be called before a checkpoint is written."""
        if self._is_kept or self._reference is None:
            return
        own = dataclasses.replace(self._policy, model=self._reference)
        # One more than checkpoints: those that are there already may each have one of their own.
        save_checkpoint(run_dir / REFERENCE, self._base, own, {}, {}, self._config.checkpoint.keep + 1)
        self._is_kept = True

    def move(self, step: int) -> None:
        """After the update of `step`: every so many steps the policy becomes the reference."""
        asked = self._config.reference
        if asked.kl and asked.every and step % asked.every == 0:
            self._reference = frozen_copy(self._policy.model)
            self._base, self._is_kept = step, False

    def charge(self, scored: Sequence[ScoredRollout]) -> tuple[tuple[ScoredRollout, ...], dict[str, float]]:
        """KL in the reward, where it is asked for; and the step's mean of it."""
        asked = self._config.reference
        if self._reference is None or asked.kl_in != "reward":
            return tuple(scored), {}
        began = time.perf_counter()
        reference_R = self._asked(self._reference, scored)
        pairs = zip(scored, reference_R, strict=True)
        kl = float(np.concatenate([estimated(item, other_T, asked.chosen) for item, other_T in pairs]).mean())
        taken_s = time.perf_counter() - began
        return charged(scored, reference_R, asked.kl, asked.chosen), {"kl": kl, "asked_s": taken_s}

    def teach(self, samples: Sequence[Sample]) -> tuple[tuple[Sample, ...], dict[str, float]]:
        """What the loss and the advantages need to know of the reference and the teacher; and the step's mean of the sampled reverse KL."""
        teaching, scored, began = self._config.teacher, [sample.scored for sample in samples], time.perf_counter()
        samples, said = tuple(samples), {}
        if self._teacher is not None and teaching.loss == "sampled":
            teacher_R = self._asked(self._teacher, scored)
            pairs = zip(scored, teacher_R, strict=True)
            said["reverse_kl"] = float(np.concatenate([estimated(s, other_T, "k1") for s, other_T in pairs]).mean())
            samples = taught(samples, teacher_R, teaching.weight, teaching.reward_weight)
        elif self._teacher is not None:
            scaled = [np.multiply(s.advantage_T, teaching.reward_weight, dtype=np.float32) for s in samples]
            samples = tuple(dataclasses.replace(s, advantage_T=a) for s, a in zip(samples, scaled, strict=True))
        if self._reference is not None and self._config.reference.kl_in == "loss":
            reference_R = self._asked(self._reference, scored)
            pairs = zip(samples, reference_R, strict=True)
            samples = tuple(dataclasses.replace(sample, reference_T=other_T) for sample, other_T in pairs)
        anchored = self._reference is not None or self._teacher is not None
        return samples, said | ({"asked_s": time.perf_counter() - began} if anchored else {})

    def _asked(self, model: PreTrainedModel, scored: Sequence[ScoredRollout]) -> tuple[PerToken, ...]:
        policy, temperature = self._config.policy, self._config.rollout.temperature
        return logprobs_under(model, scored, temperature, policy.tokens_per_microbatch, policy.logit_chunk)


def frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """The model as it is now, for good: what a run without `reference.path` is held to."""
    return copy.deepcopy(model).requires_grad_(False)


def _load(what: str, path: str, dtype: str, config: Config, policy: Policy, needed: int) -> PreTrainedModel | None:
    if not path:
        return None
    asked = {"path": model_of(path), "device": config.model.device, "trust_remote_code": config.model.trust_remote_code}
    try:
        other = load_policy(ModelConfig.model_validate(asked), own_dtype=dtype)
    except ModelError as error:
        raise ModelError(f"the {what} of {what}.path cannot be loaded: {error}") from None
    ours, theirs = policy.tokenizer.get_vocab(), other.tokenizer.get_vocab()
    odd = sorted(token for token in {**ours, **theirs} if ours.get(token) != theirs.get(token))
    if odd:
        raise ModelError(
            f"{what}.path: '{path}' has another tokenizer than the policy: {len(odd)} tokens differ, first {odd[0]!r}, which is "
            f"{theirs.get(odd[0])} there and {ours.get(odd[0])} here. Its probabilities would be of other texts; take a {what} with the same tokenizer"
        )
    if other.context_length < needed:
        raise ModelError(
            f"{what}.path: '{path}' reads {other.context_length} tokens, prompts and completions are up to {needed}; take another {what} or lower "
            "rollout.max_new_tokens"
        )
    return other.model.requires_grad_(False)
