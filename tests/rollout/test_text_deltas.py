"""Pieces of text put end to end are the text, and none ends within a character or a stop string's beginning."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from respec.rollout.text_deltas import TextDeltas


def decode(tokens: Sequence[int]) -> str:
    """A token a byte, as the smallest tokens of byte-level vocabularies are."""
    return bytes(tokens).decode(errors="replace")


def pieces_of(tokens: Sequence[int], sizes: Sequence[int], stop: Sequence[str], whole: str) -> list[str]:
    """What is shown as pieces of these sizes come, the last of which ends it."""
    deltas, found, at = TextDeltas(decode, stop), list[str](), 0
    for size in sizes:
        if at + size >= len(tokens):
            break
        found.append(deltas.push(tokens[at : at + size]))
        at += size
    return [*found, deltas.end(whole)]


@given(st.text(alphabet="aé中👩\u200d\n", max_size=150), st.lists(st.integers(1, 9), max_size=60))
def test_pieces_are_whole_characters_and_the_whole_text(text: str, sizes: list[int]):
    found = pieces_of(list(text.encode()), sizes, (), text)
    assert "".join(found) == text and not any("\ufffd" in piece for piece in found)


@given(st.binary(max_size=300), st.lists(st.integers(1, 9), max_size=60))
def test_bytes_that_are_no_text_come_as_they_are_decoded(raw: bytes, sizes: list[int]):
    whole = decode(list(raw))
    assert "".join(pieces_of(list(raw), sizes, (), whole)) == whole


@given(
    st.text(alphabet="ab", max_size=60),
    st.lists(st.integers(1, 3), max_size=60),
    st.sampled_from(["aab", "ba", "abab"]),
)
def test_nothing_of_a_stop_string_is_shown(text: str, sizes: list[int], stop: str):
    at = text.find(stop)
    drawn = text if at < 0 else text[: at + len(stop)]
    cut = drawn if at < 0 else text[:at]
    assert "".join(pieces_of(list(drawn.encode()), sizes, (stop,), cut)) == cut


def test_a_long_text_is_not_decoded_from_its_beginning_again():
    decoded = list[int]()
    deltas = TextDeltas(lambda tokens: decoded.append(len(tokens)) or decode(tokens), ())
    assert "".join(deltas.push([97]) for _ in range(1000)) == "a" * 1000
    assert max(decoded) < 100


@pytest.mark.parametrize("text", ["€" * 200, "a€" * 200])
def test_what_is_left_behind_ends_at_a_character(text: str):
    found = pieces_of(list(text.encode()), [1] * 1000, (), text)
    assert "".join(found) == text and max(map(len, found[:-1])) <= 2
