"""The decoding thread by itself: when newer weights are taken, and what becomes of requests that wait for them or are cancelled."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from respec.serve.asked import read
from respec.serve.decoding import DecodingThread, Job, Joined
from respec.serve.errors import ApiError


def asked(seed: int, **more: Any):
    body = {"model": "demo", "prompt": "3 + 4 - 2 + 9\n", "seed": seed, "temperature": 2.0, "max_tokens": 300, **more}
    return read(json.dumps(body).encode(), "text")


async def collect(job: Job) -> tuple[int, list[int], list[int]]:
    """The version a job was told of, those of its pieces, and its tokens."""
    joined, versions, tokens, left = await job.news.get(), list[int](), list[int](), job.asked.completions
    assert isinstance(joined, Joined), joined
    while left:
        piece = await job.news.get()
        assert not isinstance(piece, ApiError), piece.message
        versions.append(piece.version)
        tokens += piece.token_T
        left -= piece.finish is not None
    return joined.version, versions, tokens


def test_an_answer_is_of_one_version_from_its_first_token_to_its_last(make_engine, policy):
    async def scene():
        thread = DecodingThread(make_engine(), 384)
        # newer weights, and requests behind them, come in the middle of the first answer, by the hand of the engine's own rounds
        engine, step, later = thread._engine, thread._engine.step, list[Job]()

        def interrupted():
            grown = step()
            if grown and not later:
                thread.renew(policy, 3)
                later.extend(Job(asked(seed), first.loop) for seed in (1, 2))
                for job in later:
                    thread._inbox.put(lambda job=job: thread._held.append(job))
            return grown

        engine.step = interrupted
        first = Job(asked(1, n=3), asyncio.get_running_loop())
        thread._inbox.put(lambda: thread._held.append(first))
        thread.start()
        found = [await collect(first)]
        found += [await collect(job) for job in later]
        thread.stop()
        return found

    (first, first_versions, _), *rest = asyncio.run(scene())
    assert first == 0 and set(first_versions) == {0} and len(first_versions) > 10
    assert [version for version, _, _ in rest] == [3, 3]
    assert all(set(versions) == {3} for _, versions, _ in rest)


def test_a_request_cancelled_before_it_has_joined_is_never_drawn(make_engine):
    async def scene():
        thread = DecodingThread(make_engine(), 384)
        gone, stays = thread.ask(asked(1)), thread.ask(asked(2, max_tokens=5))
        thread.cancel(gone)
        thread.start()
        await collect(stays)
        thread.stop()
        return gone.news.empty() and not thread._jobs and not thread._engine.busy

    assert asyncio.run(scene())
