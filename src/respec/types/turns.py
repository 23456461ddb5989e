"""What passes between a policy and an environment, turn by turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from respec.types.drawing import Ask, Finish


@dataclass(frozen=True)
class Answer:
    """What an environment makes of a turn. `token_ids` are the prompt of the next one, empty when it is `done`.

    `solved` says whether the environment counts as solved so far. Made by a Partner, read by the engine.
    """

    token_ids: tuple[int, ...]
    reward: float
    done: bool
    solved: bool


class Partner(Protocol):
    """The environments of one rollout: an episode a completion. What is answered depends on the ask, the sample and what was said alone."""

    def answer(self, ask: Ask, sample: int, said: str, finish: Finish) -> Answer:
        """Takes the text of the episode's next turn, which `finish` ended."""
        ...
