"""Writes the result of `reward_curves.py` as Markdown.

python benchmarks/reward_table.py benchmarks/results/reward_curves.json > docs/reward_curves.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t

from respec.report.surprise import Surprise, recorded

LAST = 10


def main(path: str) -> None:
    result = json.loads(Path(path).read_text())
    runs: list[dict[str, Any]] = result["runs"]
    at = result["provenance"]
    steps = max(step["step"] for step in runs[0]["curve"])
    print("# Does speculation change what is learned?\n")
    print(
        f"The demo, {steps} steps of GRPO, an EAGLE-3 head drafting 4 deep; commit `{str(at['commit'])[:10]}`, `{path}`. `lenient` accepts drafts with "
        f"min(1, {result['lenience']:g} p / q): a verifier broken on purpose. Bands are 95 % intervals over seeds (Student's t).\n"
    )
    same = _rewards([r for r in runs if r["verifier"] == "matching" and r["seed"] == 0])
    exact = all(curve == same[0] for curve in same)
    print(
        f"In `matching`, seed 0, the four ways give {'the same curve, number for number' if exact else 'DIFFERENT curves'}.\n"
    )
    print(
        "| verifier | way | seeds | reward, last 10 steps | held-out accuracy | tokens a round | surprise less entropy, nats (standard errors) | alarms |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for verifier, way in dict.fromkeys((r["verifier"], r["way"]) for r in runs):
        chosen = [r for r in runs if (r["verifier"], r["way"]) == (verifier, way)]
        reward = _band([float(np.mean(curve[-LAST:])) for curve in _rewards(chosen)])
        accuracy = _band([100 * r["curve"][-1]["eval/accuracy"] for r in chosen])
        length = np.mean([s["rollout/accepted_length"] for r in chosen for s in r["curve"] if s["step"]])
        seen = sum((recorded(s) for r in chosen for s in r["curve"]), Surprise())
        alarms = sum(bool(r["alarm"]) for r in chosen)
        print(
            f"| {verifier} | {way} | {len(chosen)} | {reward} | {accuracy} % | {length:.2f} | {seen.mean:+.4f} ({seen.z:+.1f}) | {alarms} of {len(chosen)} |"
        )


def _rewards(runs: Sequence[dict[str, Any]]) -> list[list[float]]:
    return [[step["reward/mean"] for step in run["curve"] if step["step"]] for run in runs]


def _band(values: Sequence[float]) -> str:
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:.3f}"
    half = t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{mean:.3f} ± {half:.3f}"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
