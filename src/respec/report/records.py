"""The files of a run folder that hold what happened: metrics.jsonl, rollouts/*.jsonl, rounds/*.json. Reading needs no lock."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from respec.errors import RunDirError
from respec.types import Plan, Prompt, Rollout, RoundRecord, Sampling, ScoredRollout, Stream

METRICS_FILE = "metrics.jsonl"
ROLLOUTS = "rollouts"
ROUNDS = "rounds"
DECISIONS = "decisions"
# Enough for a reader; resuming never depends on it.
DECIMALS = 5


@dataclass(frozen=True)
class StepMetrics:
    """One line of metrics.jsonl. `time` is Unix seconds; a metric that was not finite reads as NaN."""

    step: int
    time: float
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class KeptRollout:
    """A recorded rollout and, where the run kept them, the text pieces of its tokens (else empty)."""

    scored: ScoredRollout
    pieces: tuple[str, ...]


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes a whole file or nothing: temporary file, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(content.encode("utf-8") if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Makes renames and removals in a folder durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def metrics_line(record: StepMetrics) -> str:
    """One step as a line of JSON, flat; numbers that are not finite become null."""
    numbers = {name: value if math.isfinite(value) else None for name, value in record.metrics.items()}
    return json.dumps({"step": record.step, "time": record.time, **numbers}) + "\n"


def read_metrics(run_dir: Path) -> tuple[StepMetrics, ...]:
    """All steps of metrics.jsonl; a last line that was cut off while being written is left out.

    Raises RunDirError for a line that is damaged anywhere else.
    """
    return read_metrics_file(run_dir)[0]


def read_metrics_file(run_dir: Path) -> tuple[tuple[StepMetrics, ...], int]:
    """The steps, and how many bytes of the file they take up (what follows is a torn line). Raises RunDirError."""
    path = run_dir / METRICS_FILE
    if not path.exists():
        return (), 0
    lines = path.read_bytes().splitlines(keepends=True)
    steps: list[StepMetrics] = []
    whole = 0
    for number, line in enumerate(lines, 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("cut off")
            steps.append(parse_metrics(line))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines):
                break
            raise RunDirError(
                f"line {number} of '{path}' is damaged ({error}); remove that line to read the rest"
            ) from None
        whole += len(line)
    return tuple(steps), whole


def parse_metrics(line: bytes) -> StepMetrics:
    """A line of metrics.jsonl. Raises ValueError, KeyError, TypeError or AttributeError for one that is damaged."""
    tree = json.loads(line)
    step, time = int(tree.pop("step")), float(tree.pop("time"))
    return StepMetrics(step, time, {name: math.nan if value is None else float(value) for name, value in tree.items()})


def step_file(run_dir: Path, folder: str, step: int) -> Path:
    suffix = ".jsonl" if folder == ROLLOUTS else ".json"
    return run_dir / folder / f"{step:06d}{suffix}"


def recorded_steps(run_dir: Path, folder: str) -> tuple[int, ...]:
    """The steps that have a file in `rollouts`, `rounds` or `decisions`, ascending."""
    found = (run_dir / folder).glob("*.json*")
    return tuple(sorted(int(path.stem) for path in found if path.stem.isdigit()))


def write_rollouts(
    run_dir: Path, step: int, rollouts: Sequence[ScoredRollout], pieces: Sequence[Sequence[str]] = ()
) -> None:
    """One line a rollout; `pieces` are the token texts of the first few of them."""
    lines = []
    for index, scored in enumerate(rollouts):
        rollout = scored.rollout
        tree: dict[str, Any] = {
            "row": rollout.prompt.row,
            "draw": rollout.draw,
            "sample": rollout.sample,
            "stream": int(rollout.stream),
            "reward": _rounded(scored.reward),
            "part": {name: None if value is None else _rounded(value) for name, value in scored.part.items()},
            "fell_back": list(scored.fell_back),
            "finish": rollout.finish,
            "prompt": rollout.prompt.text,
            "text": rollout.text,
            "prompt_tokens": list(rollout.prompt.token_ids),
            "tokens": rollout.token_T.tolist(),
            "proposer": rollout.proposer_T.tolist(),
            "round": rollout.round_T.tolist(),
            "version": rollout.version_T.tolist(),
            "logprob": _rounded_list(rollout.logprob_T),
            "kept_logmass": _rounded_list(rollout.kept_logmass_T),
            "entropy": _rounded_list(rollout.entropy_T),
        }
        if rollout.sampling is not None:
            tree["sampling"] = vars(rollout.sampling)
        if rollout.turn_T is not None and rollout.turn_reward_K is not None:
            tree["turn"] = rollout.turn_T.tolist()
            tree["turn_reward"] = rollout.turn_reward_K.tolist()
            tree["solved"] = rollout.solved
        if index < len(pieces):
            tree["pieces"] = list(pieces[index])
        lines.append(json.dumps(tree, ensure_ascii=True, separators=(",", ":")))
    write_atomic(step_file(run_dir, ROLLOUTS, step), "".join(line + "\n" for line in lines))


def read_kept(run_dir: Path, step: int) -> tuple[KeptRollout, ...]:
    """The rollouts recorded for a step (none if none were), with their pieces. Raises RunDirError if the file is damaged."""
    path = step_file(run_dir, ROLLOUTS, step)
    if not path.exists():
        return ()
    try:
        return tuple(_kept(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines())
    except (ValueError, KeyError, TypeError) as error:
        raise RunDirError(f"'{path}' is damaged ({error!r}); remove it to go on without that step's rollouts") from None


def read_rollouts(run_dir: Path, step: int) -> tuple[ScoredRollout, ...]:
    """The rollouts recorded for a step, in canonical order.

    Tokens, proposers, rounds and versions are exact; log-probabilities, entropies and rewards are rounded to five decimals.
    A prompt comes back without its columns and messages. Raises RunDirError if the file is damaged.
    """
    return tuple(kept.scored for kept in read_kept(run_dir, step))


def write_rounds(run_dir: Path, step: int, rounds: Sequence[RoundRecord]) -> None:
    """A step's decode rounds, column by column."""
    plans = list(dict.fromkeys(record.plan for record in rounds))
    place = {plan: i for i, plan in enumerate(plans)}
    tree = {
        "plans": [[plan.drafter, plan.s, plan.t, plan.n] for plan in plans],
        "plan": [place[record.plan] for record in rounds],
        **{name: [getattr(record, name) for record in rounds] for name in _COUNTS},
        **{name: [round(getattr(record, name), 6) for record in rounds] for name in _MEASURES},
    }
    write_atomic(step_file(run_dir, ROUNDS, step), json.dumps(tree, separators=(",", ":")))


def write_decisions(run_dir: Path, step: int, decisions: Sequence[Mapping[str, Any]]) -> None:
    """Why the plan was what it was, in this step: plain values, as the room that decides gives them."""
    write_atomic(step_file(run_dir, DECISIONS, step), json.dumps(list(decisions), separators=(",", ":")))


def read_decisions(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """What `write_decisions` wrote (nothing if nothing was decided). Raises RunDirError if the file is damaged."""
    path = step_file(run_dir, DECISIONS, step)
    if not path.exists():
        return []
    try:
        return list(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise RunDirError(
            f"'{path}' is damaged ({error!r}); remove it to go on without that step's decisions"
        ) from None


def read_rounds(run_dir: Path, step: int) -> tuple[RoundRecord, ...]:
    """A step's decode rounds (none if none were recorded). Raises RunDirError if the file is damaged."""
    path = step_file(run_dir, ROUNDS, step)
    if not path.exists():
        return ()
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        plans = [Plan(*plan) for plan in tree["plans"]]
        columns = {name: tree[name] for name in _COUNTS + _MEASURES}
        return tuple(
            RoundRecord(plan=plans[plan], **{name: column[i] for name, column in columns.items()})
            for i, plan in enumerate(tree["plan"])
        )
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise RunDirError(f"'{path}' is damaged ({error!r}); remove it to go on without that step's rounds") from None


_COUNTS = ("active", "waiting", "drafted", "accepted", "emitted")
_MEASURES = ("draft_s", "verify_s", "overhead_s", "context", "predicted")


def _rounded(value: float) -> float | None:
    return round(float(value), DECIMALS) if math.isfinite(value) else None


def _rounded_list(value_T: np.ndarray) -> list[float | None]:
    wide_T = value_T.astype(np.float64)
    numbers = np.round(wide_T, DECIMALS).tolist()
    return numbers if np.isfinite(wide_T).all() else [x if math.isfinite(x) else None for x in numbers]


def _kept(tree: dict[str, Any]) -> KeptRollout:
    def floats(name: str) -> np.ndarray:
        return np.array([math.nan if x is None else x for x in tree[name]], np.float32)

    rollout = Rollout(
        prompt=Prompt(tree["row"], tree["prompt"], tuple(tree["prompt_tokens"])),
        stream=Stream(tree["stream"]),
        draw=tree["draw"],
        sample=tree["sample"],
        token_T=np.array(tree["tokens"], np.int32),
        logprob_T=floats("logprob"),
        kept_logmass_T=floats("kept_logmass"),
        entropy_T=floats("entropy"),
        version_T=np.array(tree["version"], np.int32),
        proposer_T=np.array(tree["proposer"], np.uint8),
        round_T=np.array(tree["round"], np.int32),
        text=tree["text"],
        finish=tree["finish"],
        sampling=Sampling(**tree["sampling"]) if "sampling" in tree else None,
        turn_T=np.array(tree["turn"], np.int32) if "turn" in tree else None,
        turn_reward_K=np.array(tree["turn_reward"], np.float64) if "turn" in tree else None,
        solved=tree.get("solved"),
    )
    reward = math.nan if tree["reward"] is None else tree["reward"]
    scored = ScoredRollout(rollout, reward, tree["part"], tuple(tree["fell_back"]))
    return KeptRollout(scored, tuple(tree.get("pieces", ())))
