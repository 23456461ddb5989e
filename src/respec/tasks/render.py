"""From a dataset row to the prompt a model sees: template, chat template, tokens, and the check that it fits."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from respec.config import TaskConfig
from respec.errors import TaskError
from respec.types import Message, Prompt

_FIELD = re.compile(r"\{\{|\}\}|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class Row:
    """One row as its source gives it. `prompt` is text or chat messages; `fields` fill the template besides {prompt};
    `columns` go to rewards; `place` says where it came from, for errors; `sampling` are its own settings, as in `Prompt`."""

    prompt: str | tuple[Message, ...]
    fields: Mapping[str, Any]
    columns: Mapping[str, Any]
    place: str
    sampling: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Rendered:
    """A row with the text the model sees. `messages` only where the data itself is chat."""

    row: Row
    text: str
    messages: tuple[Message, ...] | None
    chat: bool


def fill(template: str, fields: Mapping[str, Any], place: str) -> str:
    """Puts fields into a template: `{name}`; `{{` and `}}` give single braces, and braces around no name stay as they are.

    Raises TaskError for a name that is no field, with the nearest ones.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name is None:
            return match.group(0)[0]
        if name not in fields:
            near = difflib.get_close_matches(name, list(fields), n=1, cutoff=0.5)
            hint = f"did you mean '{{{near[0]}}}'?" if near else "known: " + ", ".join(f"{{{key}}}" for key in fields)
            raise TaskError(
                f"task.template asks for '{{{name}}}', which {place} does not have; {hint} "
                f"(write '{{{{{name}}}}}' for braces that should stay)"
            )
        return str(fields[name])

    return _FIELD.sub(value, template)


class Renderer:
    """Renders rows for one tokenizer. Raises TaskError at once if chat settings and tokenizer do not go together.

    `dropped` and `cut` count the overlong prompts that `task.overlong` has left out or shortened.
    """

    def __init__(
        self, config: TaskConfig, tokenizer: PreTrainedTokenizerBase, context_length: int, max_new_tokens: int
    ) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._max_new_tokens = max_new_tokens
        self.dropped = self.cut = 0
        has_template = bool(getattr(tokenizer, "chat_template", None))
        if config.chat == "always" and not has_template:
            raise TaskError(
                "task.chat = 'always', but the tokenizer has no chat template; use a model with one, or task.chat = 'auto'"
            )
        self._chat = has_template and config.chat != "never"
        unused = "system_prompt" if config.system_prompt else "chat_template_args" if config.chat_template_args else ""
        if unused and not self._chat:
            raise TaskError(
                f"task.{unused} is set, but no chat template is applied ({self._why_no_chat()}); put the text into "
                "task.template, or remove the setting"
            )

    @property
    def chat(self) -> bool:
        """Whether a text is put into a chat template."""
        return self._chat

    def render(self, row: Row) -> Rendered:
        """The text the model sees for a row. Raises TaskError if the template or the chat template cannot take it."""
        if isinstance(row.prompt, str):
            text = fill(self._config.template, {**row.fields, "prompt": row.prompt}, row.place)
            if not self._chat:
                return Rendered(row, text, None, False)
            return Rendered(
                row, self._apply(self._with_system([{"role": "user", "content": text}]), row.place), None, True
            )
        if not self._chat:
            raise TaskError(
                f"{row.place} holds chat messages, but no chat template is applied ({self._why_no_chat()}); use a model "
                "with a chat template, or a text column"
            )
        messages = self._with_system([dict(message) for message in row.prompt])
        users = [index for index, message in enumerate(messages) if message["role"] == "user"]
        if users:
            last = messages[users[-1]]
            last["content"] = fill(self._config.template, {**row.fields, "prompt": last["content"]}, row.place)
        return Rendered(row, self._apply(messages, row.place), tuple(messages), True)

    def prompts(self, rendered: Sequence[Rendered], first_row: int) -> tuple[Prompt, ...]:
        """Tokenizes; row ids count up from `first_row`. See `fitting` for what is raised, and for prompts that are too long."""
        return tuple(prompt for prompt, _ in self.fitting(rendered, first_row))

    def fitting(self, rendered: Sequence[Rendered], first_row: int) -> list[tuple[Prompt, Rendered]]:
        """The prompts, each with its row. One of more than context_length - max_new_tokens is dropped, or loses its beginning (but a BOS
        token), where `task.overlong` says so.

        Raises TaskError for a prompt of no tokens, for one that is too long where it does not say so, and where all are dropped.
        """
        if not rendered:
            return []
        # A chat template writes the special tokens itself; plain text gets those the tokenizer adds on its own.
        special = not rendered[0].chat
        encoded: Any = self._tokenizer([item.text for item in rendered], add_special_tokens=special)["input_ids"]
        made: list[tuple[Prompt, Rendered]] = []
        for item, ids in zip(rendered, encoded, strict=True):
            row, room = first_row + len(made), self._room(item.row)
            if not ids:
                raise TaskError(
                    f"the prompt of row {row} ({item.row.place}) is empty: it has no tokens; remove or mend it"
                )
            if len(ids) > room:
                ids = self._shortened(ids, room, row, item.row)
            if ids:
                prompt = Prompt(row, item.text, tuple(ids), item.row.columns, item.messages, sampling=item.row.sampling)
                made.append((prompt, item))
        if not made:
            raise TaskError(
                f"task.overlong = 'drop' leaves no prompt of {len(rendered)}: all have more tokens than the model's context of "
                f"{self._context_length} has room for beside rollout.max_new_tokens; lower that, or use a model with a longer context"
            )
        return made

    def notes(self) -> tuple[str, ...]:
        """Lines for the user: how many prompts were dropped or cut for their length."""
        counts = ((self.dropped, "were dropped"), (self.cut, "lost their beginning"))
        return tuple(
            f"{count} prompts are too long for the model's context and {what}" for count, what in counts if count
        )

    def _room(self, row: Row) -> int:
        return self._context_length - int(row.sampling.get("max_new_tokens", self._max_new_tokens))

    def _shortened(self, ids: Sequence[int], room: int, row: int, source: Row) -> Sequence[int]:
        """What `task.overlong` leaves of a prompt's tokens; nothing where it is dropped."""
        if self._config.overlong == "error" or room < 2:
            raise TaskError(
                f"the prompt of row {row} ({source.place}) has {len(ids)} tokens, but the model's context of "
                f"{self._context_length} less {self._context_length - room} new tokens leaves room for {max(room, 0)}; shorten "
                "or remove the prompt, lower max_new_tokens, use a model with a longer context, or set task.overlong"
            )
        if self._config.overlong == "drop":
            self.dropped += 1
            return ()
        self.cut += 1
        begin = ids[:1] if ids[0] == getattr(self._tokenizer, "bos_token_id", None) else []
        return [*begin, *ids[len(ids) - room + len(begin) :]]

    def _with_system(self, messages: list[dict[str, str]]) -> list[dict[str, str]]:
        if self._config.system_prompt and not (messages and messages[0]["role"] == "system"):
            return [{"role": "system", "content": self._config.system_prompt}, *messages]
        return messages

    def _apply(self, messages: list[dict[str, str]], place: str) -> str:
        # A conversation that ends with the assistant is a beginning to be continued, as in TRL.
        goes_on = messages[-1]["role"] == "assistant"
        turn = {"add_generation_prompt": not goes_on, "continue_final_message": goes_on}
        try:
            text = self._tokenizer.apply_chat_template(
                messages, **{**turn, **self._config.chat_template_args, "tokenize": False}
            )
        except Exception as error:
            raise TaskError(
                f"the tokenizer's chat template could not render {place}: {type(error).__name__}: {error}; check "
                "task.system_prompt, task.chat_template_args and the roles of the messages"
            ) from error
        return str(text)

    def _why_no_chat(self) -> str:
        return "task.chat = 'never'" if self._config.chat == "never" else "the tokenizer has none"
