"""Made-up runs for the report's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from respec.config import Config, parse_config
from respec.types import Plan, Prompt, Rollout, RoundRecord, ScoredRollout, Stream


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., Config]:
    """`make_config(**sections)`: a configuration whose run folder is tmp_path/run; sections are dicts of keys."""

    def make(**sections: dict) -> Config:
        tree: dict = {
            "model": {"path": "builtin:demo"},
            "task": {"dataset": "chain_sum"},
            "tracking": {"to": []},
        }
        for name, keys in sections.items():
            tree[name] = {**tree.get(name, {}), **keys}
        tree["run"] = {"dir": str(tmp_path / "run"), "threads": 2, **tree.get("run", {})}
        return parse_config(tree)

    return make


@pytest.fixture
def make_scored() -> Callable[..., ScoredRollout]:
    """`make_scored(row, sample, length, text="12")`: random tokens fixed by row and sample."""

    def make(row: int, sample: int, length: int = 7, text: str = "12") -> ScoredRollout:
        rng = np.random.default_rng((row, sample))
        rollout = Rollout(
            prompt=Prompt(row, f"What is {row} + {sample}?", (1, 2, row)),
            stream=Stream.TRAIN,
            draw=0,
            sample=sample,
            token_T=rng.integers(0, 50_000, length).astype(np.int32),
            logprob_T=-rng.exponential(1.0, length).astype(np.float32),
            kept_logmass_T=np.zeros(length, np.float32),
            entropy_T=rng.exponential(1.0, length).astype(np.float32),
            version_T=np.full(length, 3, np.int32),
            proposer_T=rng.integers(0, 3, length).astype(np.uint8),
            round_T=np.arange(length, dtype=np.int32),
            text=text,
            finish="eos" if sample else "length",
        )
        return ScoredRollout(rollout, float(sample % 2), {"task": float(sample % 2), "user:fn": None}, ())

    return make


@pytest.fixture
def make_rounds() -> Callable[[int], tuple[RoundRecord, ...]]:
    """`make_rounds(n)`: n rounds, the first half drafted."""

    def make(n: int) -> tuple[RoundRecord, ...]:
        return tuple(
            RoundRecord(n - i, i, Plan("suffix", 6, 1, 6) if i < n // 2 else Plan(), 5, 3, 4, 0.001, 0.01 * i, 0.002)
            for i in range(n)
        )

    return make
