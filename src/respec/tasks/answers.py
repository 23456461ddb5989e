"""The final answer in a worked solution, in the forms that data sets use; and whether completions give one at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from respec.tasks.scorer import Scorer

_BOXES = ("\\boxed", "\\fbox")


def hashes(text: str) -> str | None:
    """What stands behind the last '####' on its line, as in GSM8K (Cobbe et al. 2021, arXiv 2110.14168), without the commas of thousands.

    None where there is none.
    """
    _, found, after = text.rpartition("####")
    answer = after.strip().split("\n")[0].strip()
    digits = answer.replace(",", "")
    return (digits if digits.lstrip("-$").replace(".", "", 1).isdigit() else answer) if found and answer else None


def boxed(text: str) -> str | None:
    """What the last \\boxed{...} or \\fbox{...} holds, braces within it included, or the word after a bare '\\boxed ', as in
    MATH (Hendrycks et al. 2021, arXiv 2103.03874). None where there is none, or where its brace is never closed.
    """
    start = max(text.rfind(box) for box in _BOXES)
    if start < 0:
        return None
    after = text[start:].removeprefix(_BOXES[0]).removeprefix(_BOXES[1])
    if not after.lstrip().startswith("{"):
        words = after.replace("$", " ").split()
        return words[0] if words else None
    after, depth = after.lstrip(), 0
    for at, char in enumerate(after):
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return after[1:at].strip()
    return None


FORMS: dict[str, Callable[[str], str | None]] = {"hashes": hashes, "boxed": boxed}


def unmatched(scorer: Scorer, texts: Sequence[str], where: str = "") -> list[str]:
    """A line for the user where the answer pattern is in none of a step's completions; none where it is in some, or there is no pattern."""
    if not scorer.answer_pattern or not texts or any(scorer.extract(text) is not None for text in texts):
        return []
    return [
        f"task.answer_pattern {scorer.answer_pattern!r} is in none of this step's {len(texts)} completions{where}, so every answer counts as "
        f"wrong; the first completion ends with {texts[0][-60:]!r}"
    ]
