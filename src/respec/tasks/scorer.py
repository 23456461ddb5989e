"""Scoring one completion with the task's own rule. Runs in the reward worker: imports nothing heavy at the top."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

BUILT_IN = ("task", "math")
"""Rewards that are not user functions: the dataset's own scorer, and math-verify. Each looks at one completion alone."""

MATH_LIMIT_S = 5
"""Seconds math-verify may take to parse or compare one answer, after which it counts as wrong. By SIGALRM."""


@dataclass(frozen=True)
class Scorer:
    """What it takes to score a completion against its row: picklable, rebuilt from names in the worker.

    `dataset` is the reasoning-gym dataset whose `score_answer` decides; empty for JSON-lines data, where the answer must
    equal the answer column after stripping. `answer_pattern`, when set, cuts the answer out of the completion.
    """

    answer_column: str
    answer_pattern: str = ""
    dataset: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)

    def extract(self, completion: str) -> str | None:
        """The answer in a completion: group 1 of the pattern's last match, else None; without a pattern the stripped text."""
        if not self.answer_pattern:
            return completion.strip()
        matches = list(re.finditer(self.answer_pattern, completion))
        return matches[-1].group(1) if matches else None

    def task(self, columns: Mapping[str, Any], completion: str) -> float:
        """The dataset's own score of a completion, in [0, 1]; 0 where the pattern finds no answer."""
        answer = self.extract(completion)
        if answer is None:
            return 0.0
        if self.dataset:
            return self._own_score(answer, dict(columns))
        return float(answer.strip() == str(columns[self.answer_column]).strip())

    def math(self, columns: Mapping[str, Any], completion: str) -> float:
        """1 if math-verify holds the answer equal to the answer column, else 0. Main thread only (its limits use SIGALRM).

        Equal texts are equal. Without `answer_pattern` math-verify itself looks for the answer in the completion.
        """
        answer = self.extract(completion)
        if answer is None:
            return 0.0
        truth = str(columns[self.answer_column]).strip()
        if answer.strip() == truth:
            return 1.0
        return float(_equal(truth, answer, bare=bool(self.answer_pattern)))

    def warm(self, name: str) -> None:
        """Imports and builds what scoring by `name` (`task` or `math`) needs, so that no time limit is spent on it."""
        if name == "math":
            import math_verify  # noqa: F401
        elif self.dataset:
            _ = self._dataset

    def _own_score(self, answer: str, entry: dict[str, Any]) -> float:
        try:
            return float(self._dataset.score_answer(answer, entry))
        except Exception:
            # Some datasets' scorers raise on answers that they cannot read. Such an answer is wrong; but if the row's true
            # answer raises as well the fault is not the answer's, and must not pass for a wrong one.
            self._dataset.score_answer(entry["answer"], entry)
            return 0.0

    @functools.cached_property
    def _dataset(self) -> Any:
        from respec.tasks.gym import open_dataset

        return open_dataset(self.dataset, self.params, seed=0, size=1)

    def __reduce__(self) -> tuple[Any, ...]:
        # The built dataset stays behind: some hold what cannot be pickled.
        return Scorer, (self.answer_column, self.answer_pattern, self.dataset, dict(self.params))


@functools.lru_cache(maxsize=4096)
def _equal(truth: str, answer: str, bare: bool) -> bool:
    """Cached: the samples of one prompt often give the same answer, and a hostile one costs its whole time limit."""
    from math_verify import parse, verify

    gold = _parse_bare(truth)
    guess = _parse_bare(answer) if bare else parse(answer, parsing_timeout=MATH_LIMIT_S)
    return bool(gold and guess) and verify(gold, guess, timeout_seconds=MATH_LIMIT_S)


@functools.lru_cache(maxsize=4096)
def _parse_bare(text: str) -> list[Any]:
    """Text that is an answer and nothing else. math-verify looks for answers in prose, and would take the 1 of 'x + 1'."""
    from math_verify import parse

    delimited = text if "$" in text or "\\boxed" in text or "\\[" in text or "\\(" in text else f"${text}$"
    return parse(delimited, parsing_timeout=MATH_LIMIT_S) or parse(text, parsing_timeout=MATH_LIMIT_S)
