"""The online learner: a head that follows the policy leaves the policy's learning bit for bit as it is, and the run a speculator."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from respec.config import Config, ModelConfig, load_config
from respec.drafter.agreement import read_agreement
from respec.drafter.examples import Example, capture
from respec.drafter.judge import judge
from respec.models.eagle import EagleHead, create_head, load_head, save_head
from respec.models.load import load_policy
from respec.online import OnlineLearner, Purpose, online_learner
from respec.report.run_dir import RunDir
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.sentinel import Sentinel
from respec.types import PLAIN, Ask, Prompt, Sampling, Stream
from respec.weights.publish import publish

SETTINGS = {
    "run.steps": 3, "run.threads": 1, "task.train_size": 8, "task.eval_size": 8, "rollout.prompts_per_step": 4, "rollout.group_size": 4,
    "rollout.max_new_tokens": 40, "checkpoint.every_steps": 1, "checkpoint.keep": 4, "eval.every": 0, "run.compare_plain_every": 1,
}  # fmt: skip


def run(folder: Path, **extra: object) -> list[dict[str, float]]:
    settings = {**SETTINGS, "run.dir": folder, **extra}
    words = [word for key, value in settings.items() for word in ("--set", f"{key.replace('__', '.')}={value}")]
    done = subprocess.run(
        [sys.executable, "-c", "from respec.cli import main; main()", "train", "examples/demo.toml", *words],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> tuple[Path, EagleHead]:
    folder = tmp_path_factory.mktemp("head")
    made = create_head(load_policy(ModelConfig(path="builtin:demo")).model, None, 0, "builtin:demo")
    save_head(made, folder)
    return folder, made


def test_a_head_that_learns_changes_neither_tokens_nor_weights_of_the_policy(head, tmp_path):
    folder, start = head
    eagle = {"speculation__drafter": "eagle", "speculation__s": 3, "speculation__drafter_path": folder}
    learning = {
        **eagle,
        "drafter__learn": "true",
        "drafter__lr": 0.002,
        "drafter__share": 1,
        "drafter__judge_every": 1,
        "drafter__minibatches": 2,
    }
    learned = run(tmp_path / "learned", **learning)
    beside = run(tmp_path / "beside", **learning, drafter__async_steps=1)
    plain = run(tmp_path / "plain", speculation__drafter="off")
    # law 7: the policy's weights after three steps
    theirs = load_file(tmp_path / "plain" / "checkpoints/000003/model.safetensors")
    for name, lines in (("learned", learned), ("beside", beside)):
        ours = load_file(tmp_path / name / "checkpoints/000003/model.safetensors")
        assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
        assert all(line["rollout/tokens_identical"] == 1 for line in lines[1:])
        assert [line["reward/mean"] for line in lines[1:]] == [line["reward/mean"] for line in plain[1:]]
    # a stage's time is counted once
    parts = [f"time/{name}_s" for name in ("generation", "reward", "training", "drafter", "weights", "compare")]
    assert all(sum(line[part] for part in parts) <= line["time/step_s"] for line in learned[1:])
    # it has learned, and what it learned is what the run leaves behind
    overlap = [line["drafter/overlap"] for line in learned[1:]]
    assert overlap[-1] > overlap[0] + 0.05
    assert all(line["drafter/gained"] > 0 for line in learned[1:])
    kept, its = (load_head(tmp_path / name / "drafter") for name in ("learned", "beside"))
    assert not torch.equal(kept.fc.weight, start.fc.weight)
    assert read_agreement(tmp_path / "learned/drafter").keys() == {"matching"}
    # beside generation the same updates are made of the same rollouts; they reach the drafts a step later, and so does what is said of them;
    # a checkpoint every step changes neither
    assert all(torch.equal(a, b) for a, b in zip(kept.parameters(), its.parameters(), strict=True))
    assert [line["drafter/age"] for line in learned[1:]] == [0.0, 1.0, 1.0]
    assert [line["drafter/age"] for line in beside[1:]] == [0.0, 1.0, 2.0]
    assert ["drafter/loss" in line for line in beside[1:]] == [False, True, True]


# every part of the learner that has a state of its own
WHOLE = {
    "speculation__drafter": "eagle", "speculation__s": 3, "drafter__learn": "true", "drafter__lr": 0.002, "drafter__every": 2,
    "speculation__mode": "rejection", "drafter__share": 0.6, "drafter__replay": 0.5, "drafter__warmup_steps": 2, "run__compare_plain_every": 0,
}  # fmt: skip


def test_a_stopped_run_learns_the_same_head_as_one_that_never_stopped(head, tmp_path):
    """Law 8, of the drafter: stopped between two updates, with rollouts seen and not yet learned from; in the mode whose tokens depend on it."""
    run(tmp_path / "whole", **WHOLE, speculation__drafter_path=head[0], run__steps=4)
    run(tmp_path / "stopped", **WHOLE, speculation__drafter_path=head[0], run__steps=3)
    left = load_file(tmp_path / "stopped" / "checkpoints/000003/optimizer.safetensors")
    assert {"drafter/replay/taps", "drafter/gate/best", "sentinel/heads/now/weights/fc.weight"} <= left.keys()
    lines = run(tmp_path / "stopped", **WHOLE, speculation__drafter_path=head[0], run__steps=4)
    assert lines[-1]["step"] == 4 and lines[-1]["drafter/updated"] == 1
    whole, stopped = (load_file(tmp_path / name / "drafter/model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    assert not torch.equal(whole["fc.weight"], head[1].fc.weight)
    drawn = [(tmp_path / name / "rollouts/000004.jsonl").read_text() for name in ("whole", "stopped")]
    assert drawn[0] == drawn[1]


@pytest.fixture(scope="module")
def examples(head) -> list[Example]:
    """Of sixteen completions."""
    policy = load_policy(ModelConfig(path="builtin:demo"))
    engine = Engine(publish(policy, "auto", 0), policy.tokenizer, policy.eos_token_ids, 0, 8)
    texts = ("3 + 4 - 2\n", "9 - 1 + 5\n", "2 + 2 + 2\n", "8 - 3\n")
    asks = [
        Ask(Prompt(row, "", tuple(policy.tokenizer(text)["input_ids"])), Stream.BENCH, 0, 4)
        for row, text in enumerate(texts)
    ]
    return capture(policy.model, head[1].shape.taps, engine.rollout(asks, Sampling(24))[0], Sampling(24))


@dataclasses.dataclass
class Seen:
    """What a watcher has seen."""

    examples: list[Example]
    wall_s: float = 0.0


class Learning:
    """A learner with the lines that it has said."""

    def __init__(self, head, *sets: str) -> None:
        words = (
            "speculation.drafter=eagle",
            f"speculation.drafter_path={head[0]}",
            "drafter.learn=true",
            "drafter.lr=0.002",
            *sets,
        )
        self.config: Config = load_config(Path("examples/demo.toml"), words)
        own = copy.deepcopy(head[1])
        self.drafter, self.lines = EagleDrafter(own, torch.float32), list[str]()
        door = Sentinel(PLAIN, {"eagle": self.drafter}, self.lines.append)
        self.online = OnlineLearner(self.config, own, self.drafter, door, self.lines.append)

    def update(self, examples: list[Example], step: int) -> dict[str, float]:
        seen: Any = Seen(examples)
        return self.online.update(seen, step)


def same(a: EagleHead, b: EagleHead) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


@pytest.mark.parametrize("sets", [("drafter.minibatches=2",), ("drafter.async_steps=1",), ("drafter.gate=0.1",)])
def test_an_update_that_is_not_finite_is_told_and_the_run_goes_on_with_the_head_before(head, examples, sets):
    # finite, and too large for a product of them to be
    bad = dataclasses.replace(examples[0], taps_LT=torch.full_like(examples[0].taps_LT, 3e38))
    ours = Learning(head, *sets)
    found = [ours.update([*examples[1:8], bad], 1)]
    ours.online.state_dict()
    if "async" in sets[0]:
        found.append(ours.update([], 2))
    assert found[-1]["drafter/failed"] == 1 and "drafter/loss" not in found[-1]
    assert len(ours.lines) == 1 and "version 0 goes on drafting" in ours.lines[0]
    assert same(ours.online.head, head[1]) and ours.drafter.version == 0 and not ours.online.agreement
    later = [ours.update(examples[8:], step) for step in (3, 4)]
    assert [line["drafter/failed"] for line in later] == [0, 0]
    assert len(ours.lines) == 1 and (ours.drafter.version > 0 or "gate" in sets[0])


@pytest.mark.parametrize("sets", [(), ("drafter.replay=1",), ("drafter.gate=0.01",)])
@pytest.mark.parametrize("part", ["taps_LT", "p_CK"])
def test_rollouts_that_are_not_finite_are_left_out_and_counted_and_never_come_again(head, examples, sets, part):
    bad = dataclasses.replace(examples[0], **{part: getattr(examples[0], part) * torch.nan})
    ours, without = Learning(head, *sets), Learning(head, *sets)
    for step, some in enumerate((examples[1:8], examples[8:12], examples[12:]), 1):
        mixed = [*some[:2], bad, *some[2:]] if step < 3 else some
        found, clean = ours.update(mixed, step), without.update(some, step)
        assert found["drafter/left_out"] == (step < 3) and found["drafter/failed"] == 0
        assert found["drafter/replay_mb"] == clean["drafter/replay_mb"]
    assert same(ours.online.head, without.online.head) and ours.drafter.version == without.drafter.version
    assert len(ours.lines) == 2 and "1 of 8 rollouts" in ours.lines[0]
    # where there is nothing else there is no update, and the run goes on
    assert ours.update([bad], 4)["drafter/updated"] == 0


@pytest.mark.parametrize("sets", [(), ("drafter.every=2",), ("drafter.replay=1",), ("drafter.gate=0.9",)])
def test_what_the_controller_is_told_is_of_new_rollouts_and_of_the_head_that_has_not_seen_them(head, examples, sets):
    ours = Learning(head, "drafter.minibatches=1", "drafter.judge_every=0", *sets)
    ours.update(examples[:8], 1)
    before = copy.deepcopy(ours.online.head)
    ours.update(examples[8:], 2)
    wanted = judge(before, examples[8:], ours.config.drafter.depths, 1.0).agreement["matching"]
    found = ours.online.agreement["matching"]
    assert found.tested_K == pytest.approx(wanted.tested_K) and found.stood_K == pytest.approx(wanted.stood_K)
    # with a second optimizer step to come, by the first mini-batch alone: the head after it is another
    two = Learning(head, "drafter.minibatches=2", "drafter.judge_every=0")
    two.update(examples, 1)
    order = np.random.default_rng((0, 1, Purpose.MINIBATCHES)).permutation(len(examples))[: len(examples) // 2]
    wanted = judge(head[1], [examples[i] for i in order], ours.config.drafter.depths, 1.0).agreement["matching"]
    assert two.online.agreement["matching"].stood_K == pytest.approx(wanted.stood_K)


def test_generation_has_its_processor_threads_back_when_the_update_beside_it_is_done(head, examples):
    own = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        made = Learning(head, "drafter.async_steps=1")
        policy = load_policy(made.config.model)
        engine = Engine(
            publish(policy, "auto", 0), policy.tokenizer, policy.eos_token_ids, 0, 4, drafters=[made.drafter]
        )
        door = Sentinel(PLAIN, engine.drafters, made.lines.append)
        online = online_learner(made.config, policy, engine, door, made.lines.append)
        assert online is not None
        ask = Ask(Prompt(0, "", (5, 6, 7)), Stream.BENCH, 0, 1)
        seen: Any = Seen(examples)
        online.update(seen, 1)
        assert torch.get_num_threads() == 1, "one is the update's"
        for _ in range(2000):
            if torch.get_num_threads() == 2:
                break
            engine.rollout([ask], Sampling(8))
        assert torch.get_num_threads() == 2
        online.update(seen, 2)
        assert torch.get_num_threads() == 1
        nothing: Any = Seen([])
        online.update(nothing, 3)
        assert torch.get_num_threads() == 2, "also where nothing was drawn meanwhile"
    finally:
        torch.set_num_threads(own)


def test_a_checkpoint_changes_neither_what_drafts_next_nor_what_is_said(head, examples, tmp_path):
    with_, without = (Learning(head, "drafter.async_steps=1", f"run.dir={tmp_path / name}") for name in ("a", "b"))
    said = []
    with RunDir(with_.config) as run:
        for step, part in enumerate((examples[:8], examples[8:], []), 1):
            lines = [learning.update(part, step) for learning in (with_, without)]
            said.append([{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines])
            assert with_.online.agreement == without.online.agreement and bool(with_.online.agreement) == (step > 1)
            saved = with_.online.state_dict()
            with_.online.save(run.path)
            assert with_.drafter.version == without.drafter.version == step - 1
            # the head in the making is what is saved, under the version it will have
            assert saved["version"] == min(step, 2)
            assert same(load_head(run.path / "drafter"), with_.online.head)
        # the last step learned nothing, and what is known of the head still lies beside it
        assert read_agreement(run.path / "drafter") == with_.online.agreement
        with_.update([], 4)
        assert not with_.online.agreement
        with_.online.save(run.path)
        assert read_agreement(run.path / "drafter")
    assert all(a == b for a, b in said) and same(with_.online.head, without.online.head)


def test_choices_depend_on_the_runs_seed_and_on_what_is_chosen(head):
    first, again, other = (Learning(head, f"run.seed={seed}").online for seed in (0, 0, 1))
    orders = [[tuple(one._draws(1, what).permutation(64)) for what in Purpose] for one in (first, again, other)]
    assert orders[0] == orders[1] and len({*orders[0], *orders[2]}) == 2 * len(Purpose)
