"""Log-probabilities of completion tokens, with logits only there and never more than one chunk of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from jaxtyping import Float, Int
from transformers import PreTrainedModel

from respec.models.packed_attention import packed_pass
from respec.types import Batch

# Rows of a chunk's logits that what is made of them, as large again, is made for at once.
ROWS = 32


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
    """Language-model head and log-softmax together, chunk by chunk; the backward pass computes the logits again.

    d logprob_i / d logit_iv = ([v = target_i] - p_iv) and d entropy_i / d logit_iv = -p_iv (log p_iv + entropy_i), so nothing of a chunk needs
    keeping but its log-normaliser and its entropy.
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
        room_cV = _room(hidden_CE, weight_VE, min(chunk, len(target_C)))
        for part in _parts(len(target_C), chunk):
            logit_cV = _logits(hidden_CE[part], weight_VE, temperature, room_cV)
            target_logit_c = logit_cV.gather(1, target_C[part, None])[:, 0]
            norm_C[part], entropy_C[part] = _norm_and_entropy(logit_cV)
            logprob_C[part] = target_logit_c - norm_C[part]
            if show is not None:
                show(part, logit_cV.sub_(norm_C[part, None]))
        ctx.save_for_backward(hidden_CE, weight_VE, target_C, norm_C, entropy_C)
        ctx.temperature, ctx.chunk, ctx.entropy_gradient = temperature, chunk, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy_C)
        return logprob_C, entropy_C

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled_C, spread_C = (gradient / ctx.temperature for gradient in gradients)
        hidden_CE, weight_VE, target_C, norm_C, entropy_C = ctx.saved_tensors
        hidden_grad_CE = torch.empty_like(hidden_CE)
        weight_grad_VE = torch.zeros_like(weight_VE) if ctx.needs_input_grad[1] else None
        room_cV = _room(hidden_CE, weight_VE, min(ctx.chunk, len(target_C)))
        for part in _parts(len(target_C), ctx.chunk):
            slope_cV = _logits(hidden_CE[part], weight_VE, ctx.temperature, room_cV)
            slope_cV.sub_(norm_C[part, None])
            pull_cV = scaled_C[part, None]
            if ctx.entropy_gradient:
                pull_cV = pull_cV + spread_C[part, None] * (slope_cV + entropy_C[part, None])
            slope_cV.exp_().mul_(-pull_cV)
            slope_cV.scatter_add_(1, target_C[part, None], scaled_C[part, None])
            slope_cV = slope_cV.to(weight_VE.dtype)
            hidden_grad_CE[part] = slope_cV @ weight_VE
            if weight_grad_VE is not None:
                weight_grad_VE.addmm_(slope_cV.T, hidden_CE[part])
        return hidden_grad_CE, weight_grad_VE, None, None, None, None, None


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(begin, begin + chunk) for begin in range(0, count, chunk)]


def _room(hidden_CE: torch.Tensor, weight_VE: torch.Tensor, rows: int) -> Float[torch.Tensor, "c V"]:
    """Where one chunk's logits lie after the other: fresh memory would be faulted in for each."""
    return hidden_CE.new_empty(rows, len(weight_VE), dtype=torch.promote_types(hidden_CE.dtype, weight_VE.dtype))


def _logits(
    hidden_cE: torch.Tensor, weight_VE: torch.Tensor, temperature: float, room_cV: torch.Tensor
) -> Float[torch.Tensor, "c V"]:
    logit_cV = torch.mm(hidden_cE, weight_VE.T, out=room_cV[: len(hidden_cE)])
    logit_cV = logit_cV.to(torch.promote_types(logit_cV.dtype, torch.float32))
    return logit_cV if temperature == 1.0 else logit_cV.div_(temperature)


def _norm_and_entropy(logit_cV: Float[torch.Tensor, "c V"]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row log sum exp, and the entropy of its softmax; with one exponential a logit.

    With l' = l - max and S = sum exp l', the norm is max + log S, and the entropy log S - (sum exp(l') l') / S.
    """
    norms, entropies = [], []
    for rows_cV in logit_cV.split(ROWS):
        highest_c1 = rows_cV.amax(dim=1, keepdim=True)
        below_cV = rows_cV - highest_c1
        mass_cV = torch.exp(below_cV)
        total_c = mass_cV.sum(dim=1)
        norms.append(total_c.log() + highest_c1[:, 0])
        entropies.append(total_c.log() - mass_cV.mul_(below_cV).sum(dim=1) / total_c)
    return torch.cat(norms), torch.cat(entropies)
