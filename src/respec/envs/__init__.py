"""Environments that speak text: each a class with `reset(seed)` and `step(text)`, one a file, in pure Python."""
