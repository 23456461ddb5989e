"""A tiny model with random weights, and engines to certify on it: a plain sampler that can be made wrong in a stated way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from respec.certify.reference import Reference
from respec.models.load import Policy
from respec.types import Ask, Plan, Prompt, Proposer, Rollout, Sampling, Stream

VOCABULARY = 48
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="session")
def policy() -> Policy:
    words = ["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRS"]
    raw = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    raw.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return Policy(model, tokenizer, (1,), 0, 512)


@pytest.fixture(scope="session")
def reference(policy) -> Reference:
    return Reference(policy.model)


@pytest.fixture(scope="session")
def asks() -> Callable[[int], tuple[Ask, ...]]:
    """Four prompts of different lengths, each to be drawn so many times."""
    rng = np.random.default_rng(5)
    prompts = [Prompt(row, "", tuple(rng.integers(3, VOCABULARY, 3 + 5 * row).tolist())) for row in range(4)]
    return lambda group: tuple(Ask(prompt, Stream.BENCH, 0, group) for prompt in prompts)


@pytest.fixture(scope="session")
def make_completion():
    """A completion of these tokens and log-probabilities, none of them drafted."""

    def make(ask: Ask, sample: int, token_T: np.ndarray, logprob_T: np.ndarray) -> Rollout:
        nought, count = np.zeros(len(token_T), np.float32), np.zeros(len(token_T), np.int32)
        proposer = np.full(len(token_T), Proposer.TARGET, np.uint8)
        return Rollout(
            ask.prompt, ask.stream, ask.draw, sample, token_T, logprob_T.astype(np.float32), nought, nought, count, proposer, count, "", "length"
        )  # fmt: skip

    return make


@pytest.fixture(scope="session")
def make_sampler(policy, make_completion):
    """A `CertifiedEngine` that draws from the model as transformers runs it, its distributions [R, V] passed through `bend`,
    which is told how many tokens of the completions there are. It does not stop at EOS. It records the model's log-probabilities or,
    with `owns_up`, those of what it samples from."""

    def make(bend: Callable[[np.ndarray, int], np.ndarray] = lambda p, place: p, seed: int = 0, owns_up: bool = False):
        def engine(asks: Sequence[Ask], sampling: Sampling, plan: Plan) -> list[Rollout]:
            rng, done = np.random.default_rng(seed), list[Rollout]()
            for ask in asks:
                known = torch.tensor(ask.prompt.token_ids).expand(ask.group, -1)
                logprobs = []
                for place in range(sampling.max_new_tokens):
                    with torch.inference_mode():
                        logits = policy.model(input_ids=known, use_cache=False, logits_to_keep=1).logits[:, -1]
                    p = torch.softmax(logits.double() / sampling.temperature, -1).numpy()
                    bent = bend(p, place)
                    reached = bent.cumsum(1)
                    tokens = (reached < rng.random((ask.group, 1)) * reached[:, -1:]).sum(1)
                    logprobs.append(np.log((bent if owns_up else p)[np.arange(ask.group), tokens]))
                    known = torch.cat([known, torch.from_numpy(tokens)[:, None]], 1)
                token_RT = known[:, len(ask.prompt.token_ids) :].numpy().astype(np.int32)
                for sample, (tokens, logprob) in enumerate(zip(token_RT, np.array(logprobs).T, strict=True)):
                    done.append(make_completion(ask, sample, tokens, logprob))
            return done

        return engine

    return make
