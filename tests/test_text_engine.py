"""The engine for other programs: the rollout engine's own tokens, streamed as whole, alone as in a crowd; and the examples run."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from respec.config import ModelConfig
from respec.errors import CacheError, CheckpointError, ConfigError, TaskError
from respec.models.load import load_policy
from respec.rollout.engine import Engine as RolloutEngine
from respec.rollout.kv_cache import bytes_of
from respec.text_engine import Engine
from respec.types import Ask, Prompt, Rollout, Sampling, Stream
from respec.weights.publish import publish

ROOT = Path(__file__).parents[1]
PROMPTS = ("3 + 4 - 2\n", "8 - 5 + 1 + 2\n", "9\n", "1 + 1\n")
SAMPLING = Sampling(max_new_tokens=60, temperature=1.0)
PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def policy():
    return load_policy(ModelConfig(path="builtin:demo"))


@pytest.fixture(scope="module")
def engine(policy) -> Engine:
    return Engine(policy, speculation="suffix", max_batch=4, max_length=256, chat_template=PLAIN_CHAT)


def same(one: Rollout, other: Rollout) -> bool:
    fields = ("token_T", "logprob_T", "entropy_T")
    return one.text == other.text and all(np.array_equal(getattr(one, f), getattr(other, f)) for f in fields)


def test_it_draws_what_the_rollout_engine_draws_without_speculation(policy, engine):
    """Law 1, through the whole of it; more completions than places."""
    prompts = [Prompt(i, text, tuple(policy.tokenizer(text)["input_ids"])) for i, text in enumerate(PROMPTS)]
    plain = RolloutEngine(publish(policy, "auto", 0), policy.tokenizer, policy.eos_token_ids, 5, 16)
    expected, _ = plain.rollout([Ask(prompt, Stream.BENCH, 0, 3) for prompt in prompts], SAMPLING)
    drawn = engine.generate(PROMPTS, SAMPLING, n=3, seed=5)
    assert [r.key for r in drawn] == [r.key for r in expected] and not engine.busy
    assert all(map(same, drawn, expected)) and any((r.proposer_T > 0).any() for r in drawn)


def test_a_budget_of_the_cache_holds_and_changes_no_token(policy, engine):
    """Of the 8 sequences asked for, two have room; it is known before anything is drawn."""
    shape = publish(policy, "auto", 0).shape
    one = bytes_of(shape, 256 + 64)
    bound = Engine(policy, speculation="suffix", max_batch=8, max_length=256, kv_cache_mb=2.5 * one / 2**20)
    assert bound.max_batch == 2
    expected, drawn = (each.generate(PROMPTS, SAMPLING, n=3, seed=5) for each in (engine, bound))
    assert all(map(same, drawn, expected))
    session = bound._session
    assert session is not None
    cache = session.target.cache
    assert sum(x.nbytes for x in (*cache.keys, *cache.values)) <= 2.5 * one
    with pytest.raises(CacheError, match="a single sequence of 320 tokens"):
        Engine(policy, speculation="suffix", max_length=256, kv_cache_mb=0.5 * one / 2**20)


def test_streaming_gives_the_same_tokens_log_probabilities_and_text(engine):
    sampling = [Sampling(60, stop=("=", "ving")), Sampling(60, 0.0), Sampling(5), Sampling(60, 0.7, top_p=0.9)]
    whole = engine.generate(PROMPTS, sampling, n=2, seed=3)
    deltas = list(engine.stream(PROMPTS, sampling, n=2, seed=3))
    assert len(deltas) > 40 and any(rollout.finish == "stop" for rollout in whole)
    for rollout in whole:
        own = [d for d in deltas if (d.prompt, d.sample) == (rollout.prompt.row, rollout.sample)]
        assert [t for d in own for t in d.token_T] == rollout.token_T.tolist()
        assert np.array_equal(np.array([p for d in own for p in d.logprob_T], np.float32), rollout.logprob_T)
        assert "".join(d.text for d in own) == rollout.text
        assert [d.finish for d in own] == [None] * (len(own) - 1) + [rollout.finish]


def test_a_prompt_with_its_own_seed_is_answered_in_a_crowd_as_alone(engine):
    """Others join and leave while it is under way; one of them is cancelled."""
    (alone,) = engine.generate([PROMPTS[1]], SAMPLING, seed=[11])
    (first,) = engine.submit(PROMPTS[0], Sampling(90), seed=1)
    for _ in range(3):
        engine.step()
    (ours,) = engine.submit(PROMPTS[1], SAMPLING, seed=11)
    for number in range(6):
        engine.submit(PROMPTS[number % 4], Sampling(7 + number, 0.8), seed=number)
        engine.step()
    engine.cancel(first)
    while not ours.done:
        engine.step()
    assert same(ours.rollout, alone)
    while engine.busy:
        engine.step()
    assert not first.done


def test_closing_a_stream_leaves_nothing_under_way(engine):
    stream = engine.stream(PROMPTS * 3, SAMPLING)
    next(stream)
    assert engine.busy
    stream.close()
    assert not engine.busy and engine.step() == []


def test_text_tokens_and_chat_are_the_same_prompt(engine):
    tokens = engine.tokenizer(PROMPTS[0])["input_ids"]
    chat = [{"role": "user", "content": PROMPTS[0]}]
    drawn = [engine.generate([prompt], SAMPLING, seed=4)[0] for prompt in (PROMPTS[0], tokens, chat)]
    assert same(drawn[0], drawn[1]) and same(drawn[0], drawn[2])
    assert same(drawn[0], engine.generate(PROMPTS[0], SAMPLING, seed=4)[0])


def test_newer_weights_draw_from_the_next_round_on(policy):
    engine = Engine(policy, speculation="ngram", max_batch=2, max_length=128)
    (under_way,) = engine.submit(PROMPTS[0], Sampling(40), seed=2)
    engine.step()
    engine.renew(policy, 3)
    while engine.busy:
        engine.step()
    versions = under_way.rollout.version_T.tolist()
    assert set(versions) == {0, 3} and versions == sorted(versions) and engine.version == 3
    assert same(under_way.rollout, engine.generate([PROMPTS[0]], Sampling(40), seed=[2])[0]), (
        "the weights were the same"
    )


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ("", SAMPLING, "has no tokens"),
        ("1 + 1\n", Sampling(4000), "leaves room for"),
        ([9_999_999], SAMPLING, "not all of the model's vocabulary"),
        (["a", "b"], SAMPLING, "a prompt is text"),
        ("1", Sampling(4, temperature=-1.0), "temperature must be"),
        ("1", Sampling(4, top_p=0.0), "top_p must be"),
        ("1", Sampling(4, stop=("",)), "must not be empty"),
    ],
)
def test_what_cannot_be_drawn_is_said_and_leaves_nothing(engine, prompt, sampling, said):
    with pytest.raises((TaskError, ConfigError), match=said):
        engine.generate([PROMPTS[0], prompt], [SAMPLING, sampling])
    assert not engine.busy


def test_what_cannot_be_opened_is_said(policy, tmp_path):
    with pytest.raises(ConfigError, match="cannot be had"):
        Engine(policy, speculation="oracle")
    with pytest.raises(TaskError, match="need a chat template"):
        Engine(policy, speculation="off").generate([[{"role": "user", "content": "1"}]])
    (tmp_path / "config.toml").touch()
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        Engine(tmp_path)


def test_importing_respec_is_quick():
    heavy = "import sys, respec; sys.exit(bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", heavy], check=False).returncode == 0


def test_every_name_that_is_offered_can_be_had():
    import respec

    assert all(getattr(respec, name) is not None for name in respec.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        _ = respec.Engin  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ("engine", "ended by eos"),
        ("controller", "1 sequences: Plan(drafter='ngram'"),
        ("losses", "gspo: loss"),
        ("drafter_learner", "overlap with the policy"),
    ],
)
def test_the_examples_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], example: str, said: str):
    monkeypatch.setattr(sys, "argv", [f"{example}.py"])
    runpy.run_path(str(ROOT / "examples" / f"{example}.py"), run_name="__main__")
    assert said in capsys.readouterr().out
