"""The figures a run is judged by, from its recorded steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from respec.report.records import StepMetrics


def summarize(steps: Sequence[StepMetrics], planned: int, wall_s: float, run_dir: Path) -> dict[str, Any]:
    """Accuracy before and after, reward first and last, the time split, and the measured speedup of the rollouts.

    `rollout_speedup` is the median over the compared steps of speculation's rate over plain decoding's (the same prompts, drawn
    twice); None when nothing was compared, as `tokens_identical` is where the mode does not promise it. `policy_entropy` is the mean over
    those steps' tokens, or over all steps'. Step 0 is the policy before RL. Shares of `time_split` leave the comparison out: it is measurement, not training.
    """
    rl = [record.metrics for record in steps if record.step > 0]
    compared = [metrics for metrics in rl if "time/compare_s" in metrics]
    identical = [m["rollout/tokens_identical"] == 1 for m in compared if "rollout/tokens_identical" in m]
    accuracy = [(record.step, record.metrics) for record in steps if "eval/accuracy" in record.metrics]
    before = accuracy[0][1] if accuracy and accuracy[0][0] == 0 else None
    after = accuracy[-1][1] if accuracy and accuracy[-1][0] > 0 else None
    generation, reward, training = (_sum(rl, f"time/{name}_s") for name in ("generation", "reward", "training"))
    training += _sum(rl, "time/critic_s")
    other = _sum(rl, "time/step_s") - _sum(rl, "time/compare_s") - generation - reward - training
    last = rl[-1] if rl else {}
    return {
        "steps": steps[-1].step if steps else 0,
        "finished": bool(steps) and steps[-1].step >= planned,
        "accuracy_before_rl": before and before["eval/accuracy"],
        "accuracy_after_rl": after and after["eval/accuracy"],
        "accuracy_se": after and after["eval/se"],
        "accuracy_items": after and int(after["eval/items"]),
        "reward_first": rl[0]["reward/mean"] if rl else None,
        "reward_last": last.get("reward/mean"),
        "rollout_speedup": float(np.median([metrics["rollout/speedup"] for metrics in compared])) if compared else None,
        "rollout_speedup_steps": [metrics["rollout/speedup"] for metrics in compared],
        "tokens_identical": all(identical) if identical else None,
        "policy_entropy": float(np.mean([metrics["rollout/entropy"] for metrics in compared or rl])) if rl else None,
        "accepted_length": float(np.mean([metrics["rollout/accepted_length"] for metrics in rl])) if rl else None,
        "tokens": last.get("tokens/total", 0.0),
        "time_split": {"generation_s": generation, "reward_s": reward, "training_s": training, "other_s": other},
        "wall_s": wall_s,
        "run_dir": str(run_dir),
        "report": str(run_dir / "report.html"),
    }


def _sum(steps: Sequence[Any], name: str) -> float:
    return float(sum(metrics.get(name, 0.0) for metrics in steps))


def tokens_so_far(records: Sequence[StepMetrics]) -> float:
    """Completion tokens that a run has drawn in the steps recorded."""
    return records[-1].metrics.get("tokens/total", 0.0) if records else 0.0
