"""Which of several drafts of a request is worth verifying, and how far; and what became of all of them, for a planner that cuts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float

from respec.rollout.draft.protocol import Drafter, Guesser
from respec.rollout.request import Request
from respec.rollout.tree import NOTHING, DraftTree
from respec.rollout.verify import Verdict
from respec.types import Cut, Leads


def beside(
    drafters: Mapping[str, Drafter],
    plan: str,
    active: Sequence[Request],
    limits: Sequence[int],
    trees: Sequence[DraftTree],
    cut: Cut,
) -> Sequence[DraftTree]:
    """The drafts of the plan's drafter, or, for the requests that they are worth more for, those of the look-up that the cut names."""
    for name in cut.beside:
        guesser = drafters.get(name)
        if isinstance(guesser, Guesser):
            return choose(plan, trees, name, guesser.guess(active, cut.deep, limits), cut)
    return trees


def choose(
    drafter: str, own: Sequence[DraftTree], beside: str, guesses: Sequence[DraftTree], cut: Cut
) -> list[DraftTree]:
    """For each request the drafter's chain, or the look-up's: the one whose tokens' chances exceed the floor by more in all. Each is cut at the
    floor. The guesses are whole as they come, the drafter's own chains cut already."""
    chosen = []
    stands_own, stands_guess = (
        np.cumprod(cut.chance(name, np.arange(1, lead.shape[1] + 1), lead), axis=1)
        for name, lead in ((drafter, _leads(own)), (beside, _leads(guesses)))
    )
    worth_own, worth_guess = (np.maximum(stands - cut.floor, 0.0).sum(axis=1) for stands in (stands_own, stands_guess))
    kept_B = ((stands_guess >= cut.floor) & (stands_guess > 0)).sum(axis=1)
    for tree, guess, kept, more in zip(own, guesses, kept_B.tolist(), worth_guess > worth_own, strict=True):
        chosen.append(replace(_upto(guess, kept) if more else tree, rivals=(tree, guess)))
    return chosen


def _upto(guess: DraftTree, kept: int) -> DraftTree:
    """Its first tokens, and the next one left out."""
    rest = guess.token_n[kept:]
    short = DraftTree.chain(guess.token_n[:kept], guess.proposer)
    return replace(short, lead_n=guess.lead_n[: kept + 1], left_out=rest[0] if rest else None)


def _leads(chains: Sequence[DraftTree]) -> Float[np.ndarray, "B D"]:
    """Their leads, NaN after the last."""
    lead_BD = np.full((len(chains), max((len(chain.lead_n) for chain in chains), default=0)), np.nan)
    for row, chain in zip(lead_BD, chains, strict=True):
        row[: len(chain.lead_n)] = chain.lead_n
    return lead_BD


def judge(drafters: Sequence[str], trees: Sequence[DraftTree], verdicts: Sequence[Verdict]) -> list[Leads]:
    """The leads of all chains by these drafters, the plan's first, and how far each stood, verified or not; requests without any are left out."""
    pairs = [
        (tree.rivals or (tree,), verdict)
        for tree, verdict in zip(trees, verdicts, strict=True)
        if (tree.rivals or (tree,))[0].lead_n
    ]
    found = []
    for i, drafter in enumerate(drafters):
        chains = [rivals[i] if i < len(rivals) else NOTHING for rivals, _ in pairs]
        known = [_known(chain, verdict) for chain, (_, verdict) in zip(chains, pairs, strict=True)]
        tested, stood = np.array(known, np.int64).reshape(-1, 2).T
        found.append(Leads(drafter, _leads(chains), tested, stood))
    return found


def fates(trees: Sequence[DraftTree], verdicts: Sequence[Verdict]) -> tuple[list[int], list[int]]:
    """For each request how deep the plan's drafter was tested and how deep it stood: by what was verified or, of chains that were cut or not
    chosen, is known anyway."""
    own = [tree.rivals[0] if tree.rivals else tree for tree in trees]
    known = [_known(tree, verdict) for tree, verdict in zip(own, verdicts, strict=True)]
    return [tested for tested, _ in known], [stood for _, stood in known]


def _known(tree: DraftTree, verdict: Verdict) -> tuple[int, int]:
    """Of how many depths, from the first on, the fate is known, and how many of them are the target's. The target has drawn its own tokens up to
    one place beyond the last that stands, whatever was verified."""
    if not tree.lead_n:
        stood = len(verdict.path)
        return min(max(tree.depth_n, default=0), stood + 1), stood
    tokens = tree.token_n if tree.left_out is None else (*tree.token_n, tree.left_out)
    drawn = verdict.draws.token.tolist()
    equal = next(
        (d for d, (a, b) in enumerate(zip(tokens, drawn, strict=False)) if a != b), min(len(tokens), len(drawn))
    )
    return min(len(tokens), len(drawn), equal + 1), equal


def shortened(trees: Sequence[DraftTree]) -> bool:
    """Whether anything that a drafter would have drafted is not verified."""
    return any(tree.left_out is not None or tree.rivals for tree in trees)
