"""The certificate of our own engine: a user's model on a user's machine, put through the checks of `certify`."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float64

from respec.certify.decoder import decoder_checks
from respec.certify.finding import Certificate, Finding
from respec.certify.honesty import allowed_mean
from respec.certify.protocol import CertifiedEngine, Margin
from respec.certify.reference import Reference
from respec.certify.same_tokens import Explain, same_tokens
from respec.certify.sampler import Samples, certify_sampler, judge_samples
from respec.config import ModelConfig, SpeculationConfig
from respec.errors import ConfigError
from respec.models import kernels
from respec.models.decoder import Decoder
from respec.models.load import Policy, load_policy
from respec.rollout.draft import make_drafters
from respec.rollout.draft.protocol import Drafter
from respec.rollout.engine import Engine
from respec.rollout.kv_cache import KVCache
from respec.rollout.randomness import Lane, sequence_key, token_key, uniform
from respec.rollout.sampling import racers
from respec.types import PLAIN, Ask, Mode, Plan, Prompt, Rollout, Sampling, Stream
from respec.weights.publish import publish

Path = Literal["native", "torch"]
MakeDrafter = Callable[[], Drafter]
# Batches of one, of a few and of many, each asked for twice what it holds, so that sequences come and go.
BATCHES = (1, 4, 16)
WIDEST = 64
NEW_TOKENS = 32
FIRST_TOKENS = 512
# A first epoch is compared token by token; the second, with numbers of its own, is drawn for the statistics of `rejection`.
SAME, FRESH = 0, 1
PROMPTS = (
    "Question: A train leaves at 9 and arrives at 12. How long does it take?\nAnswer:",
    "one two three four one two three four one two three",
    "The capital of France is",
    "Once upon a time, in a small village by the sea, there lived",
    "def add(a, b):\n    return a + b\n\ndef multiply(a, b):\n    return",
    "3 + 4 - 2 + 9",
    "To make tea, first",
    "She opened the letter. It said: ",
)


def default_drafters() -> dict[str, MakeDrafter]:
    """Those that need nothing but tokens, as eager as they can be: the more drafts, the more is tried."""

    def maker(name: str) -> MakeDrafter:
        config = SpeculationConfig.model_validate({"drafter": name, "min_match": 1, "min_confidence": 0.1})
        return lambda: make_drafters(config)[0]

    return {name: maker(name) for name in ("ngram", "suffix")}


@dataclass(frozen=True)
class Bench:
    """What all checks of one certificate share."""

    policy: Policy
    decoder: Decoder
    reference: Reference
    drafters: Mapping[str, MakeDrafter]
    prompts: tuple[Prompt, ...]
    group: int
    seed: int
    say: Callable[[str], None]

    @property
    def dtype(self) -> torch.dtype:
        return self.decoder.shape.dtype

    @property
    def sampling(self) -> Sampling:
        return Sampling(NEW_TOKENS)

    def samples(self, draw: int) -> Samples:
        short = -(-FIRST_TOKENS // len(self.prompts))
        # their own draws: samples of one prompt and draw have one key each
        return Samples(self.asks(draw, self.group), self.sampling, self.asks(draw + 2, short), Sampling(2))

    def asks(self, draw: int, group: int, prompts: int | None = None) -> tuple[Ask, ...]:
        return tuple(Ask(prompt, Stream.BENCH, draw, group) for prompt in self.prompts[:prompts])

    def engine(
        self, batch: int, drafter: str | None = None, mode: Mode = "matching", history: Sequence[Rollout] = ()
    ) -> CertifiedEngine:
        """Our engine behind the certificate's protocol. The drafter has learned `history` before each rollout, and nothing else."""

        def rollouts(asks: Sequence[Ask], sampling: Sampling, plan: Plan) -> Sequence[Rollout]:
            drafters = [self.drafters[drafter]()] if drafter else []
            for one in drafters:
                one.learn(history)
            running = Engine(
                self.decoder, self.policy.tokenizer, self.policy.eos_token_ids, self.seed, batch, drafters=drafters, mode=mode
            )  # fmt: skip
            return running.rollout(asks, sampling, plan)[0]

        return rollouts


def certify(
    model: str,
    path: Path | None = None,
    drafters: Mapping[str, MakeDrafter] | None = None,
    prompts: Sequence[str] = PROMPTS,
    tokens: int = 4096,
    dtype: str = "auto",
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Certificate:
    """Certifies the rollout engine for `model`: a local folder, a hub id or `builtin:demo`.

    `path` None takes the native kernels where there are any. About `tokens` tokens are drawn for each statistical check. Raises
    ConfigError for a path that this machine has not got, or prompts that cannot be used; ModelError for a model that cannot be loaded.
    """
    began = time.perf_counter()
    with _taking(path):
        say(f"loading {model}")
        policy = load_policy(ModelConfig.model_validate({"path": model, "dtype": dtype}))
        # the reference is transformers' own attention, not ours for packed sequences
        policy.model.set_attn_implementation("sdpa")
        decoder = publish(policy, dtype, 0)
        held = _tokenized(prompts, policy)
        bench = Bench(
            policy, decoder, Reference(policy.model), default_drafters() if drafters is None else drafters, held,
            group=max(2 * max(BATCHES) // len(held), -(-tokens // (NEW_TOKENS * len(held))), 1), seed=seed, say=say,
        )  # fmt: skip
        findings = tuple(_findings(bench))
        native = kernels.supports(
            decoder.shape.dtype, decoder.shape.device, decoder.shape.head_dim, decoder.shape.group
        )
        engine = f"{type(decoder).__name__}, {'native kernels' if native else 'PyTorch kernels'}"
        return Certificate(model, engine, _circumstances(decoder), findings, time.perf_counter() - began)


def _findings(bench: Bench) -> Iterator[Finding]:
    bench.say("b  batches, prefill and rollback of the decoder")
    shape = bench.decoder.shape
    yield from decoder_checks(
        bench.decoder,
        lambda slots, capacity: KVCache(shape, slots, capacity),
        [prompt.token_ids for prompt in bench.prompts],
    )
    bench.say(f"c, d  plain decoding, {len(bench.prompts) * bench.group} completions of {NEW_TOKENS} tokens")
    samples = bench.samples(SAME)
    plain = bench.engine(WIDEST)(samples.asks, samples.sampling, PLAIN)
    short = bench.engine(WIDEST)(samples.short_asks, samples.short, PLAIN)
    temperature = bench.sampling.temperature
    allowed = allowed_mean(bench.reference, plain, temperature, bench.dtype)
    yield from judge_samples("plain decoding", plain, short, temperature, bench.reference, bench.dtype, allowed)
    for name in bench.drafters:
        yield from _same(bench, name, plain)
    for name in bench.drafters:
        bench.say(f"c, d  rejection with {name}")
        engine = bench.engine(WIDEST, name, "rejection", plain)
        yield from certify_sampler(
            f"rejection, {name}", engine, _tree(name), bench.samples(FRESH), bench.reference, bench.dtype, allowed
        )
    yield from _unchecked(bench)


def _same(bench: Bench, name: str, plain: Sequence[Rollout]) -> Iterator[Finding]:
    """Check a for one drafter. It has seen what plain decoding gave for half of the samples: drafts right and wrong."""
    tokenizer: Any = bench.policy.tokenizer
    temperature = bench.sampling.temperature
    explain = Explain(
        lambda known: bench.reference.after(known, temperature), race_margin(bench.seed), tokenizer.decode
    )
    for kind, plan in (("chain", _chain(name)), ("tree", _tree(name))):
        drafted = {}
        for batch in BATCHES:
            bench.say(f"a  {name}, {kind}, batch {batch}")
            prompts = min(len(bench.prompts), max(2, batch))
            asks = bench.asks(SAME, max(1, 2 * batch // prompts), prompts)
            drafted[batch] = bench.engine(batch, name, history=plain[::2])(asks, bench.sampling, plan)
        yield same_tokens(f"{name}, {kind}", plain, drafted, bench.dtype, explain)


def race_margin(seed: int) -> Margin:
    """The lead in the exponential race of `rollout.sampling`, whose arrivals are E_v / p_v: the difference of their logarithms."""

    def margin(
        rollout: Rollout, position: int, logp_V: Float64[np.ndarray, "V"], winner: int, other: int
    ) -> float | None:
        racing = set(np.argsort(-logp_V, kind="stable")[: racers(len(logp_V))].tolist())
        if not {winner, other} <= racing:
            return None
        key = sequence_key(seed, rollout.stream, rollout.draw, rollout.prompt.row, rollout.sample)
        at = token_key(key, np.array([position], np.int64), Lane.TARGET)
        tokens = np.array([winner, other])
        arrival = np.log(-np.log(uniform(at, tokens.astype(np.uint64)))) - logp_V[tokens]
        return float(arrival[1] - arrival[0])

    return margin


def _chain(name: str) -> Plan:
    return Plan(name, 5, 1, 5)


def _tree(name: str) -> Plan:
    return Plan(name, 4, 3, 10)


def _unchecked(bench: Bench) -> Iterator[Finding]:
    """What a user might take to be certified, and is not."""
    there, why = kernels.available()
    if not there:
        yield Finding("native kernels", "this machine", "unchecked", f"not used here: {why}")
    if bench.decoder.shape.device.type != "cuda":
        reason = "no GPU is seen by torch" if not torch.cuda.is_available() else "the model is on the CPU"
        yield Finding("CUDA", "this machine", "unchecked", reason)
    known = [name for name in default_drafters() if name not in bench.drafters]
    if known:
        yield Finding("drafters", ", ".join(known), "unchecked", "not asked for")
    yield Finding(
        "sampling", "top-k, top-p, min-p, stop strings", "unchecked", "all checks draw at temperature 1, untruncated"
    )
    yield Finding(
        "threads", f"other than {torch.get_num_threads()}", "unchecked",
        "bits may depend on the number of threads; runs keep to one number"
    )  # fmt: skip


def _tokenized(prompts: Sequence[str], policy: Policy) -> tuple[Prompt, ...]:
    tokenizer: Any = policy.tokenizer
    held = tuple(Prompt(row, text, tuple(tokenizer(text)["input_ids"])) for row, text in enumerate(prompts))
    if len(held) < 2:
        raise ConfigError(f"a certificate needs two prompts or more, got {len(held)}; give one on each line")
    for prompt in held:
        if not prompt.token_ids:
            raise ConfigError(f"prompt {prompt.row + 1}, {prompt.text!r}, has no tokens; leave it out")
        if len(prompt.token_ids) + NEW_TOKENS > policy.context_length:
            raise ConfigError(
                f"prompt {prompt.row + 1} has {len(prompt.token_ids)} tokens; with {NEW_TOKENS} new ones it does not fit the model's "
                f"context of {policy.context_length}: shorten it"
            )
    return held


@contextmanager
def _taking(path: Path | None) -> Iterator[None]:
    """The native kernels, or PyTorch in their stead, until the block ends."""
    before = os.environ.get("RESPEC_NATIVE")
    if path == "torch":
        os.environ["RESPEC_NATIVE"] = "0"
        kernels._library.cache_clear()
    elif path == "native" and not kernels.available()[0]:
        raise ConfigError(f"the native kernels cannot be used here: {kernels.available()[1]}; take --engine torch")
    try:
        yield
    finally:
        if path == "torch":
            os.environ.pop("RESPEC_NATIVE")
            if before is not None:
                os.environ["RESPEC_NATIVE"] = before
            kernels._library.cache_clear()


def _circumstances(decoder: Decoder) -> dict[str, Any]:
    return {
        "dtype": str(decoder.shape.dtype).removeprefix("torch."), "device": str(decoder.shape.device),
        "threads": torch.get_num_threads(), "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "torch": torch.__version__, "transformers": metadata.version("transformers"),
    }  # fmt: skip
