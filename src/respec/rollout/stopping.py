"""When a completion ends: EOS and stop tokens, stop strings, the length limit.

Checked token by token, so a draft is cut where plain decoding would have stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from respec.rollout.request import Request
from respec.rollout.tree import DraftTree
from respec.types import Sampling


@dataclass(frozen=True)
class Stops:
    """Tokens and strings that end a completion. A string is complete within the last `window` tokens."""

    tokens: frozenset[int]
    strings: tuple[str, ...]
    window: int


@lru_cache(maxsize=256)
def stops_of(strings: tuple[str, ...], tokens: tuple[int, ...]) -> Stops:
    """Every token of a stop string adds at least a byte to it; a few more guard against a character split over tokens."""
    return Stops(frozenset(tokens), strings, max((len(stop.encode()) for stop in strings), default=0) + 4)


class Stopping:
    """The ending rules of requests sampled under `sampling`, or as each asks for itself; of `episodes`, those of its turns."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: tuple[int, ...],
        sampling: Sampling,
        episodes: bool = False,
    ) -> None:
        self._episodes = episodes
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._sampling = sampling

    def check(self, request: Request) -> bool:
        """Looks at the last token; sets `finish` and says whether the completion, or the episode's turn, has ended."""
        token, stops = request.tokens[-1], self._stops(request)
        if token in self._eos:
            request.finish = "eos"
        elif token in stops.tokens or (stops.strings and self._hits(request, stops)):
            request.finish = "stop"
        elif request.remaining(self._sampling) <= 0:
            request.finish = "length"
        return request.finish is not None

    def cut(self, requests: Sequence[Request], trees: Sequence[DraftTree]) -> Sequence[DraftTree]:
        """The drafts of a round, in episodes without what lies past a turn's end: it is for the environment to say."""
        if not self._episodes:
            return trees
        return [
            tree.until(self._eos | self._stops(request).tokens) for request, tree in zip(requests, trees, strict=True)
        ]

    def text(self, request: Request) -> str:
        """The completion's text, without special tokens, cut before the stop string that ended it; an episode's whole, turn after turn."""
        return self._decode(request.tokens, skip_special_tokens=True) if request.turn else self.turn(request)

    def turn(self, request: Request) -> str:
        """The last turn's text, likewise."""
        text = self._decode(request.tokens[request.turn_start :], skip_special_tokens=True)
        ends = [at for stop in self._stops(request).strings if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if request.finish == "stop" and ends else text

    def _stops(self, request: Request) -> Stops:
        own = request.under(self._sampling)
        return stops_of(own.stop, own.stop_token_ids)

    def _hits(self, request: Request, stops: Stops) -> bool:
        tail = self._decode(
            request.tokens[max(request.turn_start, len(request.tokens) - stops.window) :], skip_special_tokens=False
        )
        return any(stop in tail for stop in stops.strings)

    def _decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return str(
            self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )
