"""Whether the hub is to be asked: never for a path, and once a process whether it answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from respec.models import hub


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    hub.reachable.cache_clear()
    yield
    hub.reachable.cache_clear()


def test_paths_are_no_ids(tmp_path: Path):
    assert all(map(hub.is_id, ("owner/name", "gpt2", "Qwen/Qwen3-0.6B")))
    assert not any(map(hub.is_id, ("/a/b", "./a", "../a", "~/a", "a/b/c", "a\\b", "")))
    assert hub.folder(str(tmp_path)) == tmp_path and hub.folder(str(tmp_path / "absent")) is None


def test_it_is_asked_once_and_for_seconds_at_most(monkeypatch: pytest.MonkeyPatch):
    limits: list[float] = []

    class Session:
        def head(self, url: str, timeout: float) -> Any:
            limits.append(timeout)
            raise OSError("no route")

    monkeypatch.setattr(hub, "get_session", Session)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    assert not hub.reachable() and not hub.reachable()
    assert len(limits) == 1 and limits[0] <= 10


def test_it_is_not_asked_where_the_user_said_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(hub, "get_session", lambda: pytest.fail("asked"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert not hub.reachable()
    hub.reachable.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    assert not hub.reachable()


def test_it_answers(monkeypatch: pytest.MonkeyPatch):
    class Session:
        def head(self, url: str, timeout: float) -> None: ...

    monkeypatch.setattr(hub, "get_session", Session)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_DATASETS_OFFLINE", raising=False)
    assert hub.reachable()
