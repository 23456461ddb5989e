"""Sokoban: push every box onto a target. Rooms are made by playing backwards from the solved room, so each can be solved.

Rules and rewards of gym-sokoban (Schrader 2018) as in RAGEN (arXiv 2504.20073), written anew.
"""

from __future__ import annotations

import random
from collections import deque

from respec.envs.protocol import chosen, refusal
from respec.errors import TaskError

Place = tuple[int, int]
State = tuple[Place, frozenset[Place]]
MOVES: dict[str, Place] = {"Left": (0, -1), "Down": (1, 0), "Right": (0, 1), "Up": (-1, 0)}
RULES = (
    "You are P. Push every box X onto a target O, and do not push it where it cannot leave; # is a wall, _ is floor, * a box on a target, "
    "S is you on a target. Write Left, Down, Right or Up.\n"
)
MOST_ROOMS, MOST_STATES = 1000, 200_000


class Sokoban:
    """A room of `size` squares a side, walls around it and inside it with chance `walls`, with `boxes` boxes, which `pulls` backward steps
    have taken off their targets. Rewards: `step_cost` less a step, 1 for a box pushed onto a target, 1 less for one pushed off, 10 for
    the last; a text that is no action costs `penalty` and moves nobody. `rules`: the first text explains the game.
    """

    actions = tuple(MOVES)

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        pulls: int = 8,
        walls: float = 0.1,
        step_cost: float = 0.1,
        penalty: float = 0.1,
        rules: bool = True,
    ) -> None:
        if size < 4 or not 1 <= boxes <= (size - 2) ** 2 // 3 or pulls < 1 or not 0 <= walls <= 0.4:
            raise TaskError(
                f"sokoban takes a size of 4 or more, boxes for at most a third of the floor, a pull or more and walls of 0 to 0.4, got size {size}, "
                f"{boxes} boxes, {pulls} pulls and walls {walls}; mend task.params"
            )
        self._size, self._count, self._pulls, self._share, self._rules = size, boxes, pulls, walls, rules
        self._step_cost, self._penalty = step_cost, penalty

    def reset(self, seed: int, luck: int = 0) -> str:
        rng = random.Random(f"sokoban {seed}")
        for _ in range(MOST_ROOMS):
            self._draw(rng)
            if not self.solved:
                return (RULES if self._rules else "") + self._map()
        raise TaskError(
            f"sokoban found no room of these task.params that is not solved from the first in {MOST_ROOMS} tries; lower walls or boxes, or raise size"
        )

    @property
    def solved(self) -> bool:
        return self._boxes == self._targets

    def step(self, text: str) -> tuple[str, float, bool]:
        action = chosen(text, self.actions)
        if action is None:
            return f"{refusal(self.actions)}\n{self._map()}", -self._penalty, False
        before = len(self._boxes & self._targets)
        moved = self._moved((self._at, self._boxes), MOVES[action])
        if moved is not None:
            self._at, self._boxes = moved
        reward = len(self._boxes & self._targets) - before - self._step_cost + 10.0 * self.solved
        return self._map(), reward, self.solved

    def solve(self) -> str:
        """The first step of a shortest solution from here; any step where there is none any more, or none is found."""
        start = (self._at, self._boxes)
        first: dict[State, str] = {start: self.actions[0]}
        queue = deque([start])
        while queue and len(first) < MOST_STATES:
            state = queue.popleft()
            for action, move in MOVES.items():
                after = self._moved(state, move)
                if after is not None and after not in first:
                    first[after] = action if state == start else first[state]
                    if after[1] == self._targets:
                        return first[after]
                    queue.append(after)
        return self.actions[0]

    def _draw(self, rng: random.Random) -> None:
        """A room that has been solved, played backwards: the player walks, and pulls a box behind it where there is one."""
        inside = [(r, c) for r in range(1, self._size - 1) for c in range(1, self._size - 1)]
        self._floor = frozenset(square for square in inside if rng.random() >= self._share)
        if len(self._floor) <= self._count:
            self._boxes = self._targets = frozenset()
            return
        self._at, *targets = rng.sample(sorted(self._floor), self._count + 1)
        self._boxes = self._targets = frozenset(targets)
        pulled, stuck = 0, 0
        while pulled < self._pulls and stuck < 20 * self._size**2:
            row, column = rng.choice(list(MOVES.values()))
            to, behind = (self._at[0] + row, self._at[1] + column), (self._at[0] - row, self._at[1] - column)
            stuck += 1
            if to not in self._floor or to in self._boxes:
                continue
            if behind in self._boxes and rng.random() < 0.8:
                self._boxes = self._boxes - {behind} | {self._at}
                pulled += 1
            self._at = to

    def _moved(self, state: State, move: Place) -> State | None:
        """The state after a step, None where a wall or a box that cannot move is in the way."""
        (row, column), boxes = state
        to, beyond = (row + move[0], column + move[1]), (row + 2 * move[0], column + 2 * move[1])
        if to not in self._floor:
            return None
        if to not in boxes:
            return to, boxes
        if beyond not in self._floor or beyond in boxes:
            return None
        return to, boxes - {to} | {beyond}

    def _map(self) -> str:
        def sign(square: Place) -> str:
            target = square in self._targets
            if square == self._at:
                return "S" if target else "P"
            if square in self._boxes:
                return "*" if target else "X"
            return "O" if target else "_" if square in self._floor else "#"

        return "\n".join("".join(sign((r, c)) for c in range(self._size)) for r in range(self._size))
