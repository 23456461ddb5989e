"""The race sampler: native and reference agree, and both draw from the process distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from respec.errors import NonFiniteError
from respec.rollout.randomness import Lane, sequence_key, token_key, uniform
from respec.rollout.sampling import draw, draw_reference, process, racers
from respec.types import Sampling

SETTINGS = [
    Sampling(1), Sampling(1, 0.6), Sampling(1, 1.0, top_k=5), Sampling(1, 1.0, top_p=0.9), Sampling(1, 0.8, 20, 0.95, 0.02),
    Sampling(1, 0.0), Sampling(1, 1.0, min_p=0.2),
]  # fmt: skip


def keys(n: int, seed: int = 0) -> np.ndarray:
    return token_key(np.repeat(sequence_key(seed, 0, 0, 0, 0), n), np.arange(n), Lane.TARGET)


@pytest.mark.parametrize("vocabulary", [40, 256, 300, 3000])
@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_native_and_reference_draw_the_same(vocabulary, sampling):
    logits = torch.randn(60, vocabulary, generator=torch.Generator().manual_seed(vocabulary)) * 3
    native, reference = draw(logits, keys(60), sampling), draw_reference(logits.double().numpy(), keys(60), sampling)
    assert (native.token == reference.token).all()
    for field in ("logprob", "kept_logmass", "entropy"):
        assert np.abs(getattr(native, field) - getattr(reference, field)).max() < 5e-6, field


@pytest.mark.parametrize("sampling", [Sampling(1), Sampling(1, 0.7, top_k=6), Sampling(1, 1.0, top_p=0.7)], ids=str)
@pytest.mark.parametrize("vocabulary", [12, 600])
def test_draws_follow_the_processed_distribution(vocabulary, sampling):
    """Chi-square at level 1e-4 with a fixed seed, on 60,000 draws.

    Power: against a TV distance of 0.05 spread over the cells, the non-centrality is at least 4 * 0.05**2 * 60,000 = 600 on at most
    599 degrees of freedom, which is rejected with probability above 0.99 (600 cells) and above 0.9999 (12 cells).
    """
    n = 60_000
    logits = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(5)) * (1.0 if vocabulary < 100 else 0.3)
    drawn = draw(logits.expand(n, vocabulary).contiguous(), keys(n), sampling).token
    p = process(logits[0].double().numpy(), sampling).p
    counts = np.bincount(drawn, minlength=vocabulary)
    assert counts[p == 0].sum() == 0
    cells = p > 0
    assert stats.chisquare(counts[cells], p[cells] * n).pvalue > 1e-4


def test_the_chi_square_sees_a_small_bias():
    n, vocabulary = 60_000, 12
    p = np.full(vocabulary, 1 / vocabulary)
    biased = p.copy()
    biased[0] += 0.02
    biased[1] -= 0.02
    counts = np.random.default_rng(0).multinomial(n, biased)
    assert stats.chisquare(counts, p * n).pvalue < 1e-4


def test_ties_go_to_the_lowest_id_and_impossible_tokens_are_never_drawn():
    logits = torch.full((500, 300), -torch.inf)
    logits[:, [7, 9, 250]] = 1.0
    assert set(draw(logits, keys(500), Sampling(1)).token) == {7, 9, 250}
    assert set(draw(logits, keys(500), Sampling(1, 0.0)).token) == {7}
    assert set(draw(logits, keys(500), Sampling(1, 1.0, top_k=1)).token) == {7}


def test_a_nan_is_refused():
    logits = torch.zeros(3, 20)
    logits[1, 4] = torch.nan
    with pytest.raises(NonFiniteError, match="row 1 of 3"):
        draw(logits, keys(3), Sampling(1))


def test_numbers_depend_on_every_part_of_their_key_and_are_uniform():
    base = {"seed": 1, "stream": 0, "draw": 0, "row": 0, "sample": 0}
    one = sequence_key(**base)
    for part in base:
        assert sequence_key(**{**base, part: base[part] + 1}) != one
    first = token_key(one, np.array([3]), Lane.TARGET)
    assert token_key(one, np.array([4]), Lane.TARGET) != first != token_key(one, np.array([3]), Lane.DRAFT)
    numbers = uniform(np.repeat(first, 100_000), np.arange(100_000, dtype=np.uint64))
    assert stats.kstest(numbers, "uniform").pvalue > 1e-4 and numbers.min() > 0 and numbers.max() < 1


def test_a_small_vocabulary_races_whole():
    assert racers(256) == 256 and racers(257) == 64
