"""Chunked log-probabilities against whole logits of each sequence alone, gradients included."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from respec.errors import ModelError
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


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_and_chunked_equal_whole_and_alone(make_policy, make_samples, chunk: int, temperature: float) -> None:
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
    make_policy, make_samples, chunk: int, temperature: float
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
