"""What became of a round's drafts, token by token, for a planner that has them cut."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from respec.rollout.tree import DraftTree
from respec.rollout.verify import Verdict
from respec.types import Leads


def judge(drafter: str, trees: Sequence[DraftTree], verdicts: Sequence[Verdict]) -> Leads:
    """The leads of all chains that have them, and how far each stood. The target has drawn its own token in the place after the last one that
    stands: so the fate of a token that was left out there is known without a row of its own."""
    pairs = [(tree, verdict) for tree, verdict in zip(trees, verdicts, strict=True) if tree.lead_n]
    lead_BD = np.full((len(pairs), max((len(tree.lead_n) for tree, _ in pairs), default=0)), np.nan)
    for row, (tree, _) in zip(lead_BD, pairs, strict=True):
        row[: len(tree.lead_n)] = tree.lead_n
    known = [_known(tree, verdict) for tree, verdict in pairs]
    tested, stood = (np.array([pair[i] for pair in known], np.int64) for i in (0, 1))
    return Leads(drafter, lead_BD, tested, stood)


def _known(tree: DraftTree, verdict: Verdict) -> tuple[int, int]:
    """Of how many depths, from the first on, the fate is known, and how many of them are the target's."""
    verified, stood = max(tree.depth_n, default=0), len(verdict.path)
    if stood < verified or tree.left_out is None:
        return min(verified, stood + 1), stood
    return verified + 1, stood + int(verdict.draws.token[stood] == tree.left_out)


def fates(trees: Sequence[DraftTree], verdicts: Sequence[Verdict]) -> tuple[list[int], list[int]]:
    """For each tree how deep it was tested and how deep it stood, by what was verified or, of what was left out, is known anyway."""
    known = [_known(tree, verdict) for tree, verdict in zip(trees, verdicts, strict=True)]
    return [tested for tested, _ in known], [stood for _, stood in known]
