from __future__ import annotations

import pytest

from respec.report.alarms import alarms_of
from respec.report.records import StepMetrics
from respec.report.surprise import ALARM


def steps(*metrics: dict[str, float]) -> list[StepMetrics]:
    return [StepMetrics(step, 0.0, each) for step, each in enumerate(metrics, 1)]


@pytest.mark.parametrize(
    ("name", "calm", "bad"),
    [
        ("drafter/alarms", 0.0, 1.0),
        ("drafter/failed", 0.0, 1.0),
        ("rollout/tokens_identical", 1.0, 0.0),
        ("reward/fell_back", 0.0, 3.0),
    ],
)
def test_a_kind_of_alarm_is_one_entry_with_its_steps(name: str, calm: float, bad: float) -> None:
    assert alarms_of(steps({name: calm}, {}, {name: calm}), True) == []
    (entry,) = alarms_of(steps({name: calm}, {name: bad}, {name: calm}, {name: bad}), True)
    assert (entry["first"], entry["last"], entry["count"]) == (2, 4, 2) and entry["line"]


def test_tokens_that_are_not_the_policys_draws_alarm_once_and_not_in_mode_lossy() -> None:
    # mean m and mean square m²: a sum of n tokens is sqrt(n) standard errors
    biased = {
        "rollout/tokens": 2500.0,
        "rollout/surprise": 0.1,
        "rollout/surprise_square": 0.01 * 2500 / ALARM**2 / 1.5,
    }
    assert alarms_of(steps(biased), True) == []  # too few tokens to say
    (entry,) = alarms_of(steps(biased, biased, biased), True)
    assert entry["first"] == entry["last"] == 2 and "not the policy's own draws" in entry["line"]
    assert alarms_of(steps(biased, biased, biased), False) == []


def test_the_echo_trap_alarms() -> None:
    trapped = [
        {"group/spread": 1.0 - step / 22, "rollout/repetition": step / 22, "reward/mean": 0.5 - 0.001 * step}
        for step in range(20)
    ]
    (entry,) = alarms_of(steps(*trapped), True)
    assert entry["first"] == 20 and "echo trap" in entry["line"]
