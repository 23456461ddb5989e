"""Real, tiny tokenizers; a working directory of the test's own; rollouts made by hand."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from respec.tasks.scorer import Scorer
from respec.tasks.task import Task
from respec.types import Prompt, Rollout, Stream

CHAT = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if not (loop.last and message.role == 'assistant') %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking %}<think>{% endif %}{% endif %}"
)


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte, and <s> before plain text, as Llama's tokenizers do."""
    vocabulary = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    core.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    core.add_special_tokens(["<s>", "</s>"])
    core.post_processor = processors.TemplateProcessing(  # pyright: ignore[reportAttributeAccessIssue]
        single="<s> $A", special_tokens=[("<s>", 256)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=chat_template
    )


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


@pytest.fixture(scope="session")
def chat_tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer(CHAT)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory; the import path and the imported modules are as before afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def write_jsonl(here: Path) -> Callable[..., Path]:
    def write(rows: list[Any], name: str = "data.jsonl") -> Path:
        path = here / name
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return Path(name)

    return write


def make_prompt(row: int, text: str = "", messages: tuple[dict[str, str], ...] | None = None, **columns: Any) -> Prompt:
    return Prompt(row, text or f"prompt {row}", (1, 2), columns, messages)


def make_task(*prompts: Prompt, scorer: Scorer | None = None) -> Task:
    return Task("toy", prompts, (), 0.0, scorer or Scorer("answer"), lambda n: ())


def make_rollout(prompt: Prompt, text: str, sample: int = 0, draw: int = 0) -> Rollout:
    token = np.frombuffer(text.encode() + b"\x00", np.uint8).astype(np.int32)
    zero = np.zeros(len(token), np.float32)
    count = np.zeros(len(token), np.int32)
    return Rollout(
        prompt, Stream.TRAIN, draw, sample, token, zero, zero, zero, count, count.astype(np.uint8), count, text, "eos"
    )


@pytest.fixture
def make() -> Any:
    """Makers of prompts, tasks and rollouts."""

    class Makers:
        prompt = staticmethod(make_prompt)
        task = staticmethod(make_task)
        rollout = staticmethod(make_rollout)
        tokenizer = staticmethod(byte_tokenizer)
        chat_template = CHAT

    return Makers
