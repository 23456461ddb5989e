"""The engine for other programs: load a model or a run, draw completions from it, all at once or as they come.

from respec import Engine, Sampling

engine = Engine("builtin:demo")
for rollout in engine.generate(["3 + 4 - 2\\n"], Sampling(max_new_tokens=64), n=2, seed=7):
    print(rollout.text)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from respec.adaptive import make_planner
from respec.config import SpeculationConfig
from respec.drafting import make_drafters
from respec.errors import ConfigError, TaskError
from respec.models.load import Policy, load_policy
from respec.opening import check, model_config, newest, speculation_of
from respec.rollout.completion import Completion, Delta
from respec.rollout.engine import Engine as RolloutEngine
from respec.rollout.randomness import sequence_key
from respec.rollout.request import Request
from respec.rollout.session import Session
from respec.rollout.text_deltas import TextDeltas
from respec.types import Ask, Message, Prompt, Rollout, Sampling, Stream
from respec.weights.publish import publish
from respec.weights.swap import swap

TextOrChat = str | Sequence[int] | Sequence[Message]
"""A prompt: text that is gone on from as it is, its tokens, or chat messages (`{"role": ..., "content": ...}`) for the chat template."""

# Completions after which what drafters keep of requests is dropped, though others are under way.
FORGET_AFTER = 512


class Engine:
    """A model that draws completions, exactly: the same seeds give the same tokens with or without speculation, alone or among others.

    `model` is a folder, a hub id, `builtin:demo`, a run folder (its newest checkpoint), or a loaded `Policy`. `speculation` is `auto` (decided
    before every round), `off`, a drafter's name, or a `SpeculationConfig` for drafters that need more; its mode must be `matching`.
    `max_batch` completions are decoded at once, each of at most `max_length` tokens with its prompt (0: the model's context, up to 2048): the
    memory of the KV cache is for so many, or for as many as fit into `kv_cache_mb` MiB. `chat_template` takes the place of the tokenizer's. `say` gets
    lines about what is being done.

    Not for several threads at once. Raises ModelError for a model that cannot be loaded, ConfigError for settings that do not fit, CacheError where
    the budget has no room for one completion, CheckpointError for a run without a checkpoint.
    """

    def __init__(
        self,
        model: str | Path | Policy,
        *,
        speculation: str | SpeculationConfig = "auto",
        dtype: str = "auto",
        device: str = "auto",
        max_batch: int = 8,
        max_length: int = 0,
        chat_template: str | None = None,
        say: Callable[[str], None] | None = None,
        kv_cache_mb: float | None = None,
    ) -> None:
        config = speculation_of(speculation)
        path, version = ("", 0) if isinstance(model, Policy) else newest(str(model))
        policy = model if isinstance(model, Policy) else load_policy(model_config(path, dtype, device))
        self.tokenizer: Any = policy.tokenizer
        self.max_length = min(max_length or 2048, policy.context_length)
        self._template = chat_template
        self._dtype = dtype
        decoder, drafters = publish(policy, dtype, version), make_drafters(config, policy, dtype, version)
        self._engine = RolloutEngine(
            decoder, policy.tokenizer, policy.eos_token_ids, 0, max_batch, drafters=drafters, mode=config.mode,
            kv_budget=None if kv_cache_mb is None else int(kv_cache_mb * 2**20),
        )  # fmt: skip
        self.max_batch = self._engine.places(max_batch, self.max_length)
        context = min(256, self.max_length // 2)
        self._planner = make_planner(
            config, decoder, policy.tokenizer, drafters, self.max_batch, context, say or (lambda _: None)
        )
        self._session: Session | None = None
        self._under_way: dict[int, Completion] = {}
        self._orders, self._rows = itertools.count(), itertools.count()
        self._ended = 0

    @property
    def version(self) -> int:
        """The version of the weights: the step of a run's checkpoint, 0 of any other model."""
        return self._engine.version

    @property
    def busy(self) -> bool:
        """Whether completions are under way."""
        return bool(self._under_way)

    def generate(
        self,
        prompts: str | Sequence[TextOrChat],
        sampling: Sampling | Sequence[Sampling] = Sampling(max_new_tokens=128),
        n: int = 1,
        seed: int | Sequence[int] = 0,
    ) -> tuple[Rollout, ...]:
        """`n` completions of each prompt, in the order of the prompts. A single text counts as a list of one.

        `sampling` and `seed` are one for all, or one for each prompt. A prompt with a seed of its own is answered as it is alone; under
        one seed, prompt i is answered by numbers of its own, as by `respec generate`. Raises TaskError for a prompt that is empty or does not
        fit, ConfigError for settings out of range.
        """
        asked = self._submit_all(prompts, sampling, n, seed)
        for _ in self._drained(asked):
            """Only the whole is wanted."""
        return tuple(completion.rollout for completion in asked)

    def stream(
        self,
        prompts: str | Sequence[TextOrChat],
        sampling: Sampling | Sequence[Sampling] = Sampling(max_new_tokens=128),
        n: int = 1,
        seed: int | Sequence[int] = 0,
    ) -> Iterator[Delta]:
        """The tokens that `generate` returns, as they come. Raises what `generate` does, at once; closing the iterator cancels what is left."""
        return self._drained(self._submit_all(prompts, sampling, n, seed))

    def submit(
        self, prompt: TextOrChat, sampling: Sampling, n: int = 1, seed: int = 0, *, place: int = 0, row: int = 0
    ) -> list[Completion]:
        """Lets `n` completions join what is under way, at the next `step`. For servers: `generate` and `stream` are this and `step`.

        (seed, row, sample) are what the random numbers come from; `place` goes into the deltas. Raises what `generate` does.
        """
        encoded = self.encode(prompt, next(self._rows))
        check(sampling, n, seed)
        room = self.max_length - len(encoded.token_ids)
        if sampling.max_new_tokens > room:
            raise TaskError(
                f"a prompt of {len(encoded.token_ids)} tokens leaves room for {max(room, 0)} of the {self.max_length} that this engine holds, and "
                f"max_new_tokens is {sampling.max_new_tokens}; shorten the prompt, lower it, or make the engine with a larger max_length"
            )
        ask = Ask(encoded, Stream.BENCH, 0, n, sampling)
        keys = [sequence_key(seed, Stream.BENCH, 0, row, sample) for sample in range(n)]
        requests = [Request(ask, sample, key, next(self._orders)) for sample, key in enumerate(keys)]
        made = [Completion(place, request, TextDeltas(self._decode, sampling.stop)) for request in requests]
        self._under_way |= {completion.request.order: completion for completion in made}
        if self._session is None:
            self._session = self._engine.open(self.max_batch, self.max_length, sampling, self._planner)
        self._session.join(requests)
        return made

    def step(self) -> list[Completion]:
        """Decodes one round of everything under way; the completions that have news. None where nothing is."""
        session = self._session
        if session is None or not session.busy:
            return []
        _, ended = session.round()
        grown = [self._under_way[request.order] for request in (*session.active, *ended)]
        for completion in grown:
            completion.grow()
        for request in ended:
            del self._under_way[request.order]
        self._ended += len(ended)
        if self._ended >= FORGET_AFTER or not session.busy:
            session.forget()
            self._ended = 0
        return grown

    def cancel(self, completion: Completion) -> None:
        """Takes a completion out, if it is still under way."""
        if self._under_way.pop(completion.request.order, None) is not None and self._session is not None:
            self._session.cancel(completion.request)

    def renew(self, policy: Policy, version: int) -> None:
        """Decodes with newer weights of the same model from the next round on; what is under way goes on with them.

        Raises StaleError for a version that is not newer.
        """
        swap(self._engine, policy, self._dtype, version)

    def encode(self, prompt: TextOrChat, row: int = 0) -> Prompt:
        """The prompt in tokens. Raises TaskError for one that has none, or is of no kind that is known."""
        if isinstance(prompt, str):
            text, ids = prompt, self.tokenizer(prompt)["input_ids"]
        elif all(isinstance(token, int) for token in prompt):
            text, ids = "", [token for token in prompt if isinstance(token, int)]
            if any(token not in range(self._engine.decoder.shape.vocabulary) for token in ids):
                raise TaskError("the prompt's tokens are not all of the model's vocabulary; tokenize it with its own")
        elif all(isinstance(message, Mapping) for message in prompt):
            text = self._rendered([dict(message) for message in prompt if isinstance(message, Mapping)])
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            raise TaskError(
                f"a prompt is text, a list of tokens or a list of chat messages, got {type(prompt).__name__}"
            )
        if not ids:
            raise TaskError("the prompt has no tokens; the model needs at least one to go on from")
        return Prompt(row, text, tuple(ids))

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        if not (self._template or getattr(self.tokenizer, "chat_template", None)):
            raise TaskError(
                "chat messages need a chat template, and the tokenizer has none; give the text itself, or chat_template"
            )
        goes_on = messages[-1].get("role") == "assistant"
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, chat_template=self._template, tokenize=False, add_generation_prompt=not goes_on,
                    continue_final_message=goes_on,
                )
            )  # fmt: skip
        except Exception as error:  # templates raise kinds of their own
            raise TaskError(
                f"the chat template cannot render these messages: {type(error).__name__}: {error}"
            ) from None

    def _submit_all(
        self,
        prompts: str | Sequence[TextOrChat],
        sampling: Sampling | Sequence[Sampling],
        n: int,
        seed: int | Sequence[int],
    ) -> list[Completion]:
        listed: Sequence[TextOrChat] = [prompts] if isinstance(prompts, str) else prompts
        each = [sampling] * len(listed) if isinstance(sampling, Sampling) else sampling
        numbers = [(seed, row) for row in range(len(listed))] if isinstance(seed, int) else [(own, 0) for own in seed]
        if not len(listed) == len(each) == len(numbers):
            raise ConfigError(
                f"{len(listed)} prompts came with {len(each)} sampling settings and {len(numbers)} seeds; give one for each, or one for all"
            )
        made: list[Completion] = []
        try:
            for place, (prompt, its, (own, row)) in enumerate(zip(listed, each, numbers, strict=True)):
                made += self.submit(prompt, its, n, own, place=place, row=row)
        except BaseException:
            self._cancel_all(made)
            raise
        return made

    def _drained(self, asked: Sequence[Completion]) -> Iterator[Delta]:
        try:
            while any(completion.news or not completion.done for completion in asked):
                for completion in asked:
                    while completion.news:
                        yield completion.news.popleft()
                self.step()
        finally:
            self._cancel_all(asked)

    def _cancel_all(self, asked: Sequence[Completion]) -> None:
        for completion in asked:
            self.cancel(completion)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False))
