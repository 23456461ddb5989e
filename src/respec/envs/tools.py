"""Tools: the model calls functions of yours between tags, and reads what they return.

<tool>add({"a": 2, "b": 3})</tool> calls the function `add` with these arguments by name; a text with an <answer> ends the episode.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import lru_cache

from respec.envs.tool_process import ToolProcess
from respec.errors import TaskError

CALL = re.compile(r"<tool>\s*([A-Za-z_]\w*)\s*\((.*?)\)\s*(?:</tool>|$)", re.DOTALL)
ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)
LONGEST = 2000
HOW = "That is neither a call nor an answer. Write <tool>name({arguments as JSON})</tool> or <answer>...</answer>."


class ToolEnv:
    """`questions` names a function `module:function` that gives the question and its answer for a seed; `tools` those that the model may call,
    as `module:function`, known to it by the function's name. A call runs in a process of its own, for at most `limit_s` seconds. Reward 1
    for the answer, compared as stripped text, else 0. Results and errors longer than `longest` characters are cut.
    """

    def __init__(self, questions: str, tools: Sequence[str], limit_s: float = 5.0, longest: int = LONGEST) -> None:
        if not tools or limit_s <= 0:
            raise TaskError(
                f"tools takes a tool or more and a time limit, got {list(tools)} and {limit_s} s; mend task.params"
            )
        self._process = _process((questions, *tools), limit_s)
        self._questions, self._longest = questions, longest
        self._tools = {spec.rpartition(":")[2].rpartition(".")[2]: spec for spec in tools}
        self._truth = ""
        self.solved = False

    def reset(self, seed: int) -> str:
        asked = self._process.call(self._questions, {"seed": seed})
        if asked.error or not (isinstance(asked.value, list) and len(asked.value) == 2):
            raise TaskError(
                f"task.params.questions = '{self._questions}' gave {asked.error or asked.value!r} for seed {seed}; it must return "
                "(question, answer)"
            )
        question, self._truth = map(str, asked.value)
        self.solved = False
        return f"{question}\nTools: {', '.join(self._tools)}"

    def step(self, text: str) -> tuple[str, float, bool]:
        answer = ANSWER.findall(text)
        if answer:
            self.solved = answer[-1].strip() == self._truth.strip()
            return "right" if self.solved else "wrong", float(self.solved), True
        call = CALL.search(text)
        if call is None:
            return HOW, 0.0, False
        return self._called(*call.groups()), 0.0, False

    def _called(self, name: str, written: str) -> str:
        """What the model reads of a call: the result, or what was wrong."""
        if name not in self._tools:
            return f"error: there is no tool '{name}'; there are {', '.join(self._tools)}"
        try:
            arguments = json.loads(written or "{}")
        except json.JSONDecodeError as error:
            return f"error: the arguments are not JSON: {error.msg} at character {error.pos + 1}"
        if not isinstance(arguments, dict):
            return "error: the arguments must be a JSON object, by name"
        done = self._process.call(self._tools[name], arguments)
        said = f"error: {done.error}" if done.error else json.dumps(done.value, ensure_ascii=False)
        return said if len(said) <= self._longest else said[: self._longest] + " ... (cut)"


@lru_cache(maxsize=8)
def _process(specs: tuple[str, ...], limit_s: float) -> ToolProcess:
    """One process for all episodes: they take turns."""
    return ToolProcess(specs, limit_s)
