"""How far drafts would stand: the race's law against races that were run, its bounds, and the counts along drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from respec.drafter.agreement import ACCEPTANCE_FILE, Agreement, read_agreement, together, write_agreement
from respec.drafter.judge import judged
from respec.drafter.losses import log_law, overlap, race_match, with_tail
from respec.drafter.unroll import Depth, Unrolled
from respec.types import Mode


def laws(rows: int = 6, tokens: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(2, rows, tokens, generator=generator, dtype=torch.float64)
    return torch.softmax(logits[0], 1), torch.softmax(logits[0] + 0.4 * logits[1], 1)


def whole(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return race_match(with_tail(p), log_law(q.log(), torch.arange(p.shape[1]).repeat(len(p), 1), 1.0))


def test_races_that_were_run_end_alike_as_often_as_the_law_says():
    """40,000 races a row: a standard error is at most 0.0025, and six rows stay within four of them but once in 2,600 seeds."""
    p, q = laws()
    arrival = torch.empty(40_000, *p.shape, dtype=torch.float64).exponential_(
        generator=torch.Generator().manual_seed(1)
    )
    alike = ((arrival / p).argmin(dim=2) == (arrival / q).argmin(dim=2)).double().mean(dim=0)
    assert (whole(p, q) - alike).abs().max() < 0.01


def test_a_race_matches_between_its_bounds_and_always_under_equal_laws():
    p, q = laws(50)
    tv = 1 - torch.minimum(p, q).sum(dim=1)
    found = whole(p, q)
    assert (found >= (1 - tv) / (1 + tv) - 1e-6).all() and (found <= 1 - tv + 1e-6).all()
    assert (found < 1 - tv - 0.01).any()
    torch.testing.assert_close(whole(p, p), torch.ones(50, dtype=torch.float64), atol=1e-6, rtol=0)


def test_with_the_rest_in_one_bucket_it_is_a_lower_bound():
    p, q = laws(50)
    top, index = p.topk(5, dim=1)
    part = race_match(with_tail(top), log_law(q.log(), index, 1.0))
    assert (part <= whole(p, q) + 1e-7).all() and (part > 0.3 * whole(p, q)).all()


def test_what_cannot_be_drafted_or_drawn_never_matches():
    p = torch.tensor([[0.7, 0.3, 0.0, 0.0]])
    logq = torch.tensor([[float("-inf"), 0.5, 0.5, 1e-8]]).log()
    logq[0, 0] = float("-inf")
    # only the second token is in both: 1 / (max(.7/.3, 0) + max(1, 1) + max(0, .5/.5) + tail)
    assert race_match(p, logq)[0].item() == pytest.approx(1 / (0.7 / 0.3 + 1 + 1), rel=1e-5)


def unrolled(chance: list[list[float]]) -> Unrolled:
    """Anchors by depth; a law of two tokens whose overlap is the chance. A missing depth is left out."""
    depths = []
    for k in range(max(map(len, chance))):
        rows = [i for i, row in enumerate(chance) if len(row) > k]
        stands = torch.tensor([chance[i][k] for i in rows], dtype=torch.float64)
        p = torch.stack([torch.ones_like(stands), torch.zeros_like(stands), torch.zeros_like(stands)], dim=1)
        q = torch.stack([stands, 1 - stands, torch.zeros_like(stands)], dim=1)
        depths.append(Depth(p, q.log(), torch.tensor(rows)))
    return Unrolled(tuple(depths), torch.ones(len(chance)))


def test_chances_multiply_along_a_draft_and_ends_of_texts_are_not_held_against_it():
    seen = judged(unrolled([[0.5, 0.8], [0.2, 0.5], [0.9]]), ("rejection",))
    assert set(seen.agreement) == {"rejection"}
    found = seen.agreement["rejection"]
    assert found.tested_K == pytest.approx((3.0, 0.5 + 0.2))
    assert found.stood_K == pytest.approx((0.5 + 0.2 + 0.9, 0.4 + 0.1))


def test_batches_add_up():
    parts: list[dict[Mode, Agreement]] = [
        {"matching": Agreement((2.0, 1.0), (1.0, 0.5))},
        {"matching": Agreement((4.0, 3.0), (3.0, 2.0))},
    ]
    assert together(parts) == {"matching": Agreement((6.0, 4.0), (4.0, 2.5))}


def test_it_lies_beside_a_head_and_what_cannot_be_read_says_nothing(tmp_path: Path):
    seen: dict[Mode, Agreement] = {
        "matching": Agreement((2.0, 1.0), (1.0, 0.5)),
        "rejection": Agreement((2.0,), (1.5,)),
    }
    write_agreement(tmp_path, seen)
    assert read_agreement(tmp_path) == seen
    assert read_agreement(tmp_path / "nowhere") == {}
    for text in ("", "[1]", '{"matching": {}}', '{"matching": {"tested_K": [1], "stood_K": ["x"]}}'):
        (tmp_path / ACCEPTANCE_FILE).write_text(text)
        assert read_agreement(tmp_path) == {}


def test_a_point_mass_is_met_with_its_probability():
    """p all on one token: the race meets it as often as rejection accepts it, with what q gives it."""
    p, q = torch.tensor([[1.0, 0.0, 0.0]]), torch.tensor([[0.4, 0.6, 1e-8]])
    assert race_match(p, q.log())[0].item() == pytest.approx(overlap(p, q.log())[0].item(), rel=1e-4)
