"""The real `openai` client against a server: the engine's own tokens, whole and streamed, alone and in a crowd."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest

from respec.serve.app import VERSION_HEADER
from respec.types import Sampling

PROMPT = "3 + 4 - 2 + 9\n"
OTHERS = ("8 - 5 + 1\n", "9\n", "1 + 1 + 1 + 1\n")


@pytest.fixture(scope="module")
def client(served):
    return served.client()


def chat(client, content: str, **settings):
    return client.chat.completions.create(model="demo", messages=[{"role": "user", "content": content}], **settings)


def test_text_is_what_the_library_draws_with_the_same_seed(client, make_engine):
    drawn = make_engine().generate([PROMPT, OTHERS[0]], Sampling(70, 0.9, top_p=0.95), n=2, seed=7)
    asked = {"max_tokens": 70, "temperature": 0.9, "top_p": 0.95, "n": 2, "seed": 7, "logprobs": 0}
    answer = client.completions.create(model="demo", prompt=[PROMPT, OTHERS[0]], **asked)
    assert [choice.text for choice in answer.choices] == [rollout.text for rollout in drawn]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice, rollout in zip(answer.choices, drawn, strict=True):
        assert choice.finish_reason == {"eos": "stop", "length": "length"}[rollout.finish]
        assert choice.logprobs.token_logprobs == [float(p) for p in rollout.logprob_T]
    tokens = sum(len(rollout.token_T) for rollout in drawn)
    prompts = sum(len(rollout.prompt.token_ids) for rollout in (drawn[0], drawn[2]))
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (prompts, tokens)
    assert answer.usage.total_tokens == prompts + tokens and answer.system_fingerprint == "respec-version-0"


def test_tokens_may_be_given_for_text(client, policy):
    tokens = policy.tokenizer(PROMPT)["input_ids"]
    texts = [
        client.completions.create(model="demo", prompt=p, max_tokens=30, seed=3).choices[0].text
        for p in (PROMPT, tokens)
    ]
    assert texts[0] == texts[1]


def test_chat_is_streamed_as_it_is_answered(client):
    asked = {"max_completion_tokens": 60, "n": 2, "seed": 5, "logprobs": True, "stop": ["leaving", "zz"]}
    whole = chat(client, PROMPT, **asked)
    texts, logprobs, ends, usage = ["", ""], [[], []], ["", ""], None
    for chunk in chat(client, PROMPT, stream=True, stream_options={"include_usage": True}, **asked):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert not ends[choice.index]
            texts[choice.index] += choice.delta.content or ""
            logprobs[choice.index] += choice.logprobs.content if choice.logprobs else []
            ends[choice.index] = choice.finish_reason or ""
    assert texts == [choice.message.content for choice in whole.choices] and all(texts)
    assert logprobs == [choice.logprobs.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices] and usage == whole.usage
    assert all(token.logprob <= 0 for token in logprobs[0]) and all("leaving" not in text for text in texts)


def test_text_is_streamed_as_it_is_answered(client):
    asked = {"model": "demo", "prompt": PROMPT, "max_tokens": 60, "seed": 5, "logprobs": 0}
    whole = client.completions.create(**asked).choices[0]
    chunks = [choice for chunk in client.completions.create(stream=True, **asked) for choice in chunk.choices]
    assert "".join(chunk.text for chunk in chunks) == whole.text and chunks[-1].finish_reason == whole.finish_reason
    assert [offset for chunk in chunks for offset in chunk.logprobs.text_offset] == whole.logprobs.text_offset
    assert len(chunks) > 3


def test_greedy_needs_no_seed_and_other_answers_have_luck_of_their_own(client):
    greedy = {chat(client, PROMPT, temperature=0, max_tokens=24).choices[0].message.content for _ in range(2)}
    lucky = chat(client, PROMPT, temperature=2.0, max_tokens=24, n=8).choices
    assert len(greedy) == 1 and len({choice.message.content for choice in lucky}) > 1


def test_a_seed_answers_alone_as_in_a_crowd(client):
    """Law 1 at the endpoint: requests of all kinds join and leave meanwhile, more than there are places."""
    alone = chat(client, PROMPT, seed=11, max_tokens=80, logprobs=True).choices[0]

    def other(number: int):
        settings = {"max_tokens": 5 + 9 * (number % 7), "temperature": 0.3 * (number % 4), "n": 1 + number % 3}
        return chat(client, OTHERS[number % 3], seed=number, **settings)

    with ThreadPoolExecutor(16) as pool:
        crowd = [pool.submit(other, number) for number in range(12)]
        ours = [pool.submit(chat, client, PROMPT, seed=11, max_tokens=80, logprobs=True) for _ in range(3)]
        crowd += [pool.submit(other, number) for number in range(12, 24)]
        assert all(future.result().choices for future in crowd)
        answers = [future.result().choices[0] for future in ours]
    assert all(answer.message.content == alone.message.content for answer in answers)
    assert all(answer.logprobs == alone.logprobs for answer in answers)


def test_without_a_limit_there_is_as_much_room_as_is_left(client):
    answer = client.completions.create(model="demo", prompt=PROMPT, seed=1, temperature=2.0, extra_body={"top_k": 40})
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens <= 384 and math.isfinite(answer.usage.total_tokens)


def test_an_answer_is_of_one_version_and_says_which(served, client, policy):
    """Newer weights come while one is being streamed: it ends with the old ones, and the next begins with the new."""
    ask = client.chat.completions.with_raw_response.create
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": PROMPT}],
        "seed": 2,
        "temperature": 1.5,
        "max_tokens": 200,
    }
    stream = chat(client, PROMPT, stream=True, seed=2, temperature=1.5, max_tokens=200)
    versions = [next(stream).system_fingerprint]
    served.decoding.renew(policy, 6)
    later = ask(**body)
    versions += [chunk.system_fingerprint for chunk in stream]
    assert set(versions) == {"respec-version-0"}
    assert later.headers[VERSION_HEADER] == "6" and later.parse().system_fingerprint == "respec-version-6"


def test_it_says_what_it_serves(served, client):
    (model,) = client.models.list().data
    assert model.id == "demo" and client.models.retrieve("demo").id == "demo"
