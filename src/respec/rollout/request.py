"""One completion in the making: what was asked, what has been drawn, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Shaped, UInt64

from respec.types import ENVIRONMENT, Ask, Finish, Proposer, Rollout, Sampling

NO_SLOT = -1


@dataclass
class Request:
    """Grows token by token; `rollout()` freezes it. `slot` is its place in the KV cache while it is active.

    `tokens` are the completion's. The last token of prompt + completion is pending: drawn, not yet in the cache. In an episode they are
    those of turn after turn with the environment's text between them; `turns` says of each whose it is, the turn in the making, `turn`,
    begins at `turn_start`, and `rewards` has what each ended turn earned.
    """

    ask: Ask
    sample: int
    key: UInt64[np.ndarray, "1"]
    order: int
    slot: int = NO_SLOT
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    proposers: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    laws: list[Shaped[np.ndarray, "K"] | None] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    turn: int = 0
    turn_start: int = 0
    rewards: list[float] = field(default_factory=list)
    solved: bool = False
    finish: Finish | None = None
    text: str = ""

    @property
    def drawn(self) -> int:
        """Tokens that the policy drew."""
        return len(self.tokens) - self.turns.count(ENVIRONMENT)

    def drawn_from(self, start: int) -> list[int]:
        """Its tokens from there on, as far as the policy drew them in one turn."""
        turns = self.turns[start:]
        return self.tokens[start:][: turns.index(ENVIRONMENT) if ENVIRONMENT in turns else None]

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.ask.prompt.token_ids) + len(self.tokens)

    @property
    def known(self) -> list[int]:
        """Prompt and completion, the pending token last."""
        return [*self.ask.prompt.token_ids, *self.tokens]

    @property
    def pending(self) -> int:
        return self.tokens[-1] if self.tokens else self.ask.prompt.token_ids[-1]

    def remaining(self, sampling: Sampling) -> int:
        """How many tokens it may still draw, in this turn."""
        own = self.under(sampling)
        whole = own.max_new_tokens - len(self.tokens)
        turn = own.max_turn_tokens - (len(self.tokens) - self.turn_start)
        return min(whole, turn) if own.max_turn_tokens else whole

    def under(self, sampling: Sampling) -> Sampling:
        """What it is drawn under: its own settings, or else the rollout's."""
        return self.ask.sampling or sampling

    def append(
        self,
        token: int,
        logprob: float,
        kept: float,
        entropy: float,
        version: int,
        proposer: Proposer,
        round_index: int,
        weight: float = 1.0,
        law: Shaped[np.ndarray, "K"] | None = None,
    ) -> None:
        """Adds a token; the last two are of mode `lossy`, as in `types.Rollout`."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.kept.append(kept)
        self.entropies.append(entropy)
        self.versions.append(version)
        self.proposers.append(proposer)
        self.rounds.append(round_index)
        self.weights.append(weight)
        self.laws.append(law)
        self.turns.append(self.turn)

    def hear(self, token_ids: Sequence[int], version: int, round_index: int) -> None:
        """What the environment says after a turn: the next turn's prompt, which nobody draws. Its last token is pending."""
        for token in token_ids:
            self.append(token, 0.0, 0.0, 0.0, version, Proposer.TARGET, round_index)
            self.turns[-1] = ENVIRONMENT
        self.turn, self.turn_start, self.finish = self.turn + 1, len(self.tokens), None

    def rollout(self) -> Rollout:
        """The finished completion. Where some of its tokens have no recorded law it cannot be followed leniently, and carries none."""
        assert self.finish is not None, "a request is frozen only once it has ended"
        laws = [law for law in self.laws if law is not None]
        return Rollout(
            prompt=self.ask.prompt,
            stream=self.ask.stream,
            draw=self.ask.draw,
            sample=self.sample,
            token_T=np.array(self.tokens, np.int32),
            logprob_T=np.array(self.logprobs, np.float32),
            kept_logmass_T=np.array(self.kept, np.float32),
            entropy_T=np.array(self.entropies, np.float32),
            version_T=np.array(self.versions, np.int32),
            proposer_T=np.array(self.proposers, np.uint8),
            round_T=np.array(self.rounds, np.int32),
            text=self.text,
            finish=self.finish,
            weight_T=np.array(self.weights, np.float32) if laws else None,
            law_TK=np.stack(laws) if laws and len(laws) == len(self.tokens) else None,
            sampling=self.ask.sampling,
            turn_T=np.array(self.turns, np.int32) if self.rewards else None,
            turn_reward_K=np.array(self.rewards) if self.rewards else None,
            solved=self.solved if self.rewards else None,
        )
