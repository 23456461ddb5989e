"""Unrolled training sees the laws that drafting draws from: the same features, attention, positions and vocabulary, at every depth."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from respec.drafter.examples import capture
from respec.drafter.unroll import unroll
from respec.models.eagle import create_head
from respec.models.eagle_decoder import EagleDecoder
from respec.rollout.kv_cache import KVCache
from respec.types import Sampling

DEPTHS = 4
SAMPLING = Sampling(24, 0.8)


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("drafted", [None, range(2, 30)], ids=["whole", "reduced"])
def test_the_laws_are_those_of_the_drafter_at_every_anchor_and_depth(policy, rollouts, drafted, native):
    head = create_head(policy.model, drafted, seed=1)
    with torch.no_grad():
        # large enough for a wrong position or a missing key to show
        for parameter in head.layer.self_attn.parameters():
            parameter.mul_(4)
    examples = capture(policy.model, head.shape.taps, rollouts, SAMPLING, 40)
    unrolled = unroll(head, examples, DEPTHS, SAMPLING.temperature)
    decoder = EagleDecoder(head, torch.float32 if native else torch.float64)
    assert decoder._native == native
    index = head.draft_index
    anchor, checked = 0, 0
    for example in examples:
        count, tokens = len(example.token_CK), example.token_L.numpy()
        for start in range(1 if example.prompt == 1 else 0, count):
            # the pairs up to the one whose output drafts completion token `start`
            pairs = example.prompt - 1 + start
            cache = KVCache(decoder.shape, 1, 128)
            taps, where = example.taps_LT[:pairs], np.arange(pairs)
            feature, logits = decoder.step(
                decoder.fuse(taps), tokens[1 : pairs + 1], 0 * where, where, cache, np.array([pairs - 1])
            )
            for k, depth in enumerate(unrolled.depths):
                if start + k >= count:
                    break
                row = int((depth.anchor_N == anchor).nonzero())
                law = torch.log_softmax(logits[0].double() / SAMPLING.temperature, 0)
                ids = index[example.token_CK[start + k]]
                truth = torch.where(ids >= 0, law[ids.clamp_min(0)], -torch.inf)
                # norms are float32 in the trained module
                assert torch.allclose(depth.logq_NB[row, :-1], truth, rtol=0, atol=2e-4)
                checked += 1
                at = np.array([pairs + k])
                feature, logits = decoder.step(
                    feature, tokens[at + 1] if at[0] + 1 < len(tokens) else at, at * 0, at, cache
                )
            anchor += 1
    assert anchor == len(unrolled.weight_A) and checked > 200


def test_padding_and_company_do_not_matter(policy, rollouts):
    head = create_head(policy.model, seed=1)
    examples = capture(policy.model, head.shape.taps, rollouts, SAMPLING, 6)
    together, exists = unroll(head, examples, DEPTHS, 1.0).overlaps()
    alone = [unroll(head, [example], DEPTHS, 1.0).overlaps() for example in examples]
    assert torch.allclose(together, torch.cat([part for part, _ in alone]), rtol=0, atol=1e-12)
    assert torch.equal(exists, torch.cat([part for _, part in alone]))
