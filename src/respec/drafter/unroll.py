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
    """The laws of drafts of `depths` tokens from every place of the completions at which a draft could start."""
    weight = head.lm_head.weight
    length, first = max(e.length for e in examples), max(0, min(e.prompt for e in examples) - 2)
    token_SL, taps_SLT = (
        torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True).to(weight.device)
        for parts in ([e.token_L for e in examples], [e.taps_LT for e in examples])
    )
    feature = head.fc(taps_SLT.to(weight.dtype))
    anchors = _Anchors.of(examples, first, length).to(weight.device)
    draft_index, position = head.draft_index, torch.arange(length, device=weight.device)
    own: list[tuple[Tensor, Tensor]] = []
    made: list[Depth] = []
    for k in range(depths):
        begin = 0 if k == 0 else first
        column = position[begin:]
        token = F.pad(token_SL, (0, depths))[:, begin + k + 1 : length + k + 1]
        rotation = head.rotation((column + k)[None], feature)
        feature = head.step(feature, token, rotation, _attention(own, first), first if k == 0 else 0)
        # the draft of depth k + 1 from anchor a is judged by the target's law for the completion token a + k
        reaches = anchors.left_A > k
        rows = anchors.row_A[reaches] + k
        logits = head.logits(feature.flatten(0, 1)[anchors.cell_A[reaches]])
        ids, p = anchors.token_RK[rows], anchors.p_RK[rows].to(weight.dtype)
        made.append(Depth(with_tail(p), log_law(logits, draft_index[ids], temperature), reaches.nonzero().flatten()))
    return Unrolled(tuple(made), anchors.weight_A)


@dataclass(frozen=True)
class _Anchors:
    """Where drafts start: `cell_A` in the grid of features, `row_A` the first of the target's laws it is judged by, `left_A` how many there are."""

    cell_A: Int[Tensor, "A"]
    row_A: Int[Tensor, "A"]
    left_A: Int[Tensor, "A"]
    weight_A: Float[Tensor, "A"]
    token_RK: Int[Tensor, "R K"]
    p_RK: Float[Tensor, "R K"]

    @classmethod
    def of(cls, examples: Sequence[Example], first: int, length: int) -> _Anchors:
        cells, rows, left, weights, row = [], [], [], [], 0
        for s, example in enumerate(examples):
            count = len(example.token_CK)
            # a prompt of one token has nothing before its last: the first draft starts one later
            begin = 1 if example.prompt == 1 else 0
            start = torch.arange(begin, count)
            cells.append(s * (length - first) + example.prompt - 2 + start - first)
            rows.append(row + start)
            left.append(count - start)
            weights.append(torch.full((len(start),), float(example.weight)))
            row += count
        cell_A, row_A, left_A, weight_A = (torch.cat(parts) for parts in (cells, rows, left, weights))
        tokens, p = torch.cat([e.token_CK for e in examples]).long(), torch.cat([e.p_CK for e in examples])
        return cls(cell_A, row_A, left_A, weight_A, tokens, p)

    def to(self, device: torch.device) -> _Anchors:
        return _Anchors(*(tensor.to(device) for tensor in vars(self).values()))


def _attention(own: list[tuple[Tensor, Tensor]], first: int):
    """Attention of one step; it leaves its keys and values in `own` for the steps after. own[0] are those of the true features."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Float[Tensor, "S R heads*dim"]:
        group = q.shape[1] // k.shape[1]
        own.append((k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)))
        keys, values = own[0]
        columns = torch.arange(keys.shape[2], device=q.device)
        sees = columns[None] <= columns[first:, None]
        if len(own) == 1:
            mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=sees)
            return mixed.transpose(1, 2).flatten(2)
        scale = q.shape[-1] ** -0.5
        true = (q @ keys.transpose(2, 3)).masked_fill(~sees, -torch.inf)
        later = torch.stack([(q * key).sum(dim=-1) for key, _ in own[1:]], dim=-1)
        share = torch.softmax(torch.cat([true, later], dim=-1) * scale, dim=-1)
        mixed = share[..., : keys.shape[2]] @ values
        for place, (_, value) in enumerate(own[1:], keys.shape[2]):
            mixed = mixed + share[..., place, None] * value
        return mixed.transpose(1, 2).flatten(2)

    return attend
