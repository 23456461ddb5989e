"""Reinforcement learning of language models with exact, adaptive speculative decoding."""

import os

# OpenMP threads that spin at a barrier wait for one whose core another program has taken. Measured on two cores with one of them busy: a
# training step took ten times as long under the default (300,000 turns), twice as long under this; on a quiet machine there was no difference.
os.environ.setdefault("GOMP_SPINCOUNT", "8000")

__version__ = "0.1.0"
