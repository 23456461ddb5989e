"""Drafters: one a file, one protocol."""
