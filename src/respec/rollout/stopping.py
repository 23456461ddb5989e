"""When a completion ends: EOS and stop tokens, stop strings, the length limit.

Checked token by token, so a draft is cut where plain decoding would have stopped.
"""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from respec.rollout.request import Request
from respec.types import Sampling


class Stopping:
    """The ending rules of one rollout."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, eos_token_ids: tuple[int, ...], sampling: Sampling) -> None:
        self._tokenizer = tokenizer
        self._eos = frozenset(eos_token_ids)
        self._stop_tokens = frozenset(sampling.stop_token_ids)
        self._stop = sampling.stop
        self._sampling = sampling
        # every token of a stop string adds at least a byte to it; a few more guard against a character split over tokens
        self._window = max((len(stop.encode()) for stop in self._stop), default=0) + 4

    def check(self, request: Request) -> bool:
        """Looks at the last token; sets `finish` and says whether the completion has ended."""
        token = request.tokens[-1]
        if token in self._eos:
            request.finish = "eos"
        elif token in self._stop_tokens or (self._stop and self._hits(request.tokens[-self._window :])):
            request.finish = "stop"
        elif request.remaining(self._sampling) <= 0:
            request.finish = "length"
        return request.finish is not None

    def text(self, request: Request) -> str:
        """The completion's text, without special tokens, cut before the stop string that ended it."""
        text = self._decode(request.tokens, skip_special_tokens=True)
        ends = [at for stop in self._stop if (at := text.find(stop)) >= 0]
        return text[: min(ends)] if request.finish == "stop" and ends else text

    def _hits(self, tokens: list[int]) -> bool:
        tail = self._decode(tokens, skip_special_tokens=False)
        return any(stop in tail for stop in self._stop)

    def _decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return str(
            self._tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)
        )
