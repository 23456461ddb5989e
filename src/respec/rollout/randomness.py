"""Counter-based randomness: every number is a pure function of what it is for.

A key absorbs (seed, stream, draw, row, sample, position, lane); the numbers under a key are the outputs of SplitMix64 (Steele, Lea and
Flood 2014) at an index. So a token depends on its key and its distribution, not on the batch, the order, the worker or the drafter.
All functions are elementwise over numpy arrays of unsigned 64-bit integers.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
from jaxtyping import Float64, Int64, UInt64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


class Lane(IntEnum):
    """The role of a number. In `matching` a drafter races on the target's lane, on purpose."""

    TARGET = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3


def mix(state: UInt64[np.ndarray, "*N"]) -> UInt64[np.ndarray, "*N"]:
    """The finaliser of SplitMix64: a bijection on 64-bit integers."""
    z = (state ^ (state >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))


def absorb(key: UInt64[np.ndarray, "*N"], value: Int64[np.ndarray, "*N"] | int) -> UInt64[np.ndarray, "*N"]:
    """A new key from a key and one more integer."""
    word = np.atleast_1d(np.asarray(value, np.int64)).view(np.uint64)
    return mix(mix(key + _GOLDEN) ^ (word * _GOLDEN + _FIRST))


def sequence_key(seed: int, stream: int, draw: int, row: int, sample: int) -> UInt64[np.ndarray, "1"]:
    """The key of one completion."""
    key = np.zeros(1, np.uint64)
    for value in (seed, stream, draw, row, sample):
        key = absorb(key, value)
    return key


def token_key(
    sequence: UInt64[np.ndarray, "*N"], position: Int64[np.ndarray, "*N"], lane: int
) -> UInt64[np.ndarray, "*N"]:
    """The key of one position of a completion (0 for its first token) in one lane."""
    return absorb(absorb(sequence, position), lane)


def uniform(key: UInt64[np.ndarray, "*N"], index: UInt64[np.ndarray, "*N"]) -> Float64[np.ndarray, "*N"]:
    """Numbers in (0, 1), never 0 or 1, with 53 random bits."""
    bits = mix(key + (index + np.uint64(1)) * _GOLDEN)
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
