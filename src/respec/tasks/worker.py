"""The worker process: makes reasoning-gym rows and runs reward functions. Imports neither torch nor transformers, to start
fast; a user's own module is imported when its rewards are set up.

Requests come in one by one over the standard input, as pickled (kind, payload); each is answered with (status, value): status
`ok`, `raised`, or the name of the RespecError to raise in the parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from respec.errors import ConfigError, RespecError
from respec.tasks.functions import resolve_function
from respec.tasks.scorer import BUILT_IN, Scorer

ALWAYS = ("prompts", "completions", "completion_ids")
"""What every reward function is given by keyword, besides the columns; as in TRL."""

_GRACE_S = 2.0


@dataclass(frozen=True)
class RewardCall:
    """One completion as a reward function sees it. `prompt` and `completion` are text, or message lists for chat data."""

    prompt: Any
    completion: Any
    text: str
    token_ids: list[int]
    columns: Mapping[str, Any]


Outcome = tuple[float | None, str]
"""A sample's value (None: not applicable) and what is wrong with it (empty: nothing)."""


class _Unusable(Exception):
    """A reward function returned something that is not one value for each completion."""


@dataclass
class _State:
    """What requests leave behind for later ones."""

    functions: list[Callable[[Sequence[RewardCall]], Any]] = field(default_factory=list)
    batch: Sequence[RewardCall] = ()
    dataset: Any = None


def main() -> None:
    """Serves requests until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    source, sink = _claim_streams()
    requests: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(source, requests), daemon=True).start()
    state = _State()
    with contextlib.suppress(BrokenPipeError):  # the parent went while a function ran
        while (request := requests.get()) is not None:
            pickle.dump(_answer(state, *request), sink, protocol=pickle.HIGHEST_PROTOCOL)
            sink.flush()


def _claim_streams() -> tuple[BinaryIO, BinaryIO]:
    """Takes the standard input and output for the protocol; what users print goes to the standard error."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return source, sink


def _listen(source: BinaryIO, requests: queue.SimpleQueue[tuple[str, Any] | None]) -> None:
    try:
        while True:
            requests.put(pickle.load(source))
    except (EOFError, OSError, pickle.UnpicklingError):
        requests.put(None)
    # The parent is gone. A function that still runs has no one to answer.
    time.sleep(_GRACE_S)
    os._exit(0)


def _answer(state: _State, kind: str, payload: Any) -> tuple[str, Any]:
    try:
        return "ok", _HANDLERS[kind](state, payload)
    except _Unusable as error:
        return "raised", str(error)
    except BaseException as error:
        # A reward may raise any error, ours too; only what this process itself finds wrong is for the parent to raise.
        if isinstance(error, RespecError) and kind != "score":
            return type(error).__name__, str(error)
        frames = traceback.extract_tb(error.__traceback__)
        where = f" ({os.path.basename(frames[-1].filename)}, line {frames[-1].lineno})" if frames else ""
        text = f": {error}" if str(error) else ""
        return "raised", f"raised {type(error).__name__}{text}{where}"


def _open(state: _State, payload: tuple[str, Mapping[str, Any], int, int]) -> None:
    from respec.tasks.gym import open_dataset

    state.dataset = open_dataset(*payload)


def _rows(state: _State, payload: tuple[int, int]) -> list[dict[str, Any]]:
    from respec.tasks.gym import make_rows

    return make_rows(state.dataset, *payload)


def _set_up(state: _State, payload: tuple[Scorer, Sequence[str], Sequence[str]]) -> None:
    scorer, names, columns = payload
    state.functions = [_built_in(scorer, name) or _user(name, columns) for name in names]


def _built_in(scorer: Scorer, name: str) -> Callable[[Sequence[RewardCall]], Any] | None:
    if name not in BUILT_IN:
        return None
    scorer.warm(name)
    rule = scorer.task if name == "task" else scorer.math
    return lambda calls: [rule(call.columns, call.text) for call in calls]


def _user(name: str, columns: Sequence[str]) -> Callable[[Sequence[RewardCall]], Any]:
    function = resolve_function(name, "task.reward.fn")
    given = dict.fromkeys((*columns, *ALWAYS))
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        wanted = list(given)
    else:
        for item in parameters:
            named = item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY, item.POSITIONAL_ONLY)
            if named and item.default is item.empty and (item.name not in given or item.kind is item.POSITIONAL_ONLY):
                raise ConfigError(
                    f"task.reward.fn = '{name}' needs an argument '{item.name}' that it cannot be given; by keyword there "
                    f"are {', '.join(given)}"
                )
        takes_all = any(item.kind is item.VAR_KEYWORD for item in parameters)
        names = {item.name for item in parameters if item.kind is not item.POSITIONAL_ONLY}
        wanted = [key for key in given if takes_all or key in names]

    def call(calls: Sequence[RewardCall]) -> Any:
        arguments: dict[str, Any] = {key: [item.columns.get(key) for item in calls] for key in columns}
        arguments["prompts"] = [item.prompt for item in calls]
        arguments["completions"] = [item.completion for item in calls]
        arguments["completion_ids"] = [list(item.token_ids) for item in calls]
        result = function(**{key: arguments[key] for key in wanted})
        return asyncio.run(_wait_for(result)) if inspect.isawaitable(result) else result

    return call


async def _wait_for(result: Any) -> Any:
    return await result


def _take_batch(state: _State, payload: Sequence[RewardCall]) -> None:
    state.batch = payload


def _score(state: _State, payload: tuple[int, Sequence[int]]) -> list[Outcome]:
    which, indices = payload
    values = state.functions[which]([state.batch[index] for index in indices])
    if not isinstance(values, (list, tuple)) and hasattr(values, "tolist"):
        values = values.tolist()
    if not isinstance(values, (list, tuple)):
        raise _Unusable(f"returned a {type(values).__name__}, not a list of numbers")
    if len(values) != len(indices):
        raise _Unusable(f"returned {len(values)} values for {len(indices)} completions")
    return [_outcome(value) for value in values]


def _outcome(value: Any) -> Outcome:
    if value is None:
        return None, ""
    if hasattr(value, "item"):
        try:
            value = value.item()  # a numpy or torch scalar
        except (TypeError, ValueError, RuntimeError):
            return None, f"returned a {type(value).__name__} that is not one number"
    if not isinstance(value, (bool, int, float)):
        return None, f"returned {value!r:.60} of type {type(value).__name__}, not a number"
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    return (number, "") if math.isfinite(number) else (None, f"returned {number}")


_HANDLERS: dict[str, Callable[[_State, Any], Any]] = {
    "open": _open,
    "rows": _rows,
    "rewards": _set_up,
    "batch": _take_batch,
    "score": _score,
}
