"""FrozenLake: the same by seed, always a way, Gymnasium's rewards, and an answer to any text."""

from __future__ import annotations

from collections import Counter

import pytest

from respec.envs.frozen_lake import FrozenLake
from respec.errors import TaskError


def walk(env: FrozenLake, seed: int, luck: int = 0, most: int = 100) -> tuple[list[str], float, bool]:
    """An episode by the solver: what was read, what it earned, whether it ended."""
    read, total, done = [env.reset(seed, luck)], 0.0, False
    while not done and len(read) <= most:
        text, reward, done = env.step(env.solve())
        read.append(text)
        total += reward
    return read, total, done


@pytest.mark.parametrize("size", [2, 4, 7])
def test_every_map_has_a_way_and_is_the_same_by_its_seed(size):
    env, again = FrozenLake(size, 0.4), FrozenLake(size, 0.4)
    maps = Counter[str]()
    for seed in range(60):
        read, total, done = walk(env, seed)
        assert (total, done, env.solved) == (1.0, True, True)
        assert read == walk(again, seed)[0]
        assert len(read) - 1 >= 2 * (size - 1)
        maps[read[0]] += 1
    assert size == 2 or len(maps) > 40


def test_a_hole_ends_it_without_a_reward_and_the_edge_stops():
    env = FrozenLake(4, 0.3, rules=False)
    seed = next(s for s in range(100) if env.reset(s).split("\n")[0][1] == "O")
    assert env.reset(seed).startswith("PO")
    assert env.step("Up") == (env.reset(seed), 0.0, False)
    text, reward, done = env.step("Right")
    assert (text[:2], reward, done, env.solved) == ("_X", 0.0, True, False)


def test_what_is_no_action_moves_nobody_and_costs():
    env = FrozenLake(rules=False)
    start = env.reset(3)
    for text in ("", "?", "go right", "<answer>jump</answer>", "DownRight", "\x00" * 50):
        said, reward, done = env.step(text)
        assert said.endswith(start) and "Left, Down, Right, Up" in said and (reward, done) == (-0.1, False)


def test_an_action_is_known_by_its_name_its_beginning_and_in_tags():
    env = FrozenLake(holes=0.0, rules=False)
    for text in ("Right", " right\n", "R", "I go up? No: <answer>Right</answer>", "<answer>ri"):
        env.reset(0)
        assert env.step(text)[0].startswith("_P"), text


def test_slippery_ice_goes_each_way_a_third_of_the_time_by_luck_alone():
    """3000 steps Down from a corner: Down, Right and Left (which the edge stops) 1000 times each, standard deviation 26; 5 of them allowed."""
    env = FrozenLake(3, 0.0, slippery=True, rules=False)
    ends = Counter[str]()
    for luck in range(3000):
        env.reset(0, luck)
        ends[env.step("Down")[0]] += 1
    assert len(ends) == 3 and all(870 < count < 1130 for count in ends.values())
    one, other = walk(env, 5, luck=1), walk(env, 5, luck=2)
    assert one == walk(env, 5, luck=1) and one[0][0] == other[0][0] and one != other


def test_a_lake_that_cannot_be_is_refused():
    with pytest.raises(TaskError, match=r"size 1 and holes 0.2"):
        FrozenLake(size=1)
