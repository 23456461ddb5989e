"""What an environment is: two methods. The rest of this room are environments, and what they share."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)


class TextEnv(Protocol):
    """An environment to be acted in by writing. One object plays one episode after the other.

    Nothing may depend on anything but the seeds and what was written: episodes are played again, with speculation and without, and after
    a stop. `reset` may take a second number, `luck`: then `seed` says which problem it is and `luck` how its dice fall, so that the
    samples of one prompt face the same problem with dice of their own.

    An attribute `solved` (bool) says whether the episode is a success so far; without it, a return of 1 is one. An attribute `hidden`,
    True where the first text does not tell a problem from the others, allows problems of the same text.
    """

    def reset(self, seed: int) -> str:
        """Begins an episode; returns the first text that the policy reads."""
        ...

    def step(self, text: str) -> tuple[str, float, bool]:
        """Takes what the policy wrote in its turn; returns what it reads next, the turn's reward, and whether the episode is over."""
        ...


@runtime_checkable
class Solvable(Protocol):
    """An environment with a scripted solver, whose episodes a warm-up can learn from. It may know what the policy does not."""

    actions: Sequence[str]

    def solve(self) -> str:
        """The text to write next, for success from where the episode stands."""
        ...


def chosen(text: str, actions: Sequence[str]) -> str | None:
    """Which action a turn's text names, or None.

    What counts is what stands in the last <answer> tags, or the whole text without them; whole names and unmistakable beginnings of them are
    taken, in either case.
    """
    tagged = _TAGGED.findall(text)
    word = (tagged[-1] if tagged else text).strip().lower()
    if not word:
        return None
    exact = [action for action in actions if action.lower() == word]
    begun = [action for action in actions if action.lower().startswith(word)]
    found = exact or begun
    return found[0] if len(found) == 1 else None


def refusal(actions: Sequence[str]) -> str:
    """What is said to a text that names no action."""
    return f"That is no action. Write one of: {', '.join(actions)}."
