"""What the HTML report shows, gathered from a run folder as plain JSON values. Needs no lock, no tokenizer, no finished run."""

from __future__ import annotations

import itertools
import json
import math
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from respec.errors import RunDirError
from respec.report import records
from respec.report.alarms import alarms_of
from respec.report.metrics import metric
from respec.report.panel import split_of
from respec.report.records import ROLLOUTS, ROUNDS, KeptRollout, StepMetrics
from respec.report.run_dir import CONFIG_FILE, PROVENANCE_FILE, SUMMARY_FILE
from respec.report.said import read_said
from respec.types import Plan, Proposer

# Bounds on what is read and shown, so that a report of a long run stays quick to write and to open.
LENGTH_STEPS = 200
ROUND_STEPS = 9
ROLLOUT_STEPS = 5
ROLLOUTS_SHOWN = 6
HISTOGRAM_STEPS = 3
ROUNDS_SHOWN = 4000
TOKENS_SHOWN = 4000
TEXT_SHOWN = 20_000


def collect(
    run_dir: Path,
    steps: Sequence[StepMetrics] | None = None,
    alarms: Sequence[Mapping[str, Any]] | None = None,
    points: int | None = None,
) -> dict[str, Any]:
    """Everything the page needs. Raises RunDirError for a folder that holds no run, or one with a damaged file.

    For who follows a run: `steps` and `alarms` are those read already, and no line has more than `points` points.
    """
    config_file = run_dir / CONFIG_FILE
    if not config_file.is_file():
        raise RunDirError(
            f"'{run_dir}' holds no run: there is no {CONFIG_FILE} in it; name a folder made by 'respec train'"
        )
    try:
        config_text = config_file.read_text(encoding="utf-8")
        config = tomllib.loads(config_text)
    except ValueError as error:
        raise RunDirError(f"'{config_file}' cannot be read: {error}") from None
    steps = records.read_metrics(run_dir) if steps is None else steps
    lossless = config.get("speculation", {}).get("mode") != "lossy"
    summary = _json(run_dir / SUMMARY_FILE) or {}
    planned = config.get("run", {}).get("steps", 0)
    trained = [record for record in steps if "time/step_s" in record.metrics or "reward/mean" in record.metrics]
    recorded = records.recorded_steps(run_dir, ROLLOUTS)
    return {
        "name": run_dir.resolve().name,
        "about": _about(config),
        "steps": planned,
        "last_step": trained[-1].step if trained else 0,
        "finished": bool(summary) and bool(trained) and trained[-1].step >= planned,
        "headline": _headline(summary, steps, trained),
        "series": _series(steps, points),
        "meaning": _meanings(steps),
        "split": [{"step": record.step, **split_of(record.metrics)} for record in _some(trained, points)],
        "lengths": _lengths(run_dir, recorded),
        "histogram": _histogram(run_dir, recorded),
        "rounds": [_rounds(run_dir, step) for step in evenly(records.recorded_steps(run_dir, ROUNDS), ROUND_STEPS)],
        "rollouts": [_rollouts(run_dir, step) for step in evenly(recorded, ROLLOUT_STEPS)],
        "proposers": [proposer.name.lower() for proposer in Proposer],
        "config": config_text,
        "alarms": alarms_of(steps, lossless) if alarms is None else list(alarms),
        "said": read_said(run_dir),
        "starts": (_json(run_dir / PROVENANCE_FILE) or {}).get("starts", []),
    }


def evenly(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of the items, evenly spread, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(i * (len(items) - 1) / (most - 1))] for i in range(most)]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    except ValueError as error:
        raise RunDirError(f"'{path}' is damaged ({error}); remove it and write the report again") from None


def _about(config: dict[str, Any]) -> list[str]:
    task, speculation = config.get("task", {}), config.get("speculation", {})
    drafter = speculation.get("drafter", "off")
    parts = task.get("mixture") or [task]
    data = " + ".join(part.get("name") or part.get("dataset") or Path(part.get("path", "")).name for part in parts)
    return [
        f"model {config.get('model', {}).get('path', '?')}",
        f"task {data}",
        f"algorithm {config.get('policy', {}).get('algorithm', '?')}",
        "plain decoding" if drafter == "off" else f"drafts by {drafter}, up to {speculation.get('s')} tokens",
        f"seed {config.get('run', {}).get('seed', 0)}",
    ]


def _headline(summary: dict[str, Any], steps: Sequence[StepMetrics], trained: Sequence[StepMetrics]) -> dict[str, Any]:
    """summary.json's figures; while there is none, the same from the steps so far."""

    def values(name: str) -> list[float]:
        found = (record.metrics.get(name, math.nan) for record in steps)
        return [value for value in found if math.isfinite(value)]

    figures: dict[str, Any] = {}
    if reward := values("reward/mean"):
        figures |= {"reward_first": reward[0], "reward_last": reward[-1]}
    if accuracy := values("eval/accuracy"):
        figures["accuracy_before_rl"] = accuracy[0]
        if len(accuracy) > 1:
            figures["accuracy_after_rl"] = accuracy[-1]
    if errors := values("eval/se"):
        figures["accuracy_se"] = errors[-1]
    if speedups := values("rollout/speedup"):
        figures["rollout_speedup"] = statistics.median(speedups)
    if identical := values("rollout/tokens_identical"):
        figures["tokens_identical"] = min(identical) >= 1
    if entropy := values("policy/entropy"):
        figures["policy_entropy"] = statistics.fmean(entropy)
    if seconds := values("time/step_s"):
        figures["wall_s"] = sum(seconds)
    splits = [split_of(record.metrics) for record in trained]
    figures["time_split"] = {
        f"{part}_s": sum(split[part] for split in splits) for part in (splits[0] if splits else ())
    }
    return _finite({**figures, **{name: value for name, value in summary.items() if value is not None}})


def _some(steps: Sequence[StepMetrics], points: int | None) -> Sequence[StepMetrics]:
    return steps if points is None else [steps[i] for i in evenly(range(len(steps)), points)]


def _series(steps: Sequence[StepMetrics], points: int | None) -> dict[str, dict[str, list[float]]]:
    """name -> step and value of each finite entry, thinned to `points`."""
    series: dict[str, dict[str, list[float]]] = {}
    for record in steps:
        for name, value in record.metrics.items():
            if math.isfinite(value):
                entry = series.setdefault(name, {"step": [], "value": []})
                entry["step"].append(record.step)
                entry["value"].append(value)
    if points is not None:
        for entry in series.values():
            kept = thinned(entry["value"], points)
            entry["step"], entry["value"] = ([entry[key][i] for i in kept] for key in ("step", "value"))
    return series


def thinned(values: Sequence[float], most: int) -> list[int]:
    """Places of at most `most` values that keep a line's shape: the lowest and the highest of equal stretches, and both ends."""
    if len(values) <= most:
        return list(range(len(values)))
    edges = np.linspace(0, len(values), max(2, (most - 2) // 2 + 1)).astype(int)
    kept = {0, len(values) - 1}
    for start, end in itertools.pairwise(edges.tolist()):
        stretch = values[start:end]
        kept |= {start + int(np.argmin(stretch)), start + int(np.argmax(stretch))}
    return sorted(kept)


def _meanings(steps: Sequence[StepMetrics]) -> dict[str, str]:
    meanings = {}
    for name in dict.fromkeys(name for record in steps for name in record.metrics):
        try:
            entry = metric(name)
            meanings[name] = f"{entry.meaning}; {entry.reduction}; in {entry.unit}"
        except KeyError:  # a run made by another version of respec
            meanings[name] = name
    return meanings


def _lengths(run_dir: Path, recorded: Sequence[int]) -> list[dict[str, float]]:
    rows = []
    for step in evenly(recorded, LENGTH_STEPS):
        length_R = _length(run_dir, step)
        if len(length_R):
            low, median, high = (float(np.quantile(length_R, q)) for q in (0.1, 0.5, 0.9))
            rows.append({"step": step, "p10": low, "median": median, "p90": high, "max": float(length_R.max())})
    return rows


def _histogram(run_dir: Path, recorded: Sequence[int]) -> list[dict[str, Any]]:
    """Lengths of the first and of the last recorded steps, which never overlap."""
    count = min(HISTOGRAM_STEPS, len(recorded) // 2)
    if not count:
        return []
    ends = []
    for label, chosen in (("first", recorded[:count]), ("last", recorded[-count:])):
        length_R = np.concatenate([_length(run_dir, step) for step in chosen])
        span = f"step {chosen[0]}" if count == 1 else f"steps {chosen[0]}–{chosen[-1]}"
        ends.append({"label": f"{label}: {span}", "length": length_R.tolist()})
    return ends


def _length(run_dir: Path, step: int) -> np.ndarray:
    stat = records.step_file(run_dir, ROLLOUTS, step).stat()
    return _length_of(run_dir, step, stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=8192)
def _length_of(run_dir: Path, step: int, written_ns: int, size: int) -> np.ndarray:
    """Of a file as it was written then: who follows a run asks again and again."""
    return np.array([kept.scored.rollout.drawn for kept in records.read_kept(run_dir, step)], np.int64)


RATE_ROUNDS = 9


def _rounds(run_dir: Path, step: int) -> dict[str, Any]:
    rounds = records.read_rounds(run_dir, step)
    seconds_R = np.array([record.draft_s + record.verify_s + record.overhead_s for record in rounds])
    start_R = np.cumsum(seconds_R) - seconds_R
    rate_R = _running_rate(np.array([r.emitted for r in rounds], float), seconds_R)
    every = max(1, -(-len(rounds) // ROUNDS_SHOWN))
    rounds = rounds[::every]
    return {
        "step": step,
        "every": every,
        "start": np.round(start_R[::every], 5).tolist(),
        "end": round(float(seconds_R.sum()), 5),
        "active": [record.active for record in rounds],
        "waiting": [record.waiting for record in rounds],
        "drafted": [record.drafted for record in rounds],
        "accepted": [record.accepted for record in rounds],
        "emitted": [record.emitted for record in rounds],
        "plan": [plan_name(record.plan) for record in rounds],
        "rate": np.round(rate_R[::every], 1).tolist(),
        "predicted": [round(record.predicted, 1) for record in rounds],
    }


def _running_rate(emitted_R: Float[np.ndarray, "R"], seconds_R: Float[np.ndarray, "R"]) -> Float[np.ndarray, "R"]:
    """Tokens/s around each round: one round's own says more of luck than of the plan."""
    window = np.ones(min(RATE_ROUNDS, max(1, len(emitted_R))))
    return np.convolve(emitted_R, window, "same") / np.maximum(np.convolve(seconds_R, window, "same"), 1e-9)


def plan_name(plan: Plan) -> str:
    """`plain`, `suffix s=6` for a chain, `eagle s=6 t=4 n=24` for a tree."""
    if plan.n == 0:
        return "plain"
    tree = f" t={plan.t} n={plan.n}" if plan.t > 1 else ""
    return f"{plan.drafter} s={plan.s}{tree}"


def _rollouts(run_dir: Path, step: int) -> dict[str, Any]:
    everything = records.read_kept(run_dir, step)
    readable = [kept for kept in everything if kept.pieces] or list(everything)
    return {"step": step, "of": len(everything), "shown": [_rollout(kept) for kept in readable[:ROLLOUTS_SHOWN]]}


def _rollout(kept: KeptRollout) -> dict[str, Any]:
    scored, rollout = kept.scored, kept.scored.rollout
    return _finite(
        {
            "row": rollout.prompt.row,
            "sample": rollout.sample,
            "prompt": rollout.prompt.text[:TEXT_SHOWN],
            "text": rollout.text[:TEXT_SHOWN],
            "tokens": len(rollout.token_T),
            "reward": scored.reward,
            "part": dict(scored.part),
            "fell_back": list(scored.fell_back),
            "finish": rollout.finish,
            "pieces": list(kept.pieces[:TOKENS_SHOWN]),
            "proposer": rollout.proposer_T[:TOKENS_SHOWN].tolist(),
            "logprob": np.round(rollout.logprob_T[:TOKENS_SHOWN].astype(np.float64), 3).tolist(),
            "entropy": np.round(rollout.entropy_T[:TOKENS_SHOWN].astype(np.float64), 3).tolist(),
            "round": rollout.round_T[:TOKENS_SHOWN].tolist(),
        }
    )


def _finite(node: Any) -> Any:
    """JSON knows no NaN: what is not finite becomes null."""
    if isinstance(node, dict):
        return {key: _finite(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_finite(value) for value in node]
    return None if isinstance(node, float) and not math.isfinite(node) else node
