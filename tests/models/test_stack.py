"""All layers in one native call give the bits of the calls one by one, in every family, and nothing is left behind."""

from __future__ import annotations

import gc

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from respec.models.decoder import Branches, Pass
from respec.models.lean_decoder import LeanDecoder
from respec.models.quantized import quantized
from respec.rollout.kv_cache import KVCache

# without biases, with them, with norms of heads
FAMILIES = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TAPS = (0, 2)


def model(family: str):
    torch.manual_seed(len(family))
    return AutoModelForCausalLM.from_config(
        FAMILIES[family](
            vocab_size=31, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, max_position_embeddings=128, initializer_range=0.3,
        )
    ).eval()  # fmt: skip


def passes(decoder: LeanDecoder) -> tuple[list[Pass], KVCache]:
    """Two prompts, a token of each, and a branching draft of the second."""
    cache = KVCache(decoder.shape, 2, 64)
    slot = np.array([0] * 5 + [1] * 18)
    position = np.array([*range(5), *range(18)])
    draft = Branches(np.array([18, 19, 20]), np.array([19, 19, 19]), np.array([[0, 0], [19, 0], [20, 0]]))
    made = [
        decoder.hidden(np.arange(23) % 31, slot, position, cache, taps=TAPS),
        decoder.hidden(np.array([7, 8]), np.array([0, 1]), np.array([5, 18]), cache),
        decoder.hidden(np.array([8, 9, 3]), np.array([1, 1, 1]), np.array([18, 19, 19]), cache, draft, TAPS),
    ]
    return made, cache


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_gives_the_bits_of_the_calls_one_by_one(family: str, dtype: str):
    decoder = LeanDecoder(model(family), DTYPES[dtype], 0)
    if decoder._stack is None:
        pytest.skip("no prepacked products here, so the calls are made one by one")
    ours, cache = passes(decoder)
    decoder._stack = None
    theirs, other = passes(decoder)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a.hidden, b.hidden) and a.hidden.isfinite().all()
        assert (a.taps is None) == (b.taps is None) and (a.taps is None or torch.equal(a.taps, b.taps))  # pyright: ignore[reportArgumentType]
    for slot, length in ((0, 6), (1, 21)):
        pairs = zip(cache.entries(slot, length), other.entries(slot, length), strict=True)
        assert all(torch.equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


def test_products_of_another_kind_are_called_one_by_one():
    assert LeanDecoder(model("llama"), torch.float32, 0, quantized)._stack is None


def test_its_references_to_weights_go_with_it():
    """A decoder is made for every step: 40 of 3 MB each would be seen."""
    wide = AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=31, hidden_size=512, intermediate_size=1024, num_hidden_layers=1, num_attention_heads=8)
    )
    process, decoders = psutil.Process(), 40
    size = sum(p.numel() * 2 for p in wide.model.layers.parameters())
    LeanDecoder(wide, torch.bfloat16, 0)
    gc.collect()
    before = process.memory_info().rss
    for version in range(decoders):
        LeanDecoder(wide, torch.bfloat16, version)
    gc.collect()
    assert process.memory_info().rss - before < decoders * size / 4
