"""How far drafts of a head would stand on completions that are there already: by depth, in each mode of verification, as expected counts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from respec.types import Mode

ACCEPTANCE_FILE = "acceptance.json"
MODES: tuple[Mode, ...] = ("matching", "rejection")


@dataclass(frozen=True)
class Agreement:
    """Of the drafts from all anchors, `tested_K` are expected to stand up to the depth before, `stood_K` at this depth too. Made by
    `agreement`; read by acceptance estimates and kept beside a head.

    Each depth's chance is that of the laws there, the tokens before it being the completion's own; along a draft the chances are multiplied.
    """

    tested_K: tuple[float, ...]
    stood_K: tuple[float, ...]


def agreement(chance_Ak: Float[Tensor, "A k"], exists_Ak: Bool[Tensor, "A k"]) -> Agreement:
    """The counts of drafts from A anchors whose tokens agree with these chances, depth by depth; where the text ends before, there is none."""
    stands = torch.where(exists_Ak, chance_Ak.double().clamp(0.0, 1.0), 0.0).cumprod(dim=1)
    before = torch.cat([torch.ones_like(stands[:, :1]), stands[:, :-1]], dim=1)
    tested = torch.where(exists_Ak, before, 0.0).sum(dim=0)
    return Agreement(tuple(tested.tolist()), tuple(stands.sum(dim=0).tolist()))


def together(parts: Iterable[Mapping[Mode, Agreement]]) -> dict[Mode, Agreement]:
    """The counts of several batches of one depth, added."""
    total: dict[Mode, Agreement] = {}
    for part in parts:
        for mode, seen in part.items():
            if mode in total:
                tested = tuple(a + b for a, b in zip(total[mode].tested_K, seen.tested_K, strict=True))
                stood = tuple(a + b for a, b in zip(total[mode].stood_K, seen.stood_K, strict=True))
                total[mode] = Agreement(tested, stood)
            else:
                total[mode] = seen
    return total


def write_agreement(folder: Path, seen: Mapping[Mode, Agreement]) -> None:
    """Puts it beside a head, where `read_agreement` finds it and other software does not look."""
    (folder / ACCEPTANCE_FILE).write_text(json.dumps({mode: asdict(part) for mode, part in seen.items()}) + "\n")


def read_agreement(folder: Path) -> dict[Mode, Agreement]:
    """What was last seen of the head in this folder; nothing where nothing is written that can be read: it is a hint, and not needed."""
    try:
        seen = json.loads((folder / ACCEPTANCE_FILE).read_text())
        return {
            mode: Agreement(tuple(map(float, seen[mode]["tested_K"])), tuple(map(float, seen[mode]["stood_K"])))
            for mode in MODES
            if mode in seen
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
