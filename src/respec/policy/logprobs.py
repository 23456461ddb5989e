"""Log-probabilities of completion tokens, with logits only there and never more than one chunk of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from transformers import PreTrainedModel

from respec.models.gradients import begun, in_place
from respec.models.packed_attention import packed_pass
from respec.types import Batch

# Logits at once on a CPU: 8 MiB of float32, so that they and what is made of them stay in the processor's cache, and their memory on the heap.
TILE = 2**21
LEAST_WIDTH = 512


class Watch(Protocol):
    """Looks on at a forward pass, for a drafter that learns from it. What it is shown has no gradient and is not its to change."""

    @property
    def taps(self) -> tuple[int, ...]:
        """The layers before which hidden states are wanted."""
        ...

    def laws(self, batch: Batch, part: slice, logp_cV: Float[torch.Tensor, "c V"]) -> None:
        """Log-probabilities of every token at the completion tokens `part` of the batch; the parts come in order."""
        ...

    def states(self, batch: Batch, tap_NE: tuple[Float[torch.Tensor, "N E"], ...]) -> None:
        """The hidden states along the batch, after its laws."""
        ...


def token_logprobs(
    model: PreTrainedModel,
    batch: Batch,
    logit_chunk: int,
    watch: Watch | None = None,
    products: torch.dtype | None = None,
) -> tuple[Float[torch.Tensor, "C"], Float[torch.Tensor, "C"]]:
    """The first two of `token_pass`, the entropy without gradient."""
    return token_pass(model, batch, logit_chunk, watch, products=products)[:2]


def token_pass(
    model: PreTrainedModel,
    batch: Batch,
    logit_chunk: int,
    watch: Watch | None = None,
    entropy_gradient: bool = False,
    products: torch.dtype | None = None,
) -> tuple[Float[torch.Tensor, "C"], Float[torch.Tensor, "C"], Float[torch.Tensor, "C E"]]:
    """Log-probability of each completion token and entropy (nats) of its distribution, at the batch's temperature; and the hidden states that
    the head reads them from.

    Temperature only, no truncation; temperature 0 is read as 1, as in `Rollout.logprob_T`. float32, or float64 for a float64
    model. The log-probabilities and the hidden states carry gradients, the entropy where `entropy_gradient`. `logit_chunk`: completion tokens whose logits
    are held at once. `batch` must lie on the model's device. `watch` looks on, and changes no bit of either or of their gradients.
    `products`: the dtype of the body's matrix products, None for the model's; norms, residuals and the head keep the model's.
    Raises ModelError if the model does not use packed attention.
    """
    taps = watch.taps if watch is not None else ()
    hidden_NE, tap_NE = packed_pass(model, batch.token_N, batch.position_N, batch.start_S, taps, products)
    weight_VE = model.get_parameter("lm_head.weight")
    show = None if watch is None else (lambda part, logp_cV: watch.laws(batch, part, logp_cV))
    hidden_CE = hidden_NE.index_select(0, batch.predict_C)
    logprob_C, entropy_C = _HeadLogprob.apply(
        hidden_CE,
        weight_VE,
        batch.target_C,
        batch.temperature or 1.0,
        logit_chunk,
        show,
        entropy_gradient,
    )
    if watch is not None:
        watch.states(batch, tap_NE)
    return logprob_C, entropy_C, hidden_CE


class _HeadLogprob(torch.autograd.Function):
    """Language-model head and log-softmax together, some tokens and on a CPU some of the vocabulary at a time; the backward pass computes the logits
    again.

    d logprob_i / d logit_iv = ([v = target_i] - p_iv) and d entropy_i / d logit_iv = -p_iv (log p_iv + entropy_i), so nothing of a tile needs
    keeping but the tokens' log-normalisers and entropies.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_CE: Float[torch.Tensor, "C E"],
        weight_VE: Float[torch.Tensor, "V E"],
        target_C: Int[torch.Tensor, "C"],
        temperature: float,
        chunk: int,
        show: Callable[[slice, torch.Tensor], None] | None,
        entropy_gradient: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(hidden_CE.dtype, torch.float32)
        logprob_C = hidden_CE.new_empty(len(target_C), dtype=dtype)
        entropy_C, norm_C = torch.empty_like(logprob_C), torch.empty_like(logprob_C)
        for part in _parts(len(target_C), chunk):
            seen_cV = None if show is None else logprob_C.new_empty(len(target_C[part]), len(weight_VE))
            total = _Total(len(target_C[part]), logprob_C)
            for tile, logit_cv in _tiles(hidden_CE[part], weight_VE, temperature):
                total.take(logit_cv)
                inside_c, column_c1 = _within(target_C[part], tile)
                logprob_C[part] = torch.where(inside_c, logit_cv.gather(1, column_c1)[:, 0], logprob_C[part])
                if seen_cV is not None:
                    seen_cV[:, tile] = logit_cv
            norm_C[part], entropy_C[part] = total.norm_and_entropy()
            logprob_C[part] -= norm_C[part]
            if show is not None and seen_cV is not None:
                show(part, seen_cV.sub_(norm_C[part, None]))
        ctx.save_for_backward(hidden_CE, weight_VE, target_C, norm_C, entropy_C)
        ctx.temperature, ctx.chunk, ctx.entropy_gradient, ctx.adds = temperature, chunk, entropy_gradient, in_place()
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_C)
        return logprob_C, entropy_C

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled_C, spread_C = (gradient / ctx.temperature for gradient in gradients)
        hidden_CE, weight_VE, target_C, norm_C, entropy_C = ctx.saved_tensors
        hidden_grad_CE, weight_grad_VE = torch.zeros_like(hidden_CE), None
        if ctx.needs_input_grad[1]:
            weight_grad_VE = begun(weight_VE) if ctx.adds else torch.zeros_like(weight_VE)
        for part in _parts(len(target_C), ctx.chunk):
            for tile, slope_cv in _tiles(hidden_CE[part], weight_VE, ctx.temperature):
                slope_cv.sub_(norm_C[part, None])
                pull_cv = scaled_C[part, None]
                if ctx.entropy_gradient:
                    pull_cv = pull_cv + spread_C[part, None] * (slope_cv + entropy_C[part, None])
                slope_cv.exp_().mul_(-pull_cv)
                inside_c, column_c1 = _within(target_C[part], tile)
                slope_cv.scatter_add_(1, column_c1, torch.where(inside_c, scaled_C[part], 0.0)[:, None])
                slope_cv = slope_cv.to(weight_VE.dtype)
                hidden_grad_CE[part].addmm_(slope_cv, weight_VE[tile])
                if weight_grad_VE is not None:
                    weight_grad_VE[tile].addmm_(slope_cv.T, hidden_CE[part])
        return hidden_grad_CE, None if ctx.adds else weight_grad_VE, None, None, None, None, None


class _Total:
    """Of each row of logits, seen a tile at a time, log sum exp and the entropy of its softmax; with one exponential a logit.

    With the highest logit so far m, S = sum exp(l - m) and T = sum exp(l - m) (l - m), the norm is m + log S and the entropy log S - T / S. Where a tile raises m
    by d, S becomes S exp(-d) and T (T - S d) exp(-d) before it is added (the online softmax of Milakov & Gimelshein 2018, arXiv 1805.02867, with T).
    """

    def __init__(self, rows: int, like: torch.Tensor) -> None:
        self._highest_c1 = like.new_full((rows, 1), -torch.inf)
        self._mass_c1, self._moment_c1 = like.new_zeros(rows, 1), like.new_zeros(rows, 1)

    def take(self, logit_cv: Float[torch.Tensor, "c v"]) -> None:
        highest_c1 = torch.maximum(self._highest_c1, logit_cv.amax(dim=1, keepdim=True))
        below_cv = logit_cv - highest_c1
        mass_cv = torch.exp(below_cv)
        # nought where there was nothing yet, rather than nought times infinity
        raised_c1 = (highest_c1 - self._highest_c1).masked_fill_(self._mass_c1 == 0, 0.0)
        fade_c1 = torch.exp(-raised_c1)
        self._moment_c1 = (self._moment_c1 - self._mass_c1 * raised_c1) * fade_c1
        self._mass_c1 = self._mass_c1 * fade_c1 + mass_cv.sum(dim=1, keepdim=True)
        self._moment_c1 += mass_cv.mul_(below_cv).sum(dim=1, keepdim=True)
        self._highest_c1 = highest_c1

    def norm_and_entropy(self) -> tuple[Float[torch.Tensor, "c"], Float[torch.Tensor, "c"]]:
        log_c1 = self._mass_c1.log()
        return (log_c1 + self._highest_c1)[:, 0], (log_c1 - self._moment_c1 / self._mass_c1)[:, 0]


def _parts(count: int, size: int) -> list[slice]:
    return [slice(begin, min(begin + size, count)) for begin in range(0, count, size)]


def _tiles(
    hidden_cE: torch.Tensor, weight_VE: torch.Tensor, temperature: float
) -> Iterator[tuple[slice, Float[torch.Tensor, "c v"]]]:
    """The rows' logits, a slice of the vocabulary at a time; each is gone when the next one comes, as they lie in the same memory."""
    rows, vocabulary = len(hidden_cE), len(weight_VE)
    width = min(vocabulary, max(LEAST_WIDTH, TILE // rows)) if hidden_cE.device.type == "cpu" else vocabulary
    dtype = torch.promote_types(hidden_cE.dtype, weight_VE.dtype)
    room = hidden_cE.new_empty(rows * width, dtype=dtype)
    for tile in _parts(vocabulary, width):
        count = tile.stop - tile.start
        logit_cv = torch.mm(hidden_cE, weight_VE[tile].T, out=room[: rows * count].view(rows, count))
        logit_cv = logit_cv.to(torch.promote_types(dtype, torch.float32))
        yield tile, logit_cv if temperature == 1.0 else logit_cv.div_(temperature)


def _within(target_c: Int[torch.Tensor, "c"], tile: slice) -> tuple[Bool[torch.Tensor, "c"], Int[torch.Tensor, "c 1"]]:
    """Which rows' targets are in a slice of the vocabulary, and their columns there; of the others, its last or first."""
    inside_c = (target_c >= tile.start) & (target_c < tile.stop)
    return inside_c, (target_c - tile.start).clamp(0, tile.stop - tile.start - 1)[:, None]
