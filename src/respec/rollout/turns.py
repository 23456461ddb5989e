"""Episodes in the engine: a sequence that has ended its turn hears what its environment says, and goes on in its slot."""

from __future__ import annotations

from collections.abc import Iterable

from respec.rollout.request import Request
from respec.rollout.stopping import Stopping
from respec.rollout.target import Target
from respec.types import Partner, Sampling


def converse(
    partner: Partner,
    active: Iterable[Request],
    target: Target,
    stopping: Stopping,
    sampling: Sampling,
    round_index: int,
) -> None:
    """Gives every turn that has ended to its environment, and reads what is answered to those that go on behind the keys they have.

    An episode ends when its environment says so (finish `done`), or when what is said leaves no room for another token of the policy
    (finish `length`). Positions count on through what the environment says, so no two tokens of an episode share a random number.
    """
    going_on = list[Request]()
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
            request.hear(answer.token_ids, target.decoder.version, round_index)
            going_on.append(request)
    target.prefill_on(going_on)
