"""Tasks that are environments: rows are seeds, a completion is an episode, and the environment gives the rewards."""

from __future__ import annotations

import hashlib
import inspect
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from transformers import PreTrainedTokenizerBase

from respec.config import TaskConfig
from respec.errors import ConfigError, TaskError
from respec.tasks.functions import resolve_function
from respec.tasks.render import Renderer, Row
from respec.tasks.wording import Wording
from respec.types import Answer, Ask, Finish, Prompt, Rollout, ScoredRollout, Shown

ENVIRONMENTS = {
    "bandit": "respec.envs.bandit:Bandit",
    "frozen_lake": "respec.envs.frozen_lake:FrozenLake",
    "sokoban": "respec.envs.sokoban:Sokoban",
    "gymnasium": "respec.envs.gymnasium_text:GymnasiumEnv",
    "tools": "respec.envs.tools:ToolEnv",
}
# Draws in a row that bring no new text before a task is taken to have no more.
PATIENCE = 500
Key = tuple[int, int, int, int]


@dataclass(frozen=True)
class Game:
    """How an environment is made and begun, and what its class promises."""

    make: Callable[[], Any]
    name: str

    def begin(self, seed: int, luck: int) -> tuple[Any, str]:
        """An episode: the environment and its first text."""
        env = self.make()
        lucky = "luck" in inspect.signature(env.reset).parameters
        text = self._called(lambda: env.reset(seed, luck) if lucky else env.reset(seed), f"reset with seed {seed}")
        if not isinstance(text, str):
            raise TaskError(f"environment '{self.name}': reset gave a {type(text).__name__}; it must give a text")
        return env, text

    def step(self, env: Any, said: str) -> tuple[str, float, bool]:
        what = f"step on {said[:80]!r}"
        taken = self._called(lambda: env.step(said), what)
        if not (isinstance(taken, tuple) and len(taken) == 3 and isinstance(taken[0], str)):
            raise TaskError(f"environment '{self.name}': {what} gave {taken!r:.80}; it must give (text, reward, done)")
        reward = float(taken[1])
        if not abs(reward) < float("inf"):
            raise TaskError(f"environment '{self.name}': {what} gave the reward {reward}; it must be finite")
        return taken[0], reward, bool(taken[2])

    def _called(self, call: Callable[[], Any], what: str) -> Any:
        try:
            return call()
        except TaskError:
            raise
        except Exception as error:
            raise TaskError(
                f"environment '{self.name}': {what} raised {type(error).__name__}: {error}; an environment answers any text, "
                "bad actions too"
            ) from error


@dataclass
class _Episode:
    env: Any
    turns: int = 0
    total: float = 0.0


class Episodes:
    """The environments of one rollout, each made when its first turn is heard; see `types.Partner`."""

    def __init__(self, game: Game, wording: Wording, max_turns: int) -> None:
        self._game, self._wording, self._max_turns = game, wording, max_turns
        self._playing: dict[Key, _Episode] = {}

    def answer(self, ask: Ask, sample: int, said: str, finish: Finish) -> Answer:
        seed = ask.prompt.columns["seed"]
        key = (int(ask.stream), ask.prompt.row, ask.draw, sample)
        if key not in self._playing:
            # the samples of a prompt play the same problem, each with dice of its own
            self._playing[key] = _Episode(self._game.begin(seed, derive("luck", *key))[0])
        episode = self._playing[key]
        text, reward, done = self._game.step(episode.env, said)
        episode.turns += 1
        episode.total += reward
        done = done or episode.turns == self._max_turns
        solved = bool(getattr(episode.env, "solved", episode.total >= 1))
        if done:
            del self._playing[key]
        return Answer(() if done else self._wording.heard(text, finish), reward, done, solved)


class EpisodeReward:
    """What the environments gave: a rollout's reward is the sum over its turns. In the place of a `RewardWorker`."""

    names = ("solved", "return")

    def __enter__(self) -> EpisodeReward:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to close."""

    def score(self, rollouts: Sequence[Rollout]) -> tuple[ScoredRollout, ...]:
        scored = []
        for rollout in rollouts:
            assert rollout.turn_reward_K is not None, "the rollout of an environment's task is an episode"
            total = float(rollout.turn_reward_K.sum())
            scored.append(ScoredRollout(rollout, total, {"solved": float(bool(rollout.solved)), "return": total}))
        return tuple(scored)


@dataclass(frozen=True)
class EpisodeRows:
    """What a task needs of an environment: see `Task`."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    solve: Callable[[int], tuple[tuple[Prompt, Shown], ...]]
    episodes: Callable[[], Episodes]


def load_episodes(config: TaskConfig, renderer: Renderer, tokenizer: PreTrainedTokenizerBase) -> EpisodeRows:
    """The rows of an environment: seeds drawn from `config.seed`, held-out ones apart from those for training.

    First texts are told apart as prompts are, but for an environment that is `hidden`. Raises TaskError where there are too few.
    """
    game = game_of(config)
    wording = Wording(config, tokenizer, renderer.chat)
    hidden = bool(getattr(game.make(), "hidden", False))

    def draw(stream: str, count: int, key: str, seen: set[str]) -> list[tuple[int, str]]:
        """Seeds and first texts, none of which is in `seen`; they are added to it."""
        found: list[tuple[int, str]] = []
        fruitless = number = 0
        while len(found) < count:
            seed = derive(str(config.seed), stream, number)
            number += 1
            text = game.begin(seed, 0)[1]
            new = hidden or text not in seen
            fruitless = 0 if new else fruitless + 1
            if new:
                seen.add(text)
                found.append((seed, text))
            if fruitless > PATIENCE:
                raise TaskError(
                    f"{key} asks for {count} problems of environment '{config.env}' that no other row has, and {PATIENCE} seeds in a row gave "
                    f"none after {len(found)}; lower {key}, widen task.params, or give the class `hidden = True` where its first text tells no "
                    "problems apart"
                )
        return found

    def prompts(rows: Sequence[tuple[int, str]], first_row: int) -> tuple[Prompt, ...]:
        named = [Row(text, {"seed": seed}, {"seed": seed}, f"seed {seed} of '{config.env}'") for seed, text in rows]
        return renderer.prompts([renderer.render(row) for row in named], first_row)

    taken: set[str] = set()
    held = draw("held-out", config.eval_size, "task.eval_size", taken)
    train = draw("train", config.train_size, "task.train_size", taken)
    known = len(train) + len(held)

    def solve(n: int) -> tuple[tuple[Prompt, Shown], ...]:
        starts = prompts(draw("worked", n, "warmup.train_size", set(taken)), known)
        return tuple((start, shown(game, start, wording, config)) for start in starts)

    return EpisodeRows(
        prompts(train, 0), prompts(held, len(train)), solve, lambda: Episodes(game, wording, config.max_turns)
    )


def shown(game: Game, start: Prompt, wording: Wording, config: TaskConfig) -> Shown:
    """An episode of the scripted solver, of which a policy is to learn the turns.

    A share `config.solver_noise` of its actions is drawn from all actions instead, so that a policy learns how to write and something
    of how to play, and has room to find the rest.
    """
    seed = start.columns["seed"]
    env, _ = game.begin(seed, derive("worked", seed))
    if not (hasattr(env, "solve") and hasattr(env, "actions")):
        raise TaskError(
            f"environment '{game.name}' has no scripted solver to warm up on: give its class `actions` and `solve()`, or set warmup.steps = 0"
        )
    dice = random.Random(f"solver {seed}")
    tokens, own, turns = list[int](), list[bool](), 0
    while True:
        stray = dice.random() < config.solver_noise
        said = dice.choice(list(env.actions)) if stray else env.solve()
        text, _, done = game.step(env, said)
        turns += 1
        tokens += (turn := wording.said(said))
        own += [True] * len(turn)
        if done or turns == config.max_turns:
            return Shown(tuple(tokens), tuple(own))
        tokens += (heard := wording.heard(text, "eos"))
        own += [False] * len(heard)


def game_of(config: TaskConfig) -> Game:
    """The environment that `task.env` names, with `task.params`. Raises ConfigError for a bad name or bad parameters."""
    spec = ENVIRONMENTS.get(config.env, config.env)
    if ":" not in spec:
        raise ConfigError(
            f"task.env: there is no environment '{config.env}'; it is one of {', '.join(ENVIRONMENTS)}, or 'module:Class' of your own"
        )
    make = resolve_function(spec, "task.env")
    try:
        inspect.signature(make).bind(**config.params)
    except TypeError as error:
        known = ", ".join(inspect.signature(make).parameters)
        raise ConfigError(f"task.params do not fit environment '{config.env}': {error}; it takes {known}") from None
    params: Mapping[str, Any] = config.params
    game = Game(lambda: make(**params), config.env)
    for method in ("reset", "step"):
        if not callable(getattr(game.make(), method, None)):
            raise ConfigError(f"task.env = '{config.env}': it has no method '{method}'; see respec.envs.protocol")
    return game


def derive(*parts: str | int) -> int:
    """A seed far from its neighbours'."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
