"""What an engine is tried on: texts of different lengths, some of which repeat themselves, so that there is something to look up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from respec.errors import ConfigError
from respec.models.load import Policy
from respec.types import Prompt

PROMPTS = (
    "Question: A train leaves at 9 and arrives at 12. How long does it take?\nAnswer:",
    "one two three four one two three four one two three",
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def add(a, b):\n    return a + b\n\ndef multiply(a, b):\n    return",
    "3 + 4 - 2 + 9",
    "To make tea, first",
    "She opened the letter. It said: ",
)


def tokenized(texts: Sequence[str], policy: Policy, new_tokens: int) -> tuple[Prompt, ...]:
    """The texts as prompts. Raises ConfigError for fewer than two, for one without tokens, or one too long for `new_tokens` more."""
    tokenizer: Any = policy.tokenizer
    held = tuple(Prompt(row, text, tuple(tokenizer(text)["input_ids"])) for row, text in enumerate(texts))
    if len(held) < 2:
        raise ConfigError(f"a certificate needs two prompts or more, got {len(held)}; give one on each line")
    for prompt in held:
        length = len(prompt.token_ids)
        if not length:
            raise ConfigError(f"prompt {prompt.row + 1}, {prompt.text!r}, has no tokens; leave it out")
        if length + new_tokens > policy.context_length:
            raise ConfigError(
                f"prompt {prompt.row + 1} has {length} tokens; with {new_tokens} new ones it does not fit the model's context of "
                f"{policy.context_length}: shorten it"
            )
    return held
