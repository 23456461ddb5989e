"""The profile: times of rounds over batch, rows and context, measured once for a machine and a model, kept on disk, gone on with.

What runs a round is handed in; this room never sees the model.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from respec.speculation.cost_model import CostSample
from respec.types import RoundRecord

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
DEPTHS = (0, 1, 3, 7, 15)
DRAFTED_DEPTH = 8
# The first rounds of a cell pay for what later ones find ready: kernels for a new number of rows, memory.
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Cell:
    """One point of the grid: `batch` sequences of `context` tokens, each with `s` drafted ones.

    Under drafter "off" the tokens are made up, to load the target alone; else that drafter is timed on drafts of its own.
    """

    drafter: str
    batch: int
    s: int
    context: int


def grid(
    max_batch: int, contexts: Sequence[int], drafters: Sequence[str], most_rows: int = 512, brief: bool = False
) -> tuple[Cell, ...]:
    """The cells worth measuring, up to `most_rows` rows in a pass. `brief` is about a quarter of them."""
    batches = [b for b in BATCHES if b < max_batch] + [max_batch]
    if brief:
        batches = sorted({batches[0], batches[len(batches) // 2], batches[-1]})
    depths = DEPTHS[:4] if brief else DEPTHS
    target = [
        Cell("off", batch, s, context)
        for context in (contexts[:1] if brief else contexts)
        for batch in batches
        for s in depths
        if batch * (1 + s) <= most_rows
    ]
    few = sorted({batches[0], batches[len(batches) // 2], batches[-1]})
    drafted = [
        Cell(name, batch, s, contexts[0])
        for name in drafters
        for batch in few
        for s in _two_depths(most_rows // batch - 1)
    ]
    return (*target, *drafted)


def _two_depths(deepest: int) -> list[int]:
    """Two depths of a draft, so that what a batch costs and what each depth of it costs can be told apart; fewer where there is no room."""
    deepest = min(deepest, DRAFTED_DEPTH)
    return sorted({min(2, deepest), deepest} - {0})


def measure(
    cells: Sequence[Cell],
    run: Callable[[Cell], Sequence[RoundRecord]],
    known: Sequence[tuple[Cell, CostSample]] = (),
) -> Iterator[tuple[Cell, CostSample]]:
    """Runs the cells that are not known yet, one after the other; each gives the median of its rounds."""
    done = {cell for cell, _ in known}
    for cell in cells:
        if cell not in done:
            yield cell, _sample(cell, run(cell))


def save(path: Path, known: Sequence[tuple[Cell, CostSample]]) -> None:
    """Writes a profile, whole or begun; the file is replaced at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".tmp")
    scratch.write_text(json.dumps([{"cell": asdict(cell), "sample": asdict(sample)} for cell, sample in known]))
    scratch.replace(path)


def load(path: Path) -> list[tuple[Cell, CostSample]]:
    """What `save` wrote; nothing where there is no file, or one that cannot be read (it is then measured anew)."""
    try:
        return [(Cell(**item["cell"]), CostSample(**item["sample"])) for item in json.loads(path.read_text())]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _sample(cell: Cell, records: Sequence[RoundRecord]) -> CostSample:
    whole = [record for record in records if record.active == cell.batch]
    kept = whole[WARM_UP_ROUNDS:] or whole
    draft, verify, overhead, context, rows = (
        statistics.median(values)
        for values in zip(
            *((r.draft_s, r.verify_s, r.overhead_s, r.context, r.active + r.drafted) for r in kept), strict=True
        )
    )
    if cell.drafter == "off":
        return CostSample(cell.batch, round(rows), context, verify_s=verify, overhead_s=overhead)
    start = max(0.0, whole[0].draft_s - draft)
    return CostSample(cell.batch, round(rows), context, cell.drafter, cell.s, draft, verify, overhead, start)
