"""Whole rollouts with a long tail, one way to draft beside the other: seconds from the first sequence's start to the last one's end."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from respec.bench.record import refuse_dirty, write_result
from respec.bench.speculation import OFF, Timed, Variant, bootstrap, identical, over_best, side_by_side
from respec.models.decoder import Decoder
from respec.models.load import Policy
from respec.types import Prompt, Sampling


def bench_rollouts(
    policy: Policy,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    variants: Sequence[Variant],
    sequences: int,
    group: int,
    sampling: Sampling,
    repeats: int,
    out: Path | None,
    about: Mapping[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Every variant and plain decoding over rollouts of `sequences` completions in groups of `group`, all begun at once, each to its own end:
    the batch thins out until the longest is alone.

    Each repeat is a fresh draw of the same prompts, the same for all variants, in turning order; ratios are of one repeat each. Raises
    ConfigError when `out` is given in a tree with uncommitted changes.
    """
    if out is not None:
        refuse_dirty()
    count = max(1, sequences // group)
    taken = side_by_side(policy, decoder, prompts, count, variants, count * group, group, sampling, repeats)
    plain = taken[OFF.label]
    rows = [_row(variant, taken[variant.label], plain) for variant in (OFF, *variants)]
    for row in rows:
        say(f"{row['variant']:24s} {row['seconds']:.2f} s  {row['ratio']:.2f}x  {row['rounds']:.0f} rounds")
    lengths = np.array([len(r.token_T) for timed in plain for r in timed.rollouts])
    entropy = np.concatenate([r.entropy_T for timed in plain for r in timed.rollouts])
    return write_result(out, {
        "what": "whole rollouts of one batch, against plain decoding in the same engine", **about, "sequences": count * group,
        "repeats": repeats, "policy_entropy": float(entropy.mean()),
        "length": {"min": int(lengths.min()), "median": float(np.median(lengths)), "mean": float(lengths.mean()), "max": int(lengths.max())},
        "rows": rows, "auto": [_auto(row, rows) for row in rows if row["variant"].startswith("auto")],
    })  # fmt: skip


def _row(variant: Variant, ours: Sequence[Timed], plain: Sequence[Timed]) -> dict[str, Any]:
    ratios = [b.seconds / a.seconds for a, b in zip(ours, plain, strict=True)]
    stats = [timed.stats for timed in ours]
    return {
        "variant": variant.label, "seconds": statistics.median(timed.seconds for timed in ours), "ratio": statistics.median(ratios),
        "ratios": ratios, "interval": bootstrap(ratios), "rounds": statistics.mean(len(s.round_R) for s in stats),
        "tokens": statistics.mean(s.tokens for s in stats), "drafted": statistics.mean(s.drafted for s in stats),
        "accepted": statistics.mean(s.accepted for s in stats), "accepted_length": statistics.mean(s.accepted_length for s in stats),
        "identical": identical(ours, plain) if variant.mode == "matching" else None,
    }  # fmt: skip


def _auto(auto: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """`auto` against plain decoding, the best single plan (plain decoding is one), and the best plan that is turned on below a batch size.

    Rollouts of mode `rejection` have lengths of their own, so that their seconds are of other work: they are no rivals.
    """
    static = [row for row in rows if not row["variant"].startswith("auto") and row["identical"] is not None]
    single = [row for row in static if "@" not in row["variant"]]
    on_off = [row for row in static if "@" in row["variant"]]
    found = {"variant": auto["variant"], "over_off": auto["ratio"], "over_off_interval": auto["interval"]}
    return found | over_best(auto, single, "best_static") | over_best(auto, on_off, "best_on_off")
