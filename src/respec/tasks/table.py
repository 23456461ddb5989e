"""A task's rows out of files, whatever kind they are of: which are trained on and which are held out."""

from __future__ import annotations

from respec.config import TaskConfig
from respec.tasks.columns import Table, rows_of
from respec.tasks.hf import read_hf
from respec.tasks.jsonl import read_jsonl
from respec.tasks.parquet import read_parquet
from respec.tasks.render import Rendered, Renderer
from respec.tasks.scorer import BUILT_IN
from respec.tasks.split import Split, split


def read_split(config: TaskConfig, renderer: Renderer) -> Split:
    """Reads, renders and splits the rows of kinds `jsonl`, `parquet` and `hf`. Raises TaskError for data that cannot be used."""
    needs_answer = any(reward.fn in BUILT_IN for reward in config.reward)

    def rendered(table: Table, config: TaskConfig) -> list[Rendered]:
        return [renderer.render(row) for row in rows_of(table, config, needs_answer)]

    main, apart = _tables(config)
    # held-out rows are drawn by the settings of [eval], so what is held out needs no columns of its own for them
    held = config.model_copy(update={"sampling_columns": ()})
    return split(rendered(main, config), rendered(apart, held) if apart is not None else None, config)


def _tables(config: TaskConfig) -> tuple[Table, Table | None]:
    """The rows, and those to be held out where they come apart; of what is streamed, as many as were asked for."""
    apart = config.eval_split not in ("", config.split) if config.kind == "hf" else config.eval_path is not None
    few = config.train_size + (0 if apart else config.eval_size) if config.streaming else None
    held = max(1, config.eval_size) if config.streaming else None
    if config.kind == "hf":
        return read_hf(config, config.split, few), read_hf(config, config.eval_split, held) if apart else None
    path, other = config.path, config.eval_path
    assert path is not None, "the configuration sees to it"
    if config.kind == "parquet":
        return read_parquet(path, few), read_parquet(other, held) if other is not None else None
    return read_jsonl(path), read_jsonl(other) if other is not None else None
