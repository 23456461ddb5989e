from __future__ import annotations

from typing import Any

import pytest

from respec.config import TaskConfig
from respec.errors import TaskError
from respec.tasks.render import Renderer, Row, fill


def row(prompt: Any = "2 + 2", **fields: Any) -> Row:
    return Row(prompt, fields, fields, "line 7 of 'data.jsonl'")


def renderer(tokenizer: Any, context: int = 1000, new: int = 100, **settings: Any) -> Renderer:
    return Renderer(TaskConfig(dataset="chain_sum", **settings), tokenizer, context, new)


def test_template_takes_any_field_and_leaves_other_braces():
    fields = {"prompt": "2 + 2", "level": 3}
    assert fill("{level}: {prompt} in \\boxed{} or {{x}} or {1: 2}", fields, "here") == (
        "3: 2 + 2 in \\boxed{} or {x} or {1: 2}"
    )


def test_values_are_not_templates():
    assert fill("{prompt}", {"prompt": "a {level} {{b}}"}, "here") == "a {level} {{b}}"


def test_unknown_field_names_the_nearest():
    with pytest.raises(TaskError, match=r"'\{promt\}'.*line 7.*'\{prompt\}'"):
        fill("{promt}", {"prompt": "x"}, "line 7 of 'data.jsonl'")


def test_plain_text_gets_the_tokenizers_own_special_tokens(tokenizer: Any):
    rendering = renderer(tokenizer, template="Q: {prompt}\nA:")
    (prompt,) = rendering.prompts([rendering.render(row(extra=1))], 5)
    assert prompt.text == "Q: 2 + 2\nA:"
    assert prompt.token_ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(prompt.token_ids[1:]) == prompt.text
    assert (prompt.row, prompt.messages, prompt.columns) == (5, None, {"extra": 1})


def test_chat_template_wraps_text_with_system_prompt_and_arguments(chat_tokenizer: Any):
    rendering = renderer(chat_tokenizer, system_prompt="Be brief.", chat_template_args={"thinking": True})
    (prompt,) = rendering.prompts([rendering.render(row())], 0)
    assert prompt.text == "<|system|>Be brief.<|end|><|user|>2 + 2<|end|><|assistant|><think>"
    assert chat_tokenizer.decode(prompt.token_ids) == prompt.text, "the chat template writes special tokens itself"
    assert prompt.messages is None, "text data stays text for rewards"


def test_chat_never_leaves_the_template_alone(chat_tokenizer: Any):
    assert renderer(chat_tokenizer, chat="never").render(row()).text == "2 + 2"


def test_messages_are_rendered_and_kept(chat_tokenizer: Any):
    messages = (
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "2"},
    )
    item = renderer(chat_tokenizer, template="{prompt}!", system_prompt="S").render(row(messages))
    assert item.text == "<|system|>S<|end|><|user|>hi<|end|><|assistant|>yes?<|end|><|user|>2!<|end|><|assistant|>"
    assert item.messages is not None
    assert [message["role"] for message in item.messages] == ["system", "user", "assistant", "user"]
    assert messages[2]["content"] == "2", "the data is not changed"


def test_a_system_message_of_the_data_wins(chat_tokenizer: Any):
    messages = ({"role": "system", "content": "mine"}, {"role": "user", "content": "hi"})
    assert (
        renderer(chat_tokenizer, system_prompt="S")
        .render(row(messages))
        .text.startswith("<|system|>mine<|end|><|user|>")
    )


def test_a_begun_answer_is_continued(chat_tokenizer: Any):
    messages = ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"})
    assert renderer(chat_tokenizer).render(row(messages)).text == "<|user|>hi<|end|><|assistant|>Well"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chat": "always"}, "no chat template"),
        ({"system_prompt": "S"}, r"task\.system_prompt is set.*the tokenizer has none"),
        ({"chat_template_args": {"thinking": True}}, r"task\.chat_template_args is set"),
    ],
)
def test_chat_settings_without_a_chat_template(tokenizer: Any, settings: dict[str, Any], message: str):
    with pytest.raises(TaskError, match=message):
        renderer(tokenizer, **settings)


def test_system_prompt_with_chat_never(chat_tokenizer: Any):
    with pytest.raises(TaskError, match=r"task\.system_prompt is set.*task\.chat = 'never'"):
        renderer(chat_tokenizer, chat="never", system_prompt="S")


def test_messages_without_a_chat_template(tokenizer: Any):
    with pytest.raises(TaskError, match=r"line 7 of 'data.jsonl' holds chat messages"):
        renderer(tokenizer).render(row(({"role": "user", "content": "hi"},)))


def test_a_chat_template_that_refuses(make: Any):
    refusing = make.tokenizer("{{ raise_exception('no system role') }}")
    with pytest.raises(TaskError, match=r"could not render line 7 of 'data.jsonl'.*no system role"):
        renderer(refusing).render(row())


def test_a_prompt_that_just_fits_and_one_that_does_not(tokenizer: Any):
    rendering = renderer(tokenizer, context=20, new=10)
    rendering.prompts([rendering.render(row("123456789"))], 0)  # <s> and nine bytes
    with pytest.raises(TaskError, match=r"row 4 \(line 7 of 'data.jsonl'\) has 11 tokens.*20 less 10.*room for 10"):
        rendering.prompts([rendering.render(row("123456789")), rendering.render(row("1234567890"))], 3)


def test_an_empty_prompt(make: Any):
    rendering = renderer(make.tokenizer("{{ '' }}"))
    with pytest.raises(TaskError, match=r"prompt of row 2 \(line 7 of 'data.jsonl'\) is empty"):
        rendering.prompts([rendering.render(row())], 2)


def overlong(tokenizer: Any, policy: str, *texts: str, limit: int = 30, **sampling: float) -> Renderer:
    renderer = Renderer(TaskConfig.model_validate({"dataset": "x", "overlong": policy}), tokenizer, limit, 10)
    rows = [Row(text, {}, {}, f"row {i}", sampling) for i, text in enumerate(texts)]
    renderer.made = renderer.prompts([renderer.render(row) for row in rows], 5)  # pyright: ignore[reportAttributeAccessIssue]
    return renderer


def test_overlong_prompts_are_dropped_and_counted(tokenizer: Any):
    done: Any = overlong(tokenizer, "drop", "short", "x" * 20, "y" * 19)
    assert [(p.row, p.text) for p in done.made] == [(5, "short"), (6, "y" * 19)], "no row id is left out"
    assert done.notes() == ("1 prompts are too long for the model's context and were dropped",)
    with pytest.raises(TaskError, match="leaves no prompt of 2"):
        overlong(tokenizer, "drop", "x" * 20, "x" * 21)


def test_overlong_prompts_lose_their_beginning_but_the_bos(tokenizer: Any, chat_tokenizer: Any):
    done: Any = overlong(tokenizer, "truncate_left", "short", "0123456789" * 3)
    ids = done.made[1].token_ids
    assert len(ids) == 20 and ids[0] == 256 and tokenizer.decode(ids[1:]) == "1234567890123456789"
    assert done.notes() == ("1 prompts are too long for the model's context and lost their beginning",)
    chat: Any = overlong(chat_tokenizer, "truncate_left", "0123456789" * 3, limit=40)
    assert (
        chat_tokenizer.decode(chat.made[0].token_ids).endswith("789<|end|><|assistant|>")
        and len(chat.made[0].token_ids) == 30
    )


def test_a_rows_own_length_counts(tokenizer: Any):
    with pytest.raises(TaskError, match="context of 30 less 25 new tokens leaves room for 5"):
        overlong(tokenizer, "error", "123456", max_new_tokens=25)
    assert not overlong(tokenizer, "error", "1" * 22, max_new_tokens=7).notes()
