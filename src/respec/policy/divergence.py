"""How far a student's laws are from a teacher's, over the whole vocabulary, with gradient; never more than a chunk of logits at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch.utils.checkpoint import checkpoint

from respec.policy.losses import Tokens

Laws = Float[torch.Tensor, "c V"]
"""Log-probabilities of every token, one law a row."""


@dataclass(frozen=True)
class Head:
    """What gives the laws of C tokens: hidden states and the rows of a language-model head."""

    hidden_CE: Float[torch.Tensor, "C E"]
    weight_VE: Float[torch.Tensor, "V E"]


def forward_kl(teacher_cV: Laws, student_cV: Laws, beta: float) -> Tokens:
    """KL(teacher || student): the student covers all that the teacher might say."""
    return (teacher_cV.exp() * (teacher_cV - student_cV)).sum(1)


def reverse_kl(teacher_cV: Laws, student_cV: Laws, beta: float) -> Tokens:
    """KL(student || teacher): the student keeps to what the teacher finds likely."""
    return (student_cV.exp() * (student_cV - teacher_cV)).sum(1)


def jsd(teacher_cV: Laws, student_cV: Laws, beta: float) -> Tokens:
    """beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta) student, 0 < beta < 1 (GKD, arXiv 2306.13649,
    equation 1). At most log 2 for beta a half; its gradient nears beta times the forward KL's for beta -> 0."""
    mixed_cV = torch.logaddexp(teacher_cV + math.log(beta), student_cV + math.log1p(-beta))
    return beta * forward_kl(teacher_cV, mixed_cV, beta) + (1 - beta) * forward_kl(student_cV, mixed_cV, beta)


DIVERGENCES: dict[str, Callable[[Laws, Laws, float], Tokens]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
}


def divergence(name: str, teacher: Head, student: Head, temperature: float, chunk: int, beta: float) -> Tokens:
    """The divergence `name` of each token's two laws, at the temperature that tokens were drawn at (0 is read as 1).

    Carries the student's gradient; the backward pass computes a chunk's logits again instead of keeping them. float32, or float64 for a
    float64 student. Of two vocabularies padded to different sizes the shorter one counts: rows past the tokenizer's own name no token.
    """
    rows = min(len(teacher.weight_VE), len(student.weight_VE))
    dtype = torch.promote_types(student.hidden_CE.dtype, torch.float32)

    def laws(hidden_cE: torch.Tensor, weight_VE: torch.Tensor) -> Laws:
        return torch.log_softmax((hidden_cE @ weight_VE[:rows].T).to(dtype) / (temperature or 1.0), dim=1)

    def of_part(part: slice, student_CE: torch.Tensor, student_VE: torch.Tensor) -> Tokens:
        with torch.no_grad():
            teacher_cV = laws(teacher.hidden_CE[part], teacher.weight_VE)
        return DIVERGENCES[name](teacher_cV, laws(student_CE[part], student_VE), beta)

    again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    parts = [slice(begin, begin + chunk) for begin in range(0, len(student.hidden_CE), chunk)]
    values = [again(of_part, part, student.hidden_CE, student.weight_VE) for part in parts]
    return torch.cat(values) if values else student.hidden_CE.new_zeros(0, dtype=dtype)  # type: ignore[arg-type]
