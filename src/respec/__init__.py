"""Reinforcement learning of language models with exact, adaptive speculative rollouts."""

__version__ = "0.1.0"
