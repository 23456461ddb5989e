"""Worked solutions for the warm-up: row -> the text a model should learn to write.

Each is a function of one row, named in the configuration as `task.solution = "respec.tasks.worked:chain_sum"`. A
reasoning-gym row holds `question`, `answer` and `metadata`; a JSON-lines row its columns.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

TERMS_AT_ONCE, WEIGHTS = (1, 2, 3), (0.65, 0.2, 0.15)
JOINTS = (", so ", ", then ", ", giving ", ", leaving ")


def chain_sum(row: Mapping[str, Any]) -> str:
    """reasoning-gym's `chain_sum` from the left, a line a step: '3 + 4 = 7, leaving 7 - 2', '7 - 2 = 5', '<answer>5</answer>'.

    A step takes one to three terms, and the wording varies, as people's does. Both are drawn from the expression itself, so a row has
    always the same solution, while a model that learns from many rows learns a choice: short ways with large steps, or long safe ones.
    """
    total, *rest = row["metadata"]["expression"].split()
    choice = random.Random(row["metadata"]["expression"])
    lines = []
    while rest:
        size = 2 * choice.choices(TERMS_AT_ONCE, WEIGHTS)[0]
        now, rest = rest[:size], rest[size:]
        worked = " ".join([total, *now])
        value = int(total)
        for sign, term in zip(now[::2], now[1::2], strict=True):
            value += int(term) if sign == "+" else -int(term)
        total = str(value)
        left = choice.choice(JOINTS) + " ".join([total, *rest]) if rest else ""
        lines.append(f"{worked} = {total}{left}")
    return "\n".join([*lines, f"<answer>{total}</answer>"])
