"""Law 1 (`matching`): with the same seeds, tokens and log-probabilities with speculation on equal those with it off.

In `rejection` only the distribution is equal (test_law_rejection.py); at temperature 0, where it is a point, so are the tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from respec.models.load import Policy
from respec.rollout.draft.model import ModelDrafter
from respec.rollout.draft.ngram import NgramDrafter
from respec.rollout.draft.previous import PreviousDrafter
from respec.rollout.draft.protocol import Drafter
from respec.rollout.draft.self_quant import SelfQuantDrafter
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.engine import Engine
from respec.rollout.planner import Planner
from respec.types import PLAIN, Ask, Load, Mode, Plan, Prompt, Proposer, Rollout, RoundRecord, Sampling, Stream
from respec.weights.publish import publish, publish_draft
from respec.weights.swap import swap

SAMPLING = Sampling(max_new_tokens=32, temperature=0.7)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
NAMES = ("ngram", "suffix", "previous", "model", "self_quant")
# a chain, a chain longer than it is ever right, and a tree (of which a drafter that only knows chains takes the chain)
SHAPES = {"short": (1, 1, 1), "chain": (6, 1, 6), "tree": (4, 3, 10)}


def asks(n: int = 5, group: int = 3, draw: int = 0) -> list[Ask]:
    rng = random.Random(3)
    prompts = [Prompt(row, "", tuple(rng.randrange(3, 48) for _ in range(rng.randint(1, 40)))) for row in range(n)]
    return [Ask(prompt, Stream.TRAIN, draw, group) for prompt in prompts]


def drafter(name: str, policy: Policy, small: Policy, dtype: str) -> Drafter:
    """`small` is the policy of the model drafter: one near the target's."""
    if name == "ngram":
        return NgramDrafter(1)
    if name == "suffix":
        return SuffixDrafter(1, 0.1, 10_000)
    if name == "previous":
        return PreviousDrafter(SuffixDrafter(1, 0.1, 10_000), 10_000)
    if name == "model":
        return ModelDrafter(publish(small, dtype, 0), small.tokenizer, policy.tokenizer, 48)
    return SelfQuantDrafter(publish_draft(policy, dtype, 0))


def engine(
    policy: Policy,
    dtype: str,
    max_batch: int = 16,
    drafters: Sequence[Drafter] = (),
    chunk: int = 64,
    mode: Mode = "matching",
) -> Engine:
    return Engine(
        publish(policy, dtype, 0), policy.tokenizer, policy.eos_token_ids, 7, max_batch, chunk, drafters, mode
    )


@pytest.fixture
def everybody(near):
    """All drafters for a policy, those that learn having learned these rollouts, every third of their answers forged in the middle."""

    def make(policy: Policy, dtype: str, learned: Sequence[Rollout] = ()) -> list[Drafter]:
        drafters = [drafter(name, policy, near(policy), dtype) for name in NAMES]
        for one in drafters:
            one.learn([forged(r, len(r.token_T) // 2 if i % 3 == 0 else None) for i, r in enumerate(learned)])
        return drafters

    return make


def forged(rollout: Rollout, at: int | None) -> Rollout:
    tokens = rollout.token_T.copy()
    if at is not None:
        tokens[at] = (tokens[at] + 1) % 48
    return dataclasses.replace(rollout, token_T=tokens)


class Cycle:
    """Another plan every round: plain decoding, then each of these in turn."""

    predicted = 0.0

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.plans, self.round = (PLAIN, *plans), 0
        self.accepted = dict.fromkeys(plans, 0)

    def plan(self, load: Load) -> Plan:
        self.round += 1
        return self.plans[self.round % len(self.plans)]

    def observe(self, record: RoundRecord) -> None:
        if record.plan in self.accepted:
            self.accepted[record.plan] += record.accepted


def every_plan() -> Cycle:
    return Cycle([Plan(name, *shape) for shape in SHAPES.values() for name in NAMES])


def equal(one, other, dtype: str) -> bool:
    if [r.key for r in one] != [r.key for r in other]:
        return False
    same = all(
        np.array_equal(a.token_T, b.token_T) and a.text == b.text and a.finish == b.finish
        for a, b in zip(one, other, strict=True)
    )
    gap = max(float(np.abs(a.logprob_T - b.logprob_T).max()) for a, b in zip(one, other, strict=True)) if same else 1.0
    return same and gap <= (1e-6 if dtype == "float64" else 0.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_drafter_gives_the_tokens_and_bits_of_plain_decoding(make_policy, everybody, name, shape):
    policy = make_policy()
    plain, _ = engine(policy, "bfloat16").rollout(asks(), SAMPLING)
    running = engine(policy, "bfloat16", drafters=everybody(policy, "bfloat16", plain))
    drafted, stats = running.rollout(asks(), SAMPLING, Plan(name, *SHAPES[shape]))
    assert equal(plain, drafted, "bfloat16")
    # the law says nothing unless drafts are both accepted and rejected, and trees branch
    assert 0 < stats.accepted < stats.drafted
    branched = any(record.drafted > sum(record.drafted_D) for record in stats.round_R)
    assert branched == (shape == "tree" and name != "ngram")


@pytest.mark.parametrize("native", [True, False], ids=["native", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_family_dtype_and_path_keeps_the_law(make_policy, monkeypatch, everybody, family, dtype, native):
    """All drafters in one run, another plan every round: chains, trees and plain decoding, on drafts begun late."""
    if not native:
        monkeypatch.setattr("respec.models.kernels.supports", lambda *_: False)
    policy = make_policy(family, torch.float64 if dtype == "float64" else torch.float32)
    few = asks(3, 2)
    plain, _ = engine(policy, dtype).rollout(few, SAMPLING)
    cycle = every_plan()
    drafted, stats = engine(policy, dtype, drafters=everybody(policy, dtype, plain)).rollout(few, SAMPLING, cycle)
    assert equal(plain, drafted, dtype)
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize(("max_batch", "chunk"), [(1, 64), (3, 8), (24, 5)])
def test_neither_batch_nor_chunk_nor_order_of_arrival_matter(make_policy, everybody, max_batch, chunk):
    """Prompts of 1 to 40 tokens, shared by their samples, come in when others leave."""
    policy = make_policy()
    plain, _ = engine(policy, "bfloat16").rollout(asks(), SAMPLING)
    shuffled = asks()
    random.Random(max_batch).shuffle(shuffled)
    running = engine(policy, "bfloat16", max_batch, everybody(policy, "bfloat16", plain), chunk)
    other, _ = running.rollout(shuffled, SAMPLING, every_plan())
    assert equal(plain, other, "bfloat16")
    alone, _ = running.rollout(asks()[2:3], SAMPLING, every_plan())
    assert equal([r for r in plain if r.prompt.row == 2], alone, "bfloat16")


class Apart(Cycle):
    """Every sequence to a depth of its own, another every round."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        super().__init__(plans)
        self._rng = random.Random(11)
        self.told: list[Rollout] = []

    def plan(self, load: Load) -> Plan:
        self.given = super().plan(load)
        self.deep = [self._rng.randint(0, 8) for _ in range(load.active)]
        return self.given

    def depths(self) -> Sequence[int]:
        return self.deep

    def observe(self, record: RoundRecord) -> None:
        super().observe(record)
        for d, many in enumerate(record.drafted_D, 1):
            assert many <= sum(deep >= d for deep in self.deep), "a sequence drafted deeper than it was given"

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        self.told += rollouts


@pytest.mark.parametrize("name", NAMES)
def test_depths_of_their_own_change_no_token_and_no_bit(make_policy, everybody, name):
    policy = make_policy()
    plain, _ = engine(policy, "bfloat16").rollout(asks(), SAMPLING)
    apart = Apart([Plan(name, *shape) for shape in SHAPES.values()])
    drafted, stats = engine(policy, "bfloat16", drafters=everybody(policy, "bfloat16", plain)).rollout(
        asks(), SAMPLING, apart
    )
    assert equal(plain, drafted, "bfloat16") and equal(plain, apart.told, "bfloat16")
    assert 0 < stats.accepted < stats.drafted


class Pinned:
    """A plan for a single sequence, cut so that a round ends with its token number `at`."""

    predicted = 0.0

    def __init__(self, plan: Plan, at: int) -> None:
        self.full, self.left = plan, at

    def plan(self, load: Load) -> Plan:
        if self.left <= 0:
            return self.full
        s = min(self.full.s, self.left - 1)
        return dataclasses.replace(self.full, s=s) if s else PLAIN

    def observe(self, record: RoundRecord) -> None:
        self.left -= record.emitted


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_swapped_at_a_token_gives_the_tokens_of_plain_decoding_swapped_there(make_policy, everybody, name):
    """At token 11, in the middle of a sequence and of what would be a draft."""
    old, new = make_policy(), make_policy(seed=5)
    unswapped, _ = engine(old, "bfloat16").rollout(asks(12, 1), SAMPLING)
    longest = max(unswapped, key=lambda rollout: len(rollout.token_T))
    one = [ask for ask in asks(12, 1) if ask.prompt.row == longest.prompt.row]

    def run(drafters: Sequence[Drafter], planner: Planner) -> tuple[Rollout, ...]:
        running = engine(old, "bfloat16", drafters=drafters)
        emitted = 0

        def on_round(record: RoundRecord) -> None:
            nonlocal emitted
            emitted += record.emitted
            if emitted == 11:
                swap(running, new, "bfloat16", 1)

        rollouts, _ = running.rollout(one, SAMPLING, planner, on_round)
        return rollouts

    plain = run((), Cycle(()))
    assert plain[0].version_T.tolist() == [0] * 11 + [1] * (len(plain[0].token_T) - 11) and len(plain[0].token_T) > 15
    for shape in ("chain", "tree"):
        drafted = run(everybody(old, "bfloat16", plain), Pinned(Plan(name, *SHAPES[shape]), 11))
        assert equal(plain, drafted, "bfloat16") and np.array_equal(plain[0].version_T, drafted[0].version_T)


@pytest.mark.parametrize("shape", SHAPES)
def test_in_rejection_greedy_tokens_are_plain_decodings_too(make_policy, everybody, shape):
    policy, greedy = make_policy(), dataclasses.replace(SAMPLING, temperature=0.0)
    plain, _ = engine(policy, "bfloat16").rollout(asks(4, 1), greedy)
    for name in NAMES:
        running = engine(policy, "bfloat16", drafters=everybody(policy, "bfloat16", plain), mode="rejection")
        drafted, stats = running.rollout(asks(4, 1), greedy, Plan(name, *SHAPES[shape]))
        assert [r.token_T.tolist() for r in plain] == [r.token_T.tolist() for r in drafted], name
        assert stats.accepted > 0


@pytest.mark.parametrize("name", NAMES)
def test_in_rejection_with_one_plan_the_batch_does_not_matter(make_policy, near, name):
    """One sample a prompt: what a prompt's other samples have said by then does depend on the batch."""
    policy, runs = make_policy(), []
    for max_batch in (1, 24):
        drafters = [drafter(name, policy, near(policy), "bfloat16")]
        running = engine(policy, "bfloat16", max_batch, drafters, mode="rejection")
        runs.append(running.rollout(asks(4, 1), SAMPLING, Plan(name, *SHAPES["tree"]))[0])
    assert equal(runs[0], runs[1], "bfloat16")


def test_histories_change_speed_only(make_policy):
    policy = make_policy()
    plain, _ = engine(policy, "bfloat16").rollout(asks(), SAMPLING)
    for kind in (SuffixDrafter(1, 0.1, 10_000), PreviousDrafter(SuffixDrafter(1, 0.1, 10_000), 10_000)):
        one, plan = engine(policy, "bfloat16", drafters=[kind]), Plan(kind.name, 6, 1, 6)
        first, before = one.rollout(asks(), SAMPLING, plan)
        kind.learn(first)
        second, after = one.rollout(asks(), SAMPLING, plan)
        assert equal(plain, first, "") and equal(plain, second, "")
        # the same completions a second time are what the histories hold: drafts get longer
        assert after.accepted_length > before.accepted_length


def test_a_new_draw_is_fresh_and_streams_differ(make_policy):
    policy = make_policy()
    one, _ = engine(policy, "float32").rollout(asks(draw=0), SAMPLING)
    two, _ = engine(policy, "float32").rollout(asks(draw=1), SAMPLING)
    other, _ = engine(policy, "float32").rollout([dataclasses.replace(a, stream=Stream.EVAL) for a in asks()], SAMPLING)
    assert any(not np.array_equal(a.token_T, b.token_T) for a, b in zip(one, two, strict=True))
    assert any(not np.array_equal(a.token_T, b.token_T) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("sampling", [
    Sampling(24, 0.7, stop=("ab", "Q")), Sampling(24, 0.9, top_k=4), Sampling(24, 0.9, top_p=0.8), Sampling(24, 1.0, min_p=0.1),
    Sampling(24, 0.0), Sampling(1, 0.7), Sampling(24, 0.7, stop_token_ids=(9, 17, 30)),
], ids=str)  # fmt: skip
def test_stops_limits_and_truncation_cut_where_plain_decoding_does(make_policy, everybody, sampling):
    policy = make_policy()
    plain, _ = engine(policy, "bfloat16").rollout(asks(), sampling)
    running = engine(policy, "bfloat16", drafters=everybody(policy, "bfloat16", plain))
    drafted, _ = running.rollout(asks(), sampling, every_plan())
    assert equal(plain, drafted, "bfloat16")
    for rollout in plain:
        ended = rollout.finish
        assert (len(rollout.token_T) == sampling.max_new_tokens) or ended in ("eos", "stop")
        assert all(stop not in rollout.text for stop in sampling.stop if ended == "stop")
        assert 1 not in rollout.token_T[:-1]


@pytest.mark.parametrize("name", ["suffix", "previous", "self_quant"])
def test_a_stop_string_over_a_drafts_edge_ends_there(make_policy, everybody, name):
    """Stop strings come from what plain decoding wrote, and the histories hold all of it: drafts run over every one of them."""
    policy = make_policy()
    free, _ = engine(policy, "bfloat16").rollout(asks(), SAMPLING)
    stop = tuple({r.text[9:11] for r in free if len(r.text) > 12})
    sampling = dataclasses.replace(SAMPLING, stop=stop)
    plain, _ = engine(policy, "bfloat16").rollout(asks(), sampling)
    # every length of a draft puts its edge elsewhere
    for depth in (3, 8):
        running = engine(policy, "bfloat16", drafters=everybody(policy, "bfloat16", free))
        drafted, stats = running.rollout(asks(), sampling, Plan(name, depth, 1, depth))
        assert equal(plain, drafted, "bfloat16") and stats.accepted > 0
    assert any(r.finish == "stop" for r in plain)


@pytest.mark.parametrize("name", NAMES)
def test_proposers_tell_who_put_each_token_forward(make_policy, everybody, name):
    running = engine(make_policy(), "float32", drafters=everybody(make_policy(), "float32"))
    drafted, stats = running.rollout(asks(), SAMPLING, Plan(name, 4, 1, 4))
    counted = sum(int((r.proposer_T != Proposer.TARGET).sum()) for r in drafted)
    # nobody has answered these prompts before: the suffix drafter goes on for `previous`
    by = Proposer.SUFFIX if name == "previous" else Proposer[name.upper()]
    assert counted == sum(int((r.proposer_T == by).sum()) for r in drafted) == stats.accepted > 0
    assert sum(len(r.token_T) for r in drafted) == stats.tokens == sum(record.emitted for record in stats.round_R)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_processor_threads_may_change_between_two_rounds(make_policy, dtype):
    """What learns beside generation has some of them, for as long as it takes."""
    policy, own = make_policy(dtype=DTYPES[dtype]), torch.get_num_threads()
    drawn = list[Sequence[Rollout]]()
    try:
        for threads in ((1,), (2,), (1, 3, 2)):
            rounds, running = itertools.cycle(threads), engine(policy, dtype, drafters=[SuffixDrafter(1, 0.1, 10_000)])
            told = list[int]()
            running.between_rounds += [
                lambda rounds=rounds: torch.set_num_threads(next(rounds)), lambda told=told: told.append(torch.get_num_threads())
            ]  # fmt: skip
            rollouts, stats = running.rollout(asks(), SAMPLING, Plan("suffix", 6, 1, 6))
            drawn.append(rollouts)
            assert len(told) == len(stats.round_R) and set(told) == set(threads)
    finally:
        torch.set_num_threads(own)
    for other in drawn[1:]:
        for a, b in zip(drawn[0], other, strict=True):
            assert np.array_equal(a.token_T, b.token_T) and np.array_equal(a.logprob_T, b.logprob_T)
