"""The layers that train on a CPU against transformers' modelling code: values, gradients, what is kept of a pass."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from respec.models import grid_attention
from respec.models.grids import layout
from respec.models.lean_pass import lean_pass, switch, takes
from respec.models.packed_attention import packed_pass, use_packed_attention

SIZES = {
    "vocab_size": 31, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "tie_word_embeddings": True,
}  # fmt: skip
FAMILIES = {"llama": LlamaConfig(**SIZES), "qwen2": Qwen2Config(**SIZES), "qwen3": Qwen3Config(**SIZES, head_dim=8)}
# one grid without padding, one with, one of a long sequence alone
LENGTHS = (20, 7, 6, 5, 5, 1)


class Norm(torch.nn.Module):
    """transformers' RMS norm, in the dtype of what it is given: theirs is of float32 even in a float64 model."""

    def __init__(self, of) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = of.weight, of.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


def make(family: str, dtype: torch.dtype = torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(FAMILIES[family], dtype=dtype).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases that a wrong formula would show
                parameter.data = 1.0 * ("norm" in name) + 0.3 * torch.randn_like(parameter)
    for name, module in list(model.named_modules()):
        if dtype == torch.float64 and name.endswith("norm"):
            model.set_submodule(name, Norm(module))
    use_packed_attention(model)
    return model


def passed(model, taps=(), products=None, lean=False):
    generator = torch.Generator().manual_seed(5)
    token_N = torch.randint(31, (sum(LENGTHS),), generator=generator)
    position_N = torch.cat([torch.arange(length) for length in LENGTHS])
    start_S = torch.tensor([0, *LENGTHS]).cumsum(0)
    if lean:
        return lean_pass(model, token_N, position_N, layout(start_S), taps, products)
    return packed_pass(model, token_N, position_N, start_S, taps, products)


def gradients(model, hidden_NE) -> dict[str, torch.Tensor]:
    wave_NE = torch.linspace(-1, 1, hidden_NE.numel(), dtype=hidden_NE.dtype).view_as(hidden_NE).sin()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad((hidden_NE * wave_NE).sum(), list(trained.values()))
    return dict(zip(trained, found, strict=True))


@pytest.mark.parametrize("short", [0, 6, 512])  # all by flash attention; some; none
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_and_gradients_are_those_of_the_modelling_code(
    family: str, again: bool, short: int, monkeypatch
) -> None:
    monkeypatch.setattr(grid_attention, "SHORT", short)
    monkeypatch.setattr(grid_attention, "SCORES", 300)  # several parts of some grids
    model = make(family)
    for layer in model.base_model.layers:
        layer.gradient_checkpointing = again
    assert not takes(model), "a float64 model's norms are of float32 in transformers, and laws compare with them"
    hidden_NE, taps = passed(model, (0, 2), lean=True)
    ours = gradients(model, hidden_NE)
    for layer in model.base_model.layers:
        layer.gradient_checkpointing = False
    expected_NE, expected_taps = passed(model, (0, 2))
    theirs = gradients(model, expected_NE)
    torch.testing.assert_close(hidden_NE, expected_NE, rtol=0, atol=1e-12)
    for mine, other in zip(taps, expected_taps, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
        assert not mine.requires_grad
    assert ours.keys() == theirs.keys() and all(grad.abs().max() > 1e-3 for grad in theirs.values())
    for name, grad in ours.items():
        torch.testing.assert_close(grad, theirs[name], rtol=1e-9, atol=1e-11, msg=name)


def test_frozen_weights_get_no_gradient_and_change_no_other() -> None:
    model = make("qwen2", torch.float32)
    assert takes(model)
    whole = gradients(model, passed(model)[0])
    frozen = [
        name for name, _ in model.named_parameters() if "layers.0" in name or "up_proj" in name or "embed" in name
    ]
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    part = gradients(model, passed(model)[0])
    assert part.keys() == whole.keys() - set(frozen)
    assert all(torch.equal(part[name], whole[name]) for name in part)


def test_products_in_bfloat16_are_as_near_as_autocasts() -> None:
    """Against float32: the relative error of the whole gradient, at most half as much again as that of transformers under autocast."""
    model = make("qwen3", torch.float32)
    exact = gradients(model, passed(model)[0])

    def error() -> float:
        found = gradients(model, passed(model, products=torch.bfloat16)[0])
        assert all(grad.dtype == torch.float32 for grad in found.values())
        off = sum((found[name] - exact[name]).square().sum() for name in exact)
        return float(off / sum(grad.square().sum() for grad in exact.values())) ** 0.5

    ours = error()
    with switch.off():
        theirs = error()
    assert 0.0 < ours < 1.5 * theirs


def test_what_they_would_compute_wrongly_is_left_to_the_modelling_code() -> None:
    model = make("llama", torch.float32)
    assert takes(model, taps=(2,)) and not takes(model, taps=(3,))  # after the last norm
    model.base_model.layers[1].mlp.up_proj = torch.nn.utils.parametrizations.weight_norm(
        model.base_model.layers[1].mlp.up_proj
    )
    assert not takes(model)
