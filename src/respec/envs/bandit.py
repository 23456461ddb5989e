"""Bandit: which of some machines pays most often? Nothing tells but trying."""

from __future__ import annotations

import random

from respec.envs.protocol import chosen, refusal
from respec.errors import TaskError

NAMES = ("Phoenix", "Dragon", "Griffin", "Hydra", "Unicorn", "Basilisk")


class Bandit:
    """`arms` machines that pay 1 / `pulls` with a hidden chance each, for `pulls` pulls; a text that names none costs `penalty` and no pull.

    The seed draws the names and one chance of `best`, the others of `other`; luck draws what each pull pays. Solved: the best machine was
    pulled in more than half of the pulls.
    """

    hidden = True

    def __init__(
        self, arms: int = 2, pulls: int = 5, best: float = 0.8, other: float = 0.2, penalty: float = 0.1
    ) -> None:
        if not 2 <= arms <= len(NAMES) or pulls < 1 or not 0 <= other < best <= 1:
            raise TaskError(
                f"bandit takes 2 to {len(NAMES)} arms, a pull or more, and chances 0 <= other < best <= 1, got {arms} arms, {pulls} pulls, "
                f"best {best} and other {other}; mend task.params"
            )
        self._arms, self._pulls, self._best, self._other, self._penalty = arms, pulls, best, other, penalty
        self.actions: tuple[str, ...] = ()

    def reset(self, seed: int, luck: int = 0) -> str:
        rng = random.Random(f"bandit {seed}")
        self.actions = tuple(rng.sample(NAMES, self._arms))
        self._pays = rng.choice(self.actions)
        self._dice = random.Random(f"luck {seed} {luck}")
        self._pulled: list[str] = []
        return f"Machines: {', '.join(self.actions)}. You have {self._pulls} pulls. Write the name of one."

    @property
    def solved(self) -> bool:
        return 2 * self._pulled.count(self._pays) > self._pulls

    def step(self, text: str) -> tuple[str, float, bool]:
        name = chosen(text, self.actions)
        if name is None:
            return refusal(self.actions), -self._penalty, False
        self._pulled.append(name)
        paid = self._dice.random() < (self._best if name == self._pays else self._other)
        left = self._pulls - len(self._pulled)
        return f"{name} paid {int(paid)}. {left} left.", paid / self._pulls, left == 0

    def solve(self) -> str:
        """The machine that pays most often, which the solver knows."""
        return self._pays
