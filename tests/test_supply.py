"""Supply: what steps learn from, that it is the same after a resume, and that no part of it depends on speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch

from respec.config import Config, parse_config
from respec.errors import ConfigError
from respec.naming import Generated, supplied
from respec.policy.advantages import advantages
from respec.supply import Supply
from respec.tasks.order import Order
from respec.types import Ask, Prompt, Rollout, RolloutStats, RoundRecord, Sample, ScoredRollout
from respec.types.drawing import PLAIN

TRAIN = tuple(Prompt(row, "", (1, row + 1)) for row in range(10))
GROUP = 4


def walk() -> Order:
    """The rows in permutations of them."""
    return Order([TRAIN], 0, lambda place: [1.0], None)


def configured(**sets: object) -> Config:
    """Four prompts of four samples a step; `section__key=value`."""
    tree: dict = {
        "model": {"path": "builtin:demo"}, "task": {"dataset": "chain_sum"},
        "rollout": {"prompts_per_step": 4, "group_size": GROUP, "max_new_tokens": 9},
    }  # fmt: skip
    for key, value in sets.items():
        section, _, name = key.partition("__")
        tree.setdefault(section, {})[name] = value
    return parse_config(tree)


def generator(step: int, rewards: Callable[[int, int], Sequence[float]]) -> Callable[[Sequence[Ask]], Generated]:
    """Draws for policy version step - 1: `rewards(row, draw)` of a group; lengths 2..8 that depend on row, draw and sample."""

    def generate(asks: Sequence[Ask]) -> Generated:
        scored = []
        for ask in sorted(asks, key=lambda ask: (ask.prompt.row, ask.draw)):
            for sample, reward in enumerate(rewards(ask.prompt.row, ask.draw)):
                rng = np.random.default_rng((ask.prompt.row, ask.draw, sample))
                length = int(rng.integers(2, 9))
                numbers = rng.standard_normal(length).astype(np.float32)
                rollout = Rollout(
                    ask.prompt, ask.stream, ask.draw, sample, rng.integers(0, 9, length).astype(np.int32), numbers, 0 * numbers, abs(numbers),
                    np.full(length, step - 1, np.int32), np.zeros(length, np.uint8), np.arange(length, dtype=np.int32), "",
                    "length" if length == 8 else "eos",
                )  # fmt: skip
                scored.append(ScoredRollout(rollout, reward, {"task": reward}))
        tokens = sum(len(item.rollout.token_T) for item in scored)
        rounds = (RoundRecord(len(asks), 0, PLAIN, 0, 0, tokens, 0.0, 0.1, 0.0),) * 8
        stats = RolloutStats(1.0, 0.1, 0.0, 0.8, 0.1, 2 * len(asks), tokens, 3, 2, 10, rounds)
        return Generated(tuple(scored), stats, stats, True, 0.5)

    return generate


def mixed(row: int, draw: int) -> list[float]:
    """Two groups of three teach something."""
    return [0.0] * GROUP if (row + draw) % 3 == 0 else [1.0, 0.0, 1.0, 0.0]


def step_of(supply: Supply, step: int, rewards=mixed) -> tuple[Generated, tuple[Sample, ...]]:
    drawn = supply.draw(generator(step, rewards))
    return drawn.made, supply.spend(advantages(drawn.kept, "group"), drawn, step)


def keys(samples: Sequence[Sample]) -> list[tuple]:
    return [(*s.scored.rollout.key, len(s.advantage_T)) for s in samples]


def groups(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    return list(dict.fromkeys(sample.scored.rollout.key[:2] for sample in samples))


def silent(line: str) -> None:
    raise AssertionError(line)


def test_by_default_a_step_learns_from_all_that_it_draws() -> None:
    supply = Supply(configured(), walk(), silent)
    asked = []
    for step in (1, 2, 3):
        made, samples = step_of(supply, step)
        assert [sample.scored for sample in samples] == list(made.scored_R) and len(samples) == 16
        assert supply.counts is None and supplied(None) == {}
        asked += groups(samples)
    assert sorted(asked[:8] + asked[8:]) == sorted([(row, 0) for row in range(10)] + [k for k in asked if k[1] == 1])
    # a checkpoint from before there was a cursor
    resumed = Supply(configured(), walk(), silent)
    resumed.load_state_dict({}, 2)
    assert groups(step_of(resumed, 3)[1]) == asked[8:]


def test_dynamic_sampling_fills_the_step_with_the_first_groups_that_have_spread() -> None:
    supply = Supply(configured(policy__algorithm="dapo"), walk(), silent)
    twin = Supply(configured(rollout__prompts_per_step=10), walk(), silent)
    order = list(dict.fromkeys(key for step in (1, 2, 3) for key in _in_prompt_order(twin, step)))
    good = [key for key in order if (key[0] + key[1]) % 3]
    place, taken = 0, []
    for step in (1, 2, 3):
        made, samples = step_of(supply, step)
        # those drawn and not needed are not drawn again
        drawn = list(dict.fromkeys(item.rollout.key[:2] for item in made.scored_R))
        assert sorted(drawn) == sorted(order[place : place + len(drawn)])
        expected = [key for key in order[place : place + len(drawn)] if key in good][:4]
        assert groups(samples) == sorted(expected) and len(samples) == 16
        counts = supply.counts
        assert counts is not None and (counts.groups, counts.dropped_groups) == (len(drawn), len(drawn) - 4)
        assert counts.dropped_tokens == made.stats.tokens - sum(len(s.advantage_T) for s in samples)
        place += len(drawn)
        taken.append(counts.draws)
    assert max(taken) > 1


def _in_prompt_order(supply: Supply, step: int) -> list[tuple[int, int]]:
    return list(supply.draw(generator(step, mixed)).place_of)


def test_draws_add_up() -> None:
    made, _ = step_of(Supply(configured(policy__algorithm="dapo"), walk(), silent), 1)
    supply = Supply(configured(), walk(), silent)
    first, _ = step_of(supply, 1)
    assert [item.rollout.key for item in made.scored_R] == sorted(item.rollout.key for item in made.scored_R)
    times = len(made.stats.round_R) // 8
    assert times > 1 and made.stats.wall_s == times and made.reward_s == times / 2 and made.identical
    assert made.plain is not None and made.plain.tokens == made.stats.tokens == sum(
        len(item.rollout.token_T) for item in made.scored_R
    )
    # rounds are counted on from draw to draw, so that a rollout's tokens point at its own rounds
    starts = {int(item.rollout.round_T[0]) for item in made.scored_R}
    assert starts == {8 * i for i in range(times)}
    assert first.stats.tokens_per_s == pytest.approx(first.stats.tokens)


def test_when_draws_are_used_up_the_step_goes_on_and_says_so() -> None:
    lines: list[str] = []
    supply = Supply(configured(policy__algorithm="dapo", collect__max_draws=2), walk(), lines.append)
    made, samples = step_of(supply, 1, lambda row, draw: [0.0] * GROUP)
    assert len(lines) == 1 and "2 draws left 0 of 8 groups" in lines[0] and "collect.max_draws" in lines[0]
    # nothing to learn from: the first groups, which teach nothing
    assert len(samples) == 16 and not any(sample.advantage_T.any() for sample in samples)
    lone = lambda row, draw: [1.0, 0.0, 0.0, 0.0] if row == made.scored_R[0].rollout.prompt.row else [0.0] * GROUP  # noqa: E731
    fresh = Supply(configured(policy__algorithm="dapo", collect__max_draws=2), walk(), lines.append)
    assert len(step_of(fresh, 1, lone)[1]) == GROUP and len(lines) == 2


def test_a_penalty_is_learned_from_and_gives_no_group_spread() -> None:
    """Wrong answers of different lengths stay a group of equals for the filter, and none for the estimator."""
    asked = {"collect__overlong_cache": 8, "collect__overlong_weight": 0.5}
    supply = Supply(configured(policy__algorithm="dapo", **asked), walk(), silent)
    made, samples = step_of(supply, 1)
    assert all((key[0] + key[1]) % 3 for key in groups(samples))
    for item in (*made.scored_R, *(sample.scored for sample in samples)):
        penalty = min(0.0, (9 - 8 - len(item.rollout.token_T)) / 8)
        task = item.part["task"]
        assert item.part["overlong"] == penalty and task is not None and item.reward == task + 0.5 * penalty
    other = Supply(configured(**asked), walk(), silent)
    assert any(s.advantage_T.any() for s in step_of(other, 1, lambda row, draw: [0.0] * GROUP)[1])
    with pytest.raises(ConfigError, match="overlong_cache is 10 tokens, more than the longest answer has"):
        Supply(configured(collect__overlong_cache=10), walk(), silent)


def test_the_share_of_most_spread_is_drawn_once() -> None:
    supply = Supply(configured(collect__filter="top_spread", collect__share=0.5), walk(), silent)
    made, samples = step_of(supply, 1, lambda row, draw: [0.0, 0.1 * row, 0.0, 0.0])
    rows = sorted({item.rollout.prompt.row for item in made.scored_R})
    assert len(rows) == 4 and sorted({s.scored.rollout.prompt.row for s in samples}) == rows[2:]


BUDGET = {"policy__algorithm": "c3po", "policy__token_budget": 70}


@pytest.mark.parametrize("budget", [70, 120])
def test_a_budget_trains_on_exactly_so_many_tokens_and_carries_the_rest_over(budget: int) -> None:
    """A draw has about 80 tokens: for the larger budget a step needs more than one."""
    supply = Supply(configured(**(BUDGET | {"policy__token_budget": budget})), walk(), silent)
    left, trained = 0, []
    for step in range(1, 9):
        made, samples = step_of(supply, step)
        counts = supply.counts
        assert counts is not None and sum(len(s.advantage_T) for s in samples) == budget
        assert counts.carried_tokens == left <= budget
        assert left + made.stats.tokens == budget + counts.left_tokens + counts.expired_tokens
        # a sample keeps the version it was drawn under, one before this step's at most
        versions = np.concatenate([s.scored.rollout.version_T for s in samples])
        assert (versions == step - 2).sum() == counts.carried_tokens and versions.min() >= step - 2
        left = counts.left_tokens
        trained.append(counts)
    assert any(c.carried_tokens for c in trained) and any(c.draws > 1 for c in trained) == (budget > 100)
    # what waits does not grow, so that most is of the newest policy
    assert sum(c.carried_tokens for c in trained) < 4 * budget and not any(c.expired_tokens for c in trained)


def test_what_is_there_already_is_not_drawn_again() -> None:
    """Two thirds of the budget wait: a third of the prompts is drawn."""
    supply = Supply(configured(**(BUDGET | {"policy__token_budget": 60})), walk(), silent)
    step_of(supply, 1)
    before = supply.counts
    step_of(supply, 2)
    assert before is not None and supply.counts is not None
    assert (before.groups, before.left_tokens, supply.counts.groups) == (4, 40, 2)


def test_a_budget_is_filled_in_prompt_order() -> None:
    supply = Supply(configured(**BUDGET), walk(), silent)
    drawn = supply.draw(generator(1, mixed))
    samples = supply.spend(advantages(drawn.kept, "group"), drawn, 1)
    order = list(drawn.place_of)
    cut = [s for s in samples if len(s.advantage_T) < int(np.random.default_rng(s.scored.rollout.key).integers(2, 9))]
    whole = order[: order.index(cut[0].scored.rollout.key[:2])] if cut else order
    assert len(cut) <= 1 and set(groups(samples)) - set(whole) <= {order[len(whole)]} if cut else True
    assert order != sorted(order) and keys(samples) == sorted(keys(samples))


def test_what_has_waited_too_long_is_thrown_away() -> None:
    for carry in (0, 2):
        supply = Supply(
            configured(**(BUDGET | {"policy__token_budget": 20}), collect__carry_steps=carry), walk(), silent
        )
        oldest = set()
        for step in range(1, 7):
            _, samples = step_of(supply, step)
            oldest.add(step - 1 - min(int(s.scored.rollout.version_T[0]) for s in samples))
        assert supply.counts is not None and supply.counts.expired_tokens > 0
        assert max(oldest) == carry


def test_masked_answers_take_no_part_of_the_budget() -> None:
    supply = Supply(configured(**BUDGET, policy__mask_truncated=True), walk(), silent)
    for step in (1, 2, 3):
        _, samples = step_of(supply, step)
        assert not any(s.scored.rollout.truncated for s in samples) and sum(len(s.advantage_T) for s in samples) == 70


@pytest.mark.parametrize("algorithm", ["dapo", "c3po"])
def test_law_8_a_supply_that_is_taken_up_goes_on_as_one_never_put_down(algorithm: str) -> None:
    config = configured(policy__algorithm=algorithm, policy__token_budget=70, policy__aggregation="budget")
    whole = Supply(config, walk(), silent)
    for step in (1, 2, 3):
        step_of(whole, step)
    resumed = Supply(config, walk(), silent)
    state = whole.state_dict()
    assert state["cursor"] > 12 or state["waiting"]
    resumed.load_state_dict(_copied(state), 3)
    for step in (4, 5, 6):
        (_, ours), (_, theirs) = step_of(resumed, step), step_of(whole, step)
        assert keys(ours) == keys(theirs) and resumed.counts == whole.counts
        for mine, other in zip(ours, theirs, strict=True):
            for name in ("token_T", "logprob_T", "version_T", "kept_logmass_T"):
                np.testing.assert_array_equal(getattr(mine.scored.rollout, name), getattr(other.scored.rollout, name))
            np.testing.assert_array_equal(mine.advantage_T, other.advantage_T)
            assert mine.scored.rollout.prompt.token_ids == other.scored.rollout.prompt.token_ids


def _copied(state: dict) -> dict:
    return {
        k: _copied(v) if isinstance(v, dict) else v.clone() if isinstance(v, torch.Tensor) else v
        for k, v in state.items()
    }
