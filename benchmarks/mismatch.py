"""Does a policy that others' rollouts are learned from degrade, and do corrections help? Rollouts of 8-bit weights, and of policies several versions old.

    python benchmarks/mismatch.py --out benchmarks/results/mismatch.json
    python benchmarks/mismatch_table.py benchmarks/results/mismatch.json > docs/mismatch.md

GRPO on the demo to the same number of generated tokens, three seeds a way, about twenty seconds of one thread a run. `matched` draws with the policy's
own weights as they are; the others on purpose do not. Finished runs are kept in --folder, a stopped one goes on: the same command takes up
where it was.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from respec.bench.record import refuse_dirty, write_result
from short_runs import short_run

BUDGET = 60_000
# Few prompts a step, so many steps: about two times sixteen. In sixteen of them the policy moves by 0.12 nats a token.
SHARED = ("policy.lr=1e-4", "rollout.prompts_per_step=4", "rollout.max_batch=64", 'speculation.drafter="off"')
SOURCES: Mapping[str, Sequence[str]] = {
    "matched": (),
    "16 steps old": ("rollout.sync_every=16",),
    "int8": ('model.dtype="int8"',),
}
CORRECTIONS = ("none", "tis", "mis", "decoupled")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--corrections", nargs="*", default=list(CORRECTIONS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--budget", type=int, default=BUDGET, help="generated tokens")
    parser.add_argument("--settings", nargs="*", default=list(SHARED), help="of every run")
    parser.add_argument("--folder", type=Path, default=Path("runs/mismatch"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.out is not None:
        refuse_dirty()
    ways = [(source, way) for source in given.only for way in (("none",) if source == "matched" else given.corrections)]
    runs = [
        short_run(
            given.folder,
            f"{source}, {way}",
            seed,
            given.budget,
            (*SOURCES[source], *given.settings, f'policy.correction="{way}"'),
        )
        for seed in given.seeds
        for source, way in ways
    ]
    write_result(given.out, {"what": "learning from rollouts of another policy", "budget": given.budget, "runs": runs})


if __name__ == "__main__":
    main()
