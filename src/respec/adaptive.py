"""Builds the adaptive server around an engine: the profile of this machine and model, the plans to choose from, the controller."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import astuple, fields
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from respec.config import SpeculationConfig
from respec.drafter.agreement import read_agreement
from respec.models import kernels
from respec.models.decoder import Decoder
from respec.report.provenance import processor
from respec.rollout.draft.protocol import DraftContext, Drafter
from respec.rollout.engine import Engine
from respec.rollout.request import Request
from respec.rollout.tree import DraftTree
from respec.speculation.acceptance import Acceptance
from respec.speculation.confidence import Confidence
from respec.speculation.controller import Controller
from respec.speculation.cost_model import CostModel, CostSample, fit
from respec.speculation.pace import PacedController
from respec.speculation.profile import Cell, grid, load, measure, save
from respec.speculation.settings import Settings
from respec.speculation.shadow import overlapped
from respec.speculation.sharing import Sharing
from respec.types import Ask, Plan, Prompt, Proposer, Rollout, RoundRecord, Sampling, Stream

ROUNDS = 8
CHAIN_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16)
# Branching, and nodes to a level of depth, of the trees that look-up drafters may grow.
TREES = ((4, 2, 8), (6, 3, 16), (8, 3, 24))
BRANCHING = ("suffix",)
# Drafters that say by how much their tokens won, so that their chains can be cut.
LEADING = ("eagle",)
# Look-ups that may be asked beside them, for each sequence.
BESIDE = ("suffix",)
# What drafters with a distribution of their own are believed to be worth before they have been seen, and for how many sequences: without it a
# good one waits for probes that a hundredth of the time pays for.
HOPED = {"eagle": 0.75, "model": 0.6, "self_quant": 0.85}
BELIEF = 8.0
# What was measured when a head was trained counts for so many: it was another policy's, if only by a few steps.
MEASURED = 64.0
# A profile that is further off than this on its own samples was spoilt by other work; on a machine of its own it is off by 0.03 to 0.15.
BUSY = 0.5


class MadeUp:
    """Drafts of a fixed length of nonsense: loads the target with exactly that many rows."""

    name = "made-up"

    def propose(
        self, requests: Sequence[Request], plan: Plan, limits: Sequence[int], context: DraftContext
    ) -> list[DraftTree]:
        return [DraftTree.chain([request.pending] * plan.s, Proposer.TARGET) for request in requests]

    def finish(self, request: Request) -> None:
        """Nothing is kept."""

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        """Nothing is kept."""

    def drop(self) -> None:
        """Nothing is kept."""


def plans_for(drafters: Sequence[str], deepest: int) -> tuple[Plan, ...]:
    """What a controller may choose from: chains of rising depth for every drafter, trees for those that branch."""
    chains = [Plan(name, s, 1, s) for name in drafters for s in CHAIN_DEPTHS if s <= deepest]
    trees = [Plan(name, s, t, n) for name in drafters if name in BRANCHING for s, t, n in TREES if s <= deepest]
    return (*chains, *trees)


def make_planner(
    config: SpeculationConfig,
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    drafters: Sequence[Drafter],
    max_batch: int,
    context: int,
    say: Callable[[str], None],
) -> Plan | PacedController:
    """The configured static plan; for `auto` the controller of one engine, for as long as it lives.

    Where this machine and model have no profile yet, or one that was spoilt, the controller starts from a brief one, made here.
    """
    if config.drafter != "auto":
        return config.plan()
    cost = fit(samples(decoder, tokenizer, drafters, max_batch, (context,), True, say))
    if cost.held_out_error > BUSY:
        # it is on the disk, and would misguide every run to come
        say(f"profile: {cost.trust}, so the machine was busy when it was measured; it is measured once more")
        cost = fit(samples(decoder, tokenizer, drafters, max_batch, (context,), True, say, fresh=True))
    say(f"profile: {cost.trust}")
    return make_controller(cost, config, max_batch)


def make_controller(cost: CostModel, config: SpeculationConfig, largest: int) -> PacedController:
    """A controller over the candidates' plans, for batches of up to `largest`."""
    plans, acceptance = plans_for(config.candidates, config.s), Acceptance(depth=config.s)
    measured = read_agreement(config.drafter_path) if config.drafter_path and "eagle" in config.candidates else {}
    if config.mode in measured:
        overlapped(
            acceptance, {"eagle": MEASURED}, "eagle", measured[config.mode].tested_K, measured[config.mode].stood_K
        )
    for name, hoped in HOPED.items():
        if name in config.candidates and not acceptance.effective(name):
            asked = [BELIEF * hoped**d for d in range(config.s)]
            acceptance.observe_shadow(name, asked, [hoped * tested for tested in asked], weight=1.0)
    # a profile is off by the hour more than by the plan: what one plan shows is mostly the machine's, and so all plans'
    trust = Settings(spread=0.3, common=0.7, burn_in=200, burn_in_share=0.05)
    sharing = Sharing(plans, cost) if config.per_request_depth else None
    # whether a token is there may depend on how it was drawn in matching only
    leading = [name for name in LEADING if name in config.candidates and config.cut and config.mode == "matching"]
    confidence = Confidence(leading, config.s, [n for n in BESIDE if n in config.candidates]) if leading else None
    return PacedController(Controller(plans, cost, acceptance, largest, trust, confidence), sharing=sharing)


def samples(
    decoder: Decoder,
    tokenizer: PreTrainedTokenizerBase,
    drafters: Sequence[Drafter],
    max_batch: int,
    contexts: Sequence[int],
    brief: bool,
    say: Callable[[str], None],
    fresh: bool = False,
) -> tuple[CostSample, ...]:
    """What a cost model of this machine, model, dtype, thread count and engine is fitted to: from what is on disk, measured where it lacks.

    Kept under the user's cache folder by fingerprint, cell by cell, so that a profile cut short is gone on with. The drafters are left as
    they were: a rollout ends by dropping what it began, and they learn nothing here.
    """
    path = profile_path(decoder)
    known = [] if fresh else load(path)
    cells = grid(max_batch, contexts, [drafter.name for drafter in drafters], brief=brief)
    missing = len(set(cells) - {cell for cell, _ in known})

    def run(cell: Cell) -> Sequence[RoundRecord]:
        return _rounds(decoder, tokenizer, {drafter.name: drafter for drafter in drafters}, cell)

    for count, (cell, sample) in enumerate(measure(cells, run, known), 1):
        known.append((cell, sample))
        save(path, known)
        seconds = sample.draft_s + sample.verify_s + sample.overhead_s
        say(f"profile {count}/{missing}: {cell.drafter}, batch {cell.batch}, depth {cell.s}: {1000 * seconds:.1f} ms")
    return tuple(sample for cell, sample in known if cell.batch <= max_batch)


def profile_path(decoder: Decoder) -> Path:
    """Where the profile of this machine and model lies."""
    facts = (
        [field.name for field in fields(CostSample)], [str(value) for value in astuple(decoder.shape)], type(decoder).__name__, processor(), torch.get_num_threads(),
        torch.__version__, kernels.available()[0], torch.cuda.get_device_name(0) if torch.cuda.is_available() else "",
    )  # fmt: skip
    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "respec" / "profiles" / f"{name}.json"


def _rounds(
    decoder: Decoder, tokenizer: PreTrainedTokenizerBase, drafters: dict[str, Drafter], cell: Cell
) -> Sequence[RoundRecord]:
    """A few rounds of a cell, through the engine as it is: one prompt of made-up tokens, sampled `batch` times, that no token ends."""
    drafter = drafters.get(cell.drafter, MadeUp())
    engine = Engine(decoder, tokenizer, (), 0, cell.batch, drafters=(drafter,))
    tokens = np.random.default_rng(cell.context).integers(0, decoder.shape.vocabulary, cell.context)
    prompt = Prompt(0, "", tuple(tokens.tolist()))
    plan = Plan(drafter.name, cell.s, 1, cell.s) if cell.s else Plan()
    # a draft of nonsense is mostly refused, so a round gives little more than a token
    sampling = Sampling(max_new_tokens=ROUNDS if cell.drafter == "off" else ROUNDS * (1 + cell.s))
    _, stats = engine.rollout([Ask(prompt, Stream.BENCH, 0, cell.batch)], sampling, plan)
    return stats.round_R
