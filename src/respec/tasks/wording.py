"""How what an environment says is put to the model: by a template, or as a user's turn of the tokenizer's chat template."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from respec.config import TaskConfig
from respec.errors import TaskError
from respec.types import Finish

# Texts that no chat template writes itself.
MARK, HEARD = "(0-mark-0)", "(1-heard-1)"


class Wording:
    """EOS ends a turn. Raises TaskError for a tokenizer without it, or a chat template that does not let a conversation grow at its end."""

    def __init__(self, config: TaskConfig, tokenizer: PreTrainedTokenizerBase, chat: bool) -> None:
        if not tokenizer.eos_token:
            raise TaskError("the tokenizer names no EOS token, which ends a turn; set eos_token in its configuration")
        self._tokenizer, self._eos = tokenizer, str(tokenizer.eos_token)
        self._closes = chat
        self._template = self._from_chat(config) if chat else config.turn_template

    def heard(self, text: str, finish: Finish) -> tuple[int, ...]:
        """The tokens that follow a turn which `finish` ended; a chat's turn that was cut short is closed first. Never none."""
        closing = self._eos if self._closes and finish != "eos" else ""
        return self._tokens(closing + self._template.replace("{observation}", text)) or self._tokens("\n")

    def said(self, text: str) -> tuple[int, ...]:
        """The tokens of a turn of these words, EOS at its end."""
        return self._tokens(text + self._eos)

    def _from_chat(self, config: TaskConfig) -> str:
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
        after = [*before, {"role": "user", "content": HEARD}]
        text = str(
            self._tokenizer.apply_chat_template(
                after, **{**config.chat_template_args, "tokenize": False, "add_generation_prompt": True}
            )
        )
        rest = text.partition(MARK)[2]
        if rest.count(HEARD) != 1 or not rest.startswith(self._eos):
            raise TaskError(
                f"the tokenizer's chat template does not end an assistant's turn with {self._eos!r} and go on, so an episode cannot be its "
                "conversation; use task.chat = 'never' and task.turn_template"
            )
        return rest.removeprefix(self._eos).replace(HEARD, "{observation}")

    def _tokens(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
