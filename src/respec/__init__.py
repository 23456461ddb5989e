"""Reinforcement learning of language models with exact, adaptive speculative decoding.

The parts are of use alone, too: `Engine` draws completions; `Controller` decides how to draft them; `SURROGATES`, `AGGREGATIONS` and
`DRAFTER_LOSSES` are the losses; `DrafterLearner` trains a draft head. They are imported when they are first asked for.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from respec.drafter.learner import DrafterLearner, LearnerSettings
    from respec.drafter.losses import BY_TOKEN as DRAFTER_LOSSES
    from respec.policy.losses import AGGREGATIONS, SURROGATES
    from respec.speculation.acceptance import Acceptance
    from respec.speculation.controller import Controller
    from respec.text_engine import Engine
    from respec.types import Delta, Load, Plan, Rollout, RoundRecord, Sampling

# OpenMP threads that spin at a barrier wait for one whose core another program has taken. Measured on two cores with one of them busy: a
# training step took ten times as long under the default (300,000 turns), twice as long under this; on a quiet machine there was no difference.
os.environ.setdefault("GOMP_SPINCOUNT", "8000")

__version__ = "0.1.0"

_LIES_IN = {
    "AGGREGATIONS": "policy.losses", "Acceptance": "speculation.acceptance", "Controller": "speculation.controller", "DRAFTER_LOSSES": "drafter.losses",
    "Delta": "types", "DrafterLearner": "drafter.learner", "Engine": "text_engine", "LearnerSettings": "drafter.learner", "Load": "types", "Plan": "types",
    "Rollout": "types", "RoundRecord": "types", "SURROGATES": "policy.losses", "Sampling": "types",
}  # fmt: skip

__all__ = [
    "AGGREGATIONS",
    "DRAFTER_LOSSES",
    "SURROGATES",
    "Acceptance",
    "Controller",
    "Delta",
    "DrafterLearner",
    "Engine",
    "LearnerSettings",
    "Load",
    "Plan",
    "Rollout",
    "RoundRecord",
    "Sampling",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """The rooms are heavy: each is read when something in it is first asked for."""
    if name not in _LIES_IN:
        raise AttributeError(f"module 'respec' has no attribute '{name}'")
    named_there = {"DRAFTER_LOSSES": "BY_TOKEN"}.get(name, name)
    return getattr(importlib.import_module(f"respec.{_LIES_IN[name]}"), named_there)
