"""Worked solutions for the warm-up: row -> the text a model should learn to write.

Each is a function of one row, named in the configuration as `task.solution = "respec.tasks.worked:chain_sum"`. A
reasoning-gym row holds `question`, `answer` and `metadata`; a JSON-lines row its columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def chain_sum(row: Mapping[str, Any]) -> str:
    """reasoning-gym's `chain_sum`, left to right: '3 + 4 - 2 + 9 = 7 - 2 + 9 = 5 + 9 = 14', then 'Answer: 14'."""
    parts = row["metadata"]["expression"].split()
    steps = [" ".join(parts)]
    while len(parts) > 1:
        left, sign, right = parts[:3]
        total = int(left) + int(right) if sign == "+" else int(left) - int(right)
        parts = [str(total), *parts[3:]]
        steps.append(" ".join(parts))
    return " = ".join(steps) + f"\nAnswer: {parts[0]}"
