"""Packed attention: sequences do not see each other, and unpacked calls are transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from respec.errors import ModelError
from respec.models.packed_attention import layout, packed_hidden, use_packed_attention

SHAPE: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, num_key_value_heads=4),
    "llama-yarn": LlamaConfig(
        **SHAPE, num_key_value_heads=1, rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    ),
    "qwen2": Qwen2Config(**SHAPE, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8),
}
# The last is long enough to need a grid of its own.
LENGTHS = (5, 1, 9, 9, 3, 40)


def make(config: PreTrainedConfig, attention: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation=attention).eval()


def packed_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    token_N = torch.randint(0, 31, (sum(LENGTHS),), generator=torch.Generator().manual_seed(0))
    position_N = torch.cat([torch.arange(length) for length in LENGTHS])
    return token_N, position_N, torch.tensor([0, *LENGTHS]).cumsum(0)


@pytest.mark.parametrize("family", sorted(CONFIGS))
def test_packed_equals_each_sequence_alone_with_gradients(family: str) -> None:
    plain, packed = make(CONFIGS[family], "eager"), make(CONFIGS[family], "sdpa")
    use_packed_attention(packed)
    token_N, position_N, start_S = packed_inputs()
    hidden_NE = packed_hidden(packed, token_N, position_N, start_S)
    alone = [plain.base_model(input_ids=part[None], use_cache=False)[0][0] for part in token_N.split(LENGTHS)]
    torch.testing.assert_close(hidden_NE, torch.cat(alone), rtol=0, atol=1e-12)

    weight_NE = torch.randn(hidden_NE.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (weight_NE * hidden_NE).sum().backward()
    (weight_NE * torch.cat(alone)).sum().backward()
    for (name, ours), theirs in zip(packed.base_model.named_parameters(), plain.base_model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


def test_a_sequence_cannot_see_its_neighbours() -> None:
    model = make(CONFIGS["qwen3"], "respec_packed")
    token_N, position_N, start_S = packed_inputs()
    changed = token_N.clone()
    changed[: LENGTHS[0]] = (changed[: LENGTHS[0]] + 1) % 31
    before, after = (packed_hidden(model, tokens, position_N, start_S) for tokens in (token_N, changed))
    assert torch.equal(before[LENGTHS[0] :], after[LENGTHS[0] :])
    assert not torch.equal(before[: LENGTHS[0]], after[: LENGTHS[0]])


def test_unpacked_calls_are_transformers_own() -> None:
    reference: Any = make(CONFIGS["qwen3"], "sdpa")
    ours: Any = make(CONFIGS["qwen3"], "respec_packed")
    tokens = torch.randint(0, 31, (3, 7), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0  # left padding
    with torch.no_grad():
        assert torch.equal(reference(tokens, attention_mask=mask).logits, ours(tokens, attention_mask=mask).logits)
        generated = [m.generate(tokens, max_new_tokens=5, do_sample=False, pad_token_id=0) for m in (reference, ours)]
    assert torch.equal(*generated)


def test_layout_goes_there_and_back() -> None:
    (grid,) = layout(torch.tensor([0, 2, 3, 6]))
    assert (grid.sequences, grid.longest, grid.tokens) == (3, 3, 6)
    assert grid.flat_SL.tolist() == [0, 1, 1, 2, 2, 2, 3, 4, 5]
    assert grid.flat_SL[grid.padded_N].tolist() == list(range(6))


@pytest.mark.parametrize("lengths", [[1500, *[30] * 60], [*range(200, 0, -1)], [3, 900, 3, 900, 3], [1], [7] * 9])
def test_one_long_sequence_does_not_widen_the_others(lengths: list[int]) -> None:
    grids = layout(torch.tensor([0, *lengths]).cumsum(0))
    assert sum(grid.sequences for grid in grids) == len(lengths)
    assert sum(grid.tokens for grid in grids) == sum(lengths)
    for grid in grids:
        assert grid.sequences * grid.longest == len(grid.flat_SL) <= 2 * grid.tokens
        assert grid.flat_SL[grid.padded_N].tolist() == list(range(grid.tokens))


def test_sequences_of_neighbouring_lengths_share_a_grid() -> None:
    assert len(layout(torch.tensor([0, *range(110, 50, -1)]).cumsum(0))) == 1
    assert len(layout(torch.tensor([0, 1500, *[30] * 60]).cumsum(0))) == 2


def test_other_attention_is_refused() -> None:
    with pytest.raises(ModelError, match="attention is 'eager'"):
        packed_hidden(make(CONFIGS["qwen3"], "eager"), *packed_inputs())
