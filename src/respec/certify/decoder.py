"""Check b: what exactness rests on. A row's bits do not depend on its batch, prefill equals decoding, and a rejected draft leaves no trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from respec.certify.finding import Finding
from respec.certify.protocol import Cache, MakeCache
from respec.models.decoder import Branches, Decoder

BATCHES = (2, 3, 4, 5, 8, 16, 31, 64)
CHUNKS = (1, 2, 7, 16, 33)
LONGEST = 64


def decoder_checks(decoder: Decoder, make_cache: MakeCache, texts: Sequence[Sequence[int]]) -> list[Finding]:
    """All three, on these token sequences, cut to LONGEST tokens."""
    held = [list(text[:LONGEST]) if len(text) > 1 else [*text, *text] for text in texts]
    # a sequence that repeats itself is as good as another where two ways to read it are compared
    longest = (max(held, key=len) * LONGEST)[:LONGEST]
    return [
        batch_invariance(decoder, make_cache, held),
        prefill_is_decode(decoder, make_cache, longest),
        rollback(decoder, make_cache, longest),
    ]


def batch_invariance(decoder: Decoder, make_cache: MakeCache, texts: Sequence[Sequence[int]]) -> Finding:
    """The logits of a decode step are the same whoever comes along."""
    most = BATCHES[-1]
    texts = [list(texts[slot % len(texts)]) for slot in range(most)]
    cache = make_cache(most, LONGEST)
    for slot, text in enumerate(texts):
        _pass(decoder, cache, slot, text[:-1], 0)
    alone = torch.cat([_logits(decoder, cache, [slot], texts) for slot in range(most)])
    off = {
        batch: worst
        for batch in BATCHES
        if (worst := _apart(_logits(decoder, cache, range(batch), texts), alone[:batch]))
    }
    if not off:
        sentence = f"a row's logits are the same to the bit alone and in batches of {', '.join(map(str, BATCHES))}"
        return Finding("batch invariance", "decoder", "passed", sentence, {"batches": len(BATCHES)})
    sentence = (
        f"a row's logits depend on its batch: they differ by up to {max(off.values()):.2g} in batches of {', '.join(map(str, off))}; "
        "see `respec doctor`"
    )
    return Finding("batch invariance", "decoder", "failed", sentence, {"max_difference": max(off.values())})


def prefill_is_decode(decoder: Decoder, make_cache: MakeCache, text: Sequence[int]) -> Finding:
    """Read at once, in pieces or token by token: the same logits, the same keys and values."""
    whole = make_cache(1, len(text))
    logits = _read(decoder, whole, 0, text, 0)
    for chunk in CHUNKS:
        cache = make_cache(1, len(text))
        parts = [_read(decoder, cache, 0, text[start : start + chunk], start) for start in range(0, len(text), chunk)]
        worst = max(_apart(torch.cat(parts), logits), _cache_apart(cache, whole, len(text)))
        if worst:
            sentence = f"read {chunk} tokens at a time, {len(text)} tokens give logits or keys that differ by up to {worst:.2g}"
            return Finding("prefill = decode", "decoder", "failed", sentence, {"chunk": chunk, "max_difference": worst})
    sentence = f"{len(text)} tokens give the same logits, keys and values to the bit at once and {', '.join(map(str, CHUNKS))} at a time"
    return Finding("prefill = decode", "decoder", "passed", sentence, {"tokens": len(text)})


def rollback(decoder: Decoder, make_cache: MakeCache, text: Sequence[int]) -> Finding:
    """After rejected drafts, a chain and a tree whose accepted branch is kept by moving, the cache is one that never drafted."""
    plain = make_cache(1, len(text))
    logits = _read(decoder, plain, 0, text, 0)
    worst = {}
    for kind, draft in (("chain", _rejected_chain), ("tree", _half_accepted_tree)):
        cache = make_cache(1, 2 * len(text))
        middle = len(text) // 2
        _pass(decoder, cache, 0, text[:middle], 0)
        seen, upto = draft(decoder, cache, text, middle)
        rest = _read(decoder, cache, 0, text[upto:], upto)
        worst[kind] = max(
            _apart(torch.cat([seen, rest]), logits[middle:]), _cache_apart(cache, plain, len(text))
        )  # fmt: skip
    broken = [kind for kind, apart in worst.items() if apart]
    if broken:
        sentence = f"after a rejected {' and '.join(broken)} what follows differs by up to {max(worst.values()):.2g} from what never drafted"
        return Finding("rollback", "decoder", "failed", sentence, {"max_difference": max(worst.values())})
    sentence = "after a rejected chain and a half accepted tree, logits, keys and values equal those of a cache that never drafted, to the bit"
    return Finding("rollback", "decoder", "passed", sentence, {"tokens": len(text)})


def _rejected_chain(
    decoder: Decoder, cache: Cache, text: Sequence[int], middle: int
) -> tuple[Float[Tensor, "kept V"], int]:
    """text[middle] is pending; four drafted tokens after it are wrong. What is kept: the pending token's logits."""
    wrong = _wrong(decoder, text, middle + 1, 4)
    return _read(decoder, cache, 0, [text[middle], *wrong], middle)[:1], middle + 1


def _half_accepted_tree(
    decoder: Decoder, cache: Cache, text: Sequence[int], middle: int
) -> tuple[Float[Tensor, "kept V"], int]:
    """A wrong child with a child of its own, and a right one with a right and a wrong child: two nodes stand, and are moved up."""
    wrong = _wrong(decoder, text, middle + 1, 3)
    tokens = [text[middle], wrong[0], wrong[1], text[middle + 1], wrong[2], text[middle + 2]]
    depth = np.array([0, 1, 2, 1, 2, 2])
    fork = middle + 1
    # the nodes of each row's path, by depth: node i lies at fork + i
    paths = [(0, 0), (0, 0), (0, 1), (2, 0), (2, 3), (2, 4)]
    rows = len(tokens)
    branches = Branches(
        write_M=middle + np.arange(rows), fork_M=np.full(rows, fork), path_MD=fork + np.array(paths, np.int64)
    )
    hidden = decoder.hidden(
        np.array(tokens, np.int64), np.zeros(rows, np.int64), middle + depth.astype(np.int64), cache, branches
    ).hidden
    cache.move(np.zeros(2, np.int64), fork + np.array([2, 4]), fork + np.array([0, 1]))
    return decoder.logits(hidden)[[0, 3, 5]], middle + 3


def _wrong(decoder: Decoder, text: Sequence[int], start: int, count: int) -> list[int]:
    """Tokens none of which is the text's at its place."""
    return [(text[start + i] + 1 + i) % decoder.shape.vocabulary for i in range(count)]


def _read(decoder: Decoder, cache: Cache, slot: int, tokens: Sequence[int], start: int) -> Float[Tensor, "T V"]:
    return decoder.logits(_pass(decoder, cache, slot, tokens, start))


def _pass(decoder: Decoder, cache: Cache, slot: int, tokens: Sequence[int], start: int) -> Float[Tensor, "T hidden"]:
    count = len(tokens)
    position = np.arange(start, start + count)
    return decoder.hidden(np.array(tokens, np.int64), np.full(count, slot, np.int64), position, cache).hidden


def _logits(
    decoder: Decoder, cache: Cache, slots: Sequence[int], texts: Sequence[Sequence[int]]
) -> Float[Tensor, "B V"]:
    """One decode step: each slot's last token."""
    token = np.array([texts[slot][-1] for slot in slots], np.int64)
    position = np.array([len(texts[slot]) - 1 for slot in slots], np.int64)
    return decoder.logits(decoder.hidden(token, np.array(slots, np.int64), position, cache).hidden)


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference; 0 only for equal bits, infinity where one of them is no number."""
    if torch.equal(one, other):
        return 0.0
    worst = float((one.double() - other.double()).abs().max())
    return worst if worst > 0 else float("inf")


def _cache_apart(one: Cache, other: Cache, length: int) -> float:
    pairs = zip(one.entries(0, length), other.entries(0, length), strict=True)
    return max(_apart(a, b) for layers in pairs for a, b in zip(*layers, strict=True))
