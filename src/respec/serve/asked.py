"""What a request asks for: read from its JSON, field by field. What would change the answer and is not to be had is refused, not ignored."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from respec.serve.errors import ApiError, wrong
from respec.types import Sampling

Kind = Literal["chat", "text"]

# Fields that say nothing of the tokens.
IGNORED = {
    "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "reasoning_effort", "verbosity",
}  # fmt: skip
# Fields that would change the answer, with the values that would not.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "logit_bias": ({},), "response_format": ({"type": "text"},),
    "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],), "function_call": ("none",), "modalities": (["text"],), "top_logprobs": (0,),
    "echo": (False,), "suffix": ("",), "best_of": (1,),
}  # fmt: skip
KNOWN = {
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n", "stop", "stop_token_ids",
    "seed", "stream", "stream_options", "logprobs",
}  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A request as the engine takes it. `max_tokens` None: as many as there is room for. A prompt is text, tokens or chat messages."""

    kind: Kind
    model: str
    prompts: tuple[Any, ...]
    sampling: Sampling
    max_tokens: int | None
    n: int
    seed: int
    logprobs: bool
    stream: bool
    usage: bool

    @property
    def completions(self) -> int:
        return self.n * len(self.prompts)


def read(raw: bytes, kind: Kind) -> Asked:
    """Raises ApiError for what is no JSON object, has a field of the wrong kind or out of range, or asks for what is not to be had."""
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise wrong(f"the request's body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise wrong("the request's body must be a JSON object")
    body = {name: value for name, value in body.items() if value is not None}
    _refuse(body)
    stops = body.get("stop", ())
    sampling = Sampling(
        1,
        temperature=_number(body, "temperature", 1.0, 0.0, 2.0),
        top_k=_integer(body, "top_k", 0, 0),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0),
        min_p=_number(body, "min_p", 0.0, 0.0, 0.999),
        stop=_strings((stops,) if isinstance(stops, str) else stops),
        stop_token_ids=_tokens(body.get("stop_token_ids", ()), "stop_token_ids"),
    )
    if sampling.top_p == 0:
        raise wrong("top_p must be above 0 and at most 1, got 0", "top_p")
    most = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    options = body.get("stream_options", {})
    return Asked(
        kind,
        _model(body),
        (_messages(body),) if kind == "chat" else _prompts(body),
        sampling,
        _integer(body, most, 0, 1) if most in body else None,
        _integer(body, "n", 1, 1),
        _integer(body, "seed", secrets.randbits(63), -(2**63), 2**63 - 1),
        _logprobs(body, kind),
        _boolean(body, "stream"),
        isinstance(options, dict) and bool(options.get("include_usage")),
    )


def _refuse(body: Mapping[str, Any]) -> None:
    for name, value in body.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            neutral = " or ".join(json.dumps(harmless) for harmless in NEUTRAL[name])
            raise wrong(
                f"'{name}' is not supported here, got {json.dumps(value)[:80]}; leave it out, or give {neutral}", name
            )
        if name not in KNOWN | IGNORED | set(NEUTRAL):
            raise wrong(f"there is no field '{name}' in such a request; leave it out", name)


def _model(body: Mapping[str, Any]) -> str:
    if not isinstance(body.get("model"), str):
        raise wrong("'model' must be the name of a model; /v1/models says which there is", "model")
    return body["model"]


def _messages(body: Mapping[str, Any]) -> list[dict[str, str]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise wrong("'messages' must be a list of one message or more", "messages")
    return [_message(message, f"messages[{place}]") for place, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise wrong(f"'{where}' must be an object with a role and a content", where)
    content = message.get("content")
    if isinstance(content, list):
        if not all(
            isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        ):
            raise wrong(f"'{where}.content' may have parts of type 'text' only", f"{where}.content")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise wrong(f"'{where}.content' must be text", f"{where}.content")
    return {"role": message["role"], "content": content}


def _prompts(body: Mapping[str, Any]) -> tuple[Any, ...]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt, list) and prompt:
        if all(map(_is_integer, prompt)):
            return (prompt,)
        if all(isinstance(part, str) for part in prompt):
            return tuple(prompt)
        if all(isinstance(part, list) and all(map(_is_integer, part)) for part in prompt):
            return tuple(prompt)
    raise wrong("'prompt' must be text, a list of texts, a list of tokens, or a list of such lists", "prompt")


def _strings(stops: Any) -> tuple[str, ...]:
    if not isinstance(stops, list | tuple) or len(stops) > 16 or not all(isinstance(s, str) and s for s in stops):
        raise wrong("'stop' must be a text, or a list of at most 16, none of them empty", "stop")
    if any(len(stop) > 256 for stop in stops):
        raise wrong("a stop string may have 256 characters at most", "stop")
    return tuple(stops)


def _tokens(tokens: Any, name: str) -> tuple[int, ...]:
    if not isinstance(tokens, list | tuple) or not all(map(_is_integer, tokens)):
        raise wrong(f"'{name}' must be a list of tokens", name)
    return tuple(tokens)


def _logprobs(body: Mapping[str, Any], kind: Kind) -> bool:
    """Chat asks with a boolean, text with how many alternatives it wants beside each token's own."""
    value = body.get("logprobs", False)
    if isinstance(value, bool):
        return value
    if kind == "chat" or value != 0:
        raise wrong(
            "'logprobs' gives each token's own log-probability here, and no alternatives: true for chat, 0 for text",
            "logprobs",
        )
    return True


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(body: Mapping[str, Any], name: str, default: int, least: int, most: int = 2**31 - 1) -> int:
    value = body.get(name, default)
    if not _is_integer(value) or not least <= value <= most:
        raise wrong(f"'{name}' must be an integer from {least} to {most}, got {json.dumps(value)[:80]}", name)
    return value


def _number(body: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = body.get(name, default)
    if not (_is_integer(value) or isinstance(value, float)) or not least <= value <= most:
        raise wrong(f"'{name}' must be a number from {least:g} to {most:g}, got {json.dumps(value)[:80]}", name)
    return float(value)


def _boolean(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name, False)
    if not isinstance(value, bool):
        raise wrong(f"'{name}' must be true or false", name)
    return value


def refuse_another(asked: Sequence[str], served: str) -> None:
    """Raises ApiError for a model that is not the one served."""
    for name in asked:
        if name != served:
            raise ApiError(
                404,
                f"the model '{name}' does not exist; served here is '{served}'",
                param="model",
                code="model_not_found",
            )
