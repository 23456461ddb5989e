"""What a drafter inside vLLM computes by is held against what was sent, without vLLM: with layers that have its names."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from respec.rollout.vllm.process import SCRIPT


class Method:
    """Multiplies by what the layer has packed."""

    def apply(self, layer: Any, x: torch.Tensor, bias: None) -> torch.Tensor:
        return x @ layer.packed.T


class Linear(nn.Module):
    """As vLLM's on a CPU: its weight is gone once it is packed."""

    def __init__(self, packed: torch.Tensor) -> None:
        super().__init__()
        self.packed, self.input_size, self.quant_method = packed, packed.shape[1], Method()
        self.weight = nn.Parameter(torch.empty(0))


class Head(Linear):
    """The language-model head."""


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The worker's file, over a package that has what it imports of vLLM."""
    names = {
        "vllm": {}, "vllm.config": {"set_current_vllm_config": None},
        "vllm.model_executor": {}, "vllm.model_executor.layers": {}, "vllm.model_executor.model_loader": {},
        "vllm.model_executor.layers.linear": {"LinearBase": Linear, "UnquantizedLinearMethod": Method},
        "vllm.model_executor.layers.vocab_parallel_embedding": {"ParallelLMHead": Head, "UnquantizedEmbeddingMethod": Method},
        "vllm.model_executor.model_loader.reload": {"finalize_layerwise_reload": None, "initialize_layerwise_reload": None},
    }  # fmt: skip
    for name, has in names.items():
        module = ModuleType(name)
        module.__dict__.update(has)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(sys, "path", [str(SCRIPT.parent), *sys.path])
    monkeypatch.delitem(sys.modules, "drafts", raising=False)
    yield importlib.import_module("drafts")
    sys.modules.pop("drafts", None)


WIDE = torch.arange(12.0).view(4, 3).sin()
PARTS = {name: (1.0 + i) * WIDE.cos() for i, name in enumerate(("q_proj", "k_proj", "v_proj"))}


def model(qkv: torch.Tensor, head: torch.Tensor, norm: torch.Tensor) -> nn.Module:
    attention = nn.ModuleDict({"qkv_proj": Linear(qkv)})
    inner = nn.ModuleDict({"self_attn": attention, "norm": nn.ParameterDict({"weight": nn.Parameter(norm)})})
    return nn.ModuleDict({"model": inner, "lm_head": Head(head)})


SENT = {f"self_attn.{name}.weight": weight for name, weight in PARTS.items()} | {
    "lm_head.weight": WIDE, "norm.weight": torch.ones(3)
}  # fmt: skip
QKV = torch.cat(list(PARTS.values()))


def test_a_drafter_that_holds_what_was_sent_is_found_to_whether_or_not_it_says_model(drafts):
    held = model(QKV, WIDE, torch.ones(3))
    assert not list(drafts.unlike(held, SENT))
    assert not list(drafts.unlike(held, {f"model.{name}".replace("model.lm", "lm"): w for name, w in SENT.items()}))


def test_what_was_left_as_it_was_is_named_packed_stacked_and_plain(drafts):
    stale = torch.cat([PARTS["q_proj"], PARTS["k_proj"], PARTS["v_proj"] * 1.02])
    assert list(drafts.unlike(model(stale, WIDE, torch.ones(3)), SENT)) == ["model.self_attn.qkv_proj"]
    assert list(drafts.unlike(model(QKV, WIDE * 0.98, torch.ones(3)), SENT)) == ["lm_head"]
    assert list(drafts.unlike(model(QKV, WIDE, torch.full((3,), 1.01)), SENT)) == ["model.norm.weight"]


def test_a_head_that_is_tied_is_held_against_the_embedding(drafts):
    tied = {"model.embed_tokens.weight": WIDE}
    assert not list(drafts.unlike(model(QKV, WIDE, torch.ones(3)), tied))
    assert list(drafts.unlike(model(QKV, WIDE * 1.1, torch.ones(3)), tied)) == ["lm_head"]


def test_parts_of_a_split_layer_and_rows_of_padding_are_not_taken_for_wrong(drafts):
    assert not list(drafts.unlike(model(QKV[:5], WIDE[:2], torch.ones(2)), SENT))
    padded = torch.cat([WIDE, torch.zeros(4, 3)])
    assert not list(drafts.unlike(model(QKV, padded, torch.ones(3)), SENT))


def test_bfloat16_may_round_and_no_more(drafts):
    low = {name: weight.bfloat16() for name, weight in SENT.items()}
    held = model(QKV.bfloat16(), WIDE.bfloat16(), torch.ones(3, dtype=torch.bfloat16))
    assert not list(drafts.unlike(held, low))
    held.lm_head.packed *= 1.05  # pyright: ignore
    assert list(drafts.unlike(held, low)) == ["lm_head"]


def test_only_heads_without_weights_of_their_own_share_the_targets(drafts):
    shared = []
    share = drafts.apart(lambda proposer, target: shared.append(target), "has_own_embed_tokens")
    share(SimpleNamespace(model=SimpleNamespace(has_own_embed_tokens=True)), "target")
    assert not shared
    share(SimpleNamespace(model=SimpleNamespace(has_own_embed_tokens=False)), "target")
    assert shared == ["target"]


def test_a_parameter_that_is_the_targets_too_is_not_written_over(drafts):
    drafter = model(QKV, WIDE, torch.ones(3))
    worker = SimpleNamespace(get_draft_model=lambda: drafter, get_model=lambda: drafter)
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight is the target's own"):
        drafts.replace(worker, {"norm.weight": torch.ones(3)}, lambda model: None)
    with pytest.raises(RuntimeError, match="vLLM has none"):
        drafts.replace(SimpleNamespace(get_draft_model=lambda: None), SENT, lambda model: None)
