"""Decisions survive JSON and read as a page."""

from __future__ import annotations

import json
import re

from simulator import Machine, peaks, replay

from respec.speculation.acceptance import Acceptance
from respec.speculation.controller import Controller
from respec.speculation.cost_model import fit
from respec.speculation.decision import Decision, name_of
from respec.speculation.explain import explain
from respec.types import PLAIN, Plan


def decisions() -> tuple[Decision, ...]:
    machine = Machine({"a": lambda round: 0.7, "b": lambda round: 0.4}, 0)
    subject = Controller(machine.plans, fit(machine.profile()), Acceptance(8))
    replay(subject, machine, peaks(1200))
    return subject.decisions


def test_json_keeps_everything():
    made = decisions()
    assert {"start", "probe", "off", "switch"} <= {decision.kind for decision in made}
    assert tuple(Decision.from_dict(json.loads(json.dumps(decision.to_dict()))) for decision in made) == made


def test_the_page_has_a_row_a_decision_and_the_share_of_probing():
    made = decisions()
    lines = explain(made).splitlines()
    assert len(lines) == 2 + len(made) + 1
    for decision, line in zip(made, lines[2:], strict=False):
        assert line.split()[0] == str(decision.round)
        assert decision.reason in line
        assert f"{decision.best[0].goodput:.3g}" in line
    assert "probing took" in lines[-1]
    # how well costs are known is said where a controller begins
    assert re.search(r"; costs are off by \d+\.\d% \(median, on samples left out of the fit\)$", lines[2])
    assert "No decision" in explain(())


def test_plans_have_names():
    assert name_of(PLAIN) == "plain decoding"
    assert name_of(Plan("suffix", 4, 1, 4)) == "suffix to depth 4"
    assert name_of(Plan("eagle", 4, 8, 32)) == "eagle to depth 4, 32 nodes of branching 8"
