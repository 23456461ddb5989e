"""What is made of repeats: who is timed when, ratios before medians, the marks on a row."""

from __future__ import annotations

import pytest

from respec.bench import rollout_peers, step_peers
from respec.bench.rollout_peers import Timed, Work, interleaved, kinds_by_name, prompts_of_batch
from respec.errors import ConfigError
from respec.types import Prompt


def timed(seconds: float, *lengths: int) -> Timed:
    return Timed(seconds, lengths or (100,), 2.0, 0.5)


def test_every_side_begins_in_turn_after_one_round_that_is_not_counted():
    order: list[tuple[str, int]] = []

    def side(name: str):
        def run(draw: int) -> Timed:
            order.append((name, draw))
            return timed(1.0 + draw)

        return run

    taken = interleaved({name: side(name) for name in "abc"}, 4)
    assert order[:3] == [("a", 0), ("b", 0), ("c", 0)]
    assert [name for name, _ in order[3:]] == list("abcbcacababc")
    # all of a repeat are of one draw, and each draw is fresh
    assert [draw for _, draw in order] == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert [t.seconds for t in taken["b"]] == [2.0, 3.0, 4.0, 5.0]


def test_the_ratio_is_the_median_of_each_repeats_own():
    taken = {"off": [timed(1.0), timed(10.0), timed(2.0)], "vllm": [timed(2.0), timed(30.0), timed(1.0)]}
    made = rollout_peers.row(8, "off", "vllm", taken, [{"outcome": "failed"}])
    # of medians it would be 2 / 2
    assert (
        made["ratios"] == [2.0, 3.0, 0.5]
        and made["ratio"] == 2.0
        and (made["ratio_min"], made["ratio_max"]) == (0.5, 3.0)
    )
    assert made["tokens_per_s"] == 50.0 and made["peer_fits"] is False and made["policy_entropy"] == 0.5
    assert "DO NOT FIT" in rollout_peers.sentence(made)
    assert rollout_peers.row(8, "off", "vllm", taken, None)["peer_fits"] is None


def test_tokens_not_completions_are_what_rates_count():
    taken = {"auto": [timed(2.0, 10, 30)], "generate": [timed(4.0, 20, 60)]}
    made = rollout_peers.row(2, "auto", "generate", taken, None)
    assert made["ratio"] == 1.0 and made["lengths"] == {"mean": 20.0, "min": 10, "max": 30} and made["completions"] == 2


def test_batches_are_filled_whole():
    prompts = [Prompt(row, "", (row,)) for row in range(6)]

    def count(batch: int, group: int, own_eos: bool = False) -> int:
        chosen = prompts_of_batch(prompts, batch, Work((batch,), group, 8, own_eos, 1, 1))
        assert [p.row for p in chosen] == list(range(len(chosen)))
        return len(chosen) * group

    assert count(1, 1) == 4 and count(2, 1) == 6 and count(16, 1) == 16 and count(16, 8) == 48
    # where each completion ends by itself, a batch is one batch
    assert count(16, 8, own_eos=True) == 16 and count(4, 1, own_eos=True) == 4


def test_a_step_is_compared_by_its_seconds_and_the_peak_of_either_process():
    ours = [{"seconds": s, "peak_bytes": p * 2**30, "generation_s": 1.0, "training_s": 2.0, "accepted_length": 1.5, "entropy": 0.4}
            for s, p in ((2.0, 3), (4.0, 4))]  # fmt: skip
    theirs = [{"seconds": s, "peak_bytes": p * 2**30} for s, p in ((10.0, 8), (12.0, 7))]
    made = step_peers.row("trl", ours, theirs)
    assert made["ratio"] == 4.0 and (made["ratio_min"], made["ratio_max"]) == (3.0, 5.0)
    assert made["peak_gib"] == 4 and made["peer_peak_gib"] == 8 and made["memory_ratio"] == 0.5


def test_an_unknown_peer_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match=r"generate.*got 'llama'"):
        kinds_by_name(["vllm", "llama"])
