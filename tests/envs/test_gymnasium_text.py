"""Gymnasium as text, against a stand-in with its API (1.x): the package itself is optional."""

from __future__ import annotations

import sys
import types

import pytest

from respec.envs.gymnasium_text import GymnasiumEnv
from respec.errors import TaskError


class Corridor:
    """Five squares; action 1 goes right, 0 left. The fifth is the goal; ten steps are the most."""

    def __init__(self, render_mode: str | None = None) -> None:
        self.action_space = types.SimpleNamespace(n=2, start=0)
        self.spec = types.SimpleNamespace(reward_threshold=0.9)
        self.render_mode = render_mode

    def reset(self, *, seed: int, options=None):
        self.at, self.steps = seed % 2, 0
        return self.at, {}

    def step(self, action):
        self.at, self.steps = max(0, self.at + (1 if action == 1 else -1)), self.steps + 1
        return self.at, float(self.at == 4), self.at == 4, self.steps == 10, {}

    def render(self):
        return "\n" + "." * self.at + "P" + "." * (4 - self.at) + "\n"


@pytest.fixture(autouse=True)
def gymnasium(monkeypatch):
    def make(id, **options):
        if id == "Box-v0":
            env = Corridor()
            env.action_space = types.SimpleNamespace()
            return env
        if id != "Corridor-v0":
            raise ValueError(f"no environment {id}")
        return Corridor(**options)

    module = types.ModuleType("gymnasium")
    module.make = make  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "gymnasium", module)


def test_actions_by_name_and_what_the_environment_draws():
    env = GymnasiumEnv("Corridor-v0", ["left", "right"], {"render_mode": "ansi"}, prompt="Go right.\n", penalty=0.1)
    assert env.reset(1) == "Go right.\n.P..."
    assert env.step("Right") == ("..P..", 0.0, False)
    text, reward, done = env.step("jump")
    assert text.endswith("..P..") and (reward, done) == (-0.1, False)
    env.step("right")
    assert env.step("r") == ("....P", 1.0, True) and env.solved
    assert env.reset(1) == env.reset(3) and not env.solved


def test_without_names_actions_are_their_numbers_and_a_limit_ends_it():
    env = GymnasiumEnv("Corridor-v0")
    assert (env.reset(0), env.actions) == ("0", ("0", "1"))
    assert [env.step("0")[2] for _ in range(10)] == [False] * 9 + [True]
    assert not env.solved


def test_what_cannot_be_is_refused():
    with pytest.raises(TaskError, match=r"cannot make 'Maze-v0': ValueError: no environment Maze-v0"):
        GymnasiumEnv("Maze-v0")
    with pytest.raises(TaskError, match="only discrete"):
        GymnasiumEnv("Box-v0")
    with pytest.raises(TaskError, match=r"has 2 actions, task.params.actions names 3"):
        GymnasiumEnv("Corridor-v0", ["a", "b", "c"])


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(TaskError, match="pip install gymnasium"):
        GymnasiumEnv("Corridor-v0")
