"""What the engine says of its decode rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from jaxtyping import Float, Int

from respec.types.drawing import Plan, Version


@dataclass(frozen=True)
class Load:
    """What a decode round is about to carry. Made by the engine before the round, read by a planner.

    `active` sequences hold a slot, `waiting` ones do not. `context` is the mean number of keys a sequence attends to,
    `remaining_B` how many tokens each active sequence may still draw, `drawn_B` how many it has; `row_B` is its dataset row.
    `version` is that of the weights in use.
    """

    active: int
    waiting: int
    context: float
    remaining_B: tuple[int, ...]
    version: Version = field(default_factory=Version)
    row_B: tuple[int, ...] = ()
    drawn_B: tuple[int, ...] = ()


@dataclass(frozen=True)
class RoundRecord:
    """One decode round of the engine, for the report and for cost models. Seconds are wall-clock.

    By depth (the first drafted token is depth 1, at index 0): `drafted_D` sequences had a node that deep, `tested_D` of them
    had all shallower ones accepted, `accepted_D` of those had this one accepted too. `drafted` counts all nodes, siblings included.
    `context` is the mean of the keys a sequence attended to; `predicted` the tokens/s that the planner expected, 0 for none. Where drafts were
    `cut` short of tokens that were not worth a row, the fate of the first of those is known too, from the target's own draw in its place:
    `tested_D` and `accepted_D` count it, and are of all sequences at depth 1, of the surer ones below.
    """

    active: int
    waiting: int
    plan: Plan
    drafted: int
    accepted: int
    emitted: int
    draft_s: float
    verify_s: float
    overhead_s: float
    context: float = 0.0
    drafted_D: tuple[int, ...] = ()
    tested_D: tuple[int, ...] = ()
    accepted_D: tuple[int, ...] = ()
    predicted: float = 0.0
    cut: bool = False

    @property
    def fair_D(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tested and accepted, as deep as they are not of the surer sequences only."""
        return (self.tested_D[:1], self.accepted_D[:1]) if self.cut else (self.tested_D, self.accepted_D)


class Cut(Protocol):
    """Where to stop a draft: at the first token whose chance to stand, with all before it, is below `floor`. Made by a planner, asked by
    drafters. Look-ups named `beside` guess `deep` tokens for every sequence too, and the draft that is worth more is verified."""

    @property
    def floor(self) -> float: ...
    @property
    def beside(self) -> tuple[str, ...]: ...
    @property
    def deep(self) -> int: ...

    def chance(
        self, drafter: str, depth: int | Int[np.ndarray, "D"], lead: Float[np.ndarray, "*many"]
    ) -> Float[np.ndarray, "*many"]:
        """P(accepted | those before it are) of a drafter's tokens at these depths, by their leads; 0 where there is none (NaN)."""
        ...


@dataclass(frozen=True)
class Leads:
    """How sure a drafter was of a round's drafts, and what became of them; one row a sequence. Made by the engine, read by a planner that cuts.

    `lead_BD`: by depth, log of the second arrival over the first in the token's race, or a look-up's log odds; NaN where nothing was drafted.
    Of the first `tested_B` tokens it is known what the target drew in their place, and it was them for the first `stood_B`. Tokens that were
    not verified are among them as far as this is known.
    """

    drafter: str
    lead_BD: Float[np.ndarray, "B D"]
    tested_B: Int[np.ndarray, "B"]
    stood_B: Int[np.ndarray, "B"]


@dataclass(frozen=True)
class RolloutStats:
    """What one `Engine.rollout` did. Made by the engine; named as metrics only by the loop."""

    wall_s: float
    prefill_s: float
    draft_s: float
    verify_s: float
    overhead_s: float
    prompt_tokens: int
    tokens: int
    drafted: int
    accepted: int
    sequence_rounds: int
    round_R: tuple[RoundRecord, ...]

    def __add__(self, other: RolloutStats) -> RolloutStats:
        """Of one rollout after the other."""
        return RolloutStats(
            *(mine + theirs for mine, theirs in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def accepted_length(self) -> float:
        """Tokens emitted per sequence and round, the bonus token included: 1 without speculation."""
        return self.tokens / self.sequence_rounds if self.sequence_rounds else 0.0


class DraftCounts(Protocol):
    """Sequences by depth: asked to draft, drafted; on the accepted path: could go on, had a node, had it accepted."""

    @property
    def asked_D(self) -> Sequence[float]: ...
    @property
    def drafted_D(self) -> Sequence[float]: ...
    @property
    def parents_D(self) -> Sequence[float]: ...
    @property
    def tested_D(self) -> Sequence[float]: ...
    @property
    def accepted_D(self) -> Sequence[float]: ...
