"""When a completion ends: EOS and stop tokens, stop strings, the length limit.

Checked token by token, so a draft is cut where plain decoding would have stopped.
"""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from respec.rollout.request import Request
from respec.rollout.tree import DraftTree
from respec.types import Sampling


class Stopping:
    """The ending rules of one rollout; of `episodes`, those of its turns."""

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
        self._stop_tokens = frozenset(sampling.stop_token_ids)
        self._stop = sampling.stop
        self._sampling = sampling
        # every token of a stop string adds at least a byte to it; a few more guard against a character split over tokens
        self._window = max((len(stop.encode()) for stop in self._stop), default=0) + 4

    def check(self, request: Request) -> bool:
        """Looks at the last token; sets `finish` and says whether the completion, or the episode's turn, has ended."""
        token = request.tokens[-1]
        if token in self._eos:
            request.finish = "eos"
        elif token in self._stop_tokens or (
            self._stop and self._hits(request.tokens[max(request.turn_start, len(request.tokens) - self._window) :])
        ):
            request.finish = "stop"
        elif request.remaining(self._sampling) <= 0:
            request.finish = "length"
        return request.finish is not None

    def cut(self, trees: Sequence[DraftTree]) -> Sequence[DraftTree]:
        """The drafts of a round, in episodes without what lies past a turn's end: it is for the environment to say."""
        return [tree.until(self._eos | self._stop_tokens) for tree in trees] if self._episodes else trees

    def text(self, request: Request) -> str:
        """The completion's text, without special tokens, cut before the stop string that ended it; an episode's whole, turn after turn."""
        return self._decode(request.tokens, skip_special_tokens=True) if request.turn else self.turn(request)

    def turn(self, request: Request) -> str:
        """The last turn's text, likewise."""
        text = self._decode(request.tokens[request.turn_start :], skip_special_tokens=True)
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if request.finish == "stop" and ends else text

    def _hits(self, tokens: list[int]) -> bool:
        tail = self._decode(tokens, skip_special_tokens=False)
        return any(stop in tail for stop in self._stop)

    def _decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return str(
            self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )
