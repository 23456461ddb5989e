"""Splits a completion's text among its tokens, for people to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def token_pieces(tokenizer: Any, token_ids: Sequence[int]) -> tuple[str, ...]:
    """The text that each token added, special tokens included; joined they are the decoded text.

    A character spread over several tokens belongs to the one that completes it (the others are empty). `tokenizer` is a
    transformers tokenizer. Decoding is incremental, over a window that starts at the last complete character, so long
    completions cost linear time.
    """

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    pieces: list[str] = []
    window, done = 0, 0  # text of token_ids[window:done] has been given out
    for end in range(1, len(token_ids) + 1):
        before = decode(token_ids[window:done])
        now = decode(token_ids[window:end])
        if now.endswith("\ufffd") and end < len(token_ids):
            pieces.append("")
            continue
        pieces.append(now[len(before) :])
        window, done = done, end
    return tuple(pieces)
