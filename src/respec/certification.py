"""The certificate of our own engine: a user's model on a user's machine, put through the checks of `certify`."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64

from respec.certify.decoder import decoder_checks
from respec.certify.finding import Certificate, Finding
from respec.certify.honesty import allowed_mean
from respec.certify.prompts import PROMPTS, tokenized
from respec.certify.protocol import ROUNDING, CertifiedEngine, Margin
from respec.certify.reference import Reference
from respec.certify.same_tokens import Explain, same_tokens
from respec.certify.sampler import Samples, certify_sampler, judge_samples
from respec.config import ModelConfig, SpeculationConfig
from respec.drafting import MAKERS, make_drafters
from respec.errors import ConfigError
from respec.models import kernels
from respec.models.decoder import Decoder
from respec.models.load import Policy, load_policy
from respec.rollout.draft.protocol import Drafter
from respec.rollout.engine import Engine
from respec.rollout.kv_cache import KVCache
from respec.rollout.randomness import Lane, sequence_key, token_key, uniform
from respec.rollout.sampling import racers
from respec.types import PLAIN, Ask, Mode, Plan, Prompt, Rollout, Sampling, Stream
from respec.weights.publish import publish

ENGINES = ("native", "torch")
# From the policy and the decoding dtype, as it is configured.
MakeDrafter = Callable[[Policy, str], Drafter]
# Batches of one, of a few and of many, each asked for twice what it holds, so that sequences come and go.
BATCHES = (1, 4, 16)
WIDEST = 64
NEW_TOKENS = 32
FIRST_TOKENS, FIRST_PROMPTS = 512, 8
MOST_PROMPTS = 64
# A first epoch is compared token by token; the second, with numbers of its own, is drawn for the statistics of `rejection`.
SAME, FRESH = 0, 1


def default_drafters(head: Path | None = None, draft_model: str = "") -> dict[str, MakeDrafter]:
    """Every drafter that can be made: `eagle` where there is a `head` for it, `model` where there is a `draft_model`.

    The one that looks histories up is more eager than it is by default: the more drafts, the more is tried.
    """

    def maker(name: str) -> MakeDrafter:
        config = SpeculationConfig.model_validate(
            {"drafter": name, "min_confidence": 0.1, "drafter_path": head, "draft_model": draft_model}
        )
        return lambda policy, dtype: make_drafters(config, policy, dtype)[0]

    lacking = {"eagle": head is None, "model": not draft_model}
    return {name: maker(name) for name in MAKERS if not lacking.get(name)}


@dataclass(frozen=True)
class Bench:
    """What all checks of one certificate share."""

    policy: Policy
    decoder: Decoder
    reference: Reference
    drafters: Mapping[str, Drafter]
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
        few = min(len(self.prompts), FIRST_PROMPTS)
        # the short ones have draws, and so keys, of their own
        short = self.asks(draw + 2, FIRST_TOKENS // few, few)
        return Samples(self.asks(draw, self.group), self.sampling, short, Sampling(2))

    def asks(self, draw: int, group: int, prompts: int | None = None) -> tuple[Ask, ...]:
        return tuple(Ask(prompt, Stream.BENCH, draw, group) for prompt in self.prompts[:prompts])

    def engine(self, batch: int, drafter: str | None = None, mode: Mode = "matching") -> CertifiedEngine:
        """Our engine behind the certificate's protocol, with one drafter or none."""
        held = [self.drafters[drafter]] if drafter else []
        running = Engine(
            self.decoder, self.policy.tokenizer, self.policy.eos_token_ids, self.seed, batch, drafters=held, mode=mode
        )  # fmt: skip
        return lambda asks, sampling, plan: running.rollout(asks, sampling, plan)[0]

    def learn(self, rollouts: Sequence[Rollout]) -> None:
        for drafter in self.drafters.values():
            drafter.learn(rollouts)


def certify(
    model: str,
    engine: str | None = None,
    drafters: Mapping[str, MakeDrafter] | None = None,
    prompts: Sequence[str] = PROMPTS,
    tokens: int = 2048,
    dtype: str = "auto",
    seed: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Certificate:
    """Certifies the rollout engine for `model`: a local folder, a hub id or `builtin:demo`.

    `engine` is `native` or `torch`; None takes the native kernels where there are any. About `tokens` tokens are drawn for each
    statistical check, fewer where completions end early. Raises ConfigError for an engine that this machine has not got, prompts or a dtype
    that cannot be used; ModelError for a model that cannot be loaded.
    """
    began = time.perf_counter()
    with _kernels_of(engine):
        say(f"loading {model}")
        policy = load_policy(ModelConfig.model_validate({"path": model, "dtype": dtype}))
        # the reference is transformers' own attention, not ours for packed sequences
        policy.model.set_attn_implementation("sdpa")
        decoder = publish(policy, dtype, 0)
        if decoder.shape.dtype not in ROUNDING:
            raise ConfigError(f"a certificate is for bfloat16 or float32, which engines decode in, not for '{dtype}'")
        if len(prompts) > MOST_PROMPTS:
            say(f"the first {MOST_PROMPTS} of {len(prompts)} prompts are taken")
        held = tokenized(prompts[:MOST_PROMPTS], policy, NEW_TOKENS)
        compared = max(_compared(batch, len(held))[1] for batch in BATCHES)
        makers = default_drafters() if drafters is None else drafters
        made = {name: make(policy, dtype) for name, make in makers.items()}
        bench = Bench(
            policy, decoder, Reference(policy.model), made, held,
            group=max(compared, -(-tokens // (NEW_TOKENS * len(held)))), seed=seed, say=say,
        )  # fmt: skip
        findings = tuple(_findings(bench))
        native = kernels.supports(
            decoder.shape.dtype, decoder.shape.device, decoder.shape.head_dim, decoder.shape.group
        )
        used = f"{type(decoder).__name__}, {'native kernels' if native else 'PyTorch kernels'}"
        return Certificate(model, used, _circumstances(decoder), findings, time.perf_counter() - began)


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
    # of half of the samples the drafters know what will be drawn: drafts right and wrong
    bench.learn(plain[::2])
    for name in bench.drafters:
        yield from _same(bench, name, plain)
    bench.learn(plain[1::2])
    for name in bench.drafters:
        bench.say(f"c, d  rejection with {name}")
        engine = bench.engine(WIDEST, name, "rejection")
        yield from certify_sampler(
            f"rejection, {name}", engine, _tree(name), bench.samples(FRESH), bench.reference, bench.dtype, allowed
        )
    yield from _unchecked(bench)


def _same(bench: Bench, name: str, plain: Sequence[Rollout]) -> Iterator[Finding]:
    """Check a for one drafter."""
    tokenizer: Any = bench.policy.tokenizer
    temperature = bench.sampling.temperature
    explain = Explain(
        lambda known: bench.reference.after(known, temperature), race_margin(bench.seed), tokenizer.decode
    )
    for kind, plan in (("chain", _chain(name)), ("tree", _tree(name))):
        drafted = {}
        for batch in BATCHES:
            bench.say(f"a  {name}, {kind}, batch {batch}")
            prompts, group = _compared(batch, len(bench.prompts))
            asks = bench.asks(SAME, group, prompts)
            drafted[batch] = bench.engine(batch, name)(asks, bench.sampling, plan)
        yield same_tokens(f"{name}, {kind}", plain, drafted, bench.dtype, explain)


def _compared(batch: int, prompts: int) -> tuple[int, int]:
    """How many prompts, and how often each, fill a batch twice."""
    few = min(prompts, max(2, batch))
    return few, -(-2 * batch // few)


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
    absent = [name for name in MAKERS if name not in bench.drafters]
    if absent:
        reason = "not asked for, or (eagle, model) no head or small model was given"
        yield Finding("drafters", ", ".join(absent), "unchecked", reason)
    yield Finding(
        "mode lossy", "speculation.mode", "unchecked",
        "lossy by design: what follows an old answer has neither plain decoding's tokens nor their distribution; it cannot be certified",
    )  # fmt: skip
    yield Finding(
        "sampling", "top-k, top-p, min-p, stop strings", "unchecked", "all checks draw at temperature 1, untruncated"
    )
    yield Finding(
        "threads", f"other than {torch.get_num_threads()}", "unchecked",
        "bits may depend on the number of threads; runs keep to one number"
    )  # fmt: skip


@contextmanager
def _kernels_of(engine: str | None) -> Iterator[None]:
    """The native kernels, or PyTorch in their stead, until the block ends."""
    if engine is not None and engine not in ENGINES:
        raise ConfigError(f"--engine takes {' or '.join(ENGINES)}, got '{engine}'")
    if engine == "native" and not kernels.available()[0]:
        raise ConfigError(f"the native kernels cannot be used here: {kernels.available()[1]}; take --engine torch")
    if engine != "torch":
        yield
        return
    with kernels.switch.off():
        yield


def _circumstances(decoder: Decoder) -> dict[str, Any]:
    return {
        "dtype": str(decoder.shape.dtype).removeprefix("torch."), "device": str(decoder.shape.device),
        "threads": torch.get_num_threads(), "machine": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(), "torch": torch.__version__, "transformers": metadata.version("transformers"),
    }  # fmt: skip
