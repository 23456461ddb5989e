"""Training rows that are held out too, or almost: found by comparing their prompts as the data has them, before any template.

Equal texts but for case, spaces and punctuation are copies. Near copies share most of their word trigrams: their Jaccard similarity is at
least `NEAR` (Broder 1997, "On the resemblance and containment of documents"). It is computed from the trigrams themselves, not from hashes
of them: an index of the held-out rows' rarer trigrams says which few of them a training row need be compared with.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from respec.tasks.render import Rendered, Row

NEAR = 0.7
_WORDS = 3
# Shared by so many held-out rows, a trigram is wording ("how many does"), and tells nothing of a row.
_COMMON = 64
# Of shorter prompts each word is half the meaning: what differs in one is another question.
_SHORTEST = 8
_WORD = re.compile(r"\w+|[^\w\s]")
# Said at a sentence's end or not; other signs may be the question ("5!", "f'").
_PLAIN = frozenset(".,;:?")


Pair = tuple[Rendered, Rendered]


@dataclass(frozen=True)
class Leaks:
    """Pairs (training row, held-out row): prompts that are the very same, those that are `alike`, and near copies among the others."""

    same: tuple[Pair, ...] = ()
    alike: tuple[Pair, ...] = ()
    near: tuple[Pair, ...] = ()

    def without(self, rows: Sequence[Rendered], policy: str) -> tuple[Rendered, ...]:
        """The rows less those that `task.leakage` removes. The very same prompts leave under every policy: none is on both sides."""
        gone = {id(row) for row, _ in (*self.same, *self._removed(policy))}
        return tuple(row for row in rows if id(row) not in gone)

    def notes(self, policy: str) -> list[str]:
        """Lines for the user, of what was found and done."""
        removed, said = len(self.same) + len(self._removed(policy)), list[str]()
        if removed:
            said.append(f"{removed} training rows are held out too, and were removed")
        if self.alike and policy == "keep":
            said.append(
                f"{len(self.alike)} training rows are held out too but for case, spaces or punctuation, and stay in (task.leakage 'keep')"
            )
        if self.near and policy != "remove_near":
            (row, other), *_ = self.near
            said.append(
                f"{len(self.near)} training rows are almost the same as held-out ones, like {row.row.place} and {other.row.place}, and stay in; "
                "task.leakage = 'remove_near' would remove them"
            )
        return said

    def _removed(self, policy: str) -> tuple[Pair, ...]:
        return {"remove": self.alike, "remove_near": (*self.alike, *self.near), "keep": ()}[policy]


def find_leaks(train: Sequence[Rendered], held_out: Sequence[Rendered]) -> Leaks:
    """All training rows that are in the held-out ones, exactly or nearly."""
    by_text = {item.text: item for item in reversed(held_out)}
    by_words = {words(item.row): item for item in reversed(held_out)}
    grams_H = [trigrams(words(item.row)) for item in held_out]
    index: dict[tuple[str, ...], list[int]] = {}
    for at, grams in enumerate(grams_H):
        for gram in grams:
            index.setdefault(gram, []).append(at)
    same, alike, near = list[Pair](), list[Pair](), list[Pair]()
    for item in train:
        its = words(item.row)
        if item.text in by_text:
            same.append((item, by_text[item.text]))
        elif its in by_words:
            alike.append((item, by_words[its]))
        elif (at := _nearest(trigrams(its), index, grams_H)) is not None:
            near.append((item, held_out[at]))
    return Leaks(tuple(same), tuple(alike), tuple(near))


def words(row: Row) -> tuple[str, ...]:
    """A prompt's words and signs, in small letters; of chat messages, those of all but the system's."""
    text = row.prompt
    if not isinstance(text, str):
        text = "\n".join(message["content"] for message in text if message["role"] != "system")
    return words_in(text)


def words_in(text: str) -> tuple[str, ...]:
    """Words and signs, in small letters, without the punctuation of sentences."""
    found = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
    return tuple(word for word in found if word not in _PLAIN)


def trigrams(its: Sequence[str]) -> frozenset[tuple[str, ...]]:
    """Three words in a row each; none of a prompt that is too short to be judged by them."""
    if len(its) < _SHORTEST:
        return frozenset()
    return frozenset(tuple(its[i : i + _WORDS]) for i in range(len(its) - _WORDS + 1))


def _nearest(
    grams: frozenset[tuple[str, ...]],
    index: dict[tuple[str, ...], list[int]],
    grams_H: Sequence[frozenset[tuple[str, ...]]],
) -> int | None:
    """The held-out row that is most like it, if it is a near copy."""
    shared = Counter(at for gram in grams if len(found := index.get(gram, ())) <= _COMMON for at in found)
    best, most = None, NEAR
    # a near copy shares most of its trigrams, so the rows with the most rare ones in common are among those to look at
    for at, _ in sorted(shared.most_common(8)):
        likeness = len(grams & grams_H[at]) / len(grams | grams_H[at])
        if likeness >= most:
            best, most = at, likeness
    return best
