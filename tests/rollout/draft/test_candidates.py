"""What a drafter puts forward: in `matching` the target's own winner where the laws agree, in `rejection` a draw from the law it states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2, ncx2

from respec.models.decoder import DecodeShape
from respec.rollout.draft.candidates import candidates
from respec.rollout.draft.comb import Arrivals, lane
from respec.rollout.draft.protocol import DraftContext
from respec.rollout.kv_cache import KVCache
from respec.rollout.randomness import sequence_key, token_key, uniform
from respec.rollout.sampling import draw_reference, process, race
from respec.types import Mode, Sampling

ROWS, VOCABULARY = 40, 90
SAMPLINGS = [
    Sampling(1, 1.0), Sampling(1, 0.5), Sampling(1, 0.0), Sampling(1, 0.9, top_k=5), Sampling(1, 0.9, top_p=0.7), Sampling(1, 1.0, min_p=0.2),
    Sampling(1, 1.0, 9, 0.8, 0.05),
]  # fmt: skip


def context(sampling: Sampling, mode: Mode) -> DraftContext:
    return DraftContext(
        sampling, mode, KVCache(DecodeShape(1, 1, 1, 16, 16, VOCABULARY, torch.float32, torch.device("cpu")), 1, 16)
    )


def setting(mode: Mode = "matching", vocabulary: int = VOCABULARY):
    logits = 2 * torch.randn(ROWS, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    key = np.concatenate([sequence_key(3, 0, 0, row, 0) for row in range(ROWS)])
    return logits, token_key(key, np.arange(ROWS) % 7, lane(context(Sampling(1), mode)))


def propose(
    logits, drafted, key, sampling: Sampling, mode: Mode, first: int, vocabulary: int = VOCABULARY
) -> list[Arrivals]:
    return candidates(logits, drafted, vocabulary, key, [first] * len(logits), context(sampling, mode))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_law_equal_to_the_targets_always_matches(sampling: Sampling):
    logits, key = setting()
    every = np.arange(VOCABULARY)
    found = propose(logits, every, key, sampling, "matching", 3)
    drawn = draw_reference(logits.numpy(), key, sampling).token
    assert [int(place.token[0]) for place in found] == drawn.tolist()
    assert all(place.law is None and len(set(place.token.tolist())) == len(place.token) <= 3 for place in found)


def test_siblings_are_the_next_arrivals_and_what_is_dropped_never_arrives():
    logits, key = setting()
    sampling = Sampling(1, 0.9, top_k=2)
    found = propose(logits, np.arange(VOCABULARY), key, sampling, "matching", 3)
    for row, place in enumerate(found):
        truth = race(process(logits[row].numpy(), sampling).p, key[row : row + 1], 3)
        assert place.token.tolist() == truth.tolist() and len(place.token) == 2


@pytest.mark.parametrize("mode", ["matching", "rejection"])
def test_a_reduced_vocabulary_speaks_of_the_targets_tokens(mode):
    logits, key = setting(mode, 30)
    drafted = np.arange(30) * 3
    for place in propose(logits, drafted, key, Sampling(1), mode, 4):
        assert set(place.token.tolist()) <= set(drafted.tolist())
        if place.law is not None:
            assert len(place.law) == VOCABULARY and place.law.sum() == pytest.approx(1)
            assert not np.delete(place.law, drafted).any()


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_in_rejection_the_law_is_the_processed_one_and_has_numbers_of_its_own(sampling: Sampling):
    logits, key = setting("rejection")
    found = propose(logits, np.arange(VOCABULARY), key, sampling, "rejection", 2)
    for row, place in enumerate(found):
        truth = process(logits[row].numpy(), sampling).p
        assert place.law is not None and np.abs(place.law - truth).max() < 1e-12
        assert all(truth[token] > 0 for token in place.token)
    shared = propose(logits, np.arange(VOCABULARY), setting()[1], sampling, "matching", 2)
    if sampling.temperature:
        assert [int(place.token[0]) for place in found] != [int(place.token[0]) for place in shared]


@pytest.mark.parametrize("mode", ["matching", "rejection"])
def test_what_is_not_finite_has_no_candidates(mode):
    logits, key = setting(mode)
    logits[3, 5] = torch.nan
    found = propose(logits, np.arange(VOCABULARY), key, Sampling(1), mode, 2)
    assert [row for row, place in enumerate(found) if not len(place.token)] == [3]


def test_each_row_has_as_many_as_were_asked_for_it():
    logits, key = setting()
    first = [1 + row % 3 for row in range(ROWS)]
    few = candidates(logits, np.arange(VOCABULARY), VOCABULARY, key, first, context(Sampling(1), "matching"))
    many = propose(logits, np.arange(VOCABULARY), key, Sampling(1), "matching", 3)
    for count, some, all_ in zip(first, few, many, strict=True):
        assert some.token.tolist() == all_.token[:count].tolist()


def test_in_rejection_the_first_is_a_draw_from_the_law_and_the_second_one_from_the_rest():
    """Chi-square over 12 tokens at level 1e-4 (each of two tests): a total variation of 0.03 is seen with power 0.99."""
    count, size, level = 20_000, 12, 1e-4
    one = torch.randn(1, size, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    key = np.concatenate([sequence_key(4, 0, 0, row, 0) for row in range(count)])
    every = np.arange(size)
    found = propose(one.repeat(count, 1), every, key, Sampling(1), "rejection", 2, size)
    law = process(one[0].numpy(), Sampling(1)).p
    then = law * ((law / (1 - law)).sum() - law / (1 - law))
    critical = float(chi2.isf(level, size - 1))
    # ΣΔ²/p ≥ (Σ|Δ|)² = (2 TV)²
    assert ncx2.sf(critical, size - 1, count * (2 * 0.03) ** 2) >= 0.99
    for place, expected in enumerate((law, then)):
        seen = np.bincount([row.token[place] for row in found], minlength=size)
        assert ((seen - count * expected) ** 2 / (count * expected)).sum() < critical


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_lead_is_how_far_the_second_arrival_is_behind_the_first(sampling: Sampling):
    logits, key = setting()
    asked = replace(context(sampling, "matching"), cut=NoCut())
    found = candidates(logits, np.arange(VOCABULARY), VOCABULARY, key, [1] * ROWS, asked)
    for row, place in enumerate(found):
        if sampling.temperature == 0:
            second, first = np.sort(logits[row].numpy())[-2:]
            assert place.lead == pytest.approx(first - second)
            continue
        p = process(logits[row].numpy(), sampling).p
        arrival = -np.log(uniform(key[row : row + 1], np.flatnonzero(p).astype(np.uint64))) / p[p > 0]
        first, second = np.sort(arrival)[:2] if len(arrival) > 1 else (1.0, np.inf)
        assert place.lead == pytest.approx(np.log(second) - np.log(first))
    # nobody asks: nothing is worked out
    assert {place.lead for place in propose(logits, np.arange(VOCABULARY), key, sampling, "matching", 1)} == {np.inf}


class NoCut:
    floor, deep = 0.0, 0
    beside: tuple[str, ...] = ()

    def chance(self, drafter: str, depth: int | np.ndarray, lead: np.ndarray) -> np.ndarray:
        return np.ones_like(lead)
