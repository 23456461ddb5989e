"""What a run says before it begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from respec.config import parse_config
from respec.stages import to_know


def said(held: int = 8, **sections: Any) -> str:
    tree = {"model": {"path": "builtin:demo"}, "task": {"dataset": "chain_sum", "eval_size": 8}}
    task: Any = SimpleNamespace(held_out=range(held), notes=["2 rows were left out"])
    return "\n".join(to_know(parse_config(tree | sections), task))


def test_nothing_is_said_but_the_datas_own_notes_where_all_is_well() -> None:
    assert said() == "2 rows were left out"


def test_missing_rows_and_lenient_rollouts_are_said() -> None:
    assert "held out are 3 rows, not 8" in said(held=3)
    assert "approximately" in said(speculation={"drafter": "previous", "mode": "lossy"})


@pytest.mark.parametrize(
    ("rollout", "speaks"),
    [({"temperature": 0.0}, True), ({"temperature": 0.0, "group_size": 1}, False), ({"temperature": 0.7}, False)],
)
def test_groups_that_cannot_differ_are_said(rollout: dict[str, float], speaks: bool) -> None:
    assert ("rollout.temperature is 0" in said(rollout=rollout)) == speaks
