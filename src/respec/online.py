"""The online learner: after every policy update the EAGLE-3 head learns from the rollouts that the step has just drawn (ReSpec, section 4.2).

Its inputs are detached: the policy's gradients stay bit for bit what they would be without it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence

import numpy as np

from respec.config import Config, DrafterConfig, RolloutConfig
from respec.drafter.agreement import Agreement, together, write_agreement
from respec.drafter.examples import capture
from respec.drafter.learner import DrafterLearner, LearnerSettings
from respec.drafter.weighting import weigh
from respec.models.eagle import EagleHead, check_fits, load_head, save_head
from respec.models.load import Policy
from respec.report.run_dir import RunDir
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.sentinel import Sentinel
from respec.types import Mode, Sample

FOLDER = "drafter"


class OnlineLearner:
    """Teaches the head of an engine's `eagle` drafter, in step with the policy. The head in the making is float32; what drafts is a
    snapshot of it, which enters by the sentinel's door, between two rollouts.

    `every`: an update each so many steps, on 1/every of that step's rollouts.
    """

    def __init__(
        self, config: DrafterConfig, rollout: RolloutConfig, head: EagleHead, drafter: EagleDrafter, door: Sentinel
    ) -> None:
        self._config, self._sampling = config, rollout.sampling()
        self._drafter, self._door = drafter, door
        settings = LearnerSettings(
            loss=config.loss,
            lr=config.lr,
            depths=config.depths,
            grad_clip=config.grad_clip,
            temperature=rollout.temperature or 1.0,
        )
        self._learner = DrafterLearner(head, settings)
        # how far drafts would have stood on the rollouts of the last update, by mode; empty on a step without one
        self.agreement: Mapping[Mode, Agreement] = {}

    def update(self, policy: Policy, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """One update, and what it did, as metrics; nothing on the steps between. Raises NonFiniteError, with the head as it was."""
        self.agreement = {}
        if step % self._config.every:
            return {}
        began = time.perf_counter()
        chosen = samples[:: self._config.every]
        rewards = np.array([sample.scored.reward for sample in chosen])
        spread = np.array([float(sample.advantage_T[0]) if len(sample.advantage_T) else 0.0 for sample in chosen])
        weights, alike = weigh(self._config.weighting, rewards, self._config.reward_min, spread)
        head = self._learner.head
        rollouts = [sample.scored.rollout for sample in chosen]
        examples = capture(policy.model, head.shape.taps, rollouts, self._sampling, weights=weights.tolist())
        per_update = max(1, -(-len(examples) // self._config.minibatches))
        order = np.random.default_rng(step).permutation(len(examples))
        stats = [
            self._learner.step([examples[i] for i in order[start : start + per_update]])
            for start in range(0, len(order), per_update)
        ]
        self.agreement = together(s.agreement for s in stats)
        self._door.admit(head, self._drafter.version + 1)
        return {
            "drafter/loss": float(np.mean([s.loss for s in stats])), "drafter/grad_norm": float(np.mean([s.grad_norm for s in stats])),
            "drafter/overlap": float(np.mean([s.overlap_K[0] for s in stats])), "drafter/tokens": float(sum(s.tokens for s in stats)),
            "drafter/uniform": float(alike), "time/drafter_s": time.perf_counter() - began,
        }  # fmt: skip

    def save(self, run: RunDir) -> None:
        """Puts the head as it stands into the run folder, in the format that vLLM and the speculators library load."""
        scratch, target = run.path / f".{FOLDER}.tmp", run.path / FOLDER
        shutil.rmtree(scratch, ignore_errors=True)
        save_head(self._learner.head, scratch)
        if self.agreement:
            write_agreement(scratch, self.agreement)
        shutil.rmtree(target, ignore_errors=True)
        scratch.rename(target)


def online_learner(config: Config, policy: Policy, engine: Engine, door: Sentinel, run: RunDir) -> OnlineLearner | None:
    """The learner of the engine's `eagle` drafter, going on from the head in the run folder if there is one; None where none is wanted.

    Its optimizer begins anew at a resume, which changes the drafts that follow and how fast they are, not the tokens. Raises ModelError
    for a head that does not fit the policy.
    """
    drafter = engine.drafters.get("eagle")
    path = config.speculation.drafter_path
    if not config.drafter.learn or path is None or not isinstance(drafter, EagleDrafter):
        return None
    kept = run.path / FOLDER
    head = load_head(kept if (kept / "config.json").exists() else path)
    check_fits(head, policy.model)
    head = head.to(policy.model.device)
    if kept.exists():
        door.admit(head, drafter.version + 1)
    return OnlineLearner(config.drafter, config.rollout, head, drafter, door)
