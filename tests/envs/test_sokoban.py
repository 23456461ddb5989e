"""Sokoban: every room can be solved, is the same by its seed, and obeys the rules whatever is written."""

from __future__ import annotations

import random

import pytest

from respec.envs.sokoban import Sokoban
from respec.errors import TaskError


def play(env: Sokoban, seed: int, most: int = 60) -> tuple[list[str], float, bool]:
    read, total, done = [env.reset(seed)], 0.0, False
    while not done and len(read) <= most:
        text, reward, done = env.step(env.solve())
        read.append(text)
        total += reward
    return read, total, done


@pytest.mark.parametrize(("size", "boxes"), [(5, 1), (6, 1), (6, 2)])
def test_every_room_can_be_solved_and_is_the_same_by_its_seed(size, boxes):
    env, again = Sokoban(size, boxes), Sokoban(size, boxes)
    rooms = set()
    for seed in range(25):
        read, total, done = play(env, seed)
        assert done and env.solved, f"seed {seed} was not solved:\n{read[0]}"
        assert read == play(again, seed)[0]
        on = read[0].split("\n", 1)[1].count("*")
        assert total == pytest.approx(10 + boxes - on - 0.1 * (len(read) - 1))
        rooms.add(read[0])
    assert len(rooms) == 25


def test_whatever_is_written_walls_hold_and_no_box_is_lost():
    env = Sokoban(6, 2, rules=False)
    dice = random.Random(0)
    for seed in range(10):
        first = env.reset(seed)
        walls = [i for i, sign in enumerate(first) if sign == "#"]
        for _ in range(60):
            text, reward, done = env.step(dice.choice(["Left", "Down", "Right", "Up", "nonsense"]))
            room = text[-len(first) :]
            assert [i for i, sign in enumerate(room) if sign == "#"] == walls
            assert sum(room.count(sign) for sign in "X*") == 2 and sum(room.count(sign) for sign in "PS") == 1
            assert sum(room.count(sign) for sign in "O*S") == 2
            assert -1.2 <= reward <= 11
            if done:
                assert env.solved
                break


def test_a_push_is_worth_what_it_does():
    env = Sokoban(5, 1, walls=0.0, rules=False)
    env._floor = frozenset((r, c) for r in range(1, 4) for c in range(1, 4))
    env._at, env._boxes, env._targets = (1, 1), frozenset({(1, 2)}), frozenset({(1, 3)})
    assert env.step("Up")[1:] == (-0.1, False)
    assert env.step("?")[1:] == (-0.1, False)
    text, reward, done = env.step("Right")
    assert (text.split("\n")[1], reward, done) == ("#_P*#", pytest.approx(10.9), True)
    env._targets = frozenset({(1, 3), (2, 2)})
    env._boxes, env._at = frozenset({(1, 3), (2, 1)}), (2, 3)
    assert env.step("Up")[1:] == (-0.1, False), "a wall is behind the box"


def test_a_room_that_cannot_be_is_refused():
    with pytest.raises(TaskError, match="9 boxes"):
        Sokoban(5, 9)
    env = Sokoban(4, 1)
    env._share = 1.0
    with pytest.raises(TaskError, match="no room"):
        env.reset(0)
