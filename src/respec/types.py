"""The products that flow between stages: one frozen dataclass each, with its maker and its readers.

Ragged lists carry a suffix: `_P` over prompts, `_G` over the samples of one prompt's group, `_T` over a completion's tokens, `_R` over a
rollout's decode rounds. Everything after the engine reads rollouts in canonical order (row, draw, sample), never as they finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Float32, Int, Int32, Shaped, UInt8

Finish = Literal["eos", "stop", "length"]
Mode = Literal["matching", "rejection", "lossy"]
Message = Mapping[str, str]
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
    functions by name. `messages` is set for chat data only; rewards then see message lists, as in TRL.
    """

    row: int
    text: str
    token_ids: tuple[int, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Message, ...] | None = None


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 are off.

    `stop` are strings that end a completion (the text is cut before them, the tokens up to and including the one
    that completes the string stay); `stop_token_ids` end it like EOS and are kept.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()


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
    """One prompt to be sampled `group` times; its row has been rolled out `draw` times before in this stream. Made by the loop, read by the engine."""

    prompt: Prompt
    stream: Stream
    draw: int
    group: int


@dataclass(frozen=True)
class Rollout:
    """One completion. Made by the engine; read by rewards, the learners and the report.

    Per token: `logprob_T` is the target's log-probability at the sampling temperature, without truncation (what a learner
    recomputes; at temperature 0 that of temperature 1). `kept_logmass_T` is the log of the mass that top-k / top-p /
    min-p kept (0 without truncation): the log-probability actually sampled from is logprob - kept_logmass. `entropy_T` is that
    of the untruncated distribution, in nats. `version_T` is the policy's update counter, `proposer_T` a `Proposer`, `round_T`
    the engine's decode round. EOS, when drawn, is the last token. Only in mode `lossy`: `weight_T` multiplies a token's loss (None: 1
    everywhere), `law_TK` (dtype LAW) has the target's most probable tokens at its place, the token itself among them.
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

    @property
    def truncated(self) -> bool:
        """True when the length limit ended it."""
        return self.finish == "length"

    @property
    def key(self) -> tuple[int, int, int]:
        """Canonical order: (row, draw, sample)."""
        return (self.prompt.row, self.draw, self.sample)


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
    version: Version = Version()
    row_B: tuple[int, ...] = ()
    drawn_B: tuple[int, ...] = ()


@dataclass(frozen=True)
class RoundRecord:
    """One decode round of the engine, for the report and for cost models. Seconds are wall-clock.

    By depth (the first drafted token is depth 1, at index 0): `drafted_D` sequences had a node that deep, `tested_D` of them
    had all shallower ones accepted, `accepted_D` of those had this one accepted too. `drafted` counts all nodes, siblings included.
    `context` is the mean of the keys a sequence attended to; `predicted` the tokens/s that the planner expected, 0 for none.
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

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def accepted_length(self) -> float:
        """Tokens emitted per sequence and round, the bonus token included: 1 without speculation."""
        return self.tokens / self.sequence_rounds if self.sequence_rounds else 0.0


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with its reward. Made by `tasks.reward`, read by advantages.

    `reward` is the weighted sum of the applicable parts in `part`; a part that was not applicable is None.
    `fell_back` names the reward functions that failed here and were replaced by their configured fallback value.
    """

    rollout: Rollout
    reward: float
    part: Mapping[str, float | None]
    fell_back: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sample:
    """A scored rollout with the advantage of each token. Made by `policy.advantages`, read by `policy.pack`."""

    scored: ScoredRollout
    advantage_T: Float32[np.ndarray, "T"]


@dataclass(frozen=True)
class Batch:
    """Sequences packed end to end, without padding. Made by `policy.pack`, read by the policy learner.

    N tokens of S sequences; C of them are completion tokens. `predict_C[i]` is the index in 0..N-1 of the token whose
    hidden state predicts completion token i; `sequence_C[i]` says which of the S sequences it belongs to. Log-probabilities are
    named after three policies, always: `rollout` (what sampled, truncation included), `old` (before the step), and the one being
    trained, `theta`, which the learner computes. `weight_C` multiplies each token's loss. `key_S`: the rollouts' canonical keys.
    """

    token_N: Int[torch.Tensor, "N"]
    position_N: Int[torch.Tensor, "N"]
    start_S: Int[torch.Tensor, "S+1"]
    predict_C: Int[torch.Tensor, "C"]
    target_C: Int[torch.Tensor, "C"]
    sequence_C: Int[torch.Tensor, "C"]
    advantage_C: Float[torch.Tensor, "C"]
    rollout_logprob_C: Float[torch.Tensor, "C"]
    kept_logmass_C: Float[torch.Tensor, "C"]
    weight_C: Float[torch.Tensor, "C"]
    temperature: float
    truncated_S: Bool[torch.Tensor, "S"]
    key_S: tuple[tuple[int, int, int], ...] = ()


@dataclass(frozen=True)
class UpdateStats:
    """What one `policy.learner.update` did. Means over completion tokens unless the name says otherwise."""

    loss: float
    grad_norm: float
    lr: float
    entropy: float
    clip_fraction: float
    ratio_mean: float
    mismatch_mean: float
    mismatch_max: float
    tokens: int
    minibatches: int
    wall_s: float


@dataclass(frozen=True)
class WarmupStats:
    """What `policy.warmup.warm_up` did. Losses are means over solution tokens (nats), `tokens` all tokens passed forward."""

    steps: int
    first_loss: float
    last_loss: float
    tokens: int
    wall_s: float


@dataclass(frozen=True)
class EvalResult:
    """Held-out evaluation under its own sampling settings. `reward_I` is in the order of the held-out rows."""

    accuracy: float
    standard_error: float
    items: int
    mean_length: float
    mean_entropy: float
    reward_I: Sequence[float]
    wall_s: float
