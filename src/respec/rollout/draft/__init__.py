"""Drafters: one a file, one protocol. `respec.drafting` makes them."""
