"""Gradients added in place are those that autograd adds up, and nothing of a matrix's size is made beside them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, LlamaConfig

from respec.models.gradients import added_in_place, begin
from respec.models.lean_pass import takes
from respec.models.packed_attention import packed_pass, use_packed_attention

SIZES = {
    "vocab_size": 37, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.3, "tie_word_embeddings": True,
}  # fmt: skip
MATRICES = {(37, 24), (24, 24), (12, 24), (40, 24), (24, 40)}


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        made = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    use_packed_attention(made)
    assert takes(made)
    return made


def learn(model, seed: int, products: torch.dtype | None = None) -> None:
    """A forward and backward pass over two sequences, with tokens that come more than once, and the tied head's share."""
    generator = torch.Generator().manual_seed(seed)
    token_N = torch.randint(37, (31,), generator=generator)
    position_N = torch.cat([torch.arange(19), torch.arange(12)])
    hidden_NE, _ = packed_pass(model, token_N, position_N, torch.tensor([0, 19, 31]), products=products)
    (hidden_NE.sin() * torch.linspace(-1, 1, 24)).sum().backward()


def gradients(model) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("products", [None, torch.bfloat16])
@pytest.mark.parametrize("laid", [False, True])
def test_they_are_those_that_autograd_adds_up(model, products: torch.dtype | None, laid: bool) -> None:
    model.base_model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    learn(model, 1, products)
    learn(model, 2, products)
    expected = gradients(model)
    model.zero_grad()
    if laid:
        begin(model.parameters())
    with added_in_place():
        learn(model, 1, products)
        learn(model, 2, products)
    found = gradients(model)
    assert found.keys() == expected.keys() and "model.layers.0.mlp.up_proj.weight" not in found
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=name)


class Made(TorchDispatchMode):
    """Counts the tensors of a matrix's shape that operations make, in memory of their own."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.count, self._known = 0, {tensor.untyped_storage().data_ptr() for tensor in known}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and tuple(leaf.shape) in MATRICES:
                self.count += leaf.untyped_storage().data_ptr() not in self._known
        return result


def test_nothing_of_a_matrixs_size_is_made_beside_them(model) -> None:
    counts = []
    for inside in (False, True):
        model.zero_grad()
        begin(model.parameters())
        known = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
        made = Made(known)
        if inside:
            with added_in_place(), made:
                learn(model, 1)
        else:
            with made:
                learn(model, 1)
        counts.append(made.count)
    assert counts[0] >= 15 and counts[1] == 0  # seven matrices a layer, and the embedding


def test_they_lie_in_one_piece_of_memory_that_goes_with_the_last(model) -> None:
    begin(model.parameters())
    matrices = [p for p in model.parameters() if p.ndim > 1]
    grads = [p.grad for p in matrices]
    pieces = {grad.untyped_storage().data_ptr() for grad in grads if grad is not None}
    assert len(pieces) == 1 and len(grads) == len(matrices)
    assert all(grad is not None and not grad.any() and grad.data_ptr() % 64 == 0 for grad in grads)
    assert all(p.grad is None for p in model.parameters() if p.ndim == 1)
    kept = weakref.ref(grads[0].untyped_storage())
    before = grads[1].clone() if grads[1] is not None else None
    begin(model.parameters())  # those that have one keep it
    assert matrices[1].grad is grads[1] and before is not None
    model.zero_grad()
    grads.clear()
    gc.collect()
    assert kept() is None


def test_outside_autograd_is_told_as_ever(model) -> None:
    hidden_NE, _ = packed_pass(model, torch.arange(9), torch.arange(9), torch.tensor([0, 9]))
    weights = list(model.parameters())
    with added_in_place():  # of the forward pass it is asked, not of the backward pass
        found = torch.autograd.grad(hidden_NE.sin().sum(), weights)
    assert len(found) == len(weights) and all(p.grad is None for p in weights)
