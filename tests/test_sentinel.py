"""The sentinel on a tiny policy with a head that drafts well: every fault is seen within a few rounds, no token changes, the good head comes back."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from respec.bench.faults import FAULTS, Scene, play, updated
from respec.drafter.distil import distil
from respec.drafter.learner import LearnerSettings
from respec.errors import ModelError
from respec.models.eagle import EagleHead, create_head
from respec.models.load import Policy
from respec.models.packed_attention import use_packed_attention
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.rollout.tree import NOTHING
from respec.sentinel import Sentinel
from respec.speculation.acceptance import Acceptance
from respec.speculation.controller import Controller
from respec.speculation.cost_model import CostSample, fit
from respec.speculation.decision import Decision
from respec.speculation.explain import explain
from respec.speculation.pace import PacedController
from respec.speculation.sentinel import Watch
from respec.types import PLAIN, Ask, Load, Plan, Prompt, Rollout, RoundRecord, Sampling, Stream, Version
from respec.weights.publish import publish
from respec.weights.swap import swap

WORDS, SAMPLING, CHAIN = 40, Sampling(48), Plan("eagle", 3, 1, 3)
# Clean steps before a fault, and one after it.
BEFORE, STEPS = 2, 4
FEW = 6


def counting(rng: np.random.Generator, length: int) -> list[int]:
    """Two counts in turn, each of which now and then jumps: what comes next is told by the hidden state, not by the last word."""
    words = [int(word) for word in rng.integers(3, WORDS, 2)]
    while len(words) < length:
        words.append(3 + (words[-2] - 2) % (WORDS - 3) if rng.random() < 0.88 else int(rng.integers(3, WORDS)))
    return words


@dataclass(frozen=True)
class Taught:
    """A policy that counts, a head that has learned to, and plain decoding's rollouts of the steps."""

    policy: Policy
    head: EagleHead
    plain: list[tuple[Rollout, ...]]


def asks(step: int) -> list[Ask]:
    rng = np.random.default_rng(step)
    return [Ask(Prompt(row, "", tuple(counting(rng, 2 + row % 4))), Stream.TRAIN, step, 4) for row in range(8)]


@pytest.fixture(scope="module")
def taught() -> Taught:
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4,
        head_dim=16, max_position_embeddings=256, initializer_range=0.05, bos_token_id=None, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(7)
    rng = np.random.default_rng(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    # a small embedding that does not learn: the layers' hidden states are then unlike each other, as in a large model
    model.get_input_embeddings().weight.requires_grad_(False).mul_(0.2)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    for _ in range(100):
        words = torch.tensor([counting(rng, 24) for _ in range(24)])
        logits = model(input_ids=words, use_cache=False).logits[:, 1:-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 2:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    use_packed_attention(model)
    names = {f"w{i}": i for i in range(WORDS)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(names, unk_token="w2")), eos_token="w1", pad_token="w0"
    )
    policy = Policy(model, tokenizer, (1,), 0, 256)
    plain = [plainly(policy).rollout(asks(step), SAMPLING)[0] for step in range(STEPS)]
    head = create_head(model, range(3, WORDS), 1)
    settings = LearnerSettings("kl", depths=3, lr=5e-3)
    stats = distil(model, head, [*plain[0], *plain[1], *plain[2]], plain[3], SAMPLING, settings, 80, 16)
    assert stats.acceptance_K[0] > 0.7, "the head has not learned"
    return Taught(policy, head, plain)


def plainly(policy: Policy, *drafters: EagleDrafter) -> Engine:
    return Engine(publish(policy, "float32", 0), policy.tokenizer, (1,), 3, 16, drafters=drafters)


def scene_of(taught: Taught, lines: list[str], plan=CHAIN, clock: Callable[[], float] = float) -> Scene:
    """By a clock that stands, so that no look is put off."""
    drafter = EagleDrafter(taught.head, torch.float32)
    engine = plainly(taught.policy, drafter)
    sentinel = Sentinel(plan, engine.drafters, lines.append, lambda: copy.deepcopy(taught.head), clock)
    return Scene(engine, drafter, sentinel, copy.deepcopy(taught.head))


def republishing(scene: Scene, policy: Policy) -> Callable[[int], None]:
    return lambda version: swap(scene.engine, policy, "float32", version)


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.at == "door"])
def test_what_is_wrong_at_the_door_never_drafts(taught, name):
    lines = list[str]()
    scene = scene_of(taught, lines)
    before, version = scene.drafter.snapshot, scene.drafter.version
    FAULTS[name].strike(scene)
    assert scene.drafter.snapshot is before and scene.drafter.version == version
    assert len(lines) == 1 and "was refused" in lines[0] and "likely cause" in lines[0]
    assert scene.sentinel.take_alarms() == lines and not scene.sentinel.take_alarms()
    assert scene.sentinel.admit(updated(taught.head), version + 1).taken
    assert scene.drafter.snapshot is not before and len(lines) == 1


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.at == "behind"])
def test_what_goes_wrong_behind_it_is_seen_and_made_good_and_changes_no_token(taught, name):
    lines = list[str]()
    scene = scene_of(taught, lines)
    done = play(name, scene, lines, republishing(scene, taught.policy), asks, SAMPLING, taught.plain, BEFORE)
    assert done.identical
    assert done.rounds is not None and done.rounds <= FEW
    assert "likely cause" in lines[0] or "rounds when its" in lines[0]
    # the good head is back within the step, or after the next swap where the fault befalls any head
    assert done.accepted_after > 0.9 * done.accepted_before
    assert (done.plain_rounds > 0) == FAULTS[name].lasting
    assert FAULTS[name].lasting or done.accepted_struck > 0.7 * done.accepted_before
    assert len(lines) == 1


def test_clean_updates_raise_no_alarm(taught):
    """See tests/speculation/test_sentinel.py for how seldom they do."""
    lines = list[str]()
    scene = scene_of(taught, lines)
    for version in range(1, 8):
        scene.engine.rollout(asks(version % STEPS), SAMPLING, scene.sentinel.under(SAMPLING))
        scene.offer(updated(scene.head, 0.02, version))
        swap(scene.engine, taught.policy, "float32", version)
    assert not lines


def looks(taught: Taught, monkeypatch, clock: Callable[[], float]) -> int:
    """How often the snapshot is looked into in three rollouts, between which the policy is published twice and the head updated once."""
    seen = list[int]()
    monkeypatch.setattr("respec.rollout.draft.eagle_probe.what_is_wrong", lambda *asked: seen.append(1) or "")
    scene = scene_of(taught, lines := list[str](), clock=clock)
    for version in range(1, 4):
        scene.engine.rollout(asks(version), SAMPLING, scene.sentinel.under(SAMPLING))
        swap(scene.engine, taught.policy, "float32", version)
        if version == 1:
            scene.offer(updated(scene.head, 0.02, version))
    assert not lines
    return len(seen)


def test_a_head_is_looked_into_twice(taught, monkeypatch):
    assert looks(taught, monkeypatch, float) == 2 * 2


def test_looks_that_would_take_too_long_are_left_out(taught, monkeypatch):
    """By this clock a look takes an hour, which a few rounds do not pay for."""
    assert looks(taught, monkeypatch, itertools.count(step=3600.0).__next__) == 1


def test_alarms_are_decisions_that_can_be_explained(taught):
    lines = list[str]()
    scene = scene_of(taught, lines)
    FAULTS["NaN in an update"].strike(scene)
    decisions = scene.sentinel.take_decisions()
    assert [decision.kind for decision in decisions] == ["sentinel"]
    assert lines[0] in explain([Decision.from_dict(decisions[0].to_dict())])
    assert not scene.sentinel.take_decisions()


@torch.no_grad()
def scaled(head: EagleHead, factor: float) -> EagleHead:
    """A copy whose drafts are the same up to their sharpness."""
    other = copy.deepcopy(head)
    other.lm_head.weight.mul_(factor)
    return other


def test_a_head_may_go_far_in_many_updates_and_at_once_from_the_runs_own_checkpoint(taught):
    scene = scene_of(taught, lines := list[str]())
    for version, factor in enumerate((2.0, 4.0, 8.0), 1):
        assert scene.sentinel.admit(scaled(taught.head, factor), version).taken
    assert not scene.sentinel.admit(scaled(taught.head, 100.0), 4).taken
    resumed = scene_of(taught, lines)
    assert not resumed.sentinel.admit(scaled(taught.head, 8.0), 3).taken
    again = scene_of(taught, lines)
    assert again.sentinel.admit(scaled(taught.head, 8.0), 3, 2, trusted=True).taken
    assert (again.drafter.version, again.drafter.learned_from) == (3, 2)
    assert again.sentinel.admit(scaled(taught.head, 16.0), 4).taken
    broken = scaled(taught.head, float("nan"))
    assert not again.sentinel.admit(broken, 5, trusted=True).taken


def test_a_head_that_stays_where_one_that_was_refused_had_gone_is_not_refused_for_ever(taught):
    scene = scene_of(taught, list[str]())
    assert not scene.sentinel.admit(scaled(taught.head, 4.0), 1).taken
    assert scene.sentinel.admit(scaled(taught.head, 4.1), 1).taken


def test_a_tensor_of_zeros_in_the_head_in_use_is_no_measure(taught):
    sentinel = Sentinel(CHAIN, {"eagle": EagleDrafter(scaled(taught.head, 0.0), torch.float32)}, print)
    assert sentinel.admit(taught.head, 1).taken


def collapsed(taught: Taught, scene: Scene, name: str = "head of another policy") -> None:
    """Steps in which the head did well, without a learner, and one in which a fault befalls it."""
    for step in range(2):
        scene.engine.rollout(asks(step), SAMPLING, scene.sentinel.under(SAMPLING))
        swap(scene.engine, taught.policy, "float32", step + 1)
    FAULTS[name].strike(scene)
    scene.engine.rollout(asks(2), SAMPLING, scene.sentinel.under(SAMPLING))


def test_the_last_good_head_comes_back_with_its_version(taught):
    scene = scene_of(taught, lines := list[str]())
    assert scene.sentinel.admit(updated(taught.head, 0.01, 1), 4, 3).taken
    collapsed(taught, scene)
    assert len(lines) == 1 and "version 4, the last good one" in lines[0]
    assert (scene.drafter.version, scene.drafter.learned_from) == (4, 3)


def test_the_first_head_is_read_again_when_its_snapshot_was_spoilt_and_only_then(taught):
    scene = scene_of(taught, lines := list[str]())
    collapsed(taught, scene, "packed weights scrambled")
    assert len(lines) == 1 and "version 0, the last good one, drafts again" in lines[0]
    # hidden states that no head can read, under looks that are never paid for
    scene = scene_of(taught, lines := list[str](), clock=itertools.count(step=3600.0).__next__)
    collapsed(taught, scene, "hidden states of the layers swapped")
    assert len(lines) == 1 and "off until the next swap" in lines[0]


def test_a_first_head_that_cannot_be_read_any_more_does_not_end_the_run(taught):
    def gone() -> EagleHead:
        raise ModelError("it is gone")

    scene = scene_of(taught, lines := list[str]())
    scene.sentinel._first = gone
    collapsed(taught, scene, "packed weights scrambled")
    assert len(lines) == 1 and "off until the next swap" in lines[0]


class Renewed:
    """A drafter that decodes with the policy's weights, and drafts nothing."""

    name = "self_quant"

    def propose(self, requests, plan, limits, context):
        return [NOTHING] * len(requests)

    def renew(self, decoder) -> None:
        """Nothing."""

    def finish(self, request) -> None:
        """Nothing."""

    def learn(self, rollouts) -> None:
        """Nothing."""

    def drop(self) -> None:
        """Nothing."""


def test_without_weights_to_come_back_to_it_is_off_until_the_next_swap():
    plan, lines = Plan("self_quant", 2, 1, 2), list[str]()
    sentinel = Sentinel(plan, {"self_quant": Renewed()}, lines.append).under(SAMPLING)

    def rounds(count: int, version: int, accepted: int) -> list[Plan]:
        plans = list[Plan]()
        for _ in range(count):
            plans.append(sentinel.plan(Load(16, 0, 30.0, (30,) * 16, Version(version))))
            drafted = (16, accepted) if plans[-1].n else ()
            record = RoundRecord(16, 0, plans[-1], 32, 0, 16, 0.0, 0.0, 0.0, 30.0, drafted, drafted, drafted[1:])
            sentinel.observe(record)
        return plans

    assert PLAIN not in rounds(20, 0, 13) + rounds(20, 1, 12)
    assert rounds(20, 2, 1)[-10:] == [PLAIN] * 10
    assert len(lines) == 1 and "policy version 2" in lines[0] and "off until the next swap" in lines[0]
    assert PLAIN not in rounds(20, 3, 12) and len(lines) == 1


def test_an_adaptive_server_neither_runs_nor_probes_what_is_off():
    cost = fit([CostSample(b, b * k, 64.0, verify_s=1e-2 + 1e-5 * b * k) for b in (1, 16) for k in (1, 4)])
    controller = PacedController(Controller([Plan("self_quant", 2, 1, 2)], cost, Acceptance(depth=2), 16), share=1.0)
    lines = list[str]()
    sentinel = Sentinel(controller, {"self_quant": Renewed()}, lines.append).under(SAMPLING)

    def rounds(count: int, version: int, accepted: int) -> int:
        """How many of them drafted."""
        drafts = 0
        for _ in range(count):
            plan = sentinel.plan(Load(16, 0, 64.0, (30,) * 16, Version(version)))
            drafts += plan.n > 0
            drafted = (16, accepted) if plan.n else ()
            sentinel.observe(
                RoundRecord(16, 0, plan, 32, 0, 16 + 2 * accepted, 1e-4, 1e-2, 1e-4, 64.0, drafted, drafted, drafted[1:])
            )  # fmt: skip
        return drafts

    assert rounds(100, 0, 15) and rounds(100, 1, 15)
    assert rounds(100, 2, 0) <= FEW and controller.controller.guard.shuts("self_quant") and len(lines) == 1
    alarm = next(d for d in sentinel.take_decisions() if d.kind == "sentinel")
    assert 200 < alarm.round <= 200 + FEW and alarm.elapsed_s > 200 * 1e-2
    assert rounds(2, 3, 15) >= 0 and not controller.controller.guard.shuts("self_quant")


def test_weights_that_come_back_leave_what_is_believed_where_little_was_seen():
    cost = fit([CostSample(b, b * k, 64.0, verify_s=1e-2 + 1e-5 * b * k) for b in (1, 16) for k in (1, 4)])
    controller = PacedController(Controller([Plan("self_quant", 2, 1, 2)], cost, Acceptance(depth=2), 16))
    sentinel = Sentinel(controller, {"self_quant": Renewed()}, print)
    acceptance = controller.controller.acceptance
    acceptance.observe_shadow("self_quant", (40, 30), (30, 20), 1.0)
    sentinel._believe("self_quant", Watch(), Plan("self_quant", 2, 1, 2))
    assert acceptance.effective("self_quant") == 40
