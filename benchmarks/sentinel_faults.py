"""Makes draft weights go wrong on the demo model, and records how many rounds pass until it is seen, and what it costs: rounds and tokens, no seconds.

    respec drafter train examples/demo.toml --to demo-head --steps 200 --tokens 12000 --batch 6 --vocabulary 64
    python benchmarks/sentinel_faults.py demo-head benchmarks/results/sentinel_faults.json docs/sentinel_faults.md

Each fault has a fresh engine: four clean steps of rollouts, each followed by an update of the head (noise of a hundredth of its norm) and the
policy published anew; a step in which the fault strikes in mid rollout; two clean steps. Without files it prints the table.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from respec.bench.faults import FAULTS, Outcome, Scene, play, updated
from respec.bench.record import refuse_dirty, write_result
from respec.config import load_config
from respec.models.eagle import EagleHead, load_head
from respec.models.load import Policy, load_policy
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.sentinel import Sentinel
from respec.tasks.task import load_task
from respec.types import Ask, Plan, Sampling, Stream
from respec.weights.publish import publish
from respec.weights.swap import swap

BEFORE, STEPS, PROMPTS, GROUP, BATCH = 4, 7, 8, 4, 16
PLAN, SAMPLING = Plan("eagle", 4, 1, 4), Sampling(96)
CLEAN = 40


def main(folder: str, *out: str) -> None:
    if out:
        refuse_dirty()
    torch.set_num_threads(1)
    config = load_config(Path("examples/demo.toml"))
    policy = load_policy(config.model)
    task = load_task(config.task, policy.tokenizer, policy.context_length, SAMPLING.max_new_tokens)
    head = load_head(Path(folder))
    steps = [
        [Ask(prompt, Stream.BENCH, 0, GROUP) for prompt in task.train[PROMPTS * step : PROMPTS * (step + 1)]]
        for step in range(STEPS)
    ]
    plain = [_engine(policy).rollout(asks, SAMPLING)[0] for asks in steps]
    rows = list[Outcome]()
    for name in FAULTS:
        lines = list[str]()
        scene = _scene(policy, head, lines)
        rows.append(play(name, scene, lines, _again(scene, policy), lambda step: steps[step], SAMPLING, plain, BEFORE))
        print(name, rows[-1].rounds, rows[-1].identical, flush=True)
    clean = _clean(policy, head, steps)
    result = {
        "what": "faults in draft weights: rounds until they are seen, and what became of the run",
        "model": config.model.path, "plan": asdict(PLAN), "temperature": SAMPLING.temperature, "max_batch": BATCH, "sequences": PROMPTS * GROUP,
        "rows": [asdict(row) for row in rows], "clean": clean,
    }  # fmt: skip
    whole = write_result(Path(out[0]) if out else None, result)
    table = _table(whole, out[0] if out else "")
    if len(out) > 1:
        Path(out[1]).write_text(table)
    print(table)


def _engine(policy: Policy, *drafters: EagleDrafter) -> Engine:
    return Engine(publish(policy, "auto", 0), policy.tokenizer, policy.eos_token_ids, 0, BATCH, drafters=drafters)


def _scene(policy: Policy, head: EagleHead, lines: list[str]) -> Scene:
    drafter = EagleDrafter(head, publish(policy, "auto", 0).shape.dtype)
    engine = _engine(policy, drafter)
    sentinel = Sentinel(PLAN, engine.drafters, lines.append, lambda: copy.deepcopy(head))
    return Scene(engine, drafter, sentinel, copy.deepcopy(head))


def _again(scene: Scene, policy: Policy):
    return lambda version: swap(scene.engine, policy, "auto", version)


def _clean(policy: Policy, head: EagleHead, steps: list[list[Ask]]) -> dict[str, int]:
    """Swaps with nothing wrong, and the alarms that they raise."""
    lines, rounds = list[str](), 0
    scene = _scene(policy, head, lines)
    for version in range(1, CLEAN + 1):
        _, stats = scene.engine.rollout(steps[version % STEPS], SAMPLING, scene.sentinel.under(SAMPLING))
        rounds += len(stats.round_R)
        scene.offer(updated(head, 0.02, version))
        swap(scene.engine, policy, "auto", version)
    return {"swaps": CLEAN, "rounds": rounds, "alarms": len(lines)}


def _table(result: dict[str, Any], path: str) -> str:
    at, clean = result["provenance"], result["clean"]
    lines = [
        "# What the sentinel sees\n",
        f"`{result['model']}` with an EAGLE-3 head to depth {result['plan']['s']}, temperature {result['temperature']}, at most "
        f"{result['max_batch']} sequences at once; commit `{str(at['commit'])[:10]}`; `{path}`. Written by `benchmarks/sentinel_faults.py`, which "
        "says how.\n",
        "Rounds are those from the fault to the line that says so; 0 is at the door, before anything was drafted. Tokens a round are those of the "
        "step before the fault, of the fault's own, and of the last step. Steps differ in their prompts: a refused update shows what they give "
        "unharmed.\n",
        "| fault | rounds | tokens a round: before, during, after | rounds without drafts | tokens as in plain decoding |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        lengths = ", ".join(f"{row[key]:.2f}" for key in ("accepted_before", "accepted_struck", "accepted_after"))
        rounds = "never" if row["rounds"] is None else row["rounds"]
        lines.append(
            f"| {row['fault']} | {rounds} | {lengths} | {row['plain_rounds']} | {'yes' if row['identical'] else 'NO'} |"
        )
    lines.append(
        f"\nWith nothing wrong: {clean['alarms']} alarms in {clean['swaps']} swaps and {clean['rounds']} rounds.\n"
    )
    lines.append("What was said:\n")
    lines += [f"- {row['fault']}: {' / '.join(row['lines']) or 'nothing'}" for row in result["rows"]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    main(*sys.argv[1:])
