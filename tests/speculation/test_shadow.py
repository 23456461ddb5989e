"""An idle drafter is believed in for what finished rollouts say of it, within the time given, and no more than is wanted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
from simulator import CONTEXT, Machine, peaks, replay

from respec.speculation.acceptance import Acceptance
from respec.speculation.controller import Controller
from respec.speculation.cost_model import fit
from respec.speculation.settings import Settings
from respec.speculation.shadow import WANTED, overlapped, replayed, wanting
from respec.types import PLAIN, Load, Plan, RoundRecord

FULL = np.ones(8)


@dataclass(frozen=True)
class Counted:
    asked_D: tuple[float, ...]
    drafted_D: tuple[float, ...]
    parents_D: tuple[float, ...]
    tested_D: tuple[float, ...]
    accepted_D: tuple[float, ...]


def counted(sequences: float, accept: float, available: float = 1.0, depth: int = 4) -> Counted:
    """What a drafter of these chances is expected to count."""
    path = [sequences * (accept * available) ** d for d in range(depth)]
    tested = [available * parents for parents in path]
    return Counted(
        (sequences,) * depth, tuple(sequences * available ** (d + 1) for d in range(depth)), tuple(path), tuple(tested),
        tuple(accept * x for x in tested),
    )  # fmt: skip


def idle(accept: float, available: float = 1.0) -> Acceptance:
    """Believed bad, as after a step in use and a swap of the weights."""
    acceptance = Acceptance(8)
    machine = Machine({"x": lambda round: accept}, 0, (4,), available)
    for r in range(60):
        acceptance.observe(machine.run(16, machine.plans[1], r))
    acceptance.discount(0.3)
    return acceptance


def teach(acceptance: Acceptance, seen: Counted) -> None:
    replayed(acceptance, {"x": WANTED}, {"x": lambda enough: seen}, 1.0)


def test_drafts_that_have_become_good_are_believed_good_after_one_step():
    acceptance = idle(0.05)
    assert acceptance.outlook("x", 1, FULL).tokens_S[4] < 1.2
    teach(acceptance, counted(5000, 0.8))
    truth = np.cumsum(0.8 ** np.arange(5))[4]
    assert acceptance.outlook("x", 1, FULL).tokens_S[4] == pytest.approx(truth, rel=0.1)


def test_drafts_that_have_become_findable_are_believed_to_be_found():
    """A look-up drafter without a history has hardly a draft; once its rows come again it has."""
    acceptance = idle(0.8, available=0.05)
    assert acceptance.outlook("x", 1, FULL).tokens_S[4] < 1.2
    teach(acceptance, counted(5000, 0.8, 0.9))
    truth = np.cumsum(0.72 ** np.arange(5))[4]
    assert acceptance.outlook("x", 1, FULL).tokens_S[4] == pytest.approx(truth, rel=0.1)


def test_bad_drafts_stay_believed_bad():
    for before in (0.05, 0.8):
        acceptance = idle(before)
        teach(acceptance, counted(5000, 0.05))
        assert acceptance.outlook("x", 1, FULL).tokens_S[4] < 1.2


def test_what_is_wanted_is_what_the_step_did_not_show():
    rounds = [RoundRecord(30, 0, Plan(name, 2, 1, 2), 0, 0, 30, 0.1, 0.1, 0.1) for name in ("a", "b", "b")]
    assert wanting(rounds * 3, ("a", "b", "c")) == {"a": 110.0, "b": 20.0, "c": 200.0}
    assert wanting(rounds * 7, ("a", "b")) == {}


def test_no_more_is_taken_in_than_is_wanted():
    acceptance = Acceptance(8)
    teach(acceptance, counted(100_000, 0.5))
    assert acceptance.effective("x") == pytest.approx(WANTED)
    calls = []
    replayed(acceptance, {"y": WANTED}, {"x": lambda enough: calls.append(1) or counted(9, 0.5)}, 1.0)
    before = acceptance.to_dict()
    overlapped(acceptance, {"y": WANTED}, "x", (1000.0, 500.0), (900.0, 400.0))
    overlapped(acceptance, {"x": WANTED}, "x", (), ())
    assert not calls and acceptance.to_dict() == before
    overlapped(acceptance, {"x": WANTED}, "x", (1000.0, 900.0), (900.0, 810.0))
    np.testing.assert_allclose(acceptance.accept("x")[:2], 0.9, atol=0.06)


def test_replays_share_the_time_and_what_one_leaves_the_next_has():
    now, spent = [0.0], dict[str, float]()

    def run(name: str, wants: float) -> Callable[[Callable[[], bool]], Counted]:
        def until(enough: Callable[[], bool]) -> Counted:
            began = now[0]
            while not enough() and now[0] - began < wants:
                now[0] += 0.01
            spent[name] = now[0] - began
            return counted(10, 0.5)

        return until

    wanted = dict.fromkeys("abc", WANTED)
    replayed(Acceptance(8), wanted, {"a": run("a", 9.0), "b": run("b", 0.1), "c": run("c", 9.0)}, 3.0, lambda: now[0])
    assert spent["a"] == pytest.approx(1.0, abs=0.02) and spent["b"] == pytest.approx(0.1, abs=0.02)
    assert spent["c"] == pytest.approx(1.9, abs=0.03)


def improves(round: int) -> float:
    return 0.05 if round < 400 else 0.8


@pytest.mark.parametrize("good", [True, False])
def test_a_controller_that_may_not_probe_turns_on_what_became_good_and_nothing_else(good: bool):
    """Shadow evidence after round 400 is all that tells it."""
    machine = Machine({"a": improves}, 0)
    subject = Controller(
        machine.plans, fit(machine.profile()), Acceptance(8), settings=replace(Settings(), probe_share=0.0)
    )
    early = replay(subject, machine, peaks(400))
    assert early.share_R[-200:].mean() > 0.95
    accept = improves(400) if good else 0.05
    replayed(
        subject.acceptance,
        {"a": WANTED},
        {"a": lambda enough: counted(5000, accept, machine.available, 7)},
        1.0,
        lambda: 0.0,
    )
    load = Load(2, 0, CONTEXT, ())
    plans = [subject.plan(load) for _ in range(60)]
    assert all(plan.n > 0 for plan in plans[20:]) is good
    assert good or plans == [PLAIN] * len(plans)
