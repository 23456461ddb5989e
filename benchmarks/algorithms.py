"""Every named algorithm on the demo, three seeds, the same number of generated tokens: does each learn, and how steadily?

    python benchmarks/algorithms.py --out benchmarks/results/algorithms.json
    python benchmarks/algorithms_table.py benchmarks/results/algorithms.json > docs/algorithms.md

About twenty seconds of one thread a run. Finished runs are kept in --folder, a stopped one goes on: the same command takes up where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from respec.bench.record import refuse_dirty, write_result
from respec.policy.presets import PRESETS
from short_runs import short_run

BUDGET = 60_000
# The demo's rate; fewer prompts than its steps have, so more steps for as many tokens. How they are decoded changes no token; this takes the least time
# of one thread.
SHARED = ("policy.lr=1e-4", "rollout.prompts_per_step=6", "rollout.max_batch=64", 'speculation.drafter="off"')
# What an algorithm is given beside its preset and what is common, by its name.
OVERRIDES: Mapping[str, Sequence[str]] = {
    # four optimizer steps where the others take one
    "ppo": ("critic.lr=3e-4", "critic.return_lam=1.0", "policy.minibatches=4"),
    # RAGEN's own lambda: at 0.95 the first tokens of 60 hear 0.05 of the reward, and of a critic that 16 completions a step teach too little
    # half of the groups, not the preset's quarter: of six that would be two, and a third of the tokens; three seeds gained 6.6 +- 6.5 points with it
    "starpo_s": ("critic.lr=3e-4", "critic.lam=1.0", "collect.share=0.5"),
    # about the tokens of the others' 48 completions, out of 64
    "c3po": ("rollout.prompts_per_step=8", "policy.token_budget=2800"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(PRESETS), choices=list(PRESETS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--settings", nargs="*", default=list(SHARED), help="of every run, beside an algorithm's own")
    parser.add_argument("--budget", type=int, default=BUDGET, help="generated tokens")
    parser.add_argument("--folder", type=Path, default=Path("runs/algorithms"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.out is not None:
        refuse_dirty()
    runs = [
        short_run(
            given.folder,
            name,
            seed,
            given.budget,
            (f'policy.algorithm="{name}"', *given.settings, *OVERRIDES.get(name, ())),
        )
        for seed in given.seeds
        for name in given.only
    ]
    write_result(given.out, {"what": "every named algorithm on the demo", "budget": given.budget, "runs": runs})


if __name__ == "__main__":
    main()
