"""What mode `lossy` adds to a run folder: rollouts/*.safetensors, the laws and weights of a step's rollouts, for those to follow after a resume."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from respec.errors import RunDirError
from respec.report.records import ROLLOUTS, write_atomic
from respec.types import LAW, ScoredRollout


def law_file(run_dir: Path, step: int) -> Path:
    return run_dir / ROLLOUTS / f"{step:06d}.safetensors"


def write_laws(run_dir: Path, step: int, rollouts: Sequence[ScoredRollout]) -> None:
    """Writes them bit for bit, end to end over the rollouts; nothing in the other modes."""
    laws = [item.rollout.law_TK for item in rollouts if item.rollout.law_TK is not None]
    weights = [item.rollout.weight_T for item in rollouts if item.rollout.weight_T is not None]
    if not rollouts or len(laws) < len(rollouts):
        return
    law_NK = np.concatenate(laws)
    tensors = {name: np.ascontiguousarray(law_NK[name]) for name in ("token", "logp")}
    write_atomic(law_file(run_dir, step), save(tensors | {"weight": np.concatenate(weights)}))


def with_laws(run_dir: Path, step: int, rollouts: Sequence[ScoredRollout]) -> tuple[ScoredRollout, ...]:
    """A step's recorded rollouts with the laws and weights recorded beside them, if any. Raises RunDirError if they do not fit."""
    path = law_file(run_dir, step)
    if not rollouts or not path.exists():
        return tuple(rollouts)
    ends = np.cumsum([len(item.rollout.token_T) for item in rollouts])
    try:
        tensors = load_file(path)
        law_NK = np.empty(tensors["token"].shape, LAW)
        for name in ("token", "logp"):
            law_NK[name] = tensors[name]
        weight_N = tensors["weight"]
        if not len(law_NK) == len(weight_N) == ends[-1]:
            raise ValueError(f"laws of {len(law_NK)} tokens for {ends[-1]}")
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise RunDirError(
            f"'{path}' is damaged ({error!r}); remove it to go on, without following that step's answers"
        ) from None
    # copies, so that an answer that is kept does not keep its whole step
    parts = zip(rollouts, np.split(weight_N, ends[:-1]), np.split(law_NK, ends[:-1]), strict=True)
    return tuple(
        dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, weight_T=weight_T, law_TK=law_TK.copy()))
        for item, weight_T, law_TK in parts
    )
