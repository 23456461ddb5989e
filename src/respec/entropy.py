"""The entropy gate: a policy that is nearly certain of every token draws groups that teach nothing, however well it answers.

Ring-lite (arXiv 2506.14731) chose the checkpoint of its supervised stage to begin RL from by its entropy, not by its accuracy: the longer the
supervised stage, the lower the entropy, and the sooner RL collapsed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from respec.config import Config
from respec.report.live import View
from respec.stages import Stages, evaluate
from respec.standalone import evaluate_alone, model_of
from respec.types import EvalResult

PROBE_ITEMS = 64
# Nats a token, where nobody has named a floor: a token in a hundred is then in doubt.
NEARLY_CERTAIN = 0.05


@dataclass(frozen=True)
class Candidate:
    """A model that RL might begin from, and what it did on the probe set under training's sampling."""

    model: str
    probe: EvalResult


def ranked(config: Config, models: Sequence[str], items: int, view: View) -> list[Candidate]:
    """The models by mean token entropy on `items` held-out rows, highest first. Raises ConfigError without held-out rows."""
    plain = config.model_copy(update={"speculation": config.speculation.model_copy(update={"drafter": "off"})})
    probes = []
    for model in models:
        sampling = config.rollout.sampling()
        probes.append(Candidate(model, evaluate_alone(plain, view, model_of(model), sampling, items)))
    return sorted(probes, key=lambda candidate: -candidate.probe.mean_entropy)


def probe(stages: Stages) -> EvalResult | None:
    """The policy's entropy after a warm-up that has a floor; None for none."""
    warmup = stages.config.warmup
    if not (warmup.steps and warmup.entropy_floor):
        return None
    prompts = (stages.task.held_out or stages.task.train)[:PROBE_ITEMS]
    return evaluate(stages, prompts, stages.config.rollout.sampling())


def warnings(name: str, result: EvalResult, floor: float) -> list[str]:
    """A line for a person, where the entropy is under the floor."""
    if result.mean_entropy >= floor:
        return []
    return [
        f"{name}: its entropy is {result.mean_entropy:.4f} nats a token, under the floor of {floor:g}; RL will find little to choose between. Begin "
        "from an earlier checkpoint of the warm-up, or warm up for fewer steps"
    ]
