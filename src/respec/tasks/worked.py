"""Worked solutions for the warm-up: row -> the text a model should learn to write.

Each is a function of one row, named in the configuration as `task.solution = "respec.tasks.worked:chain_sum"`. A
reasoning-gym row holds `question`, `answer` and `metadata`; a JSON-lines row its columns.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any


MOST_TERMS_AT_ONCE = 3


def chain_sum(row: Mapping[str, Any]) -> str:
    """reasoning-gym's `chain_sum`, from the left: '3 + 4 - 2 + 9 = 7 - 2 + 9 = 14', then 'Answer: 14' on a line of its own.

    Each step adds one to three terms to the first, as people do. How many is drawn from the expression itself, so a row always has
    the same solution, while a model that learns from many rows learns to choose: short ways with large steps, long ways with safe ones.
    """
    parts = row["metadata"]["expression"].split()
    choice = random.Random(row["metadata"]["expression"])
    steps = [" ".join(parts)]
    while len(parts) > 1:
        total = int(parts[0])
        terms = min(choice.randint(1, MOST_TERMS_AT_ONCE), len(parts) // 2)
        for sign, value in zip(parts[1 : 2 * terms : 2], parts[2 : 2 * terms + 1 : 2], strict=True):
            total += int(value) if sign == "+" else -int(value)
        parts = [str(total), *parts[2 * terms + 1 :]]
        steps.append(" ".join(parts))
    return " = ".join(steps) + f"\nAnswer: {parts[0]}"
