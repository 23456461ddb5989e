"""The entropy gate: models in the order of their entropy, and a warning for one that is nearly certain."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from typer.testing import CliRunner

from respec.cli import app
from respec.config import ModelConfig, load_config
from respec.entropy import probe, warnings
from respec.loop import train
from respec.models.load import load_policy
from respec.report.live import PlainView
from respec.types import EvalResult

DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"
SMALL = ("task.train_size=8", "task.eval_size=8", "run.threads=1", "rollout.max_new_tokens=48")


def words(*sets: str) -> list[str]:
    return [word for item in (*SMALL, *sets) for word in ("--set", item)]


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with its logits times four."""
    folder = tmp_path_factory.mktemp("models") / "sharp"
    policy = load_policy(ModelConfig(path="builtin:demo"))
    with torch.no_grad():
        policy.model.get_parameter("model.norm.weight").mul_(4)
    policy.model.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)
    return folder


def test_models_are_ranked_by_entropy_and_the_certain_one_is_warned_of(sharp: Path) -> None:
    asked = ["--config", str(DEMO), "--items", "8", "--floor", "0.14", *words()]
    done = CliRunner().invoke(app, ["entropy", str(sharp), "builtin:demo", *asked])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    first, second = (next(line for line in lines if line.startswith(f" {place} ")) for place in (1, 2))
    assert "builtin:demo" in first and "builtin:demo" not in second
    assert float(first.split()[2]) > 0.14 > float(second.split()[2]) > 0
    warned = [line for line in lines if line.startswith("warning:")]
    assert len(warned) == 1 and str(sharp) in warned[0] and "under the floor of 0.14" in warned[0]


def test_the_warning_is_at_the_floor() -> None:
    result = EvalResult(0.5, 0.1, 8, 20.0, 0.2, (), 1.0)
    assert warnings("it", result, 0.2) == []
    (line,) = warnings("it", result, 0.21)
    assert line.startswith("it: its entropy is 0.2000 nats a token, under the floor of 0.21")


def test_a_warm_up_within_a_run_is_looked_at(tmp_path: Path) -> None:
    lines: list[str] = []
    sets = (*SMALL, "warmup.steps=1", "warmup.batch_size=2", "warmup.train_size=4", "run.steps=0", "eval.final_items=2")
    config = load_config(DEMO, (*sets, "warmup.entropy_floor=9.0", f"run.dir='{tmp_path / 'run'}'"))
    train(config, PlainView("run", 0, lines.append), stop=lambda: False)
    assert sum("the warmed-up policy: its entropy is" in line for line in lines) == 1
    start = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert 0 < start["warmup/entropy"] < 9
    for other in ("warmup.entropy_floor=0", "warmup.steps=0"):
        unasked = SimpleNamespace(config=load_config(DEMO, (*sets, "warmup.entropy_floor=9.0", other)))
        assert probe(cast(Any, unasked)) is None


def test_a_warm_up_leaves_candidates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("respec.standalone.evaluate_alone", lambda *_: EvalResult(0.5, 0.1, 8, 20.0, 0.2, (), 1.0))
    sets = words("warmup.steps=5", "warmup.batch_size=2", "warmup.train_size=4")
    done = CliRunner().invoke(app, ["warmup", str(DEMO), "--to", str(tmp_path / "w"), "--checkpoints", "3", *sets])
    assert done.exit_code == 0, done.output
    saved = sorted(path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("model.safetensors"))
    assert saved == ["w", "w/step-000001", "w/step-000003"]
