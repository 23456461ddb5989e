"""What mode `lossy` records beside its rollouts comes back bit for bit, and is forgotten with them; the other modes write nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from respec.config import Config
from respec.errors import RunDirError
from respec.report.laws import law_file
from respec.report.run_dir import RunDir
from respec.types import LAW, ScoredRollout

Make = Callable[..., Config]
Scored = Callable[..., ScoredRollout]


def lossy(scored: ScoredRollout) -> ScoredRollout:
    rollout, rng = scored.rollout, np.random.default_rng(scored.rollout.sample)
    law_TK = np.empty((len(rollout.token_T), 4), LAW)
    law_TK["token"] = rng.integers(0, 50_000, law_TK.shape)
    law_TK["logp"] = -rng.exponential(1.0, law_TK.shape)
    law_TK["logp"][0, -1] = -np.inf
    weight_T = rng.exponential(1.0, len(rollout.token_T)).astype(np.float32)
    return dataclasses.replace(scored, rollout=dataclasses.replace(rollout, weight_T=weight_T, law_TK=law_TK))


def test_laws_and_weights_come_back_bit_for_bit(make_config: Make, make_scored: Scored) -> None:
    scored = [lossy(make_scored(row, sample, 3 + sample)) for row in (4, 9) for sample in range(2)]
    with RunDir(make_config()) as run:
        run.write_step(1, {}, scored)
        read = run.read_rollouts(1)
    for before, after in zip(scored, read, strict=True):
        one, other = before.rollout, after.rollout
        assert one.weight_T is not None and one.law_TK is not None
        assert other.weight_T is not None and other.weight_T.tobytes() == one.weight_T.tobytes()
        assert other.law_TK is not None and other.law_TK.dtype == LAW and other.law_TK.tobytes() == one.law_TK.tobytes()


def test_the_other_modes_write_nothing_more(make_config: Make, make_scored: Scored) -> None:
    with RunDir(make_config()) as run:
        run.write_step(1, {}, [make_scored(1, 0)])
        assert [path.name for path in (run.path / "rollouts").iterdir()] == ["000001.jsonl"]
        assert run.read_rollouts(1)[0].rollout.weight_T is None


def test_cutting_back_forgets_them(make_config: Make, make_scored: Scored) -> None:
    with RunDir(make_config()) as run:
        for step in (1, 2, 3):
            run.write_step(step, {}, [lossy(make_scored(1, 0))])
        run.cut_back(1)
        assert [law_file(run.path, step).exists() for step in (1, 2, 3)] == [True, False, False]
        assert run.rollout_steps() == (1,)


@pytest.mark.parametrize("how", ["cut off", "of others"])
def test_damaged_ones_are_refused(make_config: Make, make_scored: Scored, how: str) -> None:
    with RunDir(make_config()) as run:
        run.write_step(1, {}, [lossy(make_scored(1, 0, 5))])
        path = law_file(run.path, 1)
        if how == "cut off":
            path.write_bytes(path.read_bytes()[:-7])
        else:
            run.write_step(2, {}, [lossy(make_scored(1, 0, 6))])
            path.write_bytes(law_file(run.path, 2).read_bytes())
        with pytest.raises(RunDirError, match=r"damaged.*remove it to go on"):
            run.read_rollouts(1)
