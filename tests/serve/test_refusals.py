"""What is not answered: what is wrong, who may not ask, what is too much; and what a client that goes away leaves."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time

import httpx
import openai
import pytest

from respec.errors import CheckpointError, ConfigError
from respec.serve.app import Limits
from respec.serving import Follower
from respec.serving import serve as serve_forever
from respec.weights.checkpoint import save_checkpoint

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "3 + 4\n"}]}
LONG = {**CHAT, "temperature": 2.0, "max_tokens": 370, "n": 8}


def idle(url: str) -> bool:
    """Whether the server comes to have nothing under way."""
    for _ in range(2000):
        if httpx.get(f"{url}/health").json()["requests"] == 0:
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"temperature": 3}, "temperature", "must be a number from 0 to 2"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"top_p": 0}, "top_p", "above 0"),
        ({"n": 0}, "n", "must be an integer from 1"),
        ({"max_tokens": 100_000}, "max_tokens", "at most 384 tokens"),
        ({"max_tokens": True}, "max_tokens", "must be an integer"),
        ({"seed": 2**64}, "seed", "must be an integer"),
        ({"stop": ["", "a"]}, "stop", "none of them empty"),
        ({"messages": []}, "messages", "must be a list of one message or more"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "type 'text' only"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported here"),
        ({"top_logprobs": 5}, "top_logprobs", "not supported here"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported here"),
        ({"temprature": 1}, "temprature", "no field 'temprature'"),
        ({"stream": "yes"}, "stream", "must be true or false"),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_wrong_request_is_told_what_is_wrong(served, change, param, said):
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=CHAT | change)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and said in error["message"]


def test_a_prompt_that_does_not_fit_is_told_so_by_the_engine(served):
    with pytest.raises(openai.BadRequestError, match="leaves room for"):
        served.client().completions.create(model="demo", prompt="1 + " * 300, max_tokens=10)


def test_what_is_not_json_not_there_or_not_allowed_is_told_in_the_apis_form(served):
    post = f"{served.url}/v1/completions"
    answers = {
        httpx.post(post, content=b"{", headers={"content-type": "application/json"}): 400,
        httpx.post(post, content=b"{}", headers={"content-type": "text/plain"}): 415,
        httpx.post(post, json=[1]): 400,
        httpx.post(post, json={"model": "other", "prompt": "1"}): 404,
        httpx.post(post, json={"model": "demo", "prompt": {}}): 400,
        httpx.post(post, json={"model": "demo", "prompt": "1", "logprobs": 3}): 400,
        httpx.get(f"{served.url}/v1/nothing"): 404,
        httpx.get(post): 405,
        httpx.get(f"{served.url}/v1/models", headers={"host": "evil.example"}): 403,
    }
    for answer, status in answers.items():
        assert answer.status_code == status and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    with pytest.raises(openai.NotFoundError, match=r"/v1/responses.*here are .*/v1/chat/completions"):
        served.client().responses.create(model="demo", input="1")


def test_too_much_is_refused_and_may_come_again_later(serve):
    with serve(Limits(requests=1, completions=8, body=2000, tokens=384)) as served:
        client = served.client()
        with client.chat.completions.create(stream=True, **LONG) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as refused:
                client.chat.completions.create(**CHAT)
            assert refused.value.response.headers["retry-after"] == "1"
        assert idle(served.url)
        assert client.chat.completions.create(max_tokens=3, **CHAT).choices
        with pytest.raises(openai.BadRequestError, match="at most 8 completions"):
            client.chat.completions.create(n=9, **CHAT)
        assert httpx.post(f"{served.url}/v1/completions", json={"prompt": "1" * 3000}).status_code == 413


def test_a_client_that_goes_away_cancels_its_request(served):
    """Whole or streamed: what nobody waits for any more does not keep the engine busy, and counts no longer."""
    for stream in (True, False):
        with httpx.Client() as client:
            if stream:
                with client.stream("POST", f"{served.url}/v1/chat/completions", json=LONG | {"stream": True}) as answer:
                    next(answer.iter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(f"{served.url}/v1/chat/completions", json=LONG | {"n": 64}, timeout=0.05)
        assert idle(served.url)
        assert served.client().chat.completions.create(max_tokens=3, **CHAT).choices
    assert not served.decoding._jobs


def test_a_key_is_asked_for_where_there_is_one(serve):
    with serve(key="sesame") as served:
        assert served.client("sesame").models.list().data
        for key in ("open", "sesam", "sesame!"):
            with pytest.raises(openai.AuthenticationError):
                served.client(key).chat.completions.create(**CHAT)
        assert httpx.get(f"{served.url}/v1/models").status_code == 401
        assert httpx.get(f"{served.url}/health").json()["status"] == "ok"


def test_an_engine_that_fails_says_so_and_goes_on(serve, monkeypatch):
    with serve() as served:
        engine, client = served.decoding._engine, served.client()
        with monkeypatch.context() as broken:
            broken.setattr(engine, "step", lambda: 1 / 0)
            with pytest.raises(openai.InternalServerError, match="its log says why"):
                client.chat.completions.create(**CHAT)
        assert client.chat.completions.create(max_tokens=3, **CHAT).choices


def test_an_address_that_others_can_reach_needs_a_key():
    with pytest.raises(ConfigError, match="a key is required"):
        serve_forever("builtin:demo", host="0.0.0.0")


def test_a_port_in_use_is_said_before_a_model_is_loaded(served):
    with pytest.raises(ConfigError, match="cannot be had"):
        serve_forever("/absent", port=int(served.url.rsplit(":", 1)[1]))


def test_a_run_is_followed_to_its_newest_whole_checkpoint(tmp_path, policy):
    (tmp_path / "config.toml").touch()
    taken = []
    follower = Follower(str(tmp_path), 2, "auto", "cpu", lambda new, step: taken.append(step))
    assert not follower.look()
    for step in (2, 4, 8):
        save_checkpoint(tmp_path, step, policy, {"x": 1}, {"step": step}, keep=5)
    (tmp_path / "checkpoints" / "000008" / "model.safetensors").write_bytes(b"")
    assert follower.look() and taken == [4]
    assert not follower.look() and taken == [4]
    for folder in (tmp_path / "checkpoints").iterdir():
        (folder / "counters.json").unlink()
    with pytest.raises(CheckpointError):
        follower.look()


def test_the_command_serves_and_ends_by_ctrl_c(tmp_path):
    command = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from respec.cli import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", command, "serve", "builtin:demo", "--port", "0", "--drafter", "ngram", "--name", "demo"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        lines = iter(process.stdout.readline, "")
        url = next(match[1] for line in lines if (match := re.search(r"(http://127\.0\.0\.1:\d+)/v1", line)))
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300)
        assert client.completions.create(model="demo", prompt="1 + 1\n", max_tokens=4).choices
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(timeout=300) == 0 and rest.strip() == "ended"
    finally:
        process.kill()
