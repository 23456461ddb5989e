"""The watch over accepted tokens: how soon it sees a collapse, how seldom it is wrong, and what it does with an estimate that was wrong."""

from __future__ import annotations

import numpy as np

from respec.speculation import sentinel
from respec.speculation.sentinel import Sighting, Watch

GROUP, GROUPS, ROUNDS = 4, 4, 40
KEY = (1, "sampled", 0)


def step(
    watch: Watch, rng: np.random.Generator, accept: float, rounds: int = ROUNDS, spread: float = 0.05
) -> tuple[int, Sighting] | None:
    """Rounds of sixteen sequences. Overdispersed: a step's prompts are harder or easier, and the sequences of a group alike."""
    accept = float(np.clip(rng.normal(accept, spread), 0.01, 0.99))
    for count in range(1, rounds + 1):
        p = rng.beta(8 * accept, 8 * (1 - accept), GROUPS)
        first = int(rng.binomial(GROUP, p).sum())
        second = int(rng.binomial(first, accept))
        seen = watch.observe(KEY, GROUP * GROUPS, (GROUP * GROUPS, first), (first, second))
        if seen is not None:
            return count, seen
    return None


def taught(rng: np.random.Generator, accept: float = 0.7, steps: int = 4) -> Watch:
    watch = Watch()
    for _ in range(steps):
        assert step(watch, rng, accept) is None
        watch.swapped()
    return watch


def test_a_collapse_is_seen_within_twelve_rounds():
    """One in a hundred collapses being seen too late, 150 of them would all be in time with probability 0.22; one in thirty, 0.006."""
    for seed in range(150):
        rng = np.random.default_rng(seed)
        found = step(taught(rng), rng, 0.05, spread=0.0)
        assert found is not None and found[0] <= 12
        assert found[1].depth == 1 and found[1].accepted < 0.3 * found[1].expected


def test_clean_swaps_raise_no_alarm():
    """20,000 rounds, in which acceptance also drifts: were there a false alarm in 4,000 of them, this would pass with probability 0.007."""
    rng = np.random.default_rng(0)
    watch, accept = taught(rng), 0.7
    for _ in range(500):
        accept = float(np.clip(accept + rng.normal(0, 0.02), 0.5, 0.85))
        assert step(watch, rng, accept) is None
        watch.swapped()
    assert 1.0 < watch.phi <= 4.0


def test_drafts_that_are_missing_count_as_refused():
    watch = taught(np.random.default_rng(1))
    seen = [watch.observe(KEY, 16, (), ()) for _ in range(8)]
    assert any(s is not None and s.accepted == 0 for s in seen)


def test_a_collapse_at_the_second_depth_is_seen_as_one():
    watch = taught(np.random.default_rng(2))
    seen = [watch.observe(KEY, 16, (16, 11), (11, 0)) for _ in range(12)]
    found = next(s for s in seen if s is not None)
    assert found.depth == 2 and found.accepted == 0


def test_what_was_never_seen_is_not_expected():
    watch, rng = Watch(), np.random.default_rng(3)
    assert step(watch, rng, 0.7) is None and step(watch, rng, 0.02) is None


def test_completions_that_have_just_begun_are_held_against_such():
    watch = Watch()
    for _ in range(4):
        for _ in range(20):
            assert watch.observe((1, "sampled", 0), 16, (16,), (3,)) is None
            assert watch.observe((1, "sampled", 4), 16, (16,), (14,)) is None
        watch.swapped()
    assert all(watch.observe((1, "sampled", 0), 16, (16,), (3,)) is None for _ in range(20))
    assert any(watch.observe((1, "sampled", 4), 16, (16,), (3,)) is not None for _ in range(20))


def test_an_estimate_that_drafts_never_meet_again_goes_in_the_end():
    rng = np.random.default_rng(4)
    watch, alarms = taught(rng), 0
    for _ in range(12):
        found = step(watch, rng, 0.1)
        alarms += found is not None
        watch.doubt() if found else watch.swapped()
    assert 1 <= alarms <= 5


def test_what_is_expected_is_worked_out_once_a_swap_and_not_every_round(monkeypatch):
    """A round of a small model takes as long as eight such estimates."""
    rng, worked_out = np.random.default_rng(5), list[int]()
    watch, estimate = taught(rng), sentinel._expected
    monkeypatch.setattr(sentinel, "_expected", lambda *counts: worked_out.append(1) or estimate(*counts))
    for _ in range(3):
        assert step(watch, rng, 0.7) is None
        watch.swapped()
    assert len(worked_out) == 3 * 2  # two depths


def test_few_drafts_are_no_evidence_of_what_weights_are_worth():
    watch = Watch()
    assert watch.expected(1) == ([], [])
    watch.observe(KEY, 16, (16, 11), (11, 5))
    watch.swapped()
    assert watch.expected(1) == ([], [])
    rich = taught(np.random.default_rng(6))
    tested, accepted = rich.expected(1)
    assert tested[0] > 64 and 0.5 < accepted[0] / tested[0] < 0.9


def test_a_drafter_that_is_always_right_is_watched_too():
    watch = Watch()
    for _ in range(3):
        assert all(watch.observe(KEY, 3, (3, 3, 3), (3, 3, 3)) is None for _ in range(37))
        watch.swapped()
    assert any(watch.observe(KEY, 3, (3,), (0,)) for _ in range(12))
