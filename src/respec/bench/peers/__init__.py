"""Peers: what a user has instead of respec, each run in an environment of its own, in a process that stays up between repeats."""
