"""A whole RL step beside TRL's GRPOTrainer: as many completions of as many tokens, one update; each side in a process of its own."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from respec.bench.peers.process import STEP_PEERS, WORKERS, workers
from respec.bench.record import refuse_dirty, write_result
from respec.bench.speculation import bootstrap
from respec.errors import ConfigError

OURS = "respec"
# TRL's default for GRPO.
LR = 1e-6


def bench_step(
    model: str,
    peers: Sequence[str],
    speculation: str,
    texts: Sequence[str],
    group: int,
    new_tokens: int,
    repeats: int,
    threads: int,
    peers_in: Path,
    out: Path | None,
    about: Mapping[str, Any],
    say: Callable[[str], None],
    learner: str = "float32",
) -> dict[str, Any]:
    """Our step and each peer's, `repeats` times in turning order, after one untimed step of each (allocators, optimizer state).

    Peers train and generate in float32; we train in float32, our matrix products in `learner`, and decode in the decoding dtype. Raises ConfigError for a peer that is unknown,
    is not installed, fails or does other work, and when `out` is given in a tree with uncommitted changes.
    """
    if out is not None:
        refuse_dirty()
    wrong = [name for name in peers if name not in STEP_PEERS]
    if wrong:
        raise ConfigError(f"--peers takes {', '.join(STEP_PEERS)}, with commas between; got '{wrong[0]}'")
    kinds = {name: STEP_PEERS[name] for name in peers}
    asked = {
        "model": model, "threads": threads, "prompts": list(texts), "group": group, "new_tokens": new_tokens, "lr": LR, "steps": repeats + 1
    }  # fmt: skip
    with workers(kinds, peers_in, {OURS: WORKERS / "own_step_worker.py"}) as running:
        versions = {}
        for name, worker in running.items():
            say(f"{name}: starting")
            options = {"speculation": speculation, "learner": learner} if name == OURS else kinds[name].options
            versions[name] = worker.ask("load", **asked, **options)["versions"]
        taken: dict[str, list[dict[str, Any]]] = {name: [] for name in running}
        names, tokens = list(running), len(texts) * group * new_tokens
        for repeat in range(repeats + 1):
            turn = repeat % len(names)
            for name in names[turn:] + names[:turn]:
                answer = running[name].ask("step")
                if answer["tokens"] != tokens:
                    raise ConfigError(
                        f"'{name}' drew {answer['tokens']} tokens in a step, not the {tokens} that are compared"
                    )
                say(f"{name}: {answer['seconds']:.1f} s, {answer['peak_bytes'] / 2**30:.1f} GiB at most")
                if repeat:
                    taken[name].append(answer)
    return write_result(out, {
        "what": "a whole RL step beside TRL", **about, "completions": len(texts) * group, "new_tokens": new_tokens, "group": group,
        "speculation": speculation, "learner_dtype": learner, "temperature": 1.0, "repeats": repeats, "threads": threads, "peer_versions": versions,
        "rows": [row(name, taken[OURS], taken[name]) for name in peers],
    })  # fmt: skip


def row(peer: str, ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Our steps against one peer's: seconds in each repeat, and the most memory that either process ever held."""
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(ours, theirs, strict=True)]
    peak, peer_peak = (max(step["peak_bytes"] for step in side) / 2**30 for side in (ours, theirs))
    return {
        "peer": peer, "ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios),
        "ratio_interval": bootstrap(ratios), "ratios": ratios, "seconds": statistics.median(step["seconds"] for step in ours),
        "peer_seconds": statistics.median(step["seconds"] for step in theirs), "peak_gib": peak, "peer_peak_gib": peer_peak,
        "memory_ratio": peak / peer_peak, "generation_s": statistics.median(step["generation_s"] for step in ours),
        "training_s": statistics.median(step["training_s"] for step in ours),
        "accepted_length": statistics.median(step["accepted_length"] for step in ours),
        "policy_entropy": statistics.median(step["entropy"] for step in ours),
    }  # fmt: skip
