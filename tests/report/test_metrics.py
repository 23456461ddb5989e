from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import respec
from respec.report.metrics import METRICS, checked, metric


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match="reward/meen"):
        checked({"reward/mean": 1.0, "reward/meen": 1.0})


@pytest.mark.parametrize("name", ["reward/part/", "reward/part/*", "reward", ""])
def test_a_pattern_is_no_name(name: str) -> None:
    with pytest.raises(KeyError):
        metric(name)


def test_each_reward_function_has_a_name_of_its_own() -> None:
    assert metric("reward/part/examples.rewards:brevity") is METRICS["reward/part/*"]


def test_checked_keeps_all_values_in_the_order_of_the_table() -> None:
    given = {"time/step_s": 3, "reward/part/b": 2, "reward/part/a": 1, "reward/mean": 0.5, "reward/fell_back": 0}
    assert checked(given) == given
    names = ["reward/mean", "reward/part/a", "reward/part/b", "reward/fell_back", "time/step_s"]
    assert list(checked(given)) == names


def test_every_metric_says_what_it_is() -> None:
    for name, entry in METRICS.items():
        assert "/" in name and entry.unit and entry.reduction and entry.meaning, name


def test_every_name_that_is_written_is_in_the_table() -> None:
    """Names written out where metrics are named, whether or not a run gets as far as writing them; f-strings by their beginning."""
    rooms = {name.partition("/")[0] for name in METRICS}
    files = [Path(respec.__file__).parent / f"{name}.py" for name in ("loop", "naming", "resume", "online")]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    names = [text for text in texts if re.fullmatch(r"[a-z]+/[a-z_/]+", text) and text.partition("/")[0] in rooms]
    assert {"reward/mean", "time/step_s", "reward/part/", "eval/accuracy"} <= set(names)
    for name in names:
        metric(f"{name}any" if name.endswith("/") else name)
