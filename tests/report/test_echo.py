"""The echo-trap alarm on synthetic traces: it is raised once where it should be, and seldom elsewhere."""

from __future__ import annotations

import dataclasses

import numpy as np

from respec.report.echo import WINDOW, echo_trap, repetition, trend
from respec.types import ENVIRONMENT, Prompt, Rollout, Stream


def steps(spread, seen, reward) -> list[dict[str, float]]:
    return [
        {"group/spread": float(a), "rollout/repetition": float(b), "reward/mean": float(c)}
        for a, b, c in zip(spread, seen, reward, strict=True)
    ]


def alarms(history: list[dict[str, float]]) -> list[int]:
    """The steps at which a line is said."""
    return [n for n in range(1, len(history) + 1) if echo_trap(history[:n])]


def trap(rng, reward_slope: float = 0.0) -> list[dict[str, float]]:
    """60 steps; from step 20 on spread falls from 0.4 to 0.05 and repetition rises from 0.3 to 0.8, with noise."""
    way = np.clip((np.arange(60) - 20) / 25, 0, 1)
    noise = rng.normal(size=(3, 60))
    return steps(
        0.4 - 0.35 * way + 0.02 * noise[0],
        0.3 + 0.5 * way + 0.03 * noise[1],
        0.3 + reward_slope * way + 0.03 * noise[2],
    )


def test_a_trap_is_told_once_and_in_time():
    told = [alarms(trap(np.random.default_rng(seed))) for seed in range(50)]
    assert all(told), "one was missed"
    assert all(25 < first[0] < 50 for first in told)
    assert sum(map(len, told)) <= 60
    line = echo_trap(trap(np.random.default_rng(0))[: told[0][0]])[0]
    assert "echo trap" in line and "starpo_s" in line


def test_a_task_being_mastered_is_none():
    assert not any(alarms(trap(np.random.default_rng(seed), reward_slope=0.6)) for seed in range(50))


def test_false_alarms_are_rare():
    """None in 400 runs of noise, nor in 400 of slow random walks, which have trends: a rate of 1 % would show with a chance of 0.98."""
    rng = np.random.default_rng(0)
    in_noise = in_walks = 0
    for _ in range(400):
        noise = rng.normal(size=(3, 500))
        in_noise += bool(alarms_fast(0.3 + 0.05 * noise[0], 0.5 + 0.05 * noise[1], noise[2]))
        walk = np.cumsum(rng.normal(size=(3, 500)), axis=1)
        in_walks += bool(alarms_fast(np.exp(0.05 * walk[0]), 0.5 + 0.01 * walk[1], walk[2]))
    assert in_noise == in_walks == 0


def alarms_fast(spread, seen, reward) -> bool:
    """Whether any window alarms; windows whose spread has not halved cannot, and are not looked at."""
    history = steps(spread, seen, reward)
    for end in range(WINDOW, len(history) + 1):
        quarter = WINDOW // 4
        first, last = spread[end - WINDOW : end - WINDOW + quarter].mean(), spread[end - quarter : end].mean()
        if last <= 0.5 * first and echo_trap(history[:end]):
            return True
    return False


def test_too_few_steps_or_numbers_say_nothing():
    whole = trap(np.random.default_rng(1))
    first = alarms(whole)[0]
    assert not echo_trap(whole[first - WINDOW + 1 : first])
    assert not echo_trap([{name: step[name] for name in ("reward/mean", "group/spread")} for step in whole[:first]])


def test_kendall_s_deviate_is_standard():
    """Of 4000 series without a trend: mean 0 within 0.08, variance 1 within 0.12 (five standard errors)."""
    rng = np.random.default_rng(2)
    found = np.array([trend(rng.normal(size=20)) for _ in range(4000)])
    assert abs(found.mean()) < 0.08 and abs(found.var() - 1) < 0.12
    assert trend(np.arange(20.0)) == -trend(-np.arange(20.0)) > 5 and trend(np.ones(20)) == 0


def rollout(tokens: list[int], sample: int, row: int = 0, turns: list[int] | None = None) -> Rollout:
    none = np.zeros(len(tokens), np.float32)
    whole = Rollout(
        Prompt(row, "", (1,)), Stream.TRAIN, 0, sample, np.array(tokens, np.int32), none, none, none,
        none.astype(np.int32), none.astype(np.uint8), none.astype(np.int32), "", "done",
    )  # fmt: skip
    return dataclasses.replace(whole, turn_T=None if turns is None else np.array(turns, np.int32))


def test_repetition_is_within_a_group_and_never_of_what_was_said():
    same = [1, 2, 3, 4, 5]
    assert repetition([rollout(same, 0), rollout(same, 1)]) == 0.5
    assert repetition([rollout(same, 0, row=0), rollout(same, 0, row=1)]) == 0
    assert repetition([rollout([1, 2, 3], 0)]) == 0
    said = [ENVIRONMENT] * 5
    assert repetition([rollout([*same, *same, 6, 7, 8, 9], 0, turns=[0] * 5 + said + [1] * 4)]) == 0
    assert repetition([rollout([*same, *same], 0, turns=[0] * 5 + [1] * 5)]) == 0.5
