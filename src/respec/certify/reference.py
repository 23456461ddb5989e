"""The model's own distribution: transformers' forward pass over whole sequences, in the trainer's float32, without cache or draft."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor
from transformers import PreTrainedModel

from respec.types import Proposer, Rollout

ORDERS = ("probability", "seen", "id")
# Logits held at once: 128 MiB of float32.
MOST_LOGITS = 2**25


@dataclass(frozen=True)
class Judged:
    """N sampled tokens with what the reference says of them. Made by `Reference.judge`.

    `recorded_N` are the engine's log-probabilities, `logprob_N` the recomputed ones, `drafted_N` says which tokens a drafter put forward.
    `pit_N` are the probability integral transforms by order of the vocabulary (see `ORDERS`): independent and uniform on (0, 1) if
    the tokens were drawn from the reference's distribution (Rosenblatt 1952; randomised within a token's own mass).
    """

    recorded_N: Float64[np.ndarray, "N"]
    logprob_N: Float64[np.ndarray, "N"]
    drafted_N: Bool[np.ndarray, "N"]
    pit_N: dict[str, Float64[np.ndarray, "N"]]


class Reference:
    """A causal language model as transformers runs it, its attention included."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.vocabulary = int(model.config.vocab_size)

    def rounded(self, dtype: torch.dtype) -> Reference:
        """The same model, run by transformers in another dtype."""
        model: Any = copy.deepcopy(self._model)
        return Reference(model.to(dtype))

    @torch.inference_mode()
    def after(self, tokens: Sequence[int], temperature: float) -> Float64[np.ndarray, "V"]:
        """Log-probabilities of the token after these."""
        known = torch.tensor([list(tokens)], device=self._model.device)
        logits = self._model(input_ids=known, use_cache=False, logits_to_keep=1).logits[0, -1]
        return torch.log_softmax(logits.double() / temperature, dim=-1).cpu().numpy()

    @torch.inference_mode()
    def judge(self, rollouts: Sequence[Rollout], temperature: float, seed: int = 0) -> Judged:
        """Judges every token of the rollouts, in their order by prompt. `seed` is that of the randomisation."""
        recorded, logprob, drafted = list[np.ndarray](), list[np.ndarray](), list[np.ndarray]()
        pits: dict[str, list[np.ndarray]] = {order: [] for order in ORDERS}
        numbers = np.random.default_rng(seed)
        for part in self._parts(rollouts):
            prompt = part[0].prompt.token_ids
            token_RT, real_RT = _padded(part)
            full = torch.cat([torch.tensor(prompt).expand(len(part), -1), token_RT], dim=1)
            keep = torch.arange(len(prompt) - 1, full.shape[1] - 1)
            done = self._model(
                input_ids=full.to(self._model.device), use_cache=False, logits_to_keep=keep.to(self._model.device)
            )
            logp = torch.log_softmax(done.logits.float().cpu() / temperature, dim=-1)
            logprob.append(logp.gather(2, token_RT[..., None])[..., 0][real_RT].double().numpy())
            for order, (before, own) in _intervals(logp.exp_(), token_RT, full).items():
                drawn = before[real_RT].numpy() + own[real_RT].numpy() * numbers.random(int(real_RT.sum()))
                pits[order].append(np.clip(drawn, 0.0, 1.0))
            recorded += [rollout.logprob_T for rollout in part]
            drafted += [rollout.proposer_T != Proposer.TARGET for rollout in part]
        return Judged(
            np.concatenate(recorded).astype(np.float64), np.concatenate(logprob), np.concatenate(drafted),
            {order: np.concatenate(values) for order, values in pits.items()},
        )  # fmt: skip

    def _parts(self, rollouts: Sequence[Rollout]) -> Iterator[list[Rollout]]:
        """Rollouts that are judged in one pass: of one prompt, and few enough for their logits to be held."""
        groups: dict[tuple[int, ...], list[Rollout]] = {}
        for rollout in rollouts:
            groups.setdefault(rollout.prompt.token_ids, []).append(rollout)
        for group in groups.values():
            rows = max(1, MOST_LOGITS // (self.vocabulary * max(len(rollout.token_T) for rollout in group)))
            for start in range(0, len(group), rows):
                yield group[start : start + rows]


def _padded(rollouts: Sequence[Rollout]) -> tuple[Int64[Tensor, "R T"], Bool[Tensor, "R T"]]:
    """Tokens in a rectangle, and which are real; what stands to the right of a causal model's token does not change it."""
    longest = max(len(rollout.token_T) for rollout in rollouts)
    token = torch.zeros(len(rollouts), longest, dtype=torch.int64)
    real = torch.zeros(len(rollouts), longest, dtype=torch.bool)
    for row, rollout in enumerate(rollouts):
        token[row, : len(rollout.token_T)] = torch.from_numpy(rollout.token_T.astype(np.int64))
        real[row, : len(rollout.token_T)] = True
    return token, real


def _intervals(
    p: Float[Tensor, "R T V"], token_RT: Int[Tensor, "R T"], full_RL: Int[Tensor, "R L"]
) -> dict[str, tuple[Float[Tensor, "R T"], Float[Tensor, "R T"]]]:
    """By order of the vocabulary: the mass before each token, and the mass of its own (of all its equals, where they tie).

    `probability`: the most probable first; what favours likely drafts shows at its head, what loses the tail at its end.
    `seen`: tokens that the sequence has had come first, each half by probability; what favours looked-up drafts shows.
    `id`: by token id.
    """
    own = p.gather(2, token_RT[..., None])
    above, equal = p * (p > own), p * (p == own)
    length, steps, vocabulary = full_RL.shape[1], token_RT.shape[1], p.shape[2]
    # the place at which a sequence first has each token; one that it never has comes after its end
    first = torch.full((len(full_RL), vocabulary), length).scatter_reduce_(
        1, full_RL, torch.arange(length).expand_as(full_RL), "amin"
    )
    seen = first[:, None] < torch.arange(length - steps, length)[None, :, None]
    alike = seen == seen.gather(2, token_RT[..., None])
    earlier = torch.where(seen.gather(2, token_RT[..., None])[..., 0], 0.0, (p * seen).sum(2))
    by_id = torch.arange(vocabulary) < token_RT[..., None]
    return {
        "probability": (above.sum(2), equal.sum(2)),
        "seen": (earlier + (above * alike).sum(2), (equal * alike).sum(2)),
        "id": ((p * by_id).sum(2), own[..., 0]),
    }
