"""The stages of a run, set up once, and what they do between them: draw completions, evaluate, remember histories."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch

from respec.adaptive import make_planner
from respec.config import Config, SpeculationConfig
from respec.drafter.agreement import Agreement
from respec.drafting import first_head, make_drafters, make_lenience
from respec.models.load import Policy
from respec.remote import planner_for, profiled_context, refuse_unsteered, start_vllm
from respec.report.live import View
from respec.report.provenance import processor
from respec.report.run_dir import RunDir
from respec.rollout.engine import Engine
from respec.rollout.replay import LookUp, replay
from respec.rollout.vllm.engine import VllmEngine
from respec.rollout.vllm.process import Worker
from respec.sentinel import Sentinel
from respec.speculation import memory
from respec.speculation.shadow import overlapped, replayed, wanting
from respec.tasks.answers import unmatched
from respec.tasks.mixed_reward import Reward
from respec.tasks.order import Order
from respec.tasks.task import Task
from respec.types import (
    PLAIN,
    Ask,
    EvalResult,
    Mode,
    Prompt,
    Rollout,
    RolloutStats,
    RoundRecord,
    Sampling,
    ScoredRollout,
    Stream,
)
from respec.weights.publish import publish

# Share of a step's drawing that replaying its rollouts for idle drafters may take.
REPLAY_SHARE = 0.01


@dataclass(frozen=True)
class Stages:
    """What a run is made of, built once by `build`."""

    config: Config
    policy: Policy
    task: Task
    engine: Engine | VllmEngine
    planner: Sentinel
    reward: Reward
    view: View


def build(
    config: Config, policy: Policy, task: Task, reward: Reward, view: View, version: int, worker: Worker | None = None
) -> Stages:
    """Publishes the policy and sets the engine up around it; with a `worker`, its vLLM is the engine."""
    if worker is not None:
        return _around_vllm(config, policy, task, reward, view, version, worker)
    decoder = publish(policy, config.model.dtype, version)
    drafters = make_drafters(config.speculation, policy, config.model.dtype, version)
    engine = Engine(
        decoder, policy.tokenizer, policy.eos_token_ids, config.run.seed,
        config.rollout.max_batch, config.rollout.prefill_chunk, drafters, config.speculation.mode,
        lenience=make_lenience(config.speculation),
        kv_budget=config.rollout.kv_bytes,
    )  # fmt: skip
    prompt = int(np.median([len(p.token_ids) for p in task.train])) if task.train else 32
    view.phase("profile")
    planner = make_planner(
        config.speculation, decoder, policy.tokenizer, drafters, config.rollout.max_batch, prompt + config.rollout.max_new_tokens // 4, view.say
    )  # fmt: skip
    first = partial(first_head, config.speculation, policy) if config.speculation.drafter_path else None
    sentinel = Sentinel(planner, engine.drafters, view.say, first, remembers=config.speculation.mode == "rejection")
    return Stages(config, policy, task, engine, sentinel, reward, view)


def _around_vllm(
    config: Config, policy: Policy, task: Task, reward: Reward, view: View, version: int, worker: Worker
) -> Stages:
    view.phase("vLLM")
    drawn, asked = config.rollout.sampling(), config.eval_sampling()
    train = [len(p.token_ids) + (p.settings(drawn) or drawn).max_new_tokens for p in task.train]
    longest = min(
        policy.context_length, max([*train, *(len(p.token_ids) + asked.max_new_tokens for p in task.held_out)])
    )
    engine = start_vllm(config, policy, worker, version, longest, torch.get_num_threads(), view.say)
    refuse_unsteered(config, engine)
    context = profiled_context(longest, drawn.max_new_tokens, config.speculation.s)
    vllm = [str(value) for value in (config.model.dtype, config.rollout.vllm.python, config.rollout.vllm.compile)]
    facts = [policy.source, str(torch.get_num_threads()), str(config.rollout.max_batch), processor(), *vllm]
    planner = planner_for(config.speculation, engine, config.rollout.max_batch, context, facts, view.say)
    # a drafter that vLLM cannot leave off is not turned off
    watched = engine.drafters if engine.steered else {}
    first = partial(first_head, config.speculation, policy)
    sentinel = Sentinel(planner, watched, view.say, first, remembers=bool(watched))
    return Stages(config, policy, task, engine, sentinel, reward, view)


def asks_from(order: Order, config: Config, first: int, count: int) -> tuple[Ask, ...]:
    """`count` asks from place `first` on, as the run's order has them: a pure function of the place (and of what a checkpoint keeps of measured
    difficulty), so a resumed run asks the same.
    """
    sampling, group = config.rollout.sampling(), config.rollout.group_size
    drawn = [order(place) for place in range(first, first + count)]
    return tuple(Ask(prompt, Stream.TRAIN, draw, group, prompt.settings(sampling)) for prompt, draw in drawn)


def generate(
    stages: Stages, asks: Sequence[Ask], sampling: Sampling, phase: str, plain: bool = False
) -> tuple[tuple[Rollout, ...], RolloutStats]:
    total, emitted, began = sum(ask.group for ask in asks), 0, time.perf_counter()
    stages.view.phase(phase, total)

    def show(record: RoundRecord) -> None:
        nonlocal emitted
        emitted += record.emitted
        rate = emitted / (time.perf_counter() - began)
        stages.view.advance(total - record.active - record.waiting, f"{record.active} active  {rate:,.0f} tokens/s")

    partner = stages.task.episodes() if stages.task.episodes is not None else None
    return stages.engine.rollout(asks, sampling, PLAIN if plain else stages.planner.under(sampling), show, partner)


def evaluate(stages: Stages, prompts: Sequence[Prompt], sampling: Sampling | None = None) -> EvalResult:
    """One completion a held-out prompt, under `sampling` (None: evaluation's own), on the eval stream.

    An item counts as right when its first reward gives 1 or more (a scorer's partial credit does not count).
    """
    began = time.perf_counter()
    sampling = sampling or stages.config.eval_sampling()
    asks = [Ask(prompt, Stream.EVAL, 0, 1) for prompt in prompts]
    rollouts, _ = generate(stages, asks, sampling, "evaluation")
    scored = stages.reward.score(rollouts)
    right = np.array([(next(iter(item.part.values())) or 0.0) >= 1.0 for item in scored], float)
    tasks = np.array([item.rollout.prompt.task for item in scored])
    return EvalResult(
        accuracy=float(right.mean()),
        standard_error=float(right.std() / max(1, len(right)) ** 0.5),
        items=len(right),
        mean_length=float(np.mean([r.drawn for r in rollouts])),
        mean_entropy=float(np.concatenate([r.entropy_T[r.drawn_T] for r in rollouts]).mean()),
        reward_I=right.tolist(),
        wall_s=time.perf_counter() - began,
        task_accuracy={str(name): float(right[tasks == name].mean()) for name in dict.fromkeys(tasks.tolist()) if name},
    )


def decisions_of(planner: Sentinel) -> list[dict[str, Any]]:
    """The controller's decisions since they were last asked for, as plain values; none of a static plan."""
    return [decision.to_dict() for decision in planner.take_decisions()]


def keep_controller(stages: Stages, run: RunDir) -> None:
    """Puts what the controller has learned into the run folder, for `remember`; nothing of a static plan."""
    if stages.planner.controller is not None:
        memory.keep(stages.planner.controller, run.path)


def remember(stages: Stages, run: RunDir) -> None:
    """Feeds the drafters the rollouts that the run folder holds, since token histories outlive weights, and the controller what it knew."""
    if stages.planner.controller is not None:
        memory.recall(stages.planner.controller, run.path)
    for step in run.rollout_steps():
        rollouts = [scored.rollout for scored in run.read_rollouts(step)]
        learn_histories(stages.engine, rollouts)
        stages.planner.learn(rollouts)


def estimate_idle(
    planner: Sentinel,
    engine: Engine | VllmEngine,
    asked: SpeculationConfig,
    rollouts: Sequence[Rollout],
    stats: RolloutStats,
    agreement: Mapping[Mode, Agreement],
) -> None:
    """Tells the controller what a step's rollouts say of drafters that were idle in it, before they are remembered; look-ups are replayed for
    a hundredth of the time that drawing took. `agreement`: what the learner of the `eagle` drafter saw of its drafts; empty for nothing. It is of our
    own way to verify, not of vLLM's."""
    if planner.controller is None:
        return
    acceptance = planner.controller.acceptance
    wanted = wanting(stats.round_R, asked.candidates)
    if asked.mode in agreement and isinstance(engine, Engine):
        overlapped(acceptance, wanted, "eagle", agreement[asked.mode].tested_K, agreement[asked.mode].stood_K)
    groups = [list(group) for _, group in groupby(rollouts, key=lambda rollout: rollout.key[:2])]
    order = np.random.default_rng(engine.version).permutation(len(groups))
    look_ups = {name: drafter for name, drafter in engine.drafters.items() if isinstance(drafter, LookUp)}
    replays = {
        name: partial(replay, drafter, [groups[i] for i in order], asked.s) for name, drafter in look_ups.items()
    }
    replayed(acceptance, wanted, replays, REPLAY_SHARE * stats.wall_s)


def rest(engine: Engine | VllmEngine, renewed: bool) -> None:
    """Whatever of the engine's memory can be had back while the policy is trained. `renewed`: it is given newer weights before it decodes again."""
    if isinstance(engine, VllmEngine) or renewed:
        engine.rest()


def learn_histories(engine: Engine | VllmEngine, rollouts: Sequence[Rollout]) -> None:
    for drafter in engine.drafters.values():
        drafter.learn(rollouts)


def to_know(config: Config, task: Task) -> list[str]:
    """Lines for the user: where there are fewer held-out rows than were asked for, and where rollouts are not the policy's own."""
    held, asked = len(task.held_out), sum(part.eval_size for part in config.task.mixture or (config.task,))
    short = [f"held out are {held} rows, not {asked}: there are no more to spare"] if held < asked else []
    lossy = (
        f"speculation.mode is lossy (lenience {config.speculation.lenience}): completions that follow an old answer are not drawn as the policy "
        "would; their tokens' losses are weighted for it, approximately"
    )
    return [*task.notes, *short, *((lossy,) if config.speculation.mode == "lossy" else ())]


def answerless(task: Task, scored: Sequence[ScoredRollout]) -> list[str]:
    """A line for each task whose answer pattern is in none of its completions of a step."""
    texts_of = {name: [s.rollout.text for s in scored if s.rollout.prompt.task == name] for name in task.parts or ("",)}
    return [
        line
        for name, texts in texts_of.items()
        for line in unmatched(task.parts.get(name, task).scorer, texts, f" of task '{name}'" if name else "")
    ]


def fallbacks(scored: Sequence[ScoredRollout]) -> list[str]:
    """A line that says which rewards failed in a step, and on how many rollouts; none where none did."""
    names = sorted({name for item in scored for name in item.fell_back})
    failed = sum(bool(item.fell_back) for item in scored)
    said = f"reward {', '.join(names)} failed on {failed} of {len(scored)} rollouts; its fallback value was used"
    return [said] if failed else []
