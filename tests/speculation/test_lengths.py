"""What is forecast of a length: the row's own, the run's where the row says nothing, always longer than it is, never past its budget."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rollouts import finished

from respec.speculation.lengths import Lengths, left
from respec.types import Load, Stream

EVEN = (np.arange(1000)[:, None] + 0.5) / 1000


def load(*sequences: tuple[int, int, int]) -> Load:
    """(row, drawn, remaining) of each."""
    row_B, drawn_B, remaining_B = (tuple(values) for values in zip(*sequences, strict=True))
    return Load(len(sequences), 0, 10.0, remaining_B, row_B=row_B, drawn_B=drawn_B)


def test_a_row_that_has_been_answered_is_forecast_by_its_own_answers():
    lengths = Lengths()
    assert not lengths.known
    lengths.learn(finished(np.array([[40] * 16, [200] * 16])))
    assert lengths.known
    short, long = np.median(lengths.draws(load((0, 10, 500), (1, 10, 500)), np.repeat(EVEN, 2, axis=1)), axis=0)
    assert (short, long) == (30, 190)


def test_a_row_nobody_answered_is_forecast_by_all_that_were_longer_than_it_is():
    lengths = Lengths()
    lengths.learn(finished(np.array([[20, 40, 60, 80]])))
    fresh, halfway = lengths.draws(load((7, 0, 500), (7, 50, 500)), np.repeat(EVEN, 2, axis=1)).T
    assert fresh.mean() == 50 and set(fresh) == {20, 40, 60, 80}
    # of those longer than 50
    assert halfway.mean() == 20 and set(halfway) == {10, 30}


def test_own_answers_weigh_one_each_and_the_run_as_much_as_one():
    mine, everybody = np.array([[0, 0, 30, 30, 30]]), np.array([10, 100])
    # own answers of 30 and half of the run's weight on 100 are still possible after 20 tokens
    draws = left(mine, everybody, np.array([20]), np.array([500]), EVEN)
    assert np.mean(draws == 10) == pytest.approx(3 / 3.5, abs=2e-3)
    assert set(np.unique(draws)) == {10, 80}


def test_who_outlives_everybody_goes_on_as_long_again_within_its_budget():
    lengths = Lengths()
    lengths.learn(finished(np.array([[20, 40]])))
    draws = lengths.draws(load((0, 64, 500), (3, 64, 30), (3, 500, 0)), np.repeat(EVEN, 3, axis=1))
    assert [set(column) for column in draws.T] == [{64}, {30}, {1}]


def test_a_rollout_that_is_longer_than_before_is_soon_believed():
    lengths = Lengths()
    for length in (20, 90, 90):
        lengths.learn(finished(np.full((1, 16), length)))
    assert np.median(lengths.draws(load((0, 0, 500)), EVEN)) == 90


def test_evaluations_tell_nothing():
    lengths = Lengths()
    lengths.learn([replace(rollout, stream=Stream.EVAL) for rollout in finished(np.array([[40] * 4]))])
    assert not lengths.known
