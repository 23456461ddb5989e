"""The adaptive server over a vLLM that only speaks the protocol: what it profiles, what it plans with, what it refuses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from respec.config import ModelConfig
from respec.config.reading import parse_config
from respec.config.speculation import SpeculationConfig
from respec.errors import ConfigError
from respec.models.load import load_policy
from respec.remote import planner_for, profiled_context, refuse_unsteered
from respec.rollout.vllm.engine import VllmEngine
from respec.rollout.vllm.process import Worker
from respec.rollout.vllm.worker.wire import Ready, Start
from respec.speculation.pace import PacedController
from respec.types import Ask, Load, Prompt, Sampling, Stream, Version

FAKE = Path(__file__).parent / "rollout" / "vllm" / "fake_worker.py"
START = Start("", 0, "float32", 64, 8, 0, 1, 1, 0.4, False, False, None, True)
AUTO = SpeculationConfig(drafter="auto", s=4)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., VllmEngine]]:
    """Makes an engine with the n-gram look-up; profiles go into a cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tokenizer: Any = load_policy(ModelConfig(path="builtin:demo")).tokenizer
    worker = Worker(sys.executable, tmp_path / "vllm.log", FAKE)
    worker.ask(START, 60.0, Ready)
    yield lambda steered: VllmEngine(worker, tokenizer, (), 0, 0, 30.0, 8, "ngram", 4, steered)
    worker.kill()


def test_auto_profiles_vllm_once_and_drafts_by_the_look_up_that_it_was_started_with(engine):
    made, said = engine(True), []
    planner = planner_for(AUTO, made, 8, 16, ["facts"], said.append)
    assert isinstance(planner, PacedController)
    assert len(said) == 9 and all("ms a step" in line for line in said)
    again: list[str] = []
    planner_for(AUTO, made, 8, 16, ["facts"], again.append)
    assert not again, "the second time it is on disk"
    _, stats = made.rollout([Ask(Prompt(0, "", (1, 2, 3)), Stream.TRAIN, 0, 8)], Sampling(200), planner)
    # all drafts of the fake are accepted, and cost nothing
    assert {record.plan.drafter for record in stats.round_R[2:]} == {"ngram"} and stats.accepted > 0
    assert planner.plan(Load(4, 0, 9.0, (50,) * 4, Version(0))).drafter in ("off", "ngram")


def test_what_vllms_drafts_come_to_is_what_the_server_knows_of_the_drafter_that_it_has(engine, tmp_path):
    made = engine(True)
    made.drafter = "eagle"
    asked = AUTO.model_copy(update={"candidates": ("ngram", "eagle"), "drafter_path": tmp_path / "head"})
    said: list[str] = []
    planner = planner_for(asked, made, 8, 16, ["facts"], said.append)
    assert isinstance(planner, PacedController) and all("vLLM, off" in line or "vLLM, eagle" in line for line in said)
    acceptance = planner.controller.acceptance
    before = acceptance.accept("eagle")[0]
    made.rollout([Ask(Prompt(0, "", (1, 2, 3)), Stream.TRAIN, 0, 8)], Sampling(200), planner)
    # all drafts of the fake are accepted
    assert acceptance.accept("eagle")[0] > max(before, 0.9) and acceptance.effective("eagle") > 20


def test_a_vllm_that_cannot_be_steered_is_refused_with_what_to_set(engine):
    with pytest.raises(ConfigError, match=r"set it to 'ngram'.*'off'"):
        planner_for(AUTO, engine(False), 8, 16, [], lambda line: None)
    tree = {
        "model": {"path": "builtin:demo"},
        "task": {"dataset": "chain_sum"},
        "run": {"compare_plain_every": 2},
        "rollout": {"engine": "vllm"},
    }
    with pytest.raises(ConfigError, match=r"run\.compare_plain_every.*got 2"):
        refuse_unsteered(parse_config(tree), engine(False))
    refuse_unsteered(parse_config(tree), engine(True))
    head = {"speculation": {"drafter": "eagle", "drafter_path": "h"}, "drafter": {"learn": True}, "run": {}}
    with pytest.raises(ConfigError, match=r"drafter\.learn: vLLM cannot leave off"):
        refuse_unsteered(parse_config(tree | head), engine(False))
    refuse_unsteered(parse_config(tree | head), engine(True))


def test_a_profile_of_sequences_that_never_decode_together_is_an_error_that_says_what_to_raise(engine, monkeypatch):
    made = engine(True)
    whole = made.rollout
    monkeypatch.setattr(
        made, "rollout", lambda asks, *rest, **named: whole([Ask(asks[0].prompt, asks[0].stream, 0, 1)], *rest, **named)
    )
    with pytest.raises(ConfigError, match=r"8 sequences of 16 tokens together.*rollout\.vllm\.cache_gib"):
        planner_for(AUTO, made, 8, 16, [], lambda line: None)


def test_the_prompts_of_a_profile_leave_room_for_its_rounds():
    assert profiled_context(longest=300, new_tokens=160, deepest=8) == 180
    assert profiled_context(longest=100, new_tokens=40, deepest=8) == 28
    assert profiled_context(longest=34, new_tokens=24, deepest=8) == 8
