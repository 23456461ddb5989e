"""The rate at a fixed batch: of the rounds that had all their sequences, and of no others."""

from __future__ import annotations

import pytest

from respec.bench.speculation import full_rate
from respec.types import PLAIN, RoundRecord


def record(active: int, emitted: int, seconds: float) -> RoundRecord:
    return RoundRecord(active, 0, PLAIN, 0, 0, emitted, seconds / 4, seconds / 2, seconds / 4)


def test_a_tail_does_not_count():
    full = [record(8, 8, 0.1), record(8, 16, 0.3)]
    assert full_rate(full, 8) == pytest.approx(60.0)
    assert full_rate([*full, record(7, 7, 9.0), record(1, 1, 5.0)], 8) == pytest.approx(60.0)
