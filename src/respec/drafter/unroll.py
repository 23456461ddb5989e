"""A head run as it drafts, over whole sequences at once: EAGLE-3's "training-time test" (Li et al. 2025, arXiv 2503.01840, section 3.2).

From an anchor i, step 0 reads the target's hidden state at i and token i + 1; step k reads the head's own feature of step k - 1 and token i + 1 + k.
Attention sees the true features up to the anchor, and the head's own after it, as drafting does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from respec.drafter.examples import Example
from respec.drafter.losses import log_law, overlap, with_tail
from respec.models.eagle import EagleHead


@dataclass(frozen=True)
class Depth:
    """The laws of one draft depth, row by row: p and log q over the target's top tokens and their tail (see `losses`).

    `anchor_N` says which anchor of the batch a row belongs to.
    """

    p_NB: Float[Tensor, "N B"]
    logq_NB: Float[Tensor, "N B"]
    anchor_N: Int[Tensor, "N"]


@dataclass(frozen=True)
class Unrolled:
    """A batch's laws by depth, and the weight of each anchor. An anchor is a place from which a draft would start."""

    depths: tuple[Depth, ...]
    weight_A: Float[Tensor, "A"]

    def overlaps(self) -> tuple[Float[Tensor, "A k"], Bool[Tensor, "A k"]]:
        """Σ min(p, q) by anchor and depth, and where there is one."""
        return self.by_anchor([overlap(depth.p_NB, depth.logq_NB) for depth in self.depths])

    def by_anchor(self, value_kN: Sequence[Float[Tensor, "N"]]) -> tuple[Float[Tensor, "A k"], Bool[Tensor, "A k"]]:
        """Values of the depths' rows by anchor and depth, and where there is one."""
        shape = (len(self.weight_A), len(self.depths))
        exists = torch.zeros(shape, dtype=torch.bool, device=self.weight_A.device)
        columns = []
        for k, (depth, value_N) in enumerate(zip(self.depths, value_kN, strict=True)):
            exists[depth.anchor_N, k] = True
            column = depth.p_NB.new_zeros(shape[0])
            columns.append(column.index_put((depth.anchor_N,), value_N))
        return torch.stack(columns, dim=1), exists


def unroll(head: EagleHead, examples: Sequence[Example], depths: int, temperature: float) -> Unrolled:
    """The laws of drafts of `depths` tokens from every place of the completions at which a draft could start.

    Only attention sees the sequences side by side and padded; all else is done for their own tokens, end to end.
    """
    weight = head.lm_head.weight
    places, laws = _Places.of(examples).to(weight.device), _Laws.of(examples).to(weight.device)
    tokens = torch.nn.utils.rnn.pad_sequence([e.token_L for e in examples], batch_first=True).to(weight.device)
    token_SL = F.pad(tokens, (0, depths))
    taps_NT = torch.cat([e.taps_LT for e in examples])[places.row_N.to(examples[0].taps_LT.device)].to(weight.device)
    feature, draft_index, anchors = head.fc(taps_NT.to(weight.dtype))[None], head.draft_index, len(laws.left_A)
    own: list[tuple[Tensor, Tensor]] = []
    made: list[Depth] = []
    for k in range(depths):
        # true features first, then those of the drafts from each anchor: the last of the places
        first = 0 if k == 0 else len(places.column_N) - anchors
        sequence_N, column_N = places.sequence_N[first:], places.column_N[first:]
        rotation = head.rotation((column_N + k)[None], feature)
        token = token_SL[sequence_N, column_N + k + 1][None]
        feature = head.step(feature, token, rotation, _attention(own, places, anchors), feature.shape[1] - anchors)
        # the draft of depth k + 1 from anchor a is judged by the target's law for the completion token a + k
        reaches = laws.left_A > k
        rows = laws.row_A[reaches] + k
        ids, p = laws.token_RK[rows], laws.p_RK[rows].to(weight.dtype)
        law = log_law(head.logits(feature[0, reaches]), draft_index[ids], temperature)
        made.append(Depth(with_tail(p), law, reaches.nonzero().flatten()))
    return Unrolled(tuple(made), laws.weight_A)


@dataclass(frozen=True)
class _Places:
    """The tokens that are read, those from which drafts start last: `sequence_N` and `column_N` say where each stands among S sequences of L tokens,
    `row_N` where in the sequences laid end to end. From column `first` on drafts start."""

    sequence_N: Int[Tensor, "N"]
    column_N: Int[Tensor, "N"]
    row_N: Int[Tensor, "N"]
    size: tuple[int, int]
    first: int

    @classmethod
    def of(cls, examples: Sequence[Example]) -> _Places:
        starts = [_first_anchor(example) for example in examples]
        # a place reads the token after its own, and drafts the one after that
        kinds = (
            [range(start) for start in starts],
            [range(start, e.length - 2) for start, e in zip(starts, examples, strict=True)],
        )
        columns = [torch.tensor(part, dtype=torch.long) for kind in kinds for part in kind]
        sequence = torch.arange(len(examples)).repeat(2)
        sequence_N = torch.cat([torch.full((len(c),), int(s)) for s, c in zip(sequence, columns, strict=True)])
        begins = torch.tensor([0, *(e.length for e in examples)]).cumsum(0)
        column_N = torch.cat(columns)
        size = len(examples), max(e.length for e in examples)
        return cls(sequence_N, column_N, begins[sequence_N] + column_N, size, min(starts))

    def to(self, device: torch.device) -> _Places:
        sequence_N, column_N, row_N = (x.to(device) for x in (self.sequence_N, self.column_N, self.row_N))
        return _Places(sequence_N, column_N, row_N, self.size, self.first)

    def grid(self, x: Float[Tensor, "1 heads n dim"], first: int = 0) -> Float[Tensor, "S heads columns dim"]:
        """The last n tokens' values side by side, from column `first` on."""
        count, (sequences, length) = x.shape[2], self.size
        cell = self.sequence_N[-count:] * (length - first) + self.column_N[-count:] - first
        laid = x.new_zeros(sequences * (length - first), x.shape[1], x.shape[3]).index_copy(
            0, cell, x[0].transpose(0, 1)
        )
        return laid.unflatten(0, (sequences, length - first)).transpose(1, 2)

    def ungrid(self, x: Float[Tensor, "S heads columns dim"], count: int) -> Float[Tensor, "1 count heads*dim"]:
        """The last `count` tokens' values, from those from column `self.first` on."""
        return x[self.sequence_N[-count:], :, self.column_N[-count:] - self.first].flatten(1)[None]


@dataclass(frozen=True)
class _Laws:
    """What drafts from A anchors are judged by: `row_A` is the first of the target's R laws, `left_A` how many there are from there on."""

    row_A: Int[Tensor, "A"]
    left_A: Int[Tensor, "A"]
    weight_A: Float[Tensor, "A"]
    token_RK: Int[Tensor, "R K"]
    p_RK: Float[Tensor, "R K"]

    @classmethod
    def of(cls, examples: Sequence[Example]) -> _Laws:
        rows, left, weights, row = [], [], [], 0
        for example in examples:
            count = len(example.token_CK)
            start = torch.arange(_first_anchor(example) - (example.prompt - 2), count)
            rows.append(row + start)
            left.append(count - start)
            weights.append(torch.full((len(start),), float(example.weight)))
            row += count
        row_A, left_A, weight_A = (torch.cat(parts) for parts in (rows, left, weights))
        tokens, p = torch.cat([e.token_CK for e in examples]).long(), torch.cat([e.p_CK for e in examples])
        return cls(row_A, left_A, weight_A, tokens, p)

    def to(self, device: torch.device) -> _Laws:
        return _Laws(*(tensor.to(device) for tensor in vars(self).values()))


def _first_anchor(example: Example) -> int:
    """The column of the first draft: a prompt of one token has nothing before its last, and so begins one later."""
    return max(0, example.prompt - 2)


def _attention(own: list[tuple[Tensor, Tensor]], places: _Places, anchors: int):
    """Attention of one step; it leaves its keys and values in `own` for the steps after. own[0] are those of the true features."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Float[Tensor, "1 anchors heads*dim"]:
        group, first = q.shape[1] // k.shape[1], places.first
        own.append(tuple(places.grid(x, first if own else 0).repeat_interleave(group, 1) for x in (k, v)))  # pyright: ignore[reportArgumentType]
        (keys, values), q = own[0], places.grid(q, first)
        columns = torch.arange(keys.shape[2], device=q.device)
        true = (q @ keys.transpose(2, 3)).masked_fill(columns[None] > columns[first:, None], -torch.inf)
        later = [(q * key).sum(dim=-1, keepdim=True) for key, _ in own[1:]]
        share = torch.softmax(torch.cat([true, *later], dim=-1) * q.shape[-1] ** -0.5, dim=-1)
        mixed = share[..., : keys.shape[2]] @ values
        for place, (_, value) in enumerate(own[1:], keys.shape[2]):
            mixed = mixed + share[..., place, None] * value
        return places.ungrid(mixed, anchors)

    return attend
