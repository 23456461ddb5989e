"""FrozenLake: from the upper left corner of a frozen lake to the goal in the lower right one, without falling into a hole.

Gymnasium's rules (Towers et al. 2024, arXiv 2407.17032) and RAGEN's symbols (arXiv 2504.20073), written anew.
"""

from __future__ import annotations

import random
from collections import deque

from respec.envs.protocol import chosen, refusal
from respec.errors import TaskError

Place = tuple[int, int]
MOVES: dict[str, Place] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
RULES = "You are P on a frozen lake. Go to G without falling into a hole O; _ is ice. Write Left, Down, Right or Up.{slips}\n"
SLIPS = " The ice is slippery: one step in three goes as you want, the others go to either side."


class FrozenLake:
    """`size` squares a side, each a hole with chance `holes`; maps are drawn by the seed until there is a way. Reward 1 at the goal, else 0,
    and `penalty` less for a text that is no action, which moves nobody. `slippery`: a third of the steps goes as intended, a third to either side.
    `rules`: the first text explains the game.
    """

    actions = tuple(MOVES)

    def __init__(
        self, size: int = 4, holes: float = 0.2, slippery: bool = False, penalty: float = 0.1, rules: bool = True
    ) -> None:
        if size < 2 or not 0 <= holes <= 0.6:
            raise TaskError(
                f"frozen_lake takes a size of 2 or more and holes of 0 to 0.6, got size {size} and holes {holes}; mend task.params"
            )
        self._size, self._share, self._slippery, self._penalty, self._rules = size, holes, slippery, penalty, rules
        self.solved = False

    def reset(self, seed: int, luck: int = 0) -> str:
        rng = random.Random(f"frozen lake {seed}")
        goal = (self._size - 1, self._size - 1)
        squares = [(r, c) for r in range(self._size) for c in range(self._size) if (r, c) not in ((0, 0), goal)]
        way = None
        while way is None:
            self._holes = frozenset(square for square in squares if rng.random() < self._share)
            way = self._ways(goal).get((0, 0))
        self._goal, self._at, self.solved = goal, (0, 0), False
        self._dice = random.Random(f"luck {seed} {luck}")
        told = RULES.format(slips=SLIPS if self._slippery else "") if self._rules else ""
        return told + self._map()

    def step(self, text: str) -> tuple[str, float, bool]:
        action = chosen(text, self.actions)
        if action is None:
            return f"{refusal(self.actions)}\n{self._map()}", -self._penalty, False
        row, column = MOVES[action]
        if self._slippery:
            row, column = self._dice.choice([(row, column), (column, row), (-column, -row)])
        self._at = self._bounded(self._at[0] + row, self._at[1] + column)
        self.solved = self._at == self._goal
        return self._map(), float(self.solved), self.solved or self._at in self._holes

    def solve(self) -> str:
        """The first step of a shortest way; on slippery ice, too, where it is a good step but not always the best."""
        ways = self._ways(self._goal)
        near = {action: self._bounded(self._at[0] + r, self._at[1] + c) for action, (r, c) in MOVES.items()}
        return min(self.actions, key=lambda action: ways.get(near[action], self._size**2))

    def _ways(self, goal: Place) -> dict[Place, int]:
        """Steps to the goal from every square that has a way."""
        steps, queue = {goal: 0}, deque([goal])
        while queue:
            row, column = queue.popleft()
            for r, c in MOVES.values():
                square = self._bounded(row + r, column + c)
                if square not in steps and square not in self._holes:
                    steps[square] = steps[(row, column)] + 1
                    queue.append(square)
        return steps

    def _bounded(self, row: int, column: int) -> Place:
        return min(max(row, 0), self._size - 1), min(max(column, 0), self._size - 1)

    def _map(self) -> str:
        """The lake, a line a row. Who stands in a hole is X, who stands at the goal is V."""

        def sign(square: Place) -> str:
            if square == self._at:
                return "X" if square in self._holes else "V" if square == self._goal else "P"
            return "O" if square in self._holes else "G" if square == self._goal else "_"

        return "\n".join("".join(sign((r, c)) for c in range(self._size)) for r in range(self._size))
