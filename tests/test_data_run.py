"""Law 8 with all that decides on the data: a mixture in stages, rows chosen by difficulty, rows with sampling settings of their own. A run that dies
in the middle and is taken up gives the tokens, metrics and state of one that never did; and speculation changes none of them (law 1)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from respec.config import Config, parse_config
from respec.loop import train
from respec.report.live import PlainView

STEPS = 6
TIMINGS = ("time", "rollout/tokens_per_s", "rollout/speedup")


class Died(Exception):
    """Stands for the end of the process."""


class DyingView(PlainView):
    """Ends the run after a step is recorded, before anything else is saved; keeps what was said."""

    def __init__(self, dies_at: int) -> None:
        super().__init__("", STEPS)
        self.dies_at, self.said = dies_at, list[str]()

    def step(self, step: int, metrics: Mapping[str, float], past: bool = False) -> None:
        if step == self.dies_at and not past:
            raise Died

    def say(self, line: str) -> None:
        self.said.append(line)


def config(folder: Path, data: Path, drafter: str = "suffix") -> Config:
    rows = [
        {
            "prompt": f"{i} + {i % 5} - 2",
            "answer": str(i + i % 5 - 2),
            "temperature": None if i % 2 else 1.2,
            "max_new_tokens": 12 if i % 3 else None,
        }
        for i in range(12)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared: dict[str, Any] = {"template": "{prompt}\n", "answer_pattern": "<answer>(-?\\d+)</answer>", "eval_size": 4}
    few = {"min_terms": 3, "max_terms": 4, "min_digits": 1, "max_digits": 1}
    return parse_config(
        {
            "run": {"dir": str(folder), "steps": STEPS, "threads": 1},
            "model": {"path": "builtin:demo"},
            "task": {
                "difficulty": {"low": 0.1, "high": 0.9},
                "mixture": [
                    {
                        **shared,
                        "name": "sums",
                        "dataset": "chain_sum",
                        "params": few,
                        "template": "{expression}\n",
                        "train_size": 6,
                    },
                    {
                        **shared,
                        "name": "file",
                        "kind": "jsonl",
                        "path": str(data),
                        "sampling_columns": ["temperature", "max_new_tokens"],
                    },
                ],
                "stage": [
                    {"from_step": 1, "weights": {"sums": 3.0, "file": 1.0}},
                    {"from_step": 3, "weights": {"file": 1.0}},
                ],
            },
            "rollout": {"prompts_per_step": 4, "group_size": 3, "max_new_tokens": 24},
            "policy": {"lr": 1e-4},
            "speculation": {"drafter": drafter},
            "eval": {"every": 3, "items": 6},
            "checkpoint": {"every_steps": 2},
        }
    )


def run(settings: Config, dies_at: int = -1) -> list[str]:
    view = DyingView(dies_at)
    try:
        train(settings, view, lambda: False)
    except Died:
        assert dies_at > 0
    return view.said


def recorded(folder: Path) -> tuple[list[dict[str, Any]], list[bytes]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    metrics = [{k: v for k, v in line.items() if not k.startswith(TIMINGS)} for line in lines]
    return metrics, [path.read_bytes() for path in sorted((folder / "rollouts").iterdir())]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data_run")
    run(config(folder / "run", folder / "file.jsonl"))
    return folder


def test_a_run_that_dies_and_goes_on_is_as_if_it_had_not(whole: Path, tmp_path: Path):
    settings = config(tmp_path / "run", whole / "file.jsonl")
    run(settings, dies_at=5)
    said = run(settings)
    assert any("going on from step 4" in line for line in said)
    assert recorded(tmp_path / "run") == recorded(whole / "run")
    kept = [
        load_file(folder / "run" / "checkpoints" / f"{STEPS:06d}" / "optimizer.safetensors")
        for folder in (whole, tmp_path)
    ]
    assert any(name.startswith("supply/order/difficulty/") for name in kept[0])
    assert all((kept[0][name] == kept[1][name]).all() for name in kept[0])


def test_what_a_step_did_is_told_by_task(whole: Path):
    metrics, rollouts = recorded(whole / "run")
    lines = [[json.loads(line) for line in step.decode().splitlines()] for step in rollouts]
    assert [("reward/task/sums" in m, "reward/task/file" in m) for m in metrics[1:]] == [(True, True)] * 2 + [
        (False, True)
    ] * 4
    assert {"eval/task/sums", "eval/task/file"} <= metrics[3].keys() and metrics[3]["eval/items"] == 6
    assert sum(m["data/passed_over"] for m in metrics[1:]) > 0, (
        "some rows were passed over, or this shows nothing of difficulty"
    )
    own = [line["sampling"] for step in lines for line in step if "sampling" in line]
    assert {settings["temperature"] for settings in own} == {1.0, 1.2}
    assert all(
        len(line["tokens"]) <= line.get("sampling", {"max_new_tokens": 24})["max_new_tokens"]
        for step in lines
        for line in step
    )


def test_speculation_changes_nothing_of_it(whole: Path, tmp_path: Path):
    run(config(tmp_path / "run", whole / "file.jsonl", drafter="off"))

    def tokens(folder: Path) -> list[Any]:
        return [
            [(t["row"], t["draw"], t["tokens"], t["reward"]) for t in map(json.loads, step.decode().splitlines())]
            for step in recorded(folder / "run")[1]
        ]

    assert tokens(tmp_path) == tokens(whole)
