"""Divergences over the vocabulary against plain Python, gradients included, and within a chunk's memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from respec.policy.divergence import DIVERGENCES, Head, divergence

WORDS, C, TEMPERATURE, BETA = 23, 9, 0.7, 0.3


def head(seed: int, width: int, rows: int = WORDS, grad: bool = False) -> Head:
    rng = np.random.default_rng(seed)
    hidden_CE, weight_VE = (torch.from_numpy(rng.normal(size=(n, width))) for n in (C, rows))
    return Head(hidden_CE.requires_grad_(grad), weight_VE.requires_grad_(grad))


def laws(of: Head, rows: int = WORDS) -> list[list[float]]:
    """Probabilities, by hand."""
    table = []
    for logits in (of.hidden_CE @ of.weight_VE[:rows].T / TEMPERATURE).tolist():
        powers = [math.exp(x) for x in logits]
        table.append([x / sum(powers) for x in powers])
    return table


def kl(p: list[float], q: list[float]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def by_hand(name: str, p: list[float], q: list[float]) -> float:
    """Of a teacher's law p and a student's q."""
    if name == "jsd":
        m = [BETA * a + (1 - BETA) * b for a, b in zip(p, q, strict=True)]
        return BETA * kl(p, m) + (1 - BETA) * kl(q, m)
    return kl(p, q) if name == "forward_kl" else kl(q, p)


def slope_by_hand(name: str, p: list[float], q: list[float]) -> list[float]:
    """By the student's logit: q_v (g_v - sum q g), with g the derivative by q_v, constants left out."""
    if name == "forward_kl":
        g = [-a / b for a, b in zip(p, q, strict=True)]
    elif name == "reverse_kl":
        g = [math.log(b / a) for a, b in zip(p, q, strict=True)]
    else:
        g = [(1 - BETA) * math.log(b / (BETA * a + (1 - BETA) * b)) for a, b in zip(p, q, strict=True)]
    mean = sum(b * x for b, x in zip(q, g, strict=True))
    return [b * (x - mean) for b, x in zip(q, g, strict=True)]


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_value_and_gradient_are_those_by_hand(name: str, chunk: int) -> None:
    teacher, student = head(1, 6, grad=True), head(2, 4, grad=True)
    value_C = divergence(name, teacher, student, TEMPERATURE, chunk, BETA)
    weight = [0.5 + i for i in range(C)]
    (value_C * torch.tensor(weight)).sum().backward()
    p_CV, q_CV = laws(teacher), laws(student)
    assert value_C.tolist() == pytest.approx([by_hand(name, p, q) for p, q in zip(p_CV, q_CV, strict=True)], rel=1e-10)
    slope_CV = torch.tensor(
        [[w / TEMPERATURE * x for x in slope_by_hand(name, p, q)] for w, p, q in zip(weight, p_CV, q_CV, strict=True)],
        dtype=torch.float64,
    )
    torch.testing.assert_close(student.hidden_CE.grad, slope_CV @ student.weight_VE.detach(), rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(student.weight_VE.grad, slope_CV.T @ student.hidden_CE.detach(), rtol=1e-9, atol=1e-11)
    assert teacher.hidden_CE.grad is None and teacher.weight_VE.grad is None


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_no_more_logits_than_a_chunk_forward_or_backward(widest_logits, name: str) -> None:
    # of width 16, whose matrices the counter knows to be none of logits
    teacher, student = head(1, 16), head(2, 16, grad=True)
    with widest_logits() as seen:
        divergence(name, teacher, student, 1.0, 4, BETA).sum().backward()
    assert seen.rows == 4


@pytest.mark.parametrize("name", sorted(DIVERGENCES))
def test_a_student_like_its_teacher_has_nothing_to_learn(name: str) -> None:
    student = head(2, 4, grad=True)
    value_C = divergence(name, head(2, 4), student, 1.0, 4, BETA)
    value_C.sum().backward()
    assert student.hidden_CE.grad is not None
    assert value_C.abs().max() < 1e-12 and student.hidden_CE.grad.abs().max() < 1e-12


def test_of_vocabularies_padded_differently_the_shorter_counts() -> None:
    long, short = head(1, 6, rows=WORDS + 8), head(2, 4)
    value_C = divergence("reverse_kl", long, short, TEMPERATURE, 4, BETA)
    expected = [kl(q, p) for p, q in zip(laws(long), laws(short), strict=True)]
    assert value_C.tolist() == pytest.approx(expected, rel=1e-10)


def test_no_tokens_no_divergence() -> None:
    empty = Head(torch.zeros(0, 4), torch.zeros(WORDS, 4))
    assert divergence("jsd", empty, empty, 1.0, 4, BETA).shape == (0,)
