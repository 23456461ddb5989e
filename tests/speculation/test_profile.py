"""A profile measures what is missing, keeps it, and survives being cut short or damaged."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from respec.speculation.cost_model import fit
from respec.speculation.profile import WARM_UP_ROUNDS, Cell, grid, load, measure, save
from respec.types import Plan, RoundRecord


def rounds(cell: Cell) -> Sequence[RoundRecord]:
    """A machine whose first rounds are slow, and whose rows cost a microsecond each."""
    plan = Plan(cell.drafter, cell.s, 1, cell.s) if cell.s else Plan()
    drafted = cell.batch * cell.s
    whole = [
        RoundRecord(cell.batch, 0, plan, drafted, 0, cell.batch, 1e-5, 1e-3 + 1e-6 * (cell.batch + drafted), 1e-5, cell.context)
        for _ in range(6)
    ]  # fmt: skip
    slow = [RoundRecord(cell.batch, 0, plan, drafted, 0, cell.batch, 1.0, 1.0, 1.0, cell.context)] * WARM_UP_ROUNDS
    tail = [RoundRecord(cell.batch - 1, 0, plan, 0, 0, 1, 2.0, 2.0, 2.0, cell.context)]
    return [*slow, *whole, *tail]


@pytest.mark.parametrize("brief", [True, False])
@pytest.mark.parametrize("max_batch", [1, 8, 48])
def test_the_grid_reaches_the_largest_batch_within_the_rows_allowed(max_batch, brief):
    cells = grid(max_batch, (32, 128), ("suffix",), most_rows=256, brief=brief)
    assert len(set(cells)) == len(cells)
    assert {cell.batch for cell in cells} <= set(range(1, max_batch + 1)) and max(c.batch for c in cells) == max_batch
    assert all(cell.batch * (1 + cell.s) <= 256 for cell in cells)
    assert {cell.drafter for cell in cells} == {"off", "suffix"}
    assert any(cell.s == 0 for cell in cells)
    depths = {batch: {c.s for c in cells if c.drafter == "suffix" and c.batch == batch} for batch in (1, max_batch)}
    assert all(len(found) == 2 for found in depths.values()), "one depth alone cannot tell what a depth costs"


def test_only_what_is_missing_is_measured_and_warm_up_and_tail_are_left_out(tmp_path: Path):
    cells = grid(8, (32,), ("suffix",))
    known = list(measure(cells[:5], rounds))
    asked: list[Cell] = []

    def run(cell: Cell) -> Sequence[RoundRecord]:
        asked.append(cell)
        return rounds(cell)

    known += measure(cells, run, known)
    assert asked == list(cells[5:])
    save(tmp_path / "a" / "p.json", known)
    assert load(tmp_path / "a" / "p.json") == known
    for cell, sample in known:
        assert sample.verify_s == pytest.approx(1e-3 + 1e-6 * cell.batch * (1 + cell.s))
        assert sample.rows == cell.batch * (1 + cell.s)
        assert sample.start_s == (pytest.approx(1.0 - 1e-5) if cell.drafter != "off" else 0.0)
        assert (sample.drafter, sample.s) == (cell.drafter, cell.s if cell.drafter != "off" else 0)
    assert fit([sample for _, sample in known]).held_out_error < 0.02


def test_a_damaged_profile_is_none(tmp_path: Path):
    path = tmp_path / "p.json"
    assert load(path) == []
    for text in ("", "{", '[{"cell": {}}]', "[1]"):
        path.write_text(text)
        assert load(path) == []
