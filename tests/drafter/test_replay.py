"""The replay buffer: within its bound, the oldest leave first, draws depend on the seed alone, and disk changes nothing."""

from __future__ import annotations

import torch
from safetensors.torch import load, save

from respec.drafter.examples import Example
from respec.drafter.replay import Replay

CPU = torch.device("cpu")


def example(number: int, length: int = 100) -> Example:
    taps = torch.full((length, 30), float(number), dtype=torch.bfloat16)
    tokens, laws = (
        torch.arange(length) + number,
        torch.rand(length - 4, 8, generator=torch.Generator().manual_seed(number)),
    )
    return Example(tokens, taps, 4, torch.arange(8, dtype=torch.int32).repeat(length - 4, 1), laws, number / 2, number)


def numbers(examples: list[Example]) -> list[int]:
    return [e.version for e in examples]


def test_all_that_is_new_is_learned_from_once_and_then_forgotten():
    replay = Replay(1.0)
    assert replay.add([example(1), example(2)]) == 0 and replay.add([example(3)]) == 0
    assert numbers(replay.draw(0)) == [1, 2, 3]
    assert len(replay) == 0 and replay.draw(1) == []


def test_older_ones_come_again_as_many_as_asked_for_by_the_seed_alone():
    replays = [Replay(10.0, again=0.5) for _ in range(2)]
    for replay in replays:
        replay.add([example(n) for n in range(20)])
        assert numbers(replay.draw(0)) == list(range(20))
        replay.add([example(n) for n in range(20, 28)])
    ours, theirs = (numbers(replay.draw(5)) for replay in replays)
    assert ours == theirs and ours[:8] == list(range(20, 28)) and len(set(ours)) == 12
    assert all(n < 20 for n in ours[8:])


def test_the_oldest_leave_first_and_the_bound_holds():
    each = example(0).size / 1e6
    replay = Replay(4.5 * each, again=10.0)
    assert replay.add([example(n) for n in range(3)]) == 0
    replay.draw(0)
    # one old one goes first; then, with no old one left, the oldest of the new: never learned from
    assert replay.add([example(3), example(4)]) == 0 and len(replay) == 4
    assert replay.megabytes <= 4.5 * each
    assert replay.add([example(n) for n in range(5, 9)]) == 2
    assert numbers(replay.draw(0)) == [5, 6, 7, 8] and replay.megabytes <= 4.5 * each


def test_a_gate_that_stays_shut_leaves_nothing_to_learn_late():
    replay = Replay(10.0)
    replay.add([example(1)])
    replay.pass_over()
    replay.add([example(2)])
    assert numbers(replay.draw(0)) == [2]


def test_disk_changes_nothing():
    replay = Replay(10.0, again=1.0)
    replay.add([example(n, 90 + n) for n in range(5)])
    replay.draw(0)
    replay.add([example(n, 90 + n) for n in range(5, 8)])
    state = replay.state_dict()
    written = load(save({key: value for key, value in state.items() if isinstance(value, torch.Tensor)}))
    again = Replay(10.0, again=1.0)
    again.load_state_dict(written | {"new": state["new"]}, CPU)
    assert again.megabytes == replay.megabytes
    for ours, theirs in zip(replay.draw(3), again.draw(3), strict=True):
        assert (ours.prompt, ours.weight, ours.version) == (theirs.prompt, theirs.weight, theirs.version)
        for name in ("token_L", "taps_LT", "token_CK", "p_CK"):
            mine, its = getattr(ours, name), getattr(theirs, name)
            assert mine.dtype == its.dtype and torch.equal(mine, its)
    empty = Replay(1.0)
    empty.load_state_dict(Replay(1.0).state_dict(), CPU)
    assert len(empty) == 0
