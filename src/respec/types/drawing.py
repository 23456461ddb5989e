"""What completions are asked for by, and what they are: prompts, sampling, plans, rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int32, Shaped, UInt8

Finish = Literal["eos", "stop", "length", "done"]
Mode = Literal["matching", "rejection", "lossy"]
Message = Mapping[str, str]
ENVIRONMENT = -1  # the turn of a token that the policy did not draw
LAW = np.dtype([("token", np.int32), ("logp", np.float32)])  # a distribution's likely tokens, in mode `lossy`


class Stream(IntEnum):
    """What a random number is drawn for; streams never share a number."""

    TRAIN = 0
    EVAL = 1
    BENCH = 2


class Proposer(IntEnum):
    """Who put a token forward. TARGET: the policy's own draw, not drafted (or drafted wrongly)."""

    TARGET = 0
    NGRAM = 1
    SUFFIX = 2
    PREVIOUS = 3
    MODEL = 4
    SELF_QUANT = 5
    EAGLE = 6


@dataclass(frozen=True)
class Version:
    """Which weights made something: update counters of the policy and of the drafter."""

    policy: int = 0
    drafter: int = 0


@dataclass(frozen=True)
class Prompt:
    """One dataset row, rendered and tokenized. Made by `tasks`, read by the engine and by rewards.

    `row` is the dataset row's id: stable over epochs and resumes. `columns` are the row's other fields, handed to reward
    functions by name. `messages` is set for chat data only; rewards then see message lists, as in TRL. `task` names the task of a
    mixture. `sampling` are fields of `Sampling` that the row sets for itself; `settings` applies them.
    """

    row: int
    text: str
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] | None = None
    task: str = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def settings(self, common: Sampling) -> Sampling | None:
        """How its training completions are drawn, if not as all others (None)."""
        return replace(common, **self.sampling) if self.sampling else None


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    `stop` are strings that end a completion (the text is cut before them, the tokens up to and including the one
    that completes the string stay); `stop_token_ids` end it like EOS and are kept. In an episode these end a turn: there
    `max_new_tokens` is for all turns together, with what the environment says, and `max_turn_tokens` is a turn's own limit (0: none).
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    max_turn_tokens: int = 0


@dataclass(frozen=True)
class Plan:
    """A speculation plan: drafter, depth s, branching t, drafted nodes n (root not counted). n = 0 is plain decoding."""

    drafter: str = "off"
    s: int = 0
    t: int = 1
    n: int = 0


PLAIN = Plan()


@dataclass(frozen=True)
class Ask:
    """One prompt to be sampled `group` times; its row has been rolled out `draw` times before in this stream. Made by the loop, read by the engine.

    `sampling` are its own settings, all of them; None: those of the rollout.
    """

    prompt: Prompt
    stream: Stream
    draw: int
    group: int
    sampling: Sampling | None = None


@dataclass(frozen=True)
class Rollout:
    """One completion. Made by the engine; read by rewards, the learners and the report.

    Per token: `logprob_T` is the target's log-probability at the sampling temperature, without truncation (what a learner
    recomputes; at temperature 0 that of temperature 1). `kept_logmass_T` is the log of the mass that top-k / top-p /
    min-p kept (0 without truncation): the log-probability actually sampled from is logprob - kept_logmass. `entropy_T` is that
    of the untruncated distribution, in nats. `version_T` is the policy's update counter, `proposer_T` a `Proposer`, `round_T`
    the engine's decode round. EOS, when drawn, is the last token. Only in mode `lossy`: `weight_T` multiplies a token's loss (None: 1
    everywhere), `law_TK` (dtype LAW) has the target's most probable tokens at its place, the token itself among them. `sampling`, where it was
    drawn under settings of its own (None: under the rollout's).

    Only of an episode, whose completion is turns of the policy with what the environment said between them: `turn_T` is the turn that a
    token was drawn in, or ENVIRONMENT, where log-probability and entropy are 0; `turn_reward_K` what each turn earned; `solved` whether
    the environment was. An episode that its environment ended has the finish `done`.
    """

    prompt: Prompt
    stream: Stream
    draw: int
    sample: int
    token_T: Int32[np.ndarray, "T"]
    logprob_T: Float32[np.ndarray, "T"]
    kept_logmass_T: Float32[np.ndarray, "T"]
    entropy_T: Float32[np.ndarray, "T"]
    version_T: Int32[np.ndarray, "T"]
    proposer_T: UInt8[np.ndarray, "T"]
    round_T: Int32[np.ndarray, "T"]
    text: str
    finish: Finish
    weight_T: Float32[np.ndarray, "T"] | None = None
    law_TK: Shaped[np.ndarray, "T K"] | None = None
    sampling: Sampling | None = None
    turn_T: Int32[np.ndarray, "T"] | None = None
    turn_reward_K: Float64[np.ndarray, "K"] | None = None
    solved: bool | None = None

    @property
    def drawn_T(self) -> Bool[np.ndarray, "T"]:
        """Which tokens the policy drew: all but what an environment said. These are what is learned from."""
        return np.ones(len(self.token_T), bool) if self.turn_T is None else self.turn_T != ENVIRONMENT

    @property
    def drawn(self) -> int:
        """How many tokens the policy drew."""
        return int(self.drawn_T.sum())

    @property
    def truncated(self) -> bool:
        """True when the length limit ended it."""
        return self.finish == "length"

    @property
    def key(self) -> tuple[int, int, int]:
        """Canonical order: (row, draw, sample)."""
        return (self.prompt.row, self.draw, self.sample)


@dataclass(frozen=True)
class Delta:
    """What one decode round added to one completion. Put end to end, deltas are the completion's tokens and its text.

    `prompt` is the prompt's place in the list, `sample` counts its completions. `logprob_T` is as in `Rollout`: of the model at the sampling
    temperature, in nats. `text` never ends within a character, so it may lag behind the tokens, or be empty. `finish` is set on the
    last. `version` is that of the weights that drew the tokens.
    """

    prompt: int
    sample: int
    token_T: tuple[int, ...]
    logprob_T: tuple[float, ...]
    text: str
    finish: Finish | None
    version: int
