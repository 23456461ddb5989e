"""A completion's text, piece by piece as its tokens come: no piece ends within a character, or within what may become a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

# What a tokenizer writes for bytes that are no character, or not yet.
UNFINISHED = "\ufffd"
# The tokens that are decoded anew with each piece, and how many of them stay as the context of the next.
LONGEST, CONTEXT = 64, 16


class TextDeltas:
    """Pieces of one completion. Put end to end they are its text, as `Stopping.text` has it.

    `decode` turns tokens into text without special tokens. Only the latest tokens are decoded again, so that a piece costs the same wherever
    it comes.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str]) -> None:
        self._decode, self._stop = decode, stop
        # the latest tokens, how much of their text has been taken over, and what of that is held back
        self._tokens: list[int] = []
        self._taken = 0
        self._held = ""
        self._given = 0

    def push(self, tokens: Sequence[int]) -> str:
        """What can be shown once these tokens have come; often nothing."""
        self._tokens += tokens
        text = self._decode(self._tokens)
        whole = text.rstrip(UNFINISHED)
        self._held += whole[self._taken :]
        self._taken = max(self._taken, len(whole))
        if len(self._tokens) > LONGEST and whole == text:
            self._tokens = self._tokens[-CONTEXT:]
            self._taken = len(self._decode(self._tokens))
        return self._give(len(self._held) - self._perhaps_stop())

    def end(self, text: str) -> str:
        """The rest of a completion whose whole text is this."""
        return text[self._given :]

    def _perhaps_stop(self) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        return next((n for n in sizes if any(stop.startswith(self._held[-n:]) for stop in self._stop)), 0)

    def _give(self, count: int) -> str:
        given, self._held = self._held[:count], self._held[count:]
        self._given += len(given)
        return given
