"""Speculation: which plan a decode round should run, from measured costs and acceptance; it decides, and never touches a model."""
