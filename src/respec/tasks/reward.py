"""Rewards, in a worker process and under a time limit: a failing one names itself and its sample, and never passes silently."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NoReturn

from respec.config import RewardConfig
from respec.errors import ConfigError, RewardError
from respec.tasks.episodes import EpisodeReward
from respec.tasks.process import WorkerLost, WorkerProcess, WorkerRaised
from respec.tasks.scorer import BUILT_IN
from respec.tasks.task import Task
from respec.tasks.worker import Outcome, RewardCall
from respec.types import Rollout, ScoredRollout

_START_LIMIT_S = 300.0
"""Seconds for importing the user's modules and what the built-in rewards need."""
_MAX_HANGS = 4
"""Single completions that may run into the limit in one call before the rest is taken to hang as well."""


@dataclass(frozen=True)
class _Failure:
    """A call that gave no values. `text` reads on from the function's name."""

    text: str
    hung: bool = False


class RewardWorker:
    """Scores rollouts by the configured rewards, all in one worker process. A context manager.

    User functions have TRL's form: called by keyword with `prompts`, `completions`, `completion_ids` and every column of the
    rows (those that the signature takes, if it has no **kwargs), returning one number or None for each completion. Text
    data gives strings, chat data message lists; the data decides, not the tokenizer. Async functions are awaited.

    `reward` is the sum of weight x value over the parts that are not None. Where all are None it is 0, as in TRL, and a
    warning is given once.

    Entering raises ConfigError for a function that does not exist or asks for arguments that there are not.
    """

    def __init__(self, task: Task, configs: tuple[RewardConfig, ...]) -> None:
        if not configs:
            raise ConfigError("task.reward is empty; name at least one reward, for example fn = 'task'")
        for config in configs:
            if config.fn not in BUILT_IN and ":" not in config.fn:
                raise ConfigError(
                    f"task.reward.fn = '{config.fn}' is no reward; it is 'task' (the dataset's own scorer), 'math' "
                    "(math-verify), or 'module:function'"
                )
        self.names = _distinct_names(configs)
        self._configs = configs
        self._scorer = task.scorer
        prompts = task.train or task.held_out
        self._columns = tuple(prompts[0].columns) if prompts else ()
        self._calls: list[RewardCall] = []
        self._process: WorkerProcess | None = None
        self._handed_over = False
        self._warned = False

    def __enter__(self) -> RewardWorker:
        self._running()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker. Scoring again starts another."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def score(self, rollouts: Sequence[Rollout]) -> tuple[ScoredRollout, ...]:
        """Rewards of rollouts, in their order. Raises RewardError for a reward that fails and has no fallback value."""
        if not rollouts:
            return ()
        self._calls = [_call_of(rollout) for rollout in rollouts]
        self._handed_over = False
        outcomes = [self._outcomes(which, rollouts) for which in range(len(self._configs))]
        return tuple(
            self._scored(rollout, [part[index] for part in outcomes]) for index, rollout in enumerate(rollouts)
        )

    def _scored(self, rollout: Rollout, outcomes: Sequence[Outcome]) -> ScoredRollout:
        values = [
            config.fallback if problem else value
            for config, (value, problem) in zip(self._configs, outcomes, strict=True)
        ]
        applicable = [
            config.weight * value for config, value in zip(self._configs, values, strict=True) if value is not None
        ]
        if not applicable and not self._warned:
            self._warned = True
            warnings.warn(
                f"no reward applies to {_sample_of(rollout)}: all returned None. Its reward is 0; this is said once",
                stacklevel=3,
            )
        fell_back = tuple(name for name, (_, problem) in zip(self.names, outcomes, strict=True) if problem)
        return ScoredRollout(rollout, sum(applicable, 0.0), dict(zip(self.names, values, strict=True)), fell_back)

    def _outcomes(self, which: int, rollouts: Sequence[Rollout]) -> list[Outcome]:
        everyone = list(range(len(rollouts)))
        outcomes = self._ask(which, everyone)
        if isinstance(outcomes, _Failure):
            outcomes = self._isolate(which, rollouts, outcomes)
        if self._configs[which].fallback is None:
            for rollout, (_, problem) in zip(rollouts, outcomes, strict=True):
                if problem:
                    self._fail(which, f"{problem} on {_sample_of(rollout)}")
        return outcomes

    def _isolate(self, which: int, rollouts: Sequence[Rollout], whole: _Failure) -> list[Outcome]:
        """Finds the samples that make a call fail, by calling with each alone; scores the others together again.

        Together, because a function may compare the completions it is given; not so a built-in, whose values alone stand.
        If no sample fails alone the whole batch is to blame. Without a fallback value the first failing sample raises.
        """
        strict = self._configs[which].fallback is None
        built_in = self._configs[which].fn in BUILT_IN
        if len(rollouts) == 1:
            return [(None, whole.text)]
        problems: dict[int, str] = {}
        passed: dict[int, Outcome] = {}
        hangs = 0
        for index, rollout in enumerate(rollouts):
            if hangs >= _MAX_HANGS:
                problems[index] = f"was not tried again after {hangs} completions over the time limit"
                continue
            alone = self._ask(which, [index])
            if isinstance(alone, _Failure):
                if strict:
                    self._fail(which, f"{alone.text} on {_sample_of(rollout)}")
                problems[index] = alone.text
                hangs += alone.hung
            else:
                passed[index] = alone[0]
        if not problems and not built_in:
            if strict:
                slow = "; each completion alone passed" + (": raise timeout_s" if whole.hung else "")
                first = _sample_of(rollouts[0])
                self._fail(which, f"{whole.text} on the {len(rollouts)} completions that begin with {first}{slow}")
            return [(None, whole.text)] * len(rollouts)
        if passed and not built_in:
            again = self._ask(which, list(passed))
            if isinstance(again, _Failure):
                return [(None, problems.get(index, again.text)) for index in range(len(rollouts))]
            passed = dict(zip(passed, again, strict=True))
        return [passed.get(index) or (None, problems[index]) for index in range(len(rollouts))]

    def _ask(self, which: int, indices: list[int]) -> list[Outcome] | _Failure:
        try:
            process = self._running()
            if not self._handed_over:
                process.ask("batch", self._calls, _START_LIMIT_S)
                self._handed_over = True
            return process.ask("score", (which, indices), self._configs[which].timeout_s)
        except WorkerRaised as error:
            return _Failure(str(error))
        except WorkerLost as error:
            return _Failure(str(error), error.hung)

    def _running(self) -> WorkerProcess:
        """The worker; started and set up if there is none alive."""
        if self._process is None or not self._process.alive:
            process = WorkerProcess()
            names = [config.fn for config in self._configs]
            try:
                process.ask("rewards", (self._scorer, names, self._columns), _START_LIMIT_S)
            except (WorkerLost, WorkerRaised) as error:
                process.kill()
                raise ConfigError(
                    f"task.reward: setting up {', '.join(names)} {error}; a module must import without ending its process"
                ) from error
            except BaseException:
                process.kill()
                raise
            self._process = process
            self._handed_over = False
        return self._process

    def _fail(self, which: int, text: str) -> NoReturn:
        raise RewardError(
            f"reward '{self.names[which]}' {text}. Mend the function, or give its entry in task.reward a `fallback` value"
        )


def rewards_of(task: Task, configs: tuple[RewardConfig, ...]) -> RewardWorker | EpisodeReward:
    """Who scores a task's rollouts: its environments, or a worker with the configured rewards."""
    return EpisodeReward() if task.episodes is not None else RewardWorker(task, configs)


def _call_of(rollout: Rollout) -> RewardCall:
    """What reward functions see of a rollout, in TRL's forms."""
    prompt, token_ids = rollout.prompt, [int(token) for token in rollout.token_T]
    if prompt.messages is None:
        return RewardCall(prompt.text, rollout.text, rollout.text, token_ids, dict(prompt.columns))
    messages = [dict(message) for message in prompt.messages]
    # A beginning of the answer that the prompt gave is shown with the completion.
    beginning = messages.pop()["content"] if messages[-1]["role"] == "assistant" else ""
    completion = [{"role": "assistant", "content": beginning + rollout.text}]
    return RewardCall(messages, completion, rollout.text, token_ids, dict(prompt.columns))


def _sample_of(rollout: Rollout) -> str:
    return (
        f"row {rollout.prompt.row}, draw {rollout.draw}, sample {rollout.sample}, completion {rollout.text[:80]!r}"
        + ("..." if len(rollout.text) > 80 else "")
    )


def _distinct_names(configs: Sequence[RewardConfig]) -> tuple[str, ...]:
    """The functions' names; one that is configured again gets '#2', '#3' and so on."""
    seen: dict[str, int] = {}
    names = []
    for config in configs:
        seen[config.fn] = seen.get(config.fn, 0) + 1
        names.append(config.fn if seen[config.fn] == 1 else f"{config.fn}#{seen[config.fn]}")
    return tuple(names)
