"""Configurations: what is read, and a clear refusal for everything a user can get wrong in one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from respec.config import Config, load_config, parse_config
from respec.errors import ConfigError
from respec.types import PLAIN, Plan, Sampling

LEAST = """
[model]
path = "builtin:demo"
[task]
dataset = "chain_sum"
"""

# What was written, as an override; and what the message must say, each part a regular expression.
MISTAKES = {
    "unknown section": ("polcy.lr=1e-4", r"polcy: there is no such key; did you mean 'policy'"),
    "unknown key": ("report.plots=true", r"report\.plots: there is no such key; known here: .*rollout_every"),
    "misspelt key": ("rollout.groupsize=4", r"rollout\.groupsize: .*did you mean 'group_size'"),
    "not a number": ("policy.lr=nan", r"policy\.lr: ", r"got nan"),
    "no finite number": ("rollout.temperature=inf", r"rollout\.temperature: ", r"got inf"),
    "reward of no number": ("task.reward=[{ fallback = nan }]", r"fallback: .*finite number"),
    "misspelt key of a reward": ("task.reward=[{ fn = 'task', wieght = 2 }]", r"wieght.*did you mean 'weight'"),
    "text for a number": ("run.steps=many", r"run\.steps: .*integer", r"got 'many'"),
    "fraction for a whole number": ("run.steps=1.5", r"run\.steps: .*integer", r"got 1\.5"),
    "number for a text": ("model.path=3", r"model\.path: .*string", r"got 3"),
    "number for a section": ("policy=3", r"policy: ", r"got 3"),
    "table for a number": ("run.steps={ a = 1 }", r"run\.steps: .*integer"),
    "text for a yes or no": ("report.tensorboard=perhaps", r"tracking\.to", r"boolean.*got 'perhaps'"),
    "one text for several": ("rollout.stop=END", r"rollout\.stop: ", r"got 'END'"),
    "negative steps": ("run.steps=-1", r"run\.steps: .*greater than or equal to 0", r"got -1"),
    "zero learning rate": ("policy.lr=0", r"policy\.lr: .*greater than 0", r"got 0"),
    "top_p past one": ("rollout.top_p=1.5", r"rollout\.top_p: .*less than or equal to 1", r"got 1\.5"),
    "top_p of nothing": ("rollout.top_p=0", r"rollout\.top_p: .*greater than 0", r"got 0"),
    "min_p of all": ("rollout.min_p=1", r"rollout\.min_p: .*less than 1", r"got 1"),
    "empty group": ("rollout.group_size=0", r"rollout\.group_size: .*greater than or equal to 1"),
    "negative temperature": ("eval.temperature=-0.1", r"eval\.temperature: .*greater than or equal to 0"),
    "no checkpoints kept": ("checkpoint.keep=0", r"checkpoint\.keep: .*greater than or equal to 1"),
    "draft too long": ("speculation.s=65", r"speculation\.s: .*less than or equal to 64"),
    "no time for a reward": ("task.reward=[{ timeout_s = 0 }]", r"timeout_s: .*greater than 0"),
    "unknown algorithm": ("policy.algorithm=ppq", r"policy\.algorithm: .*'grpo'.*'rloo'", r"got 'ppq'"),
    "unknown drafter": ("speculation.drafter=oracle", r"speculation\.drafter: .*'suffix'", r"got 'oracle'"),
    "unknown kind of task": ("task.kind=csv", r"task\.kind: .*'jsonl'", r"got 'csv'"),
    "unknown dtype": ("model.dtype=float16", r"model\.dtype: .*'bfloat16'", r"got 'float16'"),
    "unknown device": ("model.device=tpu", r"model\.device: .*'cuda'", r"got 'tpu'"),
    "no dataset": ("task.dataset=''", r"task\.dataset is empty; name a reasoning-gym dataset"),
    "no file": ("task.kind=jsonl", r"task\.path is empty; .*JSON-lines file"),
    "override without a value": ("policy.lr", r"--set takes section\.key=value.*got 'policy\.lr'"),
    "override without a key": ("=3", r"--set takes section\.key=value.*got '=3'"),
    "override with half a key": ("policy.=3", r"--set takes section\.key=value.*got 'policy\.=3'"),
    "override below a value": ("model.path.name=x", r"--set model\.path\.name: 'path' is a value, not a section"),
}


@pytest.fixture
def least(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(LEAST)
    return path


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named(least: Path, mistake: str) -> None:
    override, *said = MISTAKES[mistake]
    with pytest.raises(ConfigError) as caught:
        load_config(least, (override,))
    for pattern in said:
        assert re.search(pattern, str(caught.value), re.DOTALL), str(caught.value)


def test_a_mistake_in_the_file_names_the_file(least: Path) -> None:
    least.write_text(LEAST + "[polcy]\nlr = 1.0\n")
    with pytest.raises(ConfigError, match=r"run\.toml:\n  polcy: .*did you mean 'policy'"):
        load_config(least)


def test_all_mistakes_are_told_at_once(least: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(least, ("run.steps=-1", "policy.lr=fast", "evl.every=2"))
    assert all(where in str(caught.value) for where in ("run.steps", "policy.lr", "evl"))


def test_a_missing_key_is_named(least: Path) -> None:
    least.write_text('[task]\ndataset = "chain_sum"\n')
    with pytest.raises(ConfigError, match="model: is missing and has no default"):
        load_config(least)
    least.write_text('[model]\n[task]\ndataset = "chain_sum"\n')
    with pytest.raises(ConfigError, match=r"model\.path: is missing and has no default"):
        load_config(least)


def test_a_missing_file_says_where_to_begin(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no configuration file at '.*absent\.toml'; see examples/"):
        load_config(tmp_path / "absent.toml")


def test_a_folder_is_not_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as a configuration"):
        load_config(tmp_path)


def test_what_is_no_text_is_refused(least: Path) -> None:
    least.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read as a configuration"):
        load_config(least)


def test_bad_toml_says_where(least: Path) -> None:
    least.write_text(LEAST + "oops = \n")
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 6"):
        load_config(least)


def test_overrides_are_toml_or_bare_words(least: Path) -> None:
    config = load_config(
        least,
        (
            "policy.lr=1e-5", "run.dir=runs/with space", "rollout.stop=['a', 'b']", "task.params={ min_terms = 3 }",
            "model.trust_remote_code=true", "policy.algorithm = rloo", 'task.template="{prompt}=\\n"',
        ),
    )  # fmt: skip
    assert config.policy.lr == 1e-5 and config.policy.algorithm == "rloo"
    assert config.run.dir == Path("runs/with space")
    assert config.rollout.stop == ("a", "b") and config.task.params == {"min_terms": 3}
    assert config.model.trust_remote_code is True and config.task.template == "{prompt}=\n"


def test_a_later_override_wins(least: Path) -> None:
    assert load_config(least, ("run.steps=1", "run.steps=2")).run.steps == 2


def test_settings_cannot_be_changed(least: Path) -> None:
    config = load_config(least)
    with pytest.raises(ValueError, match="frozen"):
        config.run.steps = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_sampling_and_plan_come_from_their_sections(least: Path) -> None:
    config = load_config(
        least, ("rollout.max_new_tokens=9", "rollout.min_p=0.1", "eval.top_k=5", r'rollout.stop=["\n"]')
    )
    assert config.rollout.sampling() == Sampling(9, 1.0, 0, 1.0, 0.1, ("\n",))
    assert config.eval_sampling() == Sampling(9, 0.0, 5, 1.0, 0.0, ("\n",))
    assert config.speculation.drafter == "auto" and config.speculation.plan() == PLAIN
    static = load_config(least, ("speculation.drafter=suffix", "speculation.s=6"))
    assert static.speculation.plan() == Plan("suffix", 6, 1, 6)
    tree = load_config(least, ("speculation.drafter=suffix", "speculation.s=6", "speculation.t=3", "speculation.n=16"))
    assert tree.speculation.plan() == Plan("suffix", 6, 3, 16)
    assert load_config(least, ("speculation.drafter=off",)).speculation.plan() == PLAIN


@pytest.mark.parametrize("drafter", ["auto", "off", "suffix", "ngram"])
def test_mode_lossy_is_for_the_previous_drafter_alone(least: Path, drafter: str) -> None:
    with pytest.raises(
        ConfigError, match=f"'previous' alone proposes, got drafter '{drafter}'; set speculation.drafter"
    ):
        load_config(least, ("speculation.mode=lossy", f"speculation.drafter={drafter}"))


def test_mode_lossy_has_a_lenience_of_at_least_one_and_keeps_all_rollouts(least: Path) -> None:
    lossy = ("speculation.mode=lossy", "speculation.drafter=previous")
    assert load_config(least, lossy).speculation.lenience == 1.3
    with pytest.raises(ConfigError, match=r"speculation\.lenience: .*greater than or equal to 1 \(got 0\.9\)"):
        load_config(least, (*lossy, "speculation.lenience=0.9"))
    for thinned in ("report.rollouts_per_step=4", "report.rollout_every=2"):
        with pytest.raises(ConfigError, match="keeps some of them only; leave out"):
            load_config(least, (*lossy, thinned))
        load_config(least, (thinned,))


def test_a_learner_beside_generation_is_for_matching_alone(least: Path) -> None:
    asked = ("speculation.drafter=eagle", "speculation.drafter_path=h", "drafter.learn=true", "drafter.async_steps=1")
    assert load_config(least, asked).drafter.async_steps == 1
    with pytest.raises(ConfigError, match=r"'matching' alone, got 'rejection'.*set drafter.async_steps = 0"):
        load_config(least, (*asked, "speculation.mode=rejection"))
    load_config(least, (*asked[:3], "speculation.mode=rejection"))


def test_a_head_does_not_learn_from_a_policy_that_the_engine_has_not_got(least: Path) -> None:
    asked = ("speculation.drafter=eagle", "speculation.drafter_path=h", "rollout.sync_every=4")
    assert load_config(least, asked).rollout.sync_every == 4
    with pytest.raises(ConfigError, match=r"rollout.sync_every 4.*set rollout.sync_every = 1"):
        load_config(least, (*asked, "drafter.learn=true"))


def test_what_is_written_down_reads_back_the_same(least: Path) -> None:
    config = load_config(least, ("run.dir=a/b", "warmup.save_to=m", "task.reward=[{ fn = 'math', fallback = 0.5 }]"))
    assert parse_config(config.model_dump(mode="json")) == config


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[1] / "examples").glob("*.toml")), ids=lambda p: p.name)
def test_the_examples_are_valid(path: Path) -> None:
    assert isinstance(load_config(path), Config)
