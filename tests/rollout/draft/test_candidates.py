"""What a drafter puts forward: in `matching` the target's own winner where the laws agree, in `rejection` a draw from the law it states."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chi2, ncx2

from respec.rollout.draft.candidates import candidates, lane
from respec.rollout.draft.eagle import comb
from respec.rollout.randomness import Lane, sequence_key, token_key
from respec.rollout.sampling import draw_reference, process, race
from respec.types import Mode, Sampling

ROWS, VOCABULARY = 40, 90
SAMPLINGS = [
    Sampling(1, 1.0), Sampling(1, 0.5), Sampling(1, 0.0), Sampling(1, 0.9, top_k=5), Sampling(1, 0.9, top_p=0.7), Sampling(1, 1.0, min_p=0.2),
    Sampling(1, 1.0, 9, 0.8, 0.05),
]  # fmt: skip


def setting(mode: Mode = "matching", vocabulary: int = VOCABULARY):
    logits = 2 * torch.randn(ROWS, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    key = np.concatenate([sequence_key(3, 0, 0, row, 0) for row in range(ROWS)])
    return logits, token_key(key, np.arange(ROWS) % 7, lane(mode))


def test_the_lane_is_the_targets_own_in_matching_only():
    assert lane("matching") == Lane.TARGET and lane("rejection") == Lane.DRAFT


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_law_equal_to_the_targets_always_matches(sampling: Sampling):
    logits, key = setting()
    every = np.arange(VOCABULARY)
    found = candidates(logits, every, VOCABULARY, key, sampling, "matching", 3)
    drawn = draw_reference(logits.numpy(), key, sampling).token
    assert [place.tokens[0] for place in found] == drawn.tolist()
    assert all(place.law is None and len(set(place.tokens)) == len(place.tokens) <= 3 for place in found)


def test_siblings_are_the_next_arrivals_and_what_is_dropped_never_arrives():
    logits, key = setting()
    sampling = Sampling(1, 0.9, top_k=2)
    found = candidates(logits, np.arange(VOCABULARY), VOCABULARY, key, sampling, "matching", 3)
    for row, place in enumerate(found):
        truth = race(process(logits[row].numpy(), sampling).p, key[row : row + 1], 3)
        assert place.tokens == tuple(truth.tolist()) and len(place.tokens) == 2


@pytest.mark.parametrize("mode", ["matching", "rejection"])
def test_a_reduced_vocabulary_speaks_of_the_targets_tokens(mode):
    logits, key = setting(mode, 30)
    drafted = np.arange(30) * 3
    for place in candidates(logits, drafted, VOCABULARY, key, Sampling(1), mode, 4):
        assert set(place.tokens) <= set(drafted.tolist())
        if place.law is not None:
            assert len(place.law) == VOCABULARY and place.law.sum() == pytest.approx(1)
            assert not np.delete(place.law, drafted).any()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_in_rejection_the_law_is_the_processed_one_and_has_numbers_of_its_own(sampling: Sampling):
    logits, key = setting("rejection")
    found = candidates(logits, np.arange(VOCABULARY), VOCABULARY, key, sampling, "rejection", 2)
    for row, place in enumerate(found):
        truth = process(logits[row].numpy(), sampling).p
        assert place.law is not None and np.abs(place.law - truth).max() < 1e-12
        assert all(truth[token] > 0 for token in place.tokens)
    shared = candidates(logits, np.arange(VOCABULARY), VOCABULARY, setting()[1], sampling, "matching", 2)
    if sampling.temperature:
        assert [place.tokens[0] for place in found] != [place.tokens[0] for place in shared]


@pytest.mark.parametrize("mode", ["matching", "rejection"])
def test_what_is_not_finite_has_no_candidates(mode):
    logits, key = setting(mode)
    logits[3, 5] = torch.nan
    found = candidates(logits, np.arange(VOCABULARY), VOCABULARY, key, Sampling(1), mode, 2)
    assert [row for row, place in enumerate(found) if not place.tokens] == [3]


def test_a_comb_is_a_chain_and_then_its_siblings_shallowest_first():
    logits, key = setting()
    places = candidates(logits[:3], np.arange(VOCABULARY), VOCABULARY, key[:3], Sampling(1), "rejection", 3)
    tree = comb(places, 6)
    first, second, third = (place.tokens for place in places)
    assert tree.token_n == (first[0], second[0], third[0], first[1], first[2], second[1])
    assert tree.parent_n == (-1, 0, 1, -1, -1, 0)
    assert set(tree.law) == {-1, 0, 1}
    assert comb(places, 3).is_chain


def test_in_rejection_the_first_is_a_draw_from_the_law_and_the_second_one_from_the_rest():
    """Chi-square over 12 tokens at level 1e-4 (each of two tests): a total variation of 0.03 is seen with power 0.99."""
    count, size, level = 20_000, 12, 1e-4
    one = torch.randn(1, size, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    key = np.concatenate([sequence_key(4, 0, 0, row, 0) for row in range(count)])
    every = np.arange(size)
    found = candidates(one.repeat(count, 1), every, size, key, Sampling(1), "rejection", 2)
    law = process(one[0].numpy(), Sampling(1)).p
    then = law * ((law / (1 - law)).sum() - law / (1 - law))
    critical = float(chi2.isf(level, size - 1))
    # ΣΔ²/p ≥ (Σ|Δ|)² = (2 TV)²
    assert ncx2.sf(critical, size - 1, count * (2 * 0.03) ** 2) >= 0.99
    for place, expected in enumerate((law, then)):
        seen = np.bincount([row.tokens[place] for row in found], minlength=size)
        assert ((seen - count * expected) ** 2 / (count * expected)).sum() < critical
