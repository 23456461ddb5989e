from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from respec.config import RewardConfig
from respec.errors import ConfigError
from respec.tasks.reward import RewardWorker
from respec.tasks.scorer import Scorer

REWARDS = """
import asyncio, json

def spy(prompts, completions, completion_ids, **columns):
    with open("seen.jsonl", "a") as file:
        print(json.dumps([prompts, completions, completion_ids, columns]), file=file)
    print("printing is harmless")
    return [float(len(text)) for text in completions]

def length(completions):
    return [len(c) if isinstance(c, str) else len(c[0]["content"]) for c in completions]

def by_level(completions, level):
    return [None if item is None else item for item in level]

async def later(completions, **kwargs):
    await asyncio.sleep(0.001)
    return [0.25 for _ in completions]

class Judge:
    def __call__(self, completions, answer, strictness=2):
        return [strictness * (c == a) for c, a in zip(completions, answer)]

judge = Judge()

def arrays(completions, **kwargs):
    import numpy as np
    return np.arange(len(completions), dtype=np.float32)

def scalars(completions, **kwargs):
    import numpy as np
    return tuple(np.float64(1.5) for _ in completions)

def trainer(completions, trainer_state):
    return [0.0 for _ in completions]

def nothing(completions, **kwargs):
    return [None for _ in completions]

def nothing_too(completions, **kwargs):
    return [None for _ in completions]
"""


@pytest.fixture(autouse=True)
def rewards(here: Path) -> Path:
    (here / "rewards.py").write_text(REWARDS)
    return here


def worker(make: Any, *prompts: Any, **functions: float) -> RewardWorker:
    configs = tuple(RewardConfig(fn=f"rewards:{name}", weight=weight) for name, weight in functions.items())
    return RewardWorker(make.task(*prompts), configs)


def test_text_data_gives_strings_by_keyword_with_every_column(make: Any, rewards: Path):
    prompts = [make.prompt(0, "a", answer="x", level=1), make.prompt(1, "b", answer="y", level=None)]
    rollouts = [make.rollout(prompts[0], "hi"), make.rollout(prompts[1], "there", sample=3)]
    with worker(make, *prompts, spy=1.0) as running:
        scored = running.score(rollouts)
    assert [item.reward for item in scored] == [2.0, 5.0]
    assert [item.rollout for item in scored] == rollouts
    assert scored[0].part == {"rewards:spy": 2.0} and scored[0].fell_back == ()
    assert json.loads((rewards / "seen.jsonl").read_text()) == [
        ["a", "b"],
        ["hi", "there"],
        [rollout.token_T.tolist() for rollout in rollouts],
        {"answer": ["x", "y"], "level": [1, None]},
    ]


def test_chat_data_gives_message_lists(make: Any, rewards: Path):
    asked = ({"role": "system", "content": "S"}, {"role": "user", "content": "hi"})
    begun = (*asked, {"role": "assistant", "content": "We"})
    rollouts = [make.rollout(make.prompt(row, messages=messages), "ll") for row, messages in enumerate((asked, begun))]
    with worker(make, rollouts[0].prompt, spy=1.0, length=10.0) as running:
        scored = running.score(rollouts)
    prompts, completions, _, columns = json.loads((rewards / "seen.jsonl").read_text())
    assert prompts == [list(asked), list(asked)]
    assert completions == [[{"role": "assistant", "content": "ll"}], [{"role": "assistant", "content": "Well"}]]
    assert columns == {}
    assert [item.part["rewards:length"] for item in scored] == [2.0, 4.0]


def test_weights_sum_over_the_parts_that_apply(make: Any):
    prompts = [make.prompt(0, level=0.5), make.prompt(1, level=None)]
    with worker(make, *prompts, length=2.0, by_level=-4.0) as running:
        scored = running.score([make.rollout(prompt, "abc") for prompt in prompts])
    assert [item.reward for item in scored] == [2.0 * 3 - 4.0 * 0.5, 2.0 * 3]
    assert [item.part["rewards:by_level"] for item in scored] == [0.5, None]


def test_where_nothing_applies_the_reward_is_zero_and_said_once(make: Any):
    prompt = make.prompt(7)
    with worker(make, prompt, nothing=1.0, nothing_too=1.0) as running:
        with pytest.warns(UserWarning, match="no reward applies to row 7, draw 0, sample 0"):
            (scored,) = running.score([make.rollout(prompt, "abc")])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            running.score([make.rollout(prompt, "abc")])
    assert scored.reward == 0.0 and set(scored.part.values()) == {None} and scored.fell_back == ()


def test_async_functions_callable_objects_arrays_and_scalars(make: Any):
    prompt = make.prompt(0, answer="yes")
    with worker(make, prompt, later=1.0, judge=1.0, arrays=1.0, scalars=1.0) as running:
        scored = running.score([make.rollout(prompt, "yes"), make.rollout(prompt, "no", sample=1)])
    assert list(scored[0].part.values()) == [0.25, 2.0, 0.0, 1.5]
    assert list(scored[1].part.values()) == [0.25, 0.0, 1.0, 1.5]


def test_built_in_rewards_beside_user_functions_and_each_other(make: Any):
    prompt = make.prompt(0, answer="1/2")
    configs = (RewardConfig(fn="task"), RewardConfig(fn="math"), RewardConfig(fn="task", weight=2.0))
    task = make.task(prompt, scorer=Scorer("answer", r"Answer: (.+)"))
    with RewardWorker(task, configs) as running:
        assert running.names == ("task", "math", "task#2")
        exact, equal, wrong = running.score(
            [make.rollout(prompt, f"Answer: {text}", sample=i) for i, text in enumerate(("1/2", "0.5", "3"))]
        )
    assert (exact.part, exact.reward) == ({"task": 1.0, "math": 1.0, "task#2": 1.0}, 4.0)
    assert (equal.part, equal.reward) == ({"task": 0.0, "math": 1.0, "task#2": 0.0}, 1.0)
    assert wrong.reward == 0.0


def test_a_reasoning_gym_dataset_is_rebuilt_in_the_worker(make: Any):
    prompt = make.prompt(0, question="1 + 1 =", answer="2", metadata={})
    with RewardWorker(make.task(prompt, scorer=Scorer("answer", "", "chain_sum")), (RewardConfig(),)) as running:
        scored = running.score([make.rollout(prompt, text) for text in (" 2.0\n", "3")])
    assert [item.reward for item in scored] == [1.0, 0.0]


def test_no_rollouts_no_rewards(make: Any):
    with worker(make, make.prompt(0), length=1.0) as running:
        assert running.score([]) == ()


def test_closing_twice_and_scoring_again(make: Any):
    prompt = make.prompt(0)
    running = worker(make, prompt, length=1.0)
    assert running.score([make.rollout(prompt, "abc")])[0].reward == 3.0
    running.close()
    running.close()
    assert running.score([make.rollout(prompt, "ab")])[0].reward == 2.0
    running.close()


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        ("length", r"task.reward.fn = 'length' is no reward"),
        ("rewards:lenght", r"has no 'lenght'; did you mean 'length'"),
        ("reward:length", r"there is no module 'reward' in .*did you mean 'rewards'"),
        ("rewards:trainer", r"needs an argument 'trainer_state' .* answer, prompts, completions, completion_ids"),
        ("ends:f", r"setting up ends:f ended its process \(exit code 3\)"),
    ],
)
def test_functions_that_cannot_be_called_are_found_on_entering(make: Any, rewards: Path, fn: str, message: str):
    (rewards / "ends.py").write_text("import os\nos._exit(3)\n")
    with (
        pytest.raises(ConfigError, match=message),
        RewardWorker(make.task(make.prompt(0, answer="x")), (RewardConfig(fn=fn),)),
    ):
        pass


def test_rewards_that_are_not_there(make: Any):
    with pytest.raises(ConfigError, match=r"task.reward is empty"):
        RewardWorker(make.task(), ())


@pytest.mark.parametrize("key", ["weight", "fallback"])
def test_weights_and_fallbacks_are_numbers(key: str):
    with pytest.raises(ValueError, match="finite number"):
        RewardConfig.model_validate({key: float("nan")})


def test_the_worker_imports_nothing_heavy():
    code = "import sys, respec.tasks.worker, respec.tasks.gym, math_verify; print({'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
