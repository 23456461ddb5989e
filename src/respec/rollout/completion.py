"""A completion under way as its reader sees it: what each decode round added to it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from respec.rollout.request import Request
from respec.rollout.text_deltas import TextDeltas
from respec.types import Delta, Rollout


@dataclass
class Completion:
    """One completion under way; `news` are its deltas that nobody has taken yet. Made by `Engine.submit`."""

    prompt: int
    request: Request
    pieces: TextDeltas
    news: deque[Delta] = field(default_factory=deque)
    seen: int = 0

    @property
    def done(self) -> bool:
        return self.request.finish is not None

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.ask.prompt.token_ids)

    @property
    def rollout(self) -> Rollout:
        """The whole completion, once it is done; its prompt's row is the prompt's place in the list."""
        rollout = self.request.rollout()
        return replace(rollout, prompt=replace(rollout.prompt, row=self.prompt))

    def grow(self) -> None:
        """Makes a delta of what has come since the last."""
        request, start = self.request, self.seen
        tokens = request.tokens[start:]
        self.seen = len(request.tokens)
        done = request.finish is not None
        text = self.pieces.end(request.text) if done else self.pieces.push(tokens)
        drawn = tuple(tokens), tuple(request.logprobs[start:])
        self.news.append(Delta(self.prompt, request.sample, *drawn, text, request.finish, request.versions[-1]))
