"""How well a head drafts for rollouts at hand, as a whole and where the policy is more or less sure of its next token."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float64

from respec.drafter.agreement import MODES, Agreement, agreement, together
from respec.drafter.examples import Example, passes
from respec.drafter.losses import overlap, race_match
from respec.drafter.unroll import Unrolled, unroll
from respec.models.decoder import decode_dtype
from respec.models.eagle import EagleHead
from respec.types import Mode

# Nats between one band of entropy and the next: half of a policy's tokens are all but certain.
BANDS = (0.001, 0.01, 0.05, 0.15, 0.4, 0.8, 1.4, 2.5)


@dataclass(frozen=True)
class Judgement:
    """Made by `judge` and by a learner's step. `count_K` tokens were judged at each depth, `overlap_K` is their mean Σ min(p, q); of depth 1,
    `count_E` are in each band of the target's entropy and `overlap_E` is their mean. `agreement`: how far whole drafts would have stood, in
    the modes that were asked for.
    """

    count_K: Float64[np.ndarray, "K"]
    overlap_K: Float64[np.ndarray, "K"]
    count_E: Float64[np.ndarray, "E"]
    overlap_E: Float64[np.ndarray, "E"]
    agreement: Mapping[Mode, Agreement]

    @property
    def expected_length(self) -> float:
        """Tokens a round of a chain as deep as was judged, the target's own included, in `rejection`: 1 + Σ_j Π_{i≤j} α_i."""
        return 1.0 + float(np.cumprod(self.overlap_K).sum())

    @property
    def finite(self) -> bool:
        """Whether it says anything: features or weights that are not finite leave nothing to be compared."""
        return bool(np.isfinite(self.overlap_K).all())


@dataclass(frozen=True)
class Learned:
    """What an update gave. `seen`: how the head stood to its first mini-batch before the first optimizer step; None where it was judged
    before. `failure` says why there was no update, which has left no trace.
    """

    metrics: Mapping[str, float]
    seen: Judgement | None
    failure: str = ""


@torch.no_grad()
def judged(unrolled: Unrolled, modes: Sequence[Mode] = MODES) -> Judgement:
    """The judgement of one forward pass."""
    first = unrolled.depths[0]
    overlap_kN = [overlap(d.p_NB, d.logq_NB) for d in unrolled.depths]
    agreed: dict[Mode, Agreement] = {}
    for mode in modes:
        # a race costs a sort of each law: only where it is asked for
        chance_kN = [race_match(d.p_NB, d.logq_NB) for d in unrolled.depths] if mode == "matching" else overlap_kN
        agreed[mode] = agreement(*unrolled.by_anchor(chance_kN))
    overlaps = [overlap_N.double().cpu().numpy() for overlap_N in overlap_kN]
    entropy_N = -torch.special.xlogy(first.p_NB, first.p_NB).sum(dim=1).double().cpu()
    band_N = torch.bucketize(entropy_N, torch.tensor(BANDS, dtype=torch.float64)).numpy()
    count_K, count_E = np.array([float(len(o)) for o in overlaps]), np.bincount(band_N, minlength=len(BANDS) + 1) * 1.0
    sum_K, sum_E = np.array([o.sum() for o in overlaps]), np.bincount(band_N, overlaps[0], len(BANDS) + 1)
    return Judgement(count_K, sum_K / np.maximum(count_K, 1), count_E, sum_E / np.maximum(count_E, 1), agreed)


def merged(parts: Iterable[Judgement]) -> Judgement:
    """One judgement of all that the parts judged."""
    rows = list(parts)
    count_K, count_E = sum(r.count_K for r in rows), sum(r.count_E for r in rows)
    sum_K, sum_E = sum(r.count_K * r.overlap_K for r in rows), sum(r.count_E * r.overlap_E for r in rows)
    agreed = together(r.agreement for r in rows)
    return Judgement(count_K, sum_K / np.maximum(count_K, 1), count_E, sum_E / np.maximum(count_E, 1), agreed)  # pyright: ignore[reportArgumentType]


@torch.no_grad()
def judge(
    head: EagleHead,
    examples: Sequence[Example],
    depths: int,
    temperature: float,
    tokens: int = 2048,
    modes: Sequence[Mode] = MODES,
) -> Judgement:
    """Holds a head's laws against the target's on rollouts; `tokens` are padded tokens to a forward pass."""
    parts = []
    for part in passes([e.length for e in examples], tokens):
        with precision(head, True):
            parts.append(judged(unroll(head, [examples[i] for i in part], depths, temperature), modes))
    return merged(parts)


def precision(head: EagleHead, mixed: bool) -> torch.autocast:
    """The context in which a head's products are bfloat16, where that is wanted and the machine multiplies it."""
    weight = head.lm_head.weight
    usable = weight.dtype == torch.float32 and decode_dtype("auto", weight.device) == torch.bfloat16
    # no cache: it is the process's, and another thread that leaves such a context empties it; gradients of weights that are cast anew are
    # added in another precision, so bits would depend on the clock
    return torch.autocast(weight.device.type, torch.bfloat16, enabled=mixed and usable, cache_enabled=False)
