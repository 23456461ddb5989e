"""A real GRPOTrainer on the built-in demo model, small enough for seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import respec
from respec.integrations.trl import RespecRollouts

DEMO = Path(respec.__file__).parent / "models" / "demo"
PROMPTS = ["3 + 4 + 1 =\n", "8 - 2 + 5 =\n", "9 + 9 - 7 =\n", "1 + 6 + 6 =\n"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.set_num_threads(1)


def many_kinds(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """A reward that tells any two completions apart, more or less: the share of different tokens."""
    return [len(set(ids)) / len(ids) for ids in completion_ids]


class Kept:
    """A rollout_func that hands another's on, and keeps what it gave. `before` is called with the trainer before each generation."""

    def __init__(self, rollouts: RespecRollouts, before: Callable[[Any], None] | None = None) -> None:
        self.rollouts, self.before, self.given = rollouts, before, list[dict[str, Any]]()
        self.modes, self.versions = list[str](), list[int]()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        if self.before is not None:
            self.before(trainer)
        self.given.append(self.rollouts(prompts, trainer))
        self.modes.append("train" if trainer.model.training else "eval")
        self.versions.append(self.rollouts.version)
        return self.given[-1]

    @property
    def tokens(self) -> list[list[list[int]]]:
        return [given["completion_ids"] for given in self.given]


def grpo(
    folder: Path, rollout_func: Any, model: Any = None, prompts: Any = None, more: Any = None, **settings: Any
) -> Any:
    """A GRPOTrainer in float32; `settings` are those of its GRPOConfig, `more` what else the trainer itself takes."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    arguments: dict[str, Any] = {
        "output_dir": str(folder), "use_cpu": True, "bf16": False, "per_device_train_batch_size": 8, "num_generations": 4,
        "max_completion_length": 20, "max_steps": 2, "learning_rate": 1e-3, "lr_scheduler_type": "constant", "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": 0, "gradient_checkpointing": False,
    }  # fmt: skip
    given = more or {}
    return GRPOTrainer(
        model=model if model is not None else AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32),
        reward_funcs=given.pop("reward_funcs", many_kinds),
        args=GRPOConfig(**(arguments | settings)),
        train_dataset=Dataset.from_dict({"prompt": PROMPTS if prompts is None else prompts}),
        processing_class=given.pop("processing_class", None) or AutoTokenizer.from_pretrained(DEMO),
        rollout_func=rollout_func,
        **given,
    )


def quiet(**settings: Any) -> RespecRollouts:
    """Rollouts that say nothing; `suffix` drafts unless told otherwise."""
    speculation = settings.pop("speculation", {"drafter": "suffix", "s": 6})
    return RespecRollouts(speculation, say=settings.pop("say", lambda line: None), **settings)
