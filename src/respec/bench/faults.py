"""What goes wrong with draft weights between a trainer and an engine, made to happen: each fault where it would in real life.

Some come to the door with an update, some befall what has passed it. The private parts that are reached into are those that a bug would reach.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from respec.models.eagle import EagleHead, EagleShape
from respec.models.linear import PackedLinear
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.sentinel import Sentinel
from respec.types import Ask, Rollout, RolloutStats, RoundRecord, Sampling

# The round of its step after which a fault strikes.
ROUND = 4


@dataclass(frozen=True)
class Scene:
    """An engine that drafts with a good head under a sentinel; `head` is a copy of it that may be spoilt."""

    engine: Engine
    drafter: EagleDrafter
    sentinel: Sentinel
    head: EagleHead

    def offer(self, head: EagleHead, version: int | None = None) -> None:
        """An update comes to the door."""
        self.sentinel.admit(head, self.drafter.version + 1 if version is None else version)


@dataclass(frozen=True)
class Fault:
    """`at` says where it strikes: at the door or behind it. `lasting`: it strikes whatever head drafts, until the policy is published anew."""

    at: str
    strike: Callable[[Scene], None]
    lasting: bool = False


def updated(head: EagleHead, share: float = 0.01, seed: int = 0) -> EagleHead:
    """A copy that has moved as an update would move it: noise of `share` of each matrix's norm."""
    moved, generator = copy.deepcopy(head), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in moved.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                parameter.add_(noise, alpha=share * float(parameter.norm() / noise.norm()))
    return moved


@torch.no_grad()
def _nan_update(scene: Scene) -> None:
    scene.head.fc.weight[0, 0] = torch.nan
    scene.offer(scene.head)


@torch.no_grad()
def _zero_update(scene: Scene) -> None:
    scene.head.layer.self_attn.o_proj.weight.zero_()
    scene.offer(scene.head)


def _stale_version(scene: Scene) -> None:
    scene.offer(scene.head, scene.drafter.version)


@torch.no_grad()
def _shuffled_map(scene: Scene) -> None:
    assert scene.head.d2t is not None
    scene.head.d2t.add_(torch.roll(scene.head.draft_token, 1) - scene.head.draft_token)
    scene.offer(scene.head)


@torch.no_grad()
def _reordered_fusion(scene: Scene) -> None:
    blocks = scene.head.fc.weight.chunk(len(scene.head.shape.taps), dim=1)
    scene.head.fc.weight.copy_(torch.cat([*blocks[1:], blocks[0]], dim=1))
    scene.offer(scene.head)


def _another_models_head(scene: Scene) -> None:
    shape = scene.head.shape
    smaller = copy.deepcopy(shape.layer)
    smaller.intermediate_size //= 2
    scene.offer(EagleHead(EagleShape(smaller, shape.draft_vocabulary, shape.taps)))


@torch.no_grad()
def _another_policys_head(scene: Scene) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in scene.head.parameters():
        if parameter.requires_grad and parameter.ndim > 1:
            other = torch.randn(parameter.shape, generator=generator).to(parameter)
            parameter.copy_(other * (parameter.norm() / other.norm()))
    scene.offer(scene.head)


def _packed(scene: Scene, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Packs the projections of queries, keys and values anew, changed."""
    attention, decoder = scene.head.layer.self_attn, scene.drafter.snapshot
    weight = torch.cat([part.weight for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
    decoder._qkv = PackedLinear(change(weight.detach()).to(decoder.shape.dtype))


def _kept_keys(scene: Scene) -> None:
    """A swap that forgets to drop what the head before computed."""
    drafter, cache = scene.drafter, scene.drafter._cache
    drafter.drop = lambda: None
    scene.offer(updated(scene.head, seed=2))
    del drafter.drop
    drafter._cache = cache


def _wrong_map(scene: Scene) -> None:
    scene.drafter.snapshot.draft_token = np.roll(scene.drafter.snapshot.draft_token, 1)


def _reset_rotary(scene: Scene) -> None:
    scene.drafter.snapshot._cos.fill_(1.0)
    scene.drafter.snapshot._sin.fill_(0.0)


def _swapped_taps(scene: Scene) -> None:
    """The policy's decoder hands over its hidden states in another order, from a swap on until it is published anew."""
    decoder = scene.engine.decoder
    whole = decoder.hidden

    def hidden(token_M, slot_M, position_M, cache, branches=None, taps=()):
        done = whole(token_M, slot_M, position_M, cache, branches, taps)
        if done.taps is None:
            return done
        blocks = done.taps.chunk(len(taps), dim=1)
        return type(done)(done.hidden, torch.cat([*blocks[1:], blocks[0]], dim=1))

    decoder.hidden = hidden
    scene.drafter.drop()


FAULTS: Mapping[str, Fault] = {
    "NaN in an update": Fault("door", _nan_update),
    "zero weights in an update": Fault("door", _zero_update),
    "stale version": Fault("door", _stale_version),
    "vocabulary map rebuilt": Fault("door", _shuffled_map),
    "fusion layer's blocks reordered": Fault("door", _reordered_fusion),
    "head of another model": Fault("door", _another_models_head),
    "head of another policy": Fault("behind", _another_policys_head),
    "NaN in the packed weights": Fault("behind", lambda scene: _packed(scene, lambda w: torch.full_like(w, torch.nan))),
    "zeros in the packed weights": Fault("behind", lambda scene: _packed(scene, torch.zeros_like)),
    "packed weights scrambled": Fault("behind", lambda scene: _packed(scene, lambda w: w.flip(0))),
    "vocabulary map wrong in use": Fault("behind", _wrong_map),
    "hidden states of the layers swapped": Fault("behind", _swapped_taps, lasting=True),
    "rotary cache reset": Fault("behind", _reset_rotary),
    "draft keys kept over a swap": Fault("behind", _kept_keys),
}


@dataclass(frozen=True)
class Outcome:
    """What a fault did. `rounds` from the fault to the first alarm, 0 at the door, None for never; `identical`: every token of every step is
    plain decoding's. Accepted lengths are those of the last step before the fault, of the fault's, and of the last one; `plain_rounds` is how
    many of the fault's step were decoded without drafts because the drafter was off.
    """

    fault: str
    at: str
    rounds: int | None
    lines: tuple[str, ...]
    identical: bool
    accepted_before: float
    accepted_struck: float
    accepted_after: float
    plain_rounds: int


def play(
    name: str,
    scene: Scene,
    lines: Sequence[str],
    republish: Callable[[int], None],
    asks: Callable[[int], Sequence[Ask]],
    sampling: Sampling,
    plain: Sequence[Sequence[Rollout]],
    before: int,
) -> Outcome:
    """Steps of rollouts, each followed by an update of the head and the policy published anew, as in a run; a fault in the one after `before`.

    `lines` are what the scene's sentinel says, `republish(version)` publishes the same policy again, `plain` are plain decoding's rollouts by step.
    """
    clean, lengths, same = copy.deepcopy(scene.head), list[float](), True
    since: int | None = None
    found: int | None = None
    told = rounds = plain_rounds = 0

    def on_round(record: RoundRecord) -> None:
        nonlocal rounds, since, found, told
        rounds += 1
        if rounds == ROUND:
            told, since = len(lines), rounds
            FAULTS[name].strike(scene)
        if since is not None and found is None and len(lines) > told:
            found = rounds - since

    for step in range(len(plain)):
        struck = step == before
        rollouts, stats = scene.engine.rollout(
            asks(step), sampling, scene.sentinel.under(sampling), on_round if struck else None
        )
        same &= all(np.array_equal(a.token_T, b.token_T) for a, b in zip(rollouts, plain[step], strict=True))
        lengths.append(stats.accepted_length)
        if struck:
            plain_rounds = _plain(stats)
        scene.offer(updated(clean, seed=step))
        republish(step + 1)
    return Outcome(
        name, FAULTS[name].at, found, tuple(lines[told:]), same, lengths[before - 1], lengths[before], lengths[-1], plain_rounds
    )  # fmt: skip


def _plain(stats: RolloutStats) -> int:
    return sum(not record.plan.n for record in stats.round_R)
