"""The suffix automaton counts what brute force counts, and the drafter forgets within its budget."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from respec.rollout.draft.suffix import ROOT, SuffixAutomaton, SuffixDrafter

STRINGS = st.lists(st.lists(st.integers(0, 2), max_size=12), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(STRINGS, st.randoms(use_true_random=False))
def test_counts_are_the_number_of_occurrences(strings, rng):
    """Strings are fed interleaved, token by token, as the samples of a group are."""
    automaton, places = SuffixAutomaton(), [ROOT] * len(strings)
    order = [i for i, string in enumerate(strings) for _ in string]
    rng.shuffle(order)
    taken = [0] * len(strings)
    for i in order:
        places[i] = automaton.extend(places[i], strings[i][taken[i]])
        taken[i] += 1
    substrings = {tuple(s[a:b]) for s in strings for a in range(len(s)) for b in range(a + 1, len(s) + 1)}
    for wanted in substrings:
        state = ROOT
        for token in wanted:
            state = automaton.next[state][token]
        occurs = sum(tuple(s[a : a + len(wanted)]) == wanted for s in strings for a in range(len(s)))
        assert automaton.count[state] == occurs
    for absent in [(0, 1, 2, 0, 1, 2, 0), (2, 2, 2, 2, 2)]:
        if absent not in substrings:
            state: int | None = ROOT
            for token in absent:
                state = automaton.next[state].get(token) if state is not None else None
            assert state is None


def test_the_most_frequent_continuation_is_drafted():
    automaton = SuffixAutomaton()
    for string in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 5]):
        state = ROOT
        for token in string:
            state = automaton.extend(state, token)
    state = ROOT
    for token in (9, 1, 2):
        state = automaton.extend(state, token)
    assert automaton.follow(state, 5, 1, 0.0)[:2] == [3, 5]
    assert automaton.follow(state, 1, 1, 0.0) == [3]
    assert automaton.follow(state, 5, 3, 0.0) == []
    assert automaton.follow(state, 5, 1, 0.99) == []


def test_histories_stay_within_the_budget_and_the_oldest_row_leaves_first(make_rollout):
    drafter = SuffixDrafter(1, 0.1, 10)
    drafter.learn([make_rollout(row, range(4)) for row in range(4)])
    assert list(drafter._history) == [2, 3]
