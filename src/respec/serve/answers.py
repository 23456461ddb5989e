"""What is answered: pieces of completions as the API's objects, whole or chunk by chunk."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from respec.serve.asked import Asked
from respec.serve.decoding import Joined
from respec.types import Delta

FINISH = {"eos": "stop", "stop": "stop", "length": "length", "done": "stop"}
DONE = b"data: [DONE]\n\n"


@dataclass
class Choice:
    """One completion as far as it has come."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    offset: int = 0
    finish: str | None = None


class Answer:
    """Takes a job's pieces one by one; gives chunks of it, or the whole when all its completions have finished."""

    def __init__(self, asked: Asked, joined: Joined, tokenizer: Any) -> None:
        self._asked, self._joined, self._tokenizer = asked, joined, tokenizer
        chat = asked.kind == "chat"
        self._id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._object = "chat.completion" if chat else "text_completion"
        self._created = int(time.time())
        self.choices = [Choice() for _ in range(asked.completions)]

    @property
    def done(self) -> bool:
        return all(choice.finish for choice in self.choices)

    def take(self, piece: Delta) -> bytes:
        """Adds a piece; what of it is to be sent to one who listens, often nothing."""
        index = piece.prompt * self._asked.n + piece.sample
        choice = self.choices[index]
        choice.text += piece.text
        choice.tokens += piece.token_T
        choice.logprobs += piece.logprob_T
        choice.finish = FINISH[piece.finish] if piece.finish is not None else None
        if not (piece.text or piece.finish or self._asked.logprobs):
            return b""
        logprobs = self._logprobs(choice, piece.token_T, piece.logprob_T)
        return self._chunk([self._part(index, {"content": piece.text}, piece.text, logprobs, choice.finish)])

    def opening(self) -> bytes:
        """What a stream begins with: in chat, who speaks."""
        if self._asked.kind == "text":
            return b""
        said = {"role": "assistant", "content": ""}
        return self._chunk([self._part(index, said, "", None, None) for index in range(len(self.choices))])

    def closing(self) -> bytes:
        """What a stream ends with."""
        return (self._chunk([], {"usage": self._usage()}) if self._asked.usage else b"") + DONE

    def whole(self) -> dict[str, Any]:
        return self._dressed(self._object, [self._all(index) for index in range(len(self.choices))]) | {
            "usage": self._usage()
        }

    def _all(self, index: int) -> dict[str, Any]:
        choice = self.choices[index]
        choice.offset = 0
        logprobs = self._logprobs(choice, choice.tokens, choice.logprobs)
        rest = {"index": index, "logprobs": logprobs, "finish_reason": choice.finish}
        if self._asked.kind == "text":
            return {"text": choice.text, **rest}
        return {"message": {"role": "assistant", "content": choice.text, "refusal": None}, **rest}

    def _part(self, index: int, delta: dict[str, str], text: str, logprobs: Any, finish: str | None) -> dict[str, Any]:
        said = {"delta": delta} if self._asked.kind == "chat" else {"text": text}
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": finish}

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> bytes:
        kind = "chat.completion.chunk" if self._asked.kind == "chat" else self._object
        usage = {"usage": None} if self._asked.usage else {}
        return event(self._dressed(kind, choices) | usage | (more or {}))

    def _dressed(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id, "object": kind, "created": self._created, "model": self._asked.model,
            "system_fingerprint": f"respec-version-{self._joined.version}", "choices": choices,
        }  # fmt: skip

    def _usage(self) -> dict[str, int]:
        drawn = sum(len(choice.tokens) for choice in self.choices)
        prompt = self._joined.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": drawn, "total_tokens": prompt + drawn}

    def _logprobs(self, choice: Choice, tokens: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any] | None:
        """Each token's own, in nats; a text's offsets are those of the tokens' own texts end to end."""
        if not self._asked.logprobs:
            return None
        texts = [str(self._tokenizer.decode([token])) for token in tokens]
        if self._asked.kind == "chat":
            content = [
                {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for text in texts:
            offsets.append(choice.offset)
            choice.offset += len(text)
        return {"tokens": texts, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": offsets}


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
