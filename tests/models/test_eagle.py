"""The EAGLE-3 head on disk: what is written is read again, by us and by the library whose format it is; what is wrong is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from respec.drafter.examples import Example
from respec.drafter.unroll import unroll
from respec.errors import ModelError
from respec.models.eagle import CONFIG, WEIGHTS, EagleHead, create_head, default_taps, load_head, save_head
from respec.models.eagle_check import facts_of
from respec.models.eagle_decoder import EagleDecoder

SIZES = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


def target(family: str = "qwen3") -> PreTrainedModel:
    torch.manual_seed(0)
    extra = {"head_dim": 16} if family == "qwen3" else {}
    return AutoModelForCausalLM.from_config(CONFIGS[family](**SIZES, **extra)).eval()


def same(one: EagleHead, other: EagleHead) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("drafted", [None, range(0, 48, 3)], ids=["whole", "reduced"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_saved_head_is_the_one_loaded(tmp_path: Path, family: str, drafted):
    head = create_head(target(family), drafted)
    save_head(head, tmp_path)
    loaded = load_head(tmp_path)
    assert same(head, loaded) and loaded.shape.taps == (2, 4, 5)
    assert loaded.draft_token.tolist() == list(drafted or range(48))
    if drafted is not None:
        assert loaded.draft_index[[0, 1, 3]].tolist() == [0, -1, 1]


def test_a_head_begins_with_the_policys_embedding_and_head(tmp_path: Path):
    model = target()
    head = create_head(model, [7, 3, 40])
    assert torch.equal(head.lm_head.weight, model.get_parameter("lm_head.weight")[[3, 7, 40]])
    assert torch.equal(head.embed_tokens.weight, model.get_parameter("model.embed_tokens.weight"))
    assert not head.embed_tokens.weight.requires_grad
    assert same(create_head(model, seed=4), create_head(model, seed=4))
    assert not same(create_head(model, seed=4), create_head(model, seed=5))


def test_the_usual_layers_are_tapped_and_the_last_of_a_shallow_target():
    assert default_taps(30) == (2, 15, 27) and default_taps(8) == (2, 4, 5)
    assert default_taps(6) == (3, 4, 5) and default_taps(3) == (0, 1, 2) and default_taps(2) == (0, 1)


def test_what_is_wrong_on_disk_is_refused(tmp_path: Path):
    save_head(create_head(target(), range(10)), tmp_path)
    config, tensors = json.loads((tmp_path / CONFIG).read_text()), load_file(tmp_path / WEIGHTS)

    def refused(match: str, tensors=tensors, **changes) -> None:
        (tmp_path / CONFIG).write_text(json.dumps(config | changes))
        save_file(tensors, tmp_path / WEIGHTS)
        with pytest.raises(ModelError, match=match):
            load_head(tmp_path)

    refused("not an EAGLE-3 head", speculators_model_type="mtp")
    refused("which of the target's layers", eagle_aux_hidden_state_layer_ids=None)
    refused("do not fit", draft_vocab_size=11)
    refused("do not fit", {name: tensor for name, tensor in tensors.items() if name != "fc.weight"})
    refused("not finite", tensors | {"fc.weight": tensors["fc.weight"] * torch.nan})
    refused("contradict", tensors | {"d2t": tensors["d2t"] + 1})
    (tmp_path / WEIGHTS).write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="no drafter that can be read"):
        load_head(tmp_path)
    with pytest.raises(ModelError, match=r"there is no folder .*`respec drafter train"):
        load_head(tmp_path / "nowhere")


def test_a_draft_vocabulary_is_a_part_of_the_policys():
    for tokens in ([], [48], [-1]):
        with pytest.raises(ModelError, match="draft vocabulary"):
            create_head(target(), tokens)


@pytest.mark.parametrize("drafted", [None, range(0, 48, 3)], ids=["whole", "reduced"])
@pytest.mark.parametrize("family", CONFIGS)
def test_the_speculators_library_loads_it_and_drafts_the_same(tmp_path: Path, family: str, drafted):
    eagle3 = pytest.importorskip("speculators.models.eagle3", reason="the speculators library is not installed")
    model = target(family)
    model.save_pretrained(tmp_path / "policy")
    head = create_head(model, drafted, verifier=str(tmp_path / "policy"))
    with torch.no_grad():
        head.layer.mlp.down_proj.weight.mul_(4)
    save_head(head, tmp_path)
    config = eagle3.Eagle3SpeculatorConfig.from_pretrained(tmp_path)
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = eagle3.Eagle3DraftModel.from_pretrained(tmp_path, config=config)
    loaded = theirs.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in head.state_dict().items())
    assert theirs.target_layer_ids == [2, 4, 5]
    tokens, hidden, depths = torch.arange(3, 23), torch.randn(20, 3 * 32), 3
    with torch.no_grad():
        drafts = theirs(
            hidden_states=hidden[None, :-1], input_ids=tokens[None, 1:], document_ids=torch.zeros(1, 19, dtype=torch.long), ttt_steps=depths
        )  # fmt: skip
        ours = unroll(head, [_example(tokens, hidden)], depths, 1.0)
    # their rows are our anchors; the last depths of the last ones reach past the text
    for k, (depth, draft) in enumerate(zip(ours.depths, drafts, strict=True)):
        likeliest = head.draft_index[depth.logq_NB[:, :-1].argmax(dim=1)]
        assert len(likeliest) == 19 - k
        assert torch.equal(likeliest, draft[0, : 19 - k])


def _example(tokens, hidden) -> Example:
    """All of a text behind its first two tokens, judged over the whole vocabulary: log q is then that of every token, in order."""
    count = len(tokens) - 2 + 1
    every = torch.arange(48).repeat(count, 1)
    longer = torch.cat([tokens, tokens[-1:]])
    taps = torch.cat([hidden, hidden[-1:]])
    return Example(longer, taps, 2, every, torch.full((count, 48), 1 / 48))


def test_snapshots_of_a_head_that_learns_share_its_frozen_embedding_until_it_is_written_to(monkeypatch):
    head = create_head(target(), range(0, 48, 3))
    first = EagleDecoder(head, torch.bfloat16)
    with torch.no_grad():
        head.fc.weight.mul_(1.1)
    facts = facts_of(head)
    monkeypatch.setattr("respec.models.eagle_decoder.facts_of", lambda head: pytest.fail("its facts are known"))
    second = EagleDecoder(head, torch.bfloat16, first, facts)
    assert second._embedding is first._embedding and second.facts is facts and second.facts.norm != first.facts.norm
    assert EagleDecoder(head, torch.float32, first, facts)._embedding.dtype == torch.float32
    assert (
        EagleDecoder(create_head(target(), range(0, 48, 3)), torch.bfloat16, first, facts)._embedding
        is not first._embedding
    )
    with torch.no_grad():
        head.embed_tokens.weight.mul_(2.0)
    third = EagleDecoder(head, torch.bfloat16, second, facts)
    assert torch.equal(third._embedding, head.embed_tokens.weight.to(torch.bfloat16))
    assert not torch.equal(third._embedding, second._embedding)
