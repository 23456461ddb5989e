"""vLLM in the engine's place, put together for a run: its worker, what it is started with, and who plans its drafts."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from respec.adaptive import make_controller
from respec.config import Config, SpeculationConfig
from respec.drafting import first_head
from respec.errors import ConfigError, VllmError
from respec.models.decoder import decode_dtype
from respec.models.load import Policy
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.planner import Planner
from respec.rollout.vllm.engine import VllmEngine
from respec.rollout.vllm.process import Worker
from respec.rollout.vllm.worker.wire import Ready, Start
from respec.speculation.cost_model import CostModel, fit
from respec.speculation.profile import DRAFTED_DEPTH, Cell, load, measure, save
from respec.types import PLAIN, Ask, Plan, Prompt, RoundRecord, Sampling, Stream
from respec.weights.export import save_model

TRIED = "0.32."
LOG = "vllm.log"
# How a line to the user begins that says what of vLLM was mended.
MENDED = "mended in vLLM: "
# Rounds of a cell of the profile.
ROUNDS = 8


@contextmanager
def worker_of(config: Config) -> Iterator[Worker | None]:
    """The process that is to draw a run's rollouts, ended with the block; None where our own engine draws."""
    if config.rollout.engine != "vllm":
        yield None
        return
    worker = Worker(config.rollout.vllm.python or sys.executable, config.run.dir / LOG)
    try:
        yield worker
    finally:
        worker.close()


def start_vllm(
    config: Config, policy: Policy, worker: Worker, version: int, longest: int, threads: int, say: Callable[[str], None]
) -> VllmEngine:
    """Starts vLLM with the policy's weights, for sequences of up to `longest` tokens. Raises VllmError, in plain words, for one that is not there or
    will not start."""
    asked, folder, drawn = config.speculation, worker.folder / "model", config.rollout
    dtype, name = decode_dtype(config.model.dtype, policy.model.device), drafter_of(asked)
    # the one that vLLM begins with, since the folder is the same
    head = EagleDrafter(first_head(asked, policy), dtype, keeps=True) if name == "eagle" else None
    # where a whole draft does not fit vLLM lets these draft nothing, for any sequence of the batch
    room = asked.s if name in ("eagle", "model") else 0
    save_model(policy, folder)
    start = Start(
        model=str(folder), version=version, dtype=str(dtype).removeprefix("torch."), context=min(longest + room, policy.context_length),
        batch=drawn.max_batch, seed=config.run.seed % 2**32, threads=threads, cache_gib=drawn.vllm.cache_gib, gpu_share=drawn.vllm.gpu_share,
        compiled=drawn.vllm.compile, sleeps=drawn.vllm.sleep, speculation=speculation_of(asked, drawn.max_batch), mend=drawn.vllm.mend,
    )  # fmt: skip
    try:
        ready = worker.ask(start, drawn.vllm.start_s, Ready)
    except VllmError as error:
        raise VllmError(_plainer(str(error), worker.python, asked)) from None
    shutil.rmtree(folder, ignore_errors=True)
    for line in notes_of(ready):
        say(line)
    return VllmEngine(
        worker, policy.tokenizer, policy.eos_token_ids, config.run.seed, version, drawn.vllm.timeout_s, drawn.max_batch, name, asked.s, ready.steers,
        ready.sleeps, head,
    )  # fmt: skip


def drafter_of(asked: SpeculationConfig) -> str:
    """The one drafter that vLLM is started with; it cannot be given another. `auto` takes the first of these that its candidates name: suffix decoding
    needs a package that not every vLLM has."""
    if asked.drafter != "auto":
        return asked.drafter
    return next((name for name in ("eagle", "model", "ngram", "suffix") if name in asked.candidates), "ngram")


def speculation_of(asked: SpeculationConfig, batch: int) -> dict[str, Any] | None:
    """vLLM's `speculative_config` for ours, with a table of depths by batch size, which is told anew before each step. Drafts of a head or a draft
    model are its likeliest tokens: vLLM's other way draws them without a seed."""
    depth = {
        "num_speculative_tokens": asked.s,
        "num_speculative_tokens_per_batch_size": [(1, batch, asked.s)],
    }
    return {
        "off": None,
        "ngram": depth | {"method": "ngram", "prompt_lookup_min": asked.min_match, "prompt_lookup_max": max(4, asked.min_match)},
        "suffix": depth | {"method": "suffix", "suffix_decoding_min_token_prob": asked.min_confidence},
        "model": depth | {"method": "draft_model", "model": asked.draft_model},
        "eagle": depth | {"method": "eagle3", "model": str(asked.drafter_path)},
    }[drafter_of(asked)]  # fmt: skip


def planner_for(
    asked: SpeculationConfig,
    engine: VllmEngine,
    batch: int,
    context: int,
    facts: Sequence[str],
    say: Callable[[str], None],
) -> Plan | Planner:
    """Who says how deep vLLM drafts: the configured plan, or for `auto` the adaptive server, over a profile of vLLM's own rounds."""
    if engine.drafter == "off":
        return PLAIN
    if asked.drafter != "auto":
        return Plan(engine.drafter, asked.s, 1, asked.s)
    if not engine.steered:
        raise ConfigError(
            "this vLLM cannot change how deep it drafts while it runs, which speculation.drafter 'auto' needs; set it to 'ngram', which then drafts "
            "always, or to 'off'"
        )
    drafting = {"eagle": str(asked.drafter_path), "model": asked.draft_model}.get(engine.drafter)
    cost = profile_of(engine, batch, context, asked.s, [*facts, *([drafting] if drafting else [])], say)
    return make_controller(cost, asked.model_copy(update={"candidates": (engine.drafter,)}), batch)


def refuse_unsteered(config: Config, engine: VllmEngine) -> None:
    """Raises ConfigError where plain decoding is needed, to compare with or in the place of a head that went wrong, and cannot be had."""
    if engine.drafter == "off" or engine.steered:
        return
    cannot = f"vLLM cannot leave off drafting with '{engine.drafter}' while it runs"
    if config.run.compare_plain_every:
        raise ConfigError(
            f"run.compare_plain_every: {cannot}, so there is nothing to compare with (got {config.run.compare_plain_every}); set it to 0, or take "
            "drafter 'ngram'"
        )
    if config.drafter.learn:
        raise ConfigError(
            f"drafter.learn: {cannot}, which a head is that an update has spoilt; set drafter.learn = false, or take vLLM {TRIED}x"
        )


def profiled_context(longest: int, new_tokens: int, deepest: int) -> int:
    """Tokens of a profile's prompts: what a completion has before it once it is a quarter done, with room for the profile's own rounds."""
    return max(8, longest - max(3 * new_tokens // 4, ROUNDS * (1 + min(DRAFTED_DEPTH, deepest))))


def profile_of(
    engine: VllmEngine, batch: int, context: int, deepest: int, facts: Sequence[str], say: Callable[[str], None]
) -> CostModel:
    """Seconds of vLLM's steps by batch and drafted depth, measured where they are not on disk. `facts` tell this machine and model from others."""
    fingerprint = [*facts, engine.drafter, str(context)]
    name = hashlib.sha256(json.dumps(fingerprint).encode()).hexdigest()[:16]
    path = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "respec" / "profiles" / f"vllm-{name}.json"
    batches, depths = sorted({1, max(1, batch // 4), batch}), sorted({min(2, deepest), min(DRAFTED_DEPTH, deepest)})
    cells = [
        *(Cell("off", b, 0, context) for b in batches), *(Cell(engine.drafter, b, s, context) for b in batches for s in depths)
    ]  # fmt: skip
    known = load(path)
    if set(cells) - {cell for cell, _ in known}:
        # what vLLM does for the first time takes longer
        _rounds(engine, cells[-1])
    for cell, sample in measure(cells, lambda cell: _rounds(engine, cell), known):
        known.append((cell, sample))
        save(path, known)
        say(
            f"profile: vLLM, {cell.drafter}, batch {cell.batch}, depth {cell.s}: {1000 * sample.verify_s:.1f} ms a step"
        )
    return fit([sample for _, sample in known])


def _rounds(engine: VllmEngine, cell: Cell) -> Sequence[RoundRecord]:
    """A few steps of a cell: greedy completions of a text that repeats itself, which are drafted at nearly every place. Raises ConfigError where
    so many sequences never decode together."""
    prompt = Prompt(0, "", tuple([5, 7, 11, 13] * max(2, cell.context // 4)))
    plan = Plan(cell.drafter, cell.s, 1, cell.s) if cell.s else PLAIN
    _, stats = engine.rollout(
        [Ask(prompt, Stream.BENCH, 0, cell.batch)], Sampling(ROUNDS * (1 + cell.s), temperature=0.0), plan, endless=True
    )
    # a step that reads prompts is not timed
    timed = [record for record in stats.round_R if record.verify_s and record.active == cell.batch]
    if not timed:
        raise ConfigError(
            f"vLLM did not decode {cell.batch} sequences of {cell.context} tokens together: its KV cache may be too small; raise "
            "rollout.vllm.cache_gib (on a GPU gpu_share), lower rollout.max_batch, or set speculation.drafter = 'ngram'"
        )
    return timed


def notes_of(ready: Ready) -> list[str]:
    """Lines for the user about the vLLM that was started."""
    version = ready.versions["vllm"]
    lines = [
        f"vLLM {version} ({ready.device}) draws; it verifies drafts by rejection: the same distribution as plain decoding, not the same tokens"
    ]
    if not version.startswith(TRIED):
        lines.append(f"vLLM {version} has not been tried, {TRIED}x has: run `respec certify --engine vllm` first")
    return [*lines, *(f"{MENDED}{what}" for what in ready.mended)]


def mismatch_news(metrics: Mapping[str, float], config: Config) -> list[str]:
    """A line where vLLM's log-probabilities are further from the trainer's than rollout.vllm.mismatch; none of our own engine."""
    if config.rollout.engine != "vllm" or metrics["policy/mismatch_mean"] <= config.rollout.vllm.mismatch:
        return []
    return [
        f"vLLM's log-probabilities are {metrics['policy/mismatch_mean']:.3f} nats from the trainer's in the mean, {metrics['policy/mismatch_max']:.2f} "
        f"at most, above rollout.vllm.mismatch ({config.rollout.vllm.mismatch:g}): run `respec certify --engine vllm`; policy.correction = 'tis' or "
        "'mis' weighs what is left"
    ]


def _plainer(text: str, python: str, asked: SpeculationConfig) -> str:
    if "No module named 'vllm'" in text:
        return f"'{python}' has no vLLM: install it there, or name another environment's Python as rollout.vllm.python"
    if "arctic_inference" in text or "Arctic Inference" in text:
        return f"vLLM's suffix decoding needs arctic-inference, which '{python}' has not; install it there, or set speculation.drafter = 'ngram'"
    return f"vLLM could not be started for speculation.drafter '{asked.drafter}': {text}"


def refuse_unknown(drafter: str) -> None:
    """Raises ConfigError for a drafter that vLLM has nothing for."""
    if drafter not in ("off", "ngram", "suffix", "model", "eagle"):
        raise ConfigError(f"vLLM has no drafter '{drafter}'; take off, ngram, suffix, model or eagle")
