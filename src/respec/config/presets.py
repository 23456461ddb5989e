"""Known data sets in the layouts they are published in: what `task.preset` fills in where the configuration says nothing else."""

from __future__ import annotations

from typing import Any

BOXED = "{prompt}\n\nReason step by step, and put your final answer within \\boxed{{}}."

SUBJECTS = "algebra, counting_and_probability, geometry, intermediate_algebra, number_theory, prealgebra, precalculus"

PRESETS: dict[str, dict[str, Any]] = {
    # openai/gsm8k: question, answer (a worked solution that ends in '#### 72'); folders main and socratic, splits train and test
    "gsm8k": {
        "kind": "hf", "dataset": "openai/gsm8k", "subset": "main", "eval_split": "test", "prompt_column": "question",
        "solution_column": "answer", "answer_column": "answer", "answer_form": "hashes",
    },
    # EleutherAI/hendrycks_math: problem, level, type, solution; a configuration a subject, splits train and test
    "math": {
        "kind": "hf", "dataset": "EleutherAI/hendrycks_math", "subset": SUBJECTS, "eval_split": "test", "prompt_column": "problem",
        "solution_column": "solution", "answer_column": "solution", "answer_form": "boxed",
    },
    # HuggingFaceH4/MATH-500: problem, solution, answer, subject, level, unique_id; 500 of MATH's test rows, split test alone
    "math500": {
        "kind": "hf", "dataset": "HuggingFaceH4/MATH-500", "split": "test", "prompt_column": "problem",
        "solution_column": "solution", "answer_column": "answer",
    },
}  # fmt: skip


def filled(tree: Any) -> Any:
    """A task section with its preset's values where it has none of its own; whatever has no known preset comes back as it is."""
    preset = PRESETS.get(tree.get("preset", "")) if isinstance(tree, dict) else None
    if preset is None:
        return tree
    shared = {"template": BOXED, "reward": ({"fn": "math"},)}
    return {**shared, **preset, **tree}
