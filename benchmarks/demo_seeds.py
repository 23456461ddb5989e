"""Gathers finished runs of one configuration under several seeds into one result: did RL lift accuracy, and were rollouts faster?

    for s in 0 1 2; do respec train examples/demo.toml --set run.seed=$s --set run.dir=runs/demo-$s; done
    python benchmarks/demo_seeds.py benchmarks/results/demo_seeds.json runs/demo-0 runs/demo-1 runs/demo-2

Refuses runs of different commits, or of a tree with changes: a result names the code it measured.
"""

from __future__ import annotations

import json
import statistics
import sys
import tomllib
from pathlib import Path

FIGURES = (
    "accuracy_before_rl", "accuracy_after_rl", "accuracy_se", "accuracy_items", "rollout_speedup", "rollout_speedup_steps",
    "tokens_identical", "policy_entropy", "accepted_length", "wall_s", "time_split",
)  # fmt: skip


def main(out: str, *folders: str) -> None:
    rows, origins = [], []
    for folder in map(Path, folders):
        summary = json.loads((folder / "summary.json").read_text())
        origins.append(json.loads((folder / "provenance.json").read_text())["starts"][-1])
        seed = tomllib.loads((folder / "config.toml").read_text())["run"]["seed"]
        gain = summary["accuracy_after_rl"] - summary["accuracy_before_rl"]
        error = (2 * summary["accuracy_se"] ** 2) ** 0.5
        rows.append(
            {
                "seed": seed,
                **{name: summary[name] for name in FIGURES},
                "gain": gain,
                "gain_in_standard_errors": gain / error,
            }
        )
    commits = {str(origin["commit"]) for origin in origins}
    if len(commits) != 1 or any("+changes" in commit or commit == "None" for commit in commits):
        sys.exit(f"these runs are of {sorted(commits)}; gather runs of one committed tree")
    result = {
        "what": "RL of the demo under several seeds", "rows": rows, "least_gain": min(row["gain"] for row in rows),
        "median_speedup": statistics.median(row["rollout_speedup"] for row in rows), "provenance": origins[0],
    }  # fmt: skip
    Path(out).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "provenance"}, indent=2))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
