"""The sentinel on a tiny policy with a head that drafts well: every fault is seen within a few rounds, no token changes, the good head comes back."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from respec.bench.faults import FAULTS, Scene, play, updated
from respec.config import Config
from respec.drafter.distil import distil
from respec.drafter.learner import LearnerSettings
from respec.errors import ModelError
from respec.models.eagle import EagleHead, create_head
from respec.models.load import Policy
from respec.models.packed_attention import use_packed_attention
from respec.online import OnlineLearner
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.sentinel import Sentinel
from respec.speculation.decision import Decision
from respec.speculation.explain import explain
from respec.types import PLAIN, Ask, Plan, Prompt, Rollout, Sampling, Stream
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
    assert scene.sentinel._heads is not None
    scene.sentinel._heads._first = gone
    collapsed(taught, scene, "packed weights scrambled")
    assert len(lines) == 1 and "off until the next swap" in lines[0]


def test_a_head_that_has_learned_much_is_taken_up_from_its_checkpoint(taught):
    def learner(scene: Scene, head: EagleHead) -> OnlineLearner:
        run = Config.model_validate({"model": {"path": "builtin:demo"}, "task": {"dataset": "chain_sum"}})
        return OnlineLearner(run, copy.deepcopy(head), scene.drafter, scene.sentinel, lines.append)

    scene, far = scene_of(taught, lines := list[str]()), scaled(taught.head, 8.0)
    state = {**learner(scene, far).state_dict(), "version": 7, "learned_from": 6}
    learner(scene, taught.head).load_state_dict(state)
    assert (scene.drafter.version, scene.drafter.learned_from) == (7, 6) and not lines


def in_rejection(taught: Taught, version: int) -> Scene:
    drafter = EagleDrafter(taught.head, torch.float32)
    engine = Engine(
        publish(taught.policy, "float32", version), taught.policy.tokenizer, (1,), 3, 16, drafters=(drafter,), mode="rejection"
    )  # fmt: skip
    sentinel = Sentinel(CHAIN, engine.drafters, lambda line: None, lambda: copy.deepcopy(taught.head), float, True)
    return Scene(engine, drafter, sentinel, copy.deepcopy(taught.head))


def drawn(scene: Scene, step: int) -> list[list[int]]:
    return [r.token_T.tolist() for r in scene.engine.rollout(asks(step), SAMPLING, scene.sentinel.under(SAMPLING))[0]]


def through_disk(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint gives it back: tensors by safetensors, numbers by JSON."""
    if not all(isinstance(value, dict) for value in state.values()):
        tensors = load(save({key: value for key, value in state.items() if isinstance(value, torch.Tensor)}))
        numbers = json.loads(json.dumps({k: v for k, v in state.items() if not isinstance(v, torch.Tensor | dict)}))
        return {**tensors, **numbers, **{k: through_disk(v) for k, v in state.items() if isinstance(v, dict)}}
    return {key: through_disk(value) for key, value in state.items()}


@pytest.mark.parametrize("fault", ["head of another policy", "hidden states of the layers swapped"])
def test_in_rejection_a_run_that_goes_on_draws_as_one_whose_sentinel_has_stepped_in(taught, fault):
    """Law 8 where tokens depend on who drafts: a head was taken at the door, did well, and a later one failed in the step before the stop."""
    whole = in_rejection(taught, 0)
    whole.offer(updated(taught.head, 0.05, 1))
    for step in range(2):
        drawn(whole, step)
        swap(whole.engine, taught.policy, "float32", step + 1)
        whole.offer(updated(taught.head, 0.05, 2 + step))
    FAULTS[fault].strike(whole)
    drawn(whole, 2)
    assert len(whole.sentinel.take_alarms()) == 1
    # published anew, and evaluated, before the checkpoint
    swap(whole.engine, taught.policy, "float32", 3)
    drawn(whole, 0)
    state = through_disk(whole.sentinel.state_dict())
    resumed, forgetful = in_rejection(taught, 3), in_rejection(taught, 3)
    resumed.sentinel.load_state_dict(state)
    assert (resumed.drafter.version, resumed.drafter.learned_from) == (
        whole.drafter.version,
        whole.drafter.learned_from,
    )
    expected = drawn(whole, 3)
    assert drawn(resumed, 3) == expected
    assert drawn(forgetful, 3) != expected, "the head in use makes no difference: this test shows nothing"
    for scene in (whole, resumed):
        swap(scene.engine, taught.policy, "float32", 4)
        FAULTS["head of another policy"].strike(scene)
    # what is expected, and to whom it comes back, are the same
    assert drawn(whole, 1) == drawn(resumed, 1)
    alarms = [scene.sentinel.take_alarms() for scene in (whole, resumed)]
    assert alarms[0] == alarms[1] and len(alarms[0]) == 1 and "drafts again" in alarms[0][0]


def test_a_drafter_that_is_off_stays_off_until_the_next_swap(taught):
    """Evaluation comes between the swap and the checkpoint: what fails in it is off in the steps after."""
    whole = in_rejection(taught, 0)
    collapsed(taught, whole, "hidden states of the layers swapped")
    assert whole.sentinel.take_alarms()
    resumed = in_rejection(taught, 2)
    resumed.sentinel.load_state_dict(through_disk(whole.sentinel.state_dict()))
    load = whole.sentinel._load
    assert load is not None and [scene.sentinel.plan(load) for scene in (whole, resumed)] == [PLAIN, PLAIN]


def test_where_tokens_do_not_depend_on_it_there_is_no_state(taught):
    scene = scene_of(taught, list[str]())
    scene.offer(updated(taught.head))
    assert scene.sentinel.state_dict() == {}
    before = scene.drafter.snapshot
    scene.sentinel.load_state_dict({})
    assert scene.drafter.snapshot is before
