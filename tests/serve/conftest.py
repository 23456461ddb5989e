"""A server on a loopback port of its own, with the built-in model, in a thread of the tests' process."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import openai
import pytest
import uvicorn

from respec.config import ModelConfig
from respec.models.load import Policy, load_policy
from respec.serve.app import Limits, Service
from respec.serve.decoding import DecodingThread
from respec.text_engine import Engine

PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@dataclass(frozen=True)
class Served:
    """A server that runs: its address, and the thread that decodes for it."""

    url: str
    decoding: DecodingThread

    def client(self, key: str = "none", **options) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300, **options)


Serve = Callable[..., AbstractContextManager[Served]]


@pytest.fixture(scope="session")
def policy() -> Policy:
    return load_policy(ModelConfig(path="builtin:demo"))


@pytest.fixture(scope="session")
def make_engine(policy):
    def make(max_batch: int = 4) -> Engine:
        return Engine(policy, speculation="suffix", max_batch=max_batch, max_length=384, chat_template=PLAIN_CHAT)

    return make


@pytest.fixture(scope="session")
def serve(make_engine) -> Serve:
    @contextlib.contextmanager
    def running(limits: Limits = Limits(tokens=384), key: str | None = None, max_batch: int = 4) -> Iterator[Served]:
        engine = make_engine(max_batch)
        decoding = DecodingThread(engine, limits.tokens)
        app = Service(decoding, engine.tokenizer, "demo", 0, limits, key).app()
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="on", timeout_graceful_shutdown=1))
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
            thread.start()
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            yield Served(f"http://127.0.0.1:{listening.getsockname()[1]}", decoding)
            server.should_exit = True
            thread.join()
            assert not decoding.alive

    return running


@pytest.fixture(scope="module")
def served(serve: Serve) -> Iterator[Served]:
    with serve() as running:
        yield running
