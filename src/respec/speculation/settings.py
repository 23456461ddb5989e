"""How a controller weighs: its patience, its curiosity and its trust."""

from __future__ import annotations

from dataclasses import dataclass

from respec.speculation.solver import MARGIN


@dataclass(frozen=True)
class Settings:
    """How a controller weighs. Rounds unless the name says otherwise.

    `margin`: plain decoding is left only for a plan promising this much more; `stick`: a plan only for one promising this much more.
    `hope`: standard errors added to a promise before it is called hopeless. `dwell`: a plan is kept at least so long, unless plain
    decoding is predicted faster. `refresh`: predictions are made anew after so many rounds under
    one load. Probes last `probe` rounds and take at most `probe_share` of all seconds (`burn_in_share` in the first `burn_in` rounds); a
    drafter idle for `reprobe` rounds is probed however little it promises. `spread`: relative standard deviation that the models'
    predictions are trusted to, `common` the share of its square that all plans have in common; `memory`: how long what corrects them is remembered; `noise`: that of one round's seconds, to begin
    with. `swap_keep`: weight that acceptance seen before a swap keeps after it.
    """

    margin: float = MARGIN
    stick: float = 0.02
    hope: float = 2.0
    dwell: int = 8
    refresh: int = 4
    probe: int = 2
    probe_share: float = 0.01
    burn_in: int = 0
    burn_in_share: float = 0.3
    reprobe: int = 200
    spread: float = 0.1
    common: float = 0.3
    memory: float = 20000.0
    noise: float = 0.05
    swap_keep: float = 0.3
    decisions: int = 4096
