"""Chunked log-probabilities against whole logits of each sequence alone, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from respec.errors import ModelError
from respec.policy import logprobs
from respec.policy.logprobs import token_logprobs, token_pass
from respec.policy.pack import pack


def reference(policy, samples, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Each sequence through the model's own forward pass, unpacked, whole logits, longest sequence first as in packing."""
    logprobs, entropies = [], []
    for sample in sorted(samples, key=lambda s: -len(s.scored.rollout.prompt.token_ids) - len(s.advantage_T)):
        rollout = sample.scored.rollout
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_T.tolist()]])
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(rollout.prompt.token_ids) - 1 : -1]
        table = torch.log_softmax(logits / temperature, dim=-1)
        logprobs.append(table.gather(1, torch.from_numpy(rollout.token_T).long()[:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.fixture(params=[23, 5, 1], ids=["whole", "tiles", "columns"])
def width(request, monkeypatch) -> int:
    """Of a tile of the vocabulary, which has 23 words."""
    monkeypatch.setattr(logprobs, "LEAST_WIDTH", request.param)
    monkeypatch.setattr(logprobs, "TILE", 1)
    return request.param


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_and_chunked_equal_whole_and_alone(
    make_policy, make_samples, chunk: int, temperature: float, width: int
) -> None:
    policy, samples = make_policy(), make_samples([1.0] * 7)
    (batch,) = pack(samples, 10_000, temperature)
    logprob_C, entropy_C = token_logprobs(policy.model, batch, chunk)
    expected_C, expected_entropy_C = reference(policy, samples, temperature)
    torch.testing.assert_close(logprob_C, expected_C, rtol=0, atol=1e-12)
    torch.testing.assert_close(entropy_C, expected_entropy_C.detach(), rtol=0, atol=1e-12)
    assert logprob_C.dtype == torch.float64 and not entropy_C.requires_grad

    weight_C = torch.linspace(-1, 2, len(logprob_C), dtype=torch.float64)
    parameters = list(policy.model.parameters())
    ours = torch.autograd.grad((weight_C * logprob_C).sum(), parameters)
    theirs = torch.autograd.grad((weight_C * expected_C).sum(), parameters)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("chunk", [3, 1000])
def test_no_more_logits_than_a_chunk_of_them_forward_or_backward(
    make_policy, make_samples, widest_logits, chunk: int
) -> None:
    policy = make_policy()
    (batch,) = pack(make_samples([1.0] * 9), 10_000, 1.0)
    assert len(batch.target_C) > 16 + 3
    with widest_logits() as seen:
        token_logprobs(policy.model, batch, chunk)[0].sum().backward()
    assert seen.rows == min(chunk, len(batch.target_C))  # completions only: never the prompts' tokens


def test_temperature_zero_is_read_as_one(make_policy, make_samples) -> None:
    policy, samples = make_policy(torch.float32), make_samples([1.0] * 3)
    greedy, warm = (token_logprobs(policy.model, pack(samples, 999, t)[0], 8)[0] for t in (0.0, 1.0))
    assert torch.equal(greedy, warm) and warm.dtype == torch.float32


def test_a_model_without_packed_attention_is_refused(make_policy, make_samples) -> None:
    model = AutoModelForCausalLM.from_config(make_policy().model.config, attn_implementation="sdpa")
    with pytest.raises(ModelError, match="attention is 'sdpa'"):
        token_logprobs(model, pack(make_samples([1.0]), 99, 1.0)[0], 8)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_entropys_gradient_is_that_of_whole_logits(
    make_policy, make_samples, chunk: int, temperature: float, width: int
) -> None:
    policy, samples = make_policy(), make_samples([1.0] * 7)
    (batch,) = pack(samples, 10_000, temperature)
    logprob_C, entropy_C, _ = token_pass(policy.model, batch, chunk, entropy_gradient=True)
    plain_C = token_logprobs(policy.model, batch, chunk)
    assert torch.equal(logprob_C, plain_C[0]) and torch.equal(entropy_C, plain_C[1])
    expected_C, expected_entropy_C = reference(policy, samples, temperature)
    weight_C = torch.linspace(-1, 2, len(logprob_C), dtype=torch.float64)
    parameters = list(policy.model.parameters())
    ours = torch.autograd.grad((weight_C * entropy_C).sum() + (weight_C.square() * logprob_C).sum(), parameters)
    theirs = torch.autograd.grad(
        (weight_C * expected_entropy_C).sum() + (weight_C.square() * expected_C).sum(), parameters
    )
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11)


def test_the_entropys_gradient_takes_no_more_logits_than_a_chunk(make_policy, make_samples, widest_logits) -> None:
    policy = make_policy()
    (batch,) = pack(make_samples([1.0] * 9), 10_000, 1.0)
    with widest_logits() as seen:
        token_pass(policy.model, batch, 3, entropy_gradient=True)[1].sum().backward()
    assert seen.rows == 3


class Logits(TorchDispatchMode):
    """Notes, as `columns`, the most columns of any tensor with a row for each completion token, hidden states of width 16 aside."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.columns, self._rows = 0, rows

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, torch.Tensor)
                and leaf.ndim == 2
                and leaf.shape[0] == self._rows
                and leaf.shape[1] != 16
            ):
                self.columns = max(self.columns, leaf.shape[1])
        return result


class Shown:
    """A watch without taps."""

    taps = ()

    def __init__(self) -> None:
        self.shown: list[torch.Tensor] = []

    def laws(self, batch, part, logp_cV) -> None:
        self.shown.append(logp_cV.clone())

    def states(self, batch, tap_NE) -> None:
        pass


def test_tiles_together_hold_no_more_logits_than_they_may_and_a_watch_sees_whole_laws(
    make_policy, make_samples, width: int
) -> None:
    policy, watch = make_policy(), Shown()
    (batch,) = pack(make_samples([1.0] * 9), 10_000, 0.7)
    with Logits(len(batch.target_C)) as seen:
        logprob_C, _ = token_logprobs(policy.model, batch, 1000)
        logprob_C.sum().backward()
    assert seen.columns == width
    watched_C, _ = token_logprobs(policy.model, batch, 4, watch)
    law_CV = torch.cat(watch.shown)
    torch.testing.assert_close(law_CV.logsumexp(1), torch.zeros(len(law_CV), dtype=torch.float64), rtol=0, atol=1e-12)
    assert torch.equal(law_CV.gather(1, batch.target_C[:, None])[:, 0], watched_C)
