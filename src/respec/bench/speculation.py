"""Speculation against plain decoding in the same engine: acceptance by depth, and tokens/s by batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from respec.bench.record import refuse_dirty, write_result
from respec.models.decoder import Decoder
from respec.models.load import Policy
from respec.rollout.draft.protocol import Drafter
from respec.rollout.engine import Engine
from respec.rollout.planner import Planner
from respec.types import PLAIN, Ask, Mode, Plan, Prompt, Rollout, RolloutStats, RoundRecord, Sampling, Stream


@dataclass(frozen=True)
class Variant:
    """One way to draft. `drafters` and `planner` are made anew for every repeat, but for a planner that `lives`; `history` lets drafters learn
    an earlier draw first."""

    label: str
    drafters: Callable[[], Sequence[Drafter]] = tuple
    planner: Callable[[], Plan | Planner] = lambda: PLAIN
    history: bool = False
    mode: Mode = "matching"
    lives: bool = False


OFF = Variant("off")


@dataclass(frozen=True)
class Timed:
    """One repeat of one variant."""

    rollouts: tuple[Rollout, ...]
    stats: RolloutStats
    seconds: float


def bench_speculation(
    policy: Policy,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    variants: Sequence[Variant],
    batches: Sequence[int],
    group: int,
    sampling: Sampling,
    repeats: int,
    out: Path | None,
    about: Mapping[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Every variant and plain decoding over the same groups, `repeats` times in turning order; ratios are of one repeat each.

    A batch of B runs at least 3 B completions, in groups of `group`: `ratio` is of the rounds while all B places were taken, `whole_ratio` of
    the whole, whose last third thins out. Each repeat is a fresh draw, the same for all variants, so tokens are compared too. Raises
    ConfigError when `out` is given in a tree with uncommitted changes.
    """
    if out is not None:
        refuse_dirty()
    rows = []
    for batch in batches:
        count = -(-max(3 * batch, 2 * group) // group)
        taken = side_by_side(policy, decoder, prompts, count, variants, batch, group, sampling, repeats)
        for variant in variants:
            rows.append(_row(batch, variant, taken[variant.label], taken[OFF.label]))
            say(
                f"batch {batch:3d}  {variant.label:24s} {rows[-1]['ratio']:.2f}x  accepted length {rows[-1]['accepted_length']:.2f}  "
                f"({rows[-1]['tokens_per_s']:.0f} against {rows[-1]['off_tokens_per_s']:.0f} tokens/s)"
            )
    return write_result(out, {
        "what": "speculation against plain decoding in the same engine", **about, "repeats": repeats, "rows": rows,
        "auto": [_auto([row for row in rows if row["batch"] == batch]) for batch in batches] if _has_auto(variants) else None,
    })  # fmt: skip


def side_by_side(
    policy: Policy,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    count: int,
    variants: Sequence[Variant],
    batch: int,
    group: int,
    sampling: Sampling,
    repeats: int,
) -> dict[str, list[Timed]]:
    """Plain decoding and every variant over `count` groups, in an order that turns from repeat to repeat; by label.

    A planner that lives on from rollout to rollout has one at this batch behind it before it is timed, as in any step of a run but its first.
    """
    chosen = [prompts[i % len(prompts)] for i in range(count)]
    chosen = [Prompt(row, p.text, p.token_ids, p.columns, p.messages) for row, p in enumerate(chosen)]
    earlier, _, _ = _run(policy, decoder, OFF, chosen, batch, group, sampling, 0, ())
    for variant in variants:
        if variant.lives:
            _run(policy, decoder, variant, chosen, batch, group, sampling, 0, ())
    taken: dict[str, list[Timed]] = {variant.label: [] for variant in (OFF, *variants)}
    for repeat in range(repeats):
        order = [OFF, *variants]
        order = order[repeat % len(order) :] + order[: repeat % len(order)]
        for variant in order:
            timed = Timed(*_run(policy, decoder, variant, chosen, batch, group, sampling, 1 + repeat, earlier))
            taken[variant.label].append(timed)
    return taken


def _run(
    policy: Policy,
    decoder: Decoder,
    variant: Variant,
    prompts: Sequence[Prompt],
    batch: int,
    group: int,
    sampling: Sampling,
    draw: int,
    earlier: Sequence[Rollout],
) -> tuple[tuple[Rollout, ...], RolloutStats, float]:
    engine = Engine(
        decoder, policy.tokenizer, policy.eos_token_ids, 0, batch, drafters=variant.drafters(), mode=variant.mode
    )
    for drafter in engine.drafters.values() if variant.history else ():
        drafter.learn(earlier)
    asks = [Ask(prompt, Stream.BENCH, draw, group) for prompt in prompts]
    began = time.perf_counter()
    rollouts, stats = engine.rollout(asks, sampling, variant.planner())
    return rollouts, stats, time.perf_counter() - began


def _row(batch: int, variant: Variant, ours: Sequence[Timed], plain: Sequence[Timed]) -> dict[str, Any]:
    rates, plain_rates = (
        [full_rate(t.stats.round_R, batch) for t in ours],
        [full_rate(t.stats.round_R, batch) for t in plain],
    )
    ratios = [a / b for a, b in zip(rates, plain_rates, strict=True)]
    whole = [(b.seconds / b.stats.tokens) / (a.seconds / a.stats.tokens) for a, b in zip(ours, plain, strict=True)]
    records = [record for timed in ours for record in timed.stats.round_R]
    tested, accepted = (_by_depth([getattr(record, name) for record in records]) for name in ("tested_D", "accepted_D"))
    entropy = np.concatenate([r.entropy_T for timed in plain for r in timed.rollouts])
    return {
        "batch": batch, "variant": variant.label, "ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
        "ratios": ratios, "whole_ratio": statistics.median(whole), "whole_ratios": whole,
        "tokens_per_s": statistics.median(rates), "off_tokens_per_s": statistics.median(plain_rates),
        "accepted_length": float(np.mean([t.stats.accepted_length for t in ours])),
        "acceptance_by_depth": [a / t for a, t in zip(accepted, tested, strict=False) if t],
        "draft_s": sum(t.stats.draft_s for t in ours), "verify_s": sum(t.stats.verify_s for t in ours),
        "overhead_s": sum(t.stats.overhead_s for t in ours), "identical": identical(ours, plain) if variant.mode == "matching" else None,
        "policy_entropy": float(entropy.mean()), "completions": len(plain[0].rollouts),
    }  # fmt: skip


def full_rate(records: Sequence[RoundRecord], batch: int) -> float:
    """Tokens/s of the rounds that had `batch` sequences, prefill left out."""
    full = [record for record in records if record.active == batch]
    return sum(r.emitted for r in full) / sum(r.draft_s + r.verify_s + r.overhead_s for r in full)


def identical(ours: Sequence[Timed], theirs: Sequence[Timed]) -> bool:
    """Whether two variants gave the same tokens and log-probabilities, repeat by repeat."""
    return all(
        np.array_equal(x.token_T, y.token_T) and np.array_equal(x.logprob_T, y.logprob_T)
        for a, b in zip(ours, theirs, strict=True)
        for x, y in zip(a.rollouts, b.rollouts, strict=True)
    )


def _has_auto(variants: Sequence[Variant]) -> bool:
    return any(variant.label.startswith("auto") for variant in variants)


def _auto(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """`auto` against plain decoding, and against the best static plan: picked on the even repeats, compared on the odd ones.

    Plain decoding is one. Its rivals are in its own mode, and without a history that it has not got.
    """
    auto = next(row for row in rows if row["variant"].startswith("auto"))
    static: list[dict[str, Any]] = [{"variant": OFF.label, "ratios": [1.0] * len(auto["ratios"])}]
    static += [row for row in rows if not row["variant"].startswith("auto") and "+" not in row["variant"]]
    found = {"batch": auto["batch"], "over_off": auto["ratio"], "over_off_interval": bootstrap(auto["ratios"])}
    return found | over_best(auto, static, "best_static")


def over_best(auto: Mapping[str, Any], others: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """`auto` against the best of the others: picked on the even repeats, compared on the odd ones. Nothing with less than two repeats."""
    if not others or len(auto["ratios"]) < 2:
        return {}
    best = max(others, key=lambda row: statistics.median(row["ratios"][::2]))
    against = [mine / theirs for mine, theirs in zip(auto["ratios"][1::2], best["ratios"][1::2], strict=True)]
    return {
        name: best["variant"], f"over_{name}": statistics.median(against), f"over_{name}_interval": bootstrap(against)
    }  # fmt: skip


def bootstrap(values: Sequence[float], draws: int = 2000) -> tuple[float, float]:
    """The middle 95 % of the medians of resamples (Efron 1979), from a fixed seed."""
    chosen = np.random.default_rng(0).choice(np.array(values), (draws, len(values)))
    low, high = np.quantile(np.median(chosen, axis=1), (0.025, 0.975))
    return float(low), float(high)


def _by_depth(counts: Sequence[tuple[int, ...]]) -> list[int]:
    """Sums of ragged counts."""
    total = np.zeros(max(map(len, counts), default=0), np.int64)
    for count in counts:
        total[: len(count)] += np.array(count, np.int64)
    return total.tolist()
