"""The drafter in the engine draws from the laws that its head was trained to: same pairs, positions and keys, however it came there."""

from __future__ import annotations

import random

import pytest
import torch

from respec.drafter.examples import capture
from respec.drafter.unroll import unroll
from respec.models.eagle import create_head
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.engine import Engine
from respec.types import Ask, Plan, Prompt, Sampling, Stream
from respec.weights.publish import publish

SAMPLING, DEPTHS = Sampling(20, 0.8), 3


class Recording(EagleDrafter):
    """Keeps what it proposed: (row, sample, tokens drawn by then, tree)."""

    def __init__(self, *settings) -> None:
        super().__init__(*settings)
        self.proposed = []

    def propose(self, requests, plan, limits, context):
        trees = super().propose(requests, plan, limits, context)
        self.proposed += [
            ((r.ask.prompt.row, r.sample), len(r.tokens), tree) for r, tree in zip(requests, trees, strict=True)
        ]
        return trees


@pytest.mark.parametrize("when", ["undisturbed", "dropped"])
def test_its_laws_are_those_of_the_unrolled_head(make_policy, when):
    policy = make_policy(dtype=torch.float64)
    head = create_head(policy.model, range(1, 45), 3)
    with torch.no_grad():
        for parameter in head.layer.self_attn.parameters():
            parameter.mul_(4)
    drafter = Recording(head, torch.float64)
    decoder = publish(policy, "float64", 0)
    engine = Engine(decoder, policy.tokenizer, policy.eos_token_ids, 7, 5, 16, [drafter], "rejection")
    rng = random.Random(1)
    prompts = [
        Prompt(row, "", tuple(rng.randrange(3, 48) for _ in range(length))) for row, length in enumerate((1, 5, 30))
    ]
    rounds = iter(range(1000))

    def on_round(record) -> None:
        if when == "dropped" and next(rounds) % 3 == 2:
            drafter.drop()

    rollouts, _ = engine.rollout(
        [Ask(p, Stream.TRAIN, 0, 4) for p in prompts], SAMPLING, Plan("eagle", DEPTHS, 1, DEPTHS), on_round
    )
    examples = capture(policy.model, head.shape.taps, rollouts, SAMPLING, 48)
    checked = [0] * DEPTHS
    for rollout, example in zip(rollouts, examples, strict=True):
        unrolled = unroll(head, [example], DEPTHS, SAMPLING.temperature)
        skipped = 1 if example.prompt == 1 else 0
        for _, drawn, tree in (item for item in drafter.proposed if item[0] == (rollout.prompt.row, rollout.sample)):
            for k in range(len(tree.token_n)):
                # a law at depth k + 1 is comparable where the text went on as drafted so far
                if drawn + k >= len(rollout.token_T) or tree.token_n[:k] != tuple(
                    rollout.token_T[drawn : drawn + k].tolist()
                ):
                    break
                depth = unrolled.depths[k]
                row = int((depth.anchor_N == drawn - skipped).nonzero())
                law = torch.from_numpy(tree.law[k - 1])[example.token_CK[drawn + k]]
                assert torch.allclose(depth.logq_NB[row, :-1].exp(), law, rtol=0, atol=1e-4)
                checked[k] += 1
    assert min(checked) > 10


def test_it_drafts_no_deeper_than_asked_and_nothing_before_it_has_seen_a_token(make_policy):
    policy = make_policy()
    drafter = Recording(create_head(policy.model), torch.bfloat16)
    engine = Engine(publish(policy, "bfloat16", 0), policy.tokenizer, policy.eos_token_ids, 7, 8, drafters=[drafter])
    prompts = [Prompt(0, "", (5,)), Prompt(1, "", (5, 9, 11))]
    engine.rollout([Ask(prompt, Stream.TRAIN, 0, 2) for prompt in prompts], Sampling(12, 0.8), Plan("eagle", 4, 3, 9))
    for (row, _), drawn, tree in drafter.proposed:
        deepest = min(4, 12 - drawn - 1)
        assert max(tree.depth_n, default=0) == (0 if row == 0 and not drawn else deepest)
        assert len(tree.token_n) <= 9
    assert drafter._progress == {}
