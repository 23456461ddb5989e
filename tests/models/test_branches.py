"""Branching drafts: every row has the bits of the chain that its path is, and what is kept is as if nothing had branched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from respec.models.decoder import Branches, Decoder
from respec.models.hf_decoder import HFDecoder
from respec.models.lean_decoder import LeanDecoder
from respec.rollout.kv_cache import KVCache

# (query heads, key/value heads): groups of 1, 2 and 3
HEADS = {1: (2, 2), 2: (4, 2), 3: (6, 2)}
PARENTS = {
    "bushy": (-1, -1, -1, 0, 0, 1, 3, 3, 6, 4, 5, 8),
    # deep enough to cross a tile from any start, a sibling at every depth
    "comb": (*range(-1, 17), *range(-1, 17)),
    "chain": tuple(range(-1, 9)),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def decoder(path: str, dtype: torch.dtype, group: int) -> Decoder:
    heads, kv_heads = HEADS[group]
    # 64 wide: PyTorch's own silu, in transformers' code, gives the bits of a row to the row only in widths that are multiples of 32
    torch.manual_seed(group)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=31, hidden_size=16 * heads, intermediate_size=64, num_hidden_layers=2, num_attention_heads=heads,
            num_key_value_heads=kv_heads, max_position_embeddings=128, initializer_range=0.3,
        )
    ).eval()  # fmt: skip
    if path == "lean":
        return LeanDecoder(model, dtype, 0)
    return HFDecoder(model, dtype, torch.device("cpu"), 0)


def chain(made: Decoder, cache: KVCache, slot: int, tokens: list[int], start: int = 0) -> torch.Tensor:
    """One pass over tokens at start, start + 1, ..."""
    count = len(tokens)
    return made.hidden(
        np.array(tokens), np.full(count, slot), np.arange(start, start + count, dtype=np.int64), cache
    ).hidden


def branches(parents: tuple[int, ...], length: int) -> tuple[Branches, np.ndarray]:
    """Of a pending token at length - 1 and its draft: by the definition, node by node. Also every row's position."""
    paths = [[]]
    for node, parent in enumerate(parents):
        paths.append([*paths[parent + 1], length + node])
    deepest = max(map(len, paths))
    rows = len(paths)
    return Branches(
        np.arange(length - 1, length - 1 + rows), np.full(rows, length),
        np.array([path + [0] * (deepest - len(path)) for path in paths], np.int64),
    ), np.array([length - 1 + len(path) for path in paths])  # fmt: skip


def ancestors(parents: tuple[int, ...], node: int) -> list[int]:
    found = []
    while node != -1:
        found.append(node)
        node = parents[node]
    return found[::-1]


def same(one: KVCache, other: KVCache, slot: int, length: int) -> bool:
    pairs = zip(one.entries(slot, length), other.entries(slot, length), strict=True)
    return all(torch.equal(a, b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("path", ["lean", "reference", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", HEADS)
def test_a_branch_has_the_bits_of_the_chain_that_it_is(monkeypatch, path, dtype, group):
    """Two sequences in one pass, of lengths whose drafts begin before, at and after the edge of a tile of sixteen."""
    if path == "torch":
        monkeypatch.setattr("respec.models.kernels.supports", lambda *_: False)
    made = decoder(path, DTYPES[dtype], group)
    rng = np.random.default_rng(0)
    for lengths, shapes in (((14, 3), ("bushy", "comb")), ((16, 33), ("comb", "bushy")), ((17, 1), ("bushy", "chain"))):
        prompts = [rng.integers(3, 31, length).tolist() for length in lengths]
        nodes = [rng.integers(3, 31, len(PARENTS[shape])).tolist() for shape in shapes]
        cache = KVCache(made.shape, 2, 96)
        parts = []
        for slot, (prompt, shape) in enumerate(zip(prompts, shapes, strict=True)):
            if len(prompt) > 1:
                chain(made, cache, slot, prompt[:-1])
            parts.append(branches(PARENTS[shape], len(prompt)))
        wide = max(part.path_MD.shape[1] for part, _ in parts)
        both = Branches(
            np.concatenate([part.write_M for part, _ in parts]),
            np.concatenate([part.fork_M for part, _ in parts]),
            np.concatenate([np.pad(part.path_MD, ((0, 0), (0, wide - part.path_MD.shape[1]))) for part, _ in parts]),
        )
        tokens = [token for prompt, drafted in zip(prompts, nodes, strict=True) for token in (prompt[-1], *drafted)]
        slots = np.repeat([0, 1], [len(drafted) + 1 for drafted in nodes])
        hidden = made.hidden(
            np.array(tokens), slots, np.concatenate([position for _, position in parts]), cache, both
        ).hidden
        start = 0
        for slot, (prompt, drafted, shape) in enumerate(zip(prompts, nodes, shapes, strict=True)):
            parents = PARENTS[shape]
            for node in range(len(parents)):
                way = ancestors(parents, node)
                straight = KVCache(made.shape, 2, 96)
                whole = chain(made, straight, slot, [*prompt, *(drafted[i] for i in way)])
                rows = [start, *(start + 1 + i for i in way)]
                assert torch.equal(hidden[rows], whole[len(prompt) - 1 :]), (shape, node)
            # the last node's path is kept: its keys close ranks, and the next pass goes on from there
            length, source = len(prompt), np.array(ancestors(parents, len(parents) - 1))
            target = np.arange(len(source))
            moved = source != target
            cache.move(np.full(moved.sum(), slot), length + source[moved], length + target[moved])
            assert same(cache, straight, slot, length + len(source))
            after = [chain(made, held, slot, [7], length + len(source)) for held in (cache, straight)]
            assert torch.equal(*after)
            start += len(parents) + 1


def test_a_move_is_as_if_at_once():
    """A target may be another's source, as when an accepted path lies one place further on."""
    shape = decoder("lean", torch.float32, 1).shape
    cache = KVCache(shape, 2, 48)
    for keys, values in zip(cache.keys, cache.values, strict=True):
        keys.copy_(torch.randn_like(keys))
        values.copy_(torch.randn_like(values))
    before = [[layer.clone() for layer in part] for part in cache.entries(1, 48)]
    untouched = [[layer.clone() for layer in part] for part in cache.entries(0, 48)]
    source, target = np.array([15, 16, 18, 31]), np.array([14, 15, 16, 17])
    cache.move(np.full(4, 1), source, target)
    expected = np.arange(48)
    expected[target] = source
    for after, old in zip(cache.entries(1, 48), before, strict=True):
        assert all(torch.equal(a, b[:, expected]) for a, b in zip(after, old, strict=True))
    for after, old in zip(cache.entries(0, 48), untouched, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(after, old, strict=True))
