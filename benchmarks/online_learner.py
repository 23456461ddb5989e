"""Does a head that learns online keep up with the policy, and what does it cost? Frozen and learning heads, on one trajectory of the policy.

    respec drafter train examples/demo.toml --to models/demo-eagle
    python benchmarks/online_learner.py follow examples/demo.toml --head models/demo-eagle --steps 100 --out benchmarks/results/online_demo.json
    python benchmarks/online_learner.py timing examples/demo.toml --head models/demo-eagle --blocks 12 --out benchmarks/results/online_timing_demo.json

`follow`: the policy takes one run of RL steps; every head drafts the same completions in an engine of its own (matching: the tokens are held
to be equal) and learns from what was seen in the policy's one update. `kl_newest` learns from the updated policy's laws instead, by a second
forward pass. At the end a reference head, which starts where all did, learns from the last policy's rollouts until twice the steps gain nothing
more, and all are measured on held-out prompts. `timing`: steps without a learner, with one, and with one beside generation, in blocks whose order turns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from respec.bench.record import refuse_dirty, write_result
from respec.config import Config, DrafterConfig, load_config
from respec.drafter.distil import distil
from respec.drafter.examples import capture
from respec.drafter.learner import LearnerSettings
from respec.drafter.watcher import Watcher
from respec.models.decoder import decode_dtype
from respec.models.eagle import EagleHead, load_head
from respec.models.load import Policy, load_policy
from respec.online import OnlineLearner
from respec.policy.advantages import advantages
from respec.policy.learner import PolicyLearner
from respec.policy.presets import resolve
from respec.report.provenance import usable_cores
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.sentinel import Sentinel
from respec.stages import asks_from
from respec.tasks.order import order_of
from respec.tasks.reward import RewardWorker
from respec.tasks.task import Task, load_task
from respec.types import Ask, Plan, Rollout, RolloutStats, Sample, Stream
from respec.weights.publish import publish

LOSSES = ("kl", "tv", "lk", "e2e_tv")
NEWEST = "kl_newest"
# The reference has reached its plateau when twice the steps give less than this share more.
PLATEAU = 0.005
REFERENCES = ("kl", "e2e_tv")
# The references have so many steps' rollouts to learn from: far more than an update's.
REFERENCE_DATA = 8


class Follower:
    """A head, the engine it drafts in, and what teaches it (None: nothing)."""

    def __init__(self, config: Config, policy: Policy, head: EagleHead, learning: DrafterConfig | None) -> None:
        self.drafter = EagleDrafter(head, decode_dtype(config.model.dtype, policy.model.device))
        self.engine = Engine(
            publish(policy, config.model.dtype, 0), policy.tokenizer, policy.eos_token_ids, config.run.seed,
            config.rollout.max_batch, config.rollout.prefill_chunk, (self.drafter,),
        )  # fmt: skip
        self.online = None
        if learning is not None:
            door = Sentinel(Plan(), self.engine.drafters, print)
            taught = config.model_copy(update={"drafter": learning})
            self.online = OnlineLearner(taught, head, self.drafter, door, print)
            self.engine.between_rounds.append(self.online.share)

    def draw(self, asks: Sequence[Ask], config: Config) -> tuple[tuple[Rollout, ...], RolloutStats]:
        s = config.speculation.s
        return self.engine.rollout(asks, config.rollout.sampling(), Plan("eagle", s, 1, s))


@dataclass
class Newest:
    """Stands for a `Watcher` with examples of another making."""

    examples: list[Any]
    wall_s: float


def follow(config: Config, folder: Path, every: int, first: int) -> dict[str, Any]:
    policy, task, start = _begin(config, folder)
    named = {"frozen": None, **{loss: config.drafter.model_copy(update={"loss": loss}) for loss in LOSSES}}
    named[NEWEST] = config.drafter.model_copy(update={"loss": "kl"})
    followers = {name: Follower(config, policy, copy.deepcopy(start), learning) for name, learning in named.items()}
    learner = PolicyLearner(policy, config.policy, config.run.steps, config.rollout.max_new_tokens)
    rows, scored = list[dict[str, Any]](), ()
    with RewardWorker(task, config.task.reward) as reward:
        for step in range(1, config.run.steps + 1):
            asks = _asks(task, config, step)
            measured = step % every == 0 or step == 1
            lengths, rollouts = dict[str, float](), None
            for name, follower in followers.items() if measured else [("kl", followers["kl"])]:
                drawn, stats = follower.draw(asks, config)
                lengths[name] = stats.accepted_length
                rollouts = _same(rollouts, drawn)
            assert rollouts is not None
            scored = reward.score(rollouts)
            samples = advantages(scored, resolve(config.policy).estimator)
            watch = _online(followers["kl"]).watch(samples, step)
            update = learner.update(samples, config.rollout.temperature, None, watch)
            overlaps = _teach(followers, watch, policy, config, samples, step)
            decoder = publish(policy, config.model.dtype, step)
            for follower in followers.values():
                follower.engine.swap(decoder)
            rows.append(
                {"step": step, "reward": float(np.mean([s.reward for s in scored])), "entropy": update.entropy, "tokens": sum(e.length for e in watch.examples),
                 "accepted_length": lengths, "overlap": overlaps}
            )  # fmt: skip
            print(
                f"step {step}: reward {rows[-1]['reward']:.3f} entropy {update.entropy:.3f} " + _line(lengths),
                flush=True,
            )
    tokens = sum(len(s.rollout.prompt.token_ids) + len(s.rollout.token_T) for s in scored)
    final = {"held_out_accepted_length": _held_out(config, task, followers)}
    if first:
        final |= _reference(config, policy, task, followers["frozen"], start, tokens, first)
        best = final["reference"]["accepted_length"]
        final["of_reference"] = {name: length / best for name, length in final["held_out_accepted_length"].items()}
    return {"what": "heads that follow a policy", "rows": rows, **final}


def _asked_at_the_end(task: Task) -> list[Ask]:
    return [Ask(prompt, Stream.BENCH, 0, 4) for prompt in task.held_out[:64]]


def _held_out(config: Config, task: Task, followers: dict[str, Follower]) -> dict[str, float]:
    """All heads on held-out prompts under the last policy."""
    rollouts, final = None, dict[str, float]()
    for name, follower in followers.items():
        made, stats = follower.draw(_asked_at_the_end(task), config)
        rollouts, final[name] = _same(rollouts, made), stats.accepted_length
    return final


def _teach(
    followers: Mapping[str, Follower],
    watch: Watcher,
    policy: Policy,
    config: Config,
    samples: Sequence[Sample],
    step: int,
) -> dict[str, dict[str, float]]:
    """Every learner's update from the same examples; overlap before it, and what it gained."""
    rollouts = {sample.scored.rollout.key: sample.scored.rollout for sample in samples}
    newest = capture(policy.model, watch.taps, [rollouts[key] for key in watch.keys], config.rollout.sampling())
    found = {}
    for name, follower in followers.items():
        if follower.online is not None:
            seen: Any = Newest(newest, 0.0) if name == NEWEST else watch
            metrics = follower.online.update(seen, step)
            wanted = ("overlap", "gained", "drift")
            found[name] = {key: metrics[f"drafter/{key}"] for key in wanted if f"drafter/{key}" in metrics}
    return found


def _reference(
    config: Config, policy: Policy, task: Task, frozen: Follower, start: EagleHead, tokens: int, first: int
) -> dict[str, Any]:
    """The best of references that learned from the last policy's rollouts alone, on held-out prompts.

    `tokens` are those of a step's rollouts: the references draw `REFERENCE_DATA` times as many.
    """
    group, held_out = config.rollout.group_size, _asked_at_the_end(task)
    drawn, judged = list[Rollout](), frozen.draw(held_out[:16], config)[0]
    for place in range(0, len(task.train), 16):
        # draws of their own: none of these completions was learned from before
        drawn += frozen.draw([Ask(p, Stream.BENCH, 1, group) for p in task.train[place : place + 16]], config)[0]
        if sum(len(r.prompt.token_ids) + len(r.token_T) for r in drawn) >= REFERENCE_DATA * tokens:
            break
    tried = list[dict[str, Any]]()
    for loss in REFERENCES:
        settings = LearnerSettings(loss, config.drafter.depths, lr=1e-3, temperature=config.rollout.temperature or 1.0)
        head, steps, learned, before = copy.deepcopy(start), 0, 0, 0.0
        while True:
            # as many steps again as there were
            more = max(first, steps)
            stats = distil(policy.model, head, drawn, judged, config.rollout.sampling(), settings, more, 32, seed=steps)
            steps, learned = steps + more, learned + stats.tokens
            length = Follower(config, policy, head, None).draw(held_out, config)[1].accepted_length
            tried.append({"loss": loss, "steps": steps, "tokens": learned, "accepted_length": length})
            print(f"reference by {loss} after {steps} steps: {length:.3f}", flush=True)
            if length < (1 + PLATEAU) * before:
                break
            before = length
    reference = max(tried, key=lambda row: row["accepted_length"])
    return {
        "reference": reference, "reference_tried": tried, "reference_completion_tokens": sum(len(r.token_T) for r in drawn),
        "step_tokens": tokens, "reference_data_tokens": sum(len(r.prompt.token_ids) + len(r.token_T) for r in drawn),
    }  # fmt: skip


def timing(config: Config, folder: Path, blocks: int, length: int) -> dict[str, Any]:
    """Blocks of `length` timed steps after one that is not, without learner, with one, and with one beside generation."""
    policy, task, start = _begin(config, folder)
    ways: dict[str, DrafterConfig | None] = {
        "off": None, "sync": config.drafter, "beside": config.drafter.model_copy(update={"async_steps": 1}),
    }  # fmt: skip
    followers = {name: Follower(config, policy, copy.deepcopy(start), way) for name, way in ways.items()}
    learner = PolicyLearner(policy, config.policy, config.run.steps, config.rollout.max_new_tokens)
    rows, step = list[dict[str, Any]](), 0
    with RewardWorker(task, config.task.reward) as reward:

        def one(follower: Follower) -> dict[str, float]:
            nonlocal step
            step += 1
            began = time.perf_counter()
            rollouts, stats = follower.draw(_asks(task, config, step), config)
            drawn_at = time.perf_counter()
            samples = advantages(reward.score(rollouts), resolve(config.policy).estimator)
            watch = follower.online.watch(samples, step) if follower.online else None
            learner.update(samples, config.rollout.temperature, None, watch)
            updated_at = time.perf_counter()
            metrics = follower.online.update(watch, step) if follower.online and watch else {}
            follower.engine.swap(publish(policy, config.model.dtype, step))
            ended = time.perf_counter()
            return {
                "step_s": ended - began, "generation_s": drawn_at - began, "training_s": updated_at - drawn_at,
                "waited_s": metrics.get("time/drafter_s", 0.0), "update_s": metrics.get("time/drafter_update_s", 0.0),
                "tokens": float(stats.tokens), "accepted_length": stats.accepted_length,
            }  # fmt: skip

        names = list(ways)
        for block in range(blocks):
            for name in names[block % 3 :] + names[: block % 3]:
                follower = followers[name]
                # lets the weights of the steps that others took in, and an update beside begin
                follower.engine.swap(publish(policy, config.model.dtype, step + 1))
                step += 1
                one(follower)
                timed = [one(follower) for _ in range(length)]
                if follower.online is not None:
                    follower.online.state_dict()
                # by the token: the policy moves on, and completions with it
                per_token = 1e3 * sum(t["step_s"] for t in timed) / sum(t["tokens"] for t in timed)
                means = {key: statistics.mean(t[key] for t in timed) for key in timed[0]}
                rows.append({"block": block, "way": name, "ms_per_token": per_token, **means})
                print(f"block {block} {name}: " + "  ".join(f"{k} {v:.3f}" for k, v in means.items()), flush=True)
    by_way = {name: [row["ms_per_token"] for row in rows if row["way"] == name] for name in names}
    ratios = {
        f"{over} / {under}": [a / b for a, b in zip(by_way[over], by_way[under], strict=True)]
        for over, under in (("sync", "off"), ("beside", "off"), ("beside", "sync"))
    }
    return {
        "what": "what a learner adds to a step", "threads": config.run.threads, "rows": rows,
        "ratios": {name: {"median": statistics.median(r), "least": min(r), "most": max(r)} for name, r in ratios.items()},
    }  # fmt: skip


def _begin(config: Config, folder: Path) -> tuple[Policy, Task, EagleHead]:
    torch.set_num_threads(config.run.threads or usable_cores())
    policy = load_policy(config.model)
    task = load_task(config.task, policy.tokenizer, policy.context_length, config.rollout.max_new_tokens)
    return policy, task, load_head(folder).to(policy.model.device)


def _asks(task: Task, config: Config, step: int) -> Sequence[Ask]:
    """Those of a run's step."""
    count = config.rollout.prompts_per_step
    return asks_from(order_of(task, config), config, (step - 1) * count, count)


def _online(follower: Follower) -> OnlineLearner:
    assert follower.online is not None
    return follower.online


def _same(known: Sequence[Rollout] | None, made: Sequence[Rollout]) -> Sequence[Rollout]:
    """`made`, which must have the tokens of `known`: drafts never change what is drawn."""
    if known is not None:
        assert all(np.array_equal(a.token_T, b.token_T) for a, b in zip(known, made, strict=True)), "tokens differ"
    return made


def _line(lengths: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {length:.3f}" for name, length in lengths.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("follow", "timing"))
    parser.add_argument("config", type=Path)
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=5, help="steps between measurements of all heads")
    parser.add_argument(
        "--reference",
        type=int,
        default=200,
        help="steps of a reference's first attempt; each doubles them; 0: no reference",
    )
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--length", type=int, default=3, help="timed steps of a block")
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.out is not None:
        refuse_dirty()
    sets = (
        "speculation.drafter=eagle", f"speculation.drafter_path={given.head}", "speculation.s=4", "drafter.learn=true",
        f"run.steps={given.steps}", *given.set,
    )  # fmt: skip
    config = load_config(given.config, sets)
    if given.mode == "follow":
        result = follow(config, given.head, given.every, given.reference)
    else:
        result = timing(config, given.head, given.blocks, given.length)
    about = {"config": str(given.config), "settings": list(sets), "model": config.model.path}
    write_result(given.out, about | result)
    print({key: value for key, value in result.items() if key not in ("rows", "reference_tried")})


if __name__ == "__main__":
    main()
