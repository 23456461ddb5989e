"""Rollouts side by side with peers: the same model, prompts, lengths, sampling and threads; interleaved repeats, medians, ratios first."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from respec.bench.peers.process import ROLLOUT_PEERS, PeerKind, Worker, workers
from respec.bench.peers.samples import judge_peer
from respec.bench.record import refuse_dirty, write_result
from respec.bench.speculation import Variant, bootstrap
from respec.certify.reference import Reference
from respec.errors import ConfigError
from respec.models.decoder import Decoder
from respec.models.load import Policy
from respec.rollout.engine import Engine
from respec.types import Ask, Prompt, Sampling, Stream

# Places that a peer's drafts may take beyond the last token.
DRAFT_ROOM = 16


@dataclass(frozen=True)
class Work:
    """What every side is to do. `own_eos`: completions end by the model's own EOS, within `new_tokens`; else each has exactly so many."""

    batches: tuple[int, ...]
    group: int
    new_tokens: int
    own_eos: bool
    repeats: int
    threads: int


@dataclass(frozen=True)
class Timed:
    """One side's repeat. `accepted_length`: tokens a sequence gets from a pass of the model; 1 without speculation."""

    seconds: float
    length_B: tuple[int, ...]
    accepted_length: float = 1.0
    entropy: float = float("nan")

    @property
    def tokens_per_s(self) -> float:
        return sum(self.length_B) / self.seconds


Side = Callable[[int], Timed]


def kinds_by_name(names: Sequence[str]) -> dict[str, PeerKind]:
    """Raises ConfigError for a name that is no peer's."""
    wrong = [name for name in names if name not in ROLLOUT_PEERS]
    if wrong:
        raise ConfigError(f"--peers takes {', '.join(ROLLOUT_PEERS)}, with commas between; got '{wrong[0]}'")
    return {name: ROLLOUT_PEERS[name] for name in names}


def bench_rollout(
    policy: Policy,
    decoder: Decoder,
    model: str,
    prompts: Sequence[Prompt],
    ours: Sequence[Variant],
    peers: Mapping[str, PeerKind],
    work: Work,
    check: bool,
    peers_in: Path,
    out: Path | None,
    about: Mapping[str, Any],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Every way of `ours` and every peer over the same prompts, `work.repeats` times in turning order, after one untimed round.

    A peer whose samples do not follow the model's distribution (`check`) is timed all the same, and marked. Raises ConfigError for a peer
    that is not installed or fails, and when `out` is given in a tree with uncommitted changes.
    """
    if out is not None:
        refuse_dirty()
    context = max(len(p.token_ids) for p in prompts) + work.new_tokens + DRAFT_ROOM
    reference = Reference(policy.model)
    rows, versions, findings = [], dict[str, Any](), dict[str, Any]()
    with workers(peers, peers_in) as running:
        for name, worker in running.items():
            say(f"{name}: starting")
            loaded = worker.ask(
                "load", model=model, threads=work.threads, dtype=peers[name].dtype, batch=max(work.batches), context=context,
                **peers[name].options,
            )  # fmt: skip
            versions[name] = loaded["versions"]
            if check:
                judged = judge_peer(worker, peers[name].dtype, prompts, reference)
                findings[name] = [asdict(finding) for finding in judged]
                for finding in judged:
                    say(f"{name}: {finding.check}: {finding.outcome}: {finding.sentence}")
        for batch in work.batches:
            chosen = prompts_of_batch(prompts, batch, work)
            sides: dict[str, Side] = {v.label: _own_side(policy, decoder, v, chosen, batch, work) for v in ours}
            sides |= {name: _peer_side(policy, worker, chosen, batch, work) for name, worker in running.items()}
            taken = interleaved(sides, work.repeats)
            for variant in ours:
                for name in running:
                    rows.append(row(batch, variant.label, name, taken, findings.get(name)))
                    say(sentence(rows[-1]))
    return write_result(out, {
        "what": "rollouts beside peers, exactness on", **about, **asdict(work), "temperature": 1.0,
        "dtype": str(decoder.shape.dtype).removeprefix("torch."), "peer_versions": versions,
        "peer_dtypes": {name: kind.dtype for name, kind in peers.items()}, "samples": findings, "rows": rows,
    })  # fmt: skip


def prompts_of_batch(prompts: Sequence[Prompt], batch: int, work: Work) -> list[Prompt]:
    """Prompts enough for a batch, in groups. Where all completions are of one length, a small batch is filled up to four times."""
    fills = 1 if work.own_eos else max(1, min(4, len(prompts) * work.group // batch))
    count = max(1, fills * batch // work.group)
    return [Prompt(i, p.text, p.token_ids) for i, p in ((i, prompts[i % len(prompts)]) for i in range(count))]


def interleaved(sides: Mapping[str, Side], repeats: int) -> dict[str, list[Timed]]:
    """One untimed round of all sides, which warms them up; then `repeats` rounds, each beginning with the next side."""
    names = list(sides)
    for name in names:
        sides[name](0)
    taken: dict[str, list[Timed]] = {name: [] for name in names}
    for repeat in range(repeats):
        turn = repeat % len(names)
        for name in names[turn:] + names[:turn]:
            taken[name].append(sides[name](1 + repeat))
    return taken


def row(
    batch: int, ours: str, peer: str, taken: Mapping[str, Sequence[Timed]], findings: Sequence[Mapping[str, Any]] | None
) -> dict[str, Any]:
    """One way of ours against one peer: the ratio of their tokens/s in each repeat, its median and spread."""
    mine, theirs = taken[ours], taken[peer]
    ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(mine, theirs, strict=True)]
    return {
        "batch": batch, "ours": ours, "peer": peer, "ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
        "ratio_interval": bootstrap(ratios), "ratios": ratios,
        "tokens_per_s": statistics.median(t.tokens_per_s for t in mine),
        "peer_tokens_per_s": statistics.median(t.tokens_per_s for t in theirs),
        "accepted_length": float(np.mean([t.accepted_length for t in mine])),
        "peer_accepted_length": float(np.mean([t.accepted_length for t in theirs])),
        "lengths": spread(mine), "peer_lengths": spread(theirs), "policy_entropy": float(np.mean([t.entropy for t in mine])),
        "completions": len(mine[0].length_B), "peer_fits": verdict(findings),
    }  # fmt: skip


def spread(timed: Sequence[Timed]) -> dict[str, float]:
    """The lengths of all completions."""
    lengths = np.concatenate([t.length_B for t in timed])
    return {"mean": float(lengths.mean()), "min": int(lengths.min()), "max": int(lengths.max())}


def verdict(findings: Sequence[Mapping[str, Any]] | None) -> bool | None:
    """Do the samples fit? None: not checked."""
    outcomes = {finding["outcome"] for finding in findings or ()}
    return None if not outcomes - {"unchecked"} else "failed" not in outcomes


def sentence(row: Mapping[str, Any]) -> str:
    mark = {True: "", False: ", WHOSE SAMPLES DO NOT FIT THE MODEL", None: ", samples unchecked"}[row["peer_fits"]]
    return (
        f"batch {row['batch']:3d}  {row['ours']} against {row['peer']}: {row['ratio']:.2f}x ({row['ratio_min']:.2f}-{row['ratio_max']:.2f}), "
        f"{row['tokens_per_s']:.0f} against {row['peer_tokens_per_s']:.0f} tokens/s, entropy {row['policy_entropy']:.2f}{mark}"
    )


def _own_side(
    policy: Policy, decoder: Decoder, variant: Variant, prompts: Sequence[Prompt], batch: int, work: Work
) -> Side:
    """Ours: an engine that lives on over the repeats, as in a run; each repeat is a fresh draw."""
    eos = policy.eos_token_ids if work.own_eos else ()
    engine = Engine(
        decoder, policy.tokenizer, eos, 0, batch, drafters=variant.drafters(), mode=variant.mode
    )  # fmt: skip
    planner, sampling = variant.planner(), Sampling(work.new_tokens)

    def run(draw: int) -> Timed:
        asks = [Ask(prompt, Stream.BENCH, draw, work.group) for prompt in prompts]
        torch.set_num_threads(work.threads)
        rollouts, stats = engine.rollout(asks, sampling, planner)
        entropy = float(np.concatenate([r.entropy_T for r in rollouts]).mean())
        return Timed(stats.wall_s, tuple(len(r.token_T) for r in rollouts), stats.accepted_length, entropy)

    return run


def _peer_side(policy: Policy, worker: Worker, prompts: Sequence[Prompt], batch: int, work: Work) -> Side:
    """A peer: it measures its own seconds, so that the wire costs it nothing."""
    asked = [prompt.token_ids for prompt in prompts for _ in range(work.group)]
    eos = list(policy.eos_token_ids) if work.own_eos else []

    def run(draw: int) -> Timed:
        answer = worker.ask(
            "run", prompts=asked, batch=batch, new_tokens=work.new_tokens, eos=eos, temperature=1.0, logprobs=False
        )
        drafts = answer["drafts"]
        lengths = tuple(len(tokens) for tokens in answer["tokens"])
        return Timed(answer["seconds"], lengths, 1 + answer["accepted"] / drafts if drafts else 1.0)

    return run
