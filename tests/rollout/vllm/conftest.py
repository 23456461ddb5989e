"""An engine over a worker that only speaks the protocol, with a tokenizer of the demo model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from respec.config import ModelConfig
from respec.models.load import load_policy
from respec.rollout.vllm.engine import VllmEngine
from respec.rollout.vllm.process import Worker
from respec.rollout.vllm.worker.wire import Ready, Start
from respec.types import Ask, Prompt, Stream

FAKE = Path(__file__).with_name("fake_worker.py")
START = Start("", 0, "float32", 64, 8, 0, 1, 1, 0.4, False, False, None, True)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return load_policy(ModelConfig(path="builtin:demo")).tokenizer


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Callable[[str], Worker]]:
    """Makes a worker with a fault, or with none."""
    made: list[Worker] = []

    def make(fault: str = "") -> Worker:
        made.append(Worker(sys.executable, tmp_path / "vllm.log", FAKE, {"FAKE": fault}))
        return made[-1]

    yield make
    for worker in made:
        worker.kill()


@pytest.fixture
def engine(fake: Callable[[str], Worker], tokenizer: Any) -> Callable[..., VllmEngine]:
    """Makes an engine over a started worker; its drafter is the n-gram look-up, steered."""

    def make(fault: str = "", eos: tuple[int, ...] = (), limit_s: float = 30.0, **settings: Any) -> VllmEngine:
        worker: Any = fake(fault)
        worker.ask(START, 60.0, Ready)
        return VllmEngine(
            worker, tokenizer, eos, 0, 0, limit_s, 8, **({"drafter": "ngram", "depth": 4, "steered": True} | settings)
        )

    return make


@pytest.fixture
def asks() -> list[Ask]:
    """Two prompts, the later row first, three samples each."""
    return [Ask(Prompt(row, "", (1, 2, 3 + row)), Stream.TRAIN, 0, 3) for row in (1, 0)]
