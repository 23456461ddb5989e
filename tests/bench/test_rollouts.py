"""Whole rollouts side by side: the tail is there, tokens agree, and `auto` is held against the best that was picked on other repeats."""

from __future__ import annotations

import json

import pytest

from respec.bench.rollouts import bench_rollouts
from respec.bench.speculation import OFF, Variant, over_best, side_by_side
from respec.bench.variants import OnOff
from respec.config import ModelConfig
from respec.models.load import Policy, load_policy
from respec.rollout.draft.ngram import NgramDrafter
from respec.types import Plan, Prompt, Sampling
from respec.weights.publish import publish

PLAN = Plan("ngram", 3, 1, 3)
SAMPLING = Sampling(max_new_tokens=40)
WAYS = [
    Variant("auto", lambda: [NgramDrafter(1)], lambda: OnOff(PLAN, 3)),
    Variant("ngram:3", lambda: [NgramDrafter(1)], lambda: PLAN),
    Variant("ngram:3@2", lambda: [NgramDrafter(1)], lambda: OnOff(PLAN, 2)),
]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy(ModelConfig(path="builtin:demo"))


@pytest.fixture(scope="module")
def prompts(policy) -> list[Prompt]:
    tokenizer = policy.tokenizer
    texts = ("3 + 4 - 2\n", "5 + 1\n", "9 - 2 + 4 + 4 - 1\n")
    return [Prompt(row, text, tuple(tokenizer(text)["input_ids"])) for row, text in enumerate(texts)]


def test_the_batch_thins_out_and_the_tokens_are_the_same(policy, prompts):
    decoder = publish(policy, "auto", 0)
    taken = side_by_side(policy, decoder, prompts, 2, WAYS, 8, 4, SAMPLING, 2)
    assert set(taken) == {"off", *(way.label for way in WAYS)}
    for timed in (one for way in taken.values() for one in way):
        active = [record.active for record in timed.stats.round_R]
        assert active[0] == 8 and active[-1] < 8 and active == sorted(active, reverse=True)
    off = taken[OFF.label]
    assert all(
        [len(r.token_T) for r in a.rollouts] == [len(r.token_T) for r in b.rollouts]
        for a, b in zip(taken["auto"], off, strict=True)
    )
    # each repeat is a fresh draw
    assert [r.token_T.tolist() for r in off[0].rollouts] != [r.token_T.tolist() for r in off[1].rollouts]


def test_the_result_has_a_row_a_way_and_three_rivals(policy, prompts):
    said: list[str] = []
    result = bench_rollouts(
        policy, publish(policy, "auto", 0), prompts, WAYS, 8, 4, SAMPLING, 2, None, {"model": "demo"}, said.append
    )
    assert json.loads(json.dumps(result))["sequences"] == 8 and len(said) == 4
    assert [row["variant"] for row in result["rows"]] == ["off", "auto", "ngram:3", "ngram:3@2"]
    assert all(row["identical"] for row in result["rows"])
    assert result["rows"][0]["ratios"] == [1.0, 1.0] and result["rows"][2]["accepted"] > 0
    assert result["length"]["min"] < result["length"]["median"] <= result["length"]["max"] <= 40
    (auto,) = result["auto"]
    assert auto["best_static"] in ("off", "ngram:3") and auto["best_on_off"] == "ngram:3@2"


def test_the_rival_is_picked_on_the_even_repeats_and_compared_on_the_odd_ones():
    auto = {"variant": "auto", "ratios": [1.0, 2.0, 1.0, 2.0]}
    lucky, steady = (
        {"variant": "lucky", "ratios": [9.0, 1.0, 9.0, 1.0]},
        {"variant": "steady", "ratios": [2.0, 4.0, 2.0, 4.0]},
    )
    found = over_best(auto, [lucky, steady], "best_static")
    assert found["best_static"] == "lucky" and found["over_best_static"] == 2.0
    assert over_best(auto, [steady], "x")["over_x"] == 0.5
    assert over_best({"variant": "auto", "ratios": [1.0]}, [steady], "x") == {} == over_best(auto, [], "x")
