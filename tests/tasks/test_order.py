"""Which prompt comes when: the plain walk, mixtures, stages, and rows chosen by measured difficulty."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from respec.config import DifficultyConfig, parse_config
from respec.errors import CheckpointError
from respec.tasks.difficulty import Difficulty
from respec.tasks.order import Interleave, Order, order_of
from respec.types import Prompt, ScoredRollout


def prompts(count: int, first: int = 0) -> list[Prompt]:
    return [Prompt(first + i, f"{first + i}", (1,)) for i in range(count)]


def test_a_task_alone_is_walked_through_in_permutations_one_an_epoch():
    train = prompts(7)
    order = Order([train], 3, lambda place: [1.0], None)
    for place in range(30):
        epoch, index = divmod(place, 7)
        known = np.random.Generator(np.random.Philox(key=[3, epoch])).permutation(7)[index]
        assert order(place) == (train[known], epoch)
    assert order(3) == Order([train], 3, lambda place: [1.0], None)(3), "whatever was asked before"


@pytest.mark.parametrize("weights", [[1.0, 1.0], [0.7, 0.2, 0.1], [5.0, 1.0, 1.0, 0.0]])
def test_a_mixture_gives_each_task_its_share_at_all_times(weights: Sequence[float]):
    deal, share, counts = (
        Interleave(len(weights), lambda place: weights, 1),
        np.array(weights) / sum(weights),
        np.zeros(len(weights)),
    )
    for place in range(500):
        task, index = deal(place)
        assert index == counts[task]
        counts[task] += 1
        assert np.abs(counts - (place + 1) * share).max() < len(weights)
    again = Interleave(len(weights), lambda place: weights, 1)
    assert [again(place) for place in (499, 3, 250)] == [deal(place) for place in (499, 3, 250)]
    assert (
        any(Interleave(len(weights), lambda place: weights, seed)(0) != deal(0) for seed in range(20))
        or weights[0] != weights[1]
    )


def test_no_row_of_a_mixture_comes_twice_with_one_draw():
    order = Order([prompts(5), prompts(3, 10)], 0, lambda place: [2.0, 1.0], None)
    seen = [(prompt.row, draw) for prompt, draw in map(order, range(60))]
    assert len(set(seen)) == 60
    assert {draw for row, draw in seen if row >= 10} == set(range(7)), "the small task is in its seventh epoch"


def test_stages_begin_where_their_step_does(make: Any):
    config = parse_config(
        {
            "model": {"path": "x"},
            "rollout": {"prompts_per_step": 4},
            "task": {
                "mixture": [{"dataset": "maths"}, {"dataset": "code"}],
                "stage": [
                    {"from_step": 1, "weights": {"maths": 1.0}},
                    {"from_step": 3, "weights": {"code": 3.0, "maths": 1.0}},
                ],
            },
        }
    )
    maths, code = make.task(*prompts(20)), make.task(*prompts(20, 20))
    whole = make.task()
    order = order_of(type(whole)(**{**vars(whole), "parts": {"maths": maths, "code": code}}), config)
    rows = [order(place)[0].row for place in range(24)]
    assert all(row < 20 for row in rows[:8]), "two steps of maths"
    assert all(sum(row >= 20 for row in rows[at : at + 4]) == 3 for at in range(8, 24, 4)), "three in four from then on"


def scored(make: Any, prompt: Prompt, draw: int, rewards: Sequence[float]) -> list[ScoredRollout]:
    return [ScoredRollout(make.rollout(prompt, "x", i, draw), reward, {}) for i, reward in enumerate(rewards)]


def graded(make: Any, order: Order, places: Sequence[int]) -> list[int]:
    """Asks a step's places, and rewards row r as r % 3 says: always wrong, half right, always right."""
    asked = sorted(map(order, places), key=lambda item: (item[0].row, item[1]))
    assert order.difficulty is not None
    order.difficulty.learn(
        [s for prompt, draw in asked for s in scored(make, prompt, draw, [[0, 0], [0, 1], [1, 1]][prompt.row % 3])]
    )
    return [prompt.row for prompt, _ in asked]


def chooser(patience: int = 3) -> Order:
    train = prompts(12)
    difficulty = Difficulty(DifficultyConfig(low=0.2, high=0.8, patience=patience), [[prompt.row for prompt in train]])
    return Order([train], 5, lambda place: [1.0], difficulty)


def test_rows_in_the_band_are_preferred_and_others_come_back(make: Any):
    order = chooser()
    steps = [graded(make, order, range(4 * step, 4 * step + 4)) for step in range(40)]
    assert sorted(row for rows in steps[:3] for row in rows) == list(range(12)), "each once, before anything is known"
    later = [row for rows in steps[3:] for row in rows]
    shares = [sum(row % 3 == kind for row in later) / len(later) for kind in range(3)]
    # of every four turns of a row outside the band three are passed over: of 12 turns 4 in the band stand, and 8 / 4 of the others
    assert shares[1] == pytest.approx(4 / 6, abs=0.05) and min(shares) > 0.1
    assert order.difficulty is not None and order.difficulty.in_band() == pytest.approx(1 / 3)


def test_chosen_rows_have_draws_of_their_own_and_go_on_from_a_checkpoint(make: Any):
    whole, cut = chooser(), chooser()
    for step in range(6):
        for order in (whole, cut):
            graded(make, order, range(4 * step, 4 * step + 4))
    state = cut.state_dict()
    cut = chooser()
    cut.load_state_dict(state)
    rest = [list(map(order, range(24, 60))) for order in (whole, cut)]
    assert rest[0] == rest[1] and len({(p.row, draw) for p, draw in rest[0]}) == 36
    other = Order([prompts(5)], 5, lambda place: [1.0], Difficulty(DifficultyConfig(low=0, high=1), [list(range(5))]))
    with pytest.raises(CheckpointError, match="of other data"):
        other.load_state_dict(state)


def test_a_rows_running_mean_follows_its_newest_rewards(make: Any):
    order = chooser(patience=50)
    prompt = next(p for p, _ in map(order, range(12)) if p.row == 4)
    assert order.difficulty is not None
    for draw, rewards in enumerate([[0, 0], [1, 1], [1, 1]]):
        order.difficulty.learn(scored(make, prompt, draw, rewards))
    # 0, then half of 1, then half of that and half of 1
    assert order.state_dict()["difficulty"]["mean"][4] == 0.75
