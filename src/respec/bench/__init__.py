"""Measurements side by side: interleaved repeats, medians, ratios first."""
