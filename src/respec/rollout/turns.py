"""Episodes in the engine: a sequence that has ended its turn hears what its environment says, and goes on in its slot."""

from __future__ import annotations

from collections.abc import Iterable

from respec.rollout.request import Request
from respec.rollout.stopping import Stopping
from respec.types import Partner, Sampling


def converse(
    active: Iterable[Request], partner: Partner, stopping: Stopping, sampling: Sampling, version: int, round_index: int
) -> list[Request]:
    """Gives every turn that has ended to its environment; returns the requests that go on, whose new tokens have no keys yet.

    An episode ends when its environment says so (finish `done`), or when what is said leaves no room for another token of the policy
    (finish `length`). Positions count on through what the environment says, so no two tokens of an episode share a random number.
    """
    going_on = []
    for request in active:
        if request.finish is None:
            continue
        answer = partner.answer(request.ask, request.sample, stopping.turn(request), request.finish)
        request.rewards.append(answer.reward)
        request.solved = answer.solved
        if answer.done:
            request.finish = "done"
        elif len(request.tokens) + len(answer.token_ids) >= sampling.max_new_tokens:
            request.finish = "length"
        else:
            request.hear(answer.token_ids, version, round_index)
            going_on.append(request)
    return going_on
