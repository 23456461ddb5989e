"""The EAGLE-3 head (Li et al. 2025, arXiv 2503.01840): one decoder layer that drafts from three of the target's hidden states.

At position i it reads the target's hidden states there (or its own output of the step before) and the embedding of token i + 1, and
predicts token i + 2. Names of tensors and the configuration are those that vLLM's `LlamaForCausalLMEagle3` and the `speculators` library
load; whatever the target's family, the head is a Llama layer, since that is what they serve.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from respec.errors import ModelError

WEIGHTS, CONFIG = "model.safetensors", "config.json"
WRITTEN_FOR = "0.9.0"  # of the speculators library
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class EagleShape:
    """What an EAGLE-3 head is made like. `layer` has the sizes of its decoder layer, `taps` the target's layers before which it reads.

    `draft_vocabulary` tokens can be drafted. `norm_before_residual`: the residual stream starts from the normed feature, not the raw one.
    `verifier` names the model that it was made for, `verifier_architecture` its class.
    """

    layer: LlamaConfig
    draft_vocabulary: int
    taps: tuple[int, ...]
    norm_before_residual: bool = True
    verifier: str | None = None
    verifier_architecture: str = "LlamaForCausalLM"


class EagleAttention(nn.Module):
    """The projections; how queries meet keys is the caller's."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        dim, heads, kv_heads = int(config.head_dim), int(config.num_attention_heads), int(config.num_key_value_heads)  # pyright: ignore[reportArgumentType]
        self.q_proj = nn.Linear(2 * config.hidden_size, heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, config.hidden_size, bias=False)


class EagleLayer(nn.Module):
    """A Llama layer whose attention reads [norm(embedding) ; norm(feature)]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        eps = float(config.rms_norm_eps)
        self.self_attn = EagleAttention(config)
        self.mlp = LlamaMLP(config)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, eps)


class EagleHead(nn.Module):
    """The trainable head, in the trainer's dtype. The embedding is a frozen copy of the target's.

    `d2t[i]` is what to add to draft token i to get the target's token; `t2d` marks the target's tokens that can be drafted. Both are
    None where all can.
    """

    d2t: Int[Tensor, "draft"] | None
    t2d: Bool[Tensor, "V"] | None

    def __init__(self, shape: EagleShape) -> None:
        super().__init__()
        config, self.shape = shape.layer, shape
        width = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, width)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(len(shape.taps) * width, width, bias=False)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.norm = LlamaRMSNorm(width, float(config.rms_norm_eps))
        self.lm_head = nn.Linear(width, shape.draft_vocabulary, bias=False)
        reduced = shape.draft_vocabulary != config.vocab_size
        self.register_buffer("d2t", torch.zeros(shape.draft_vocabulary, dtype=torch.long) if reduced else None)
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool) if reduced else None)
        self.rotary = LlamaRotaryEmbedding(config)

    @property
    def layer(self) -> EagleLayer:
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    @property
    def draft_token(self) -> Int[Tensor, "draft"]:
        """The target's token of each draft token, ascending."""
        own = torch.arange(self.shape.draft_vocabulary, device=self.lm_head.weight.device)
        return own if self.d2t is None else own + self.d2t

    @property
    def draft_index(self) -> Int[Tensor, "V"]:
        """The draft token of each of the target's tokens; -1 where it has none."""
        index = torch.full((self.shape.layer.vocab_size,), -1, device=self.lm_head.weight.device)
        index[self.draft_token] = torch.arange(self.shape.draft_vocabulary, device=index.device)
        return index

    def rotation(
        self, position: Int[Tensor, "*N"], like: Tensor
    ) -> tuple[Float[Tensor, "*N dim"], Float[Tensor, "*N dim"]]:
        """Cosines and sines of the rotary positions, in the dtype of `like`."""
        return self.rotary(like, position)

    def step(
        self,
        feature: Float[Tensor, "S L hidden"],
        token: Int[Tensor, "S L"],
        rotation: tuple[Float[Tensor, "S L dim"], Float[Tensor, "S L dim"]],
        attend: Attend,
        first: int = 0,
    ) -> Float[Tensor, "S R hidden"]:
        """The next features from these and the tokens after them, for the columns from `first` on.

        `attend` maps rotated q [S, heads, R, dim], k and v [S, kv_heads, L, dim] to their mix [S, R, heads*dim].
        """
        layer, dim = self.layer, int(self.shape.layer.head_dim)  # pyright: ignore[reportArgumentType]
        normed = layer.hidden_norm(feature)
        residual = normed if self.shape.norm_before_residual else feature
        read = torch.cat([layer.input_layernorm(self.embed_tokens(token)), normed], dim=-1)
        projections = (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        q, k, v = (linear(read).unflatten(-1, (-1, dim)).transpose(1, 2) for linear in projections)
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        residual = residual[:, first:] + layer.self_attn.o_proj(attend(q[:, :, first:], k, v))
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    def logits(self, feature: Float[Tensor, "*N hidden"]) -> Float[Tensor, "*N draft"]:
        """Over the draft vocabulary."""
        return self.lm_head(self.norm(feature))


def default_taps(layers: int) -> tuple[int, ...]:
    """The layers before which the head reads: early, middle, late as in the paper's code and vLLM; the last ones of a shallow target."""
    usual = (2, layers // 2, layers - 3)
    return usual if usual[0] < usual[1] < usual[2] else tuple(range(max(0, layers - 3), layers))


def create_head(
    model: PreTrainedModel, draft_tokens: Sequence[int] | None = None, seed: int = 0, verifier: str | None = None
) -> EagleHead:
    """A head for a policy, with random weights (embedding, final norm and language-model head are the policy's own).

    `draft_tokens` are the tokens that can be drafted; None for all. Raises ModelError for one that the policy does not have.
    """
    config: Any = model.config
    vocabulary = config.vocab_size
    drafted = sorted(set(draft_tokens)) if draft_tokens is not None else list(range(vocabulary))
    if not drafted or drafted[0] < 0 or drafted[-1] >= vocabulary:
        raise ModelError(
            f"a draft vocabulary is a choice of the policy's {vocabulary} tokens; got {drafted[:1]}..{drafted[-1:]}"
        )
    layer = LlamaConfig(
        vocab_size=vocabulary, hidden_size=config.hidden_size, intermediate_size=config.intermediate_size, num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings, rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters), bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    architecture = (config.architectures or [type(model).__name__])[0]
    shape = EagleShape(layer, len(drafted), default_taps(config.num_hidden_layers), True, verifier, architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = EagleHead(shape)
    with torch.no_grad():
        chosen = torch.tensor(drafted)
        if head.d2t is not None and head.t2d is not None:
            head.d2t.copy_(chosen - torch.arange(len(drafted)))
            head.t2d[chosen] = True
        head.embed_tokens.weight.copy_(model.get_input_embeddings().weight)  # pyright: ignore[reportArgumentType]
        head.norm.weight.copy_(model.get_parameter("model.norm.weight"))
        head.lm_head.weight.copy_(model.get_parameter("lm_head.weight")[chosen.to(model.device)])
    return head.to(model.device, next(model.parameters()).dtype)


def save_head(head: EagleHead, folder: Path) -> None:
    """Writes `model.safetensors` and `config.json`, for vLLM, the speculators library and `load_head`."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = head.shape
    config = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": WRITTEN_FOR,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": shape.verifier, "architectures": [shape.verifier_architecture]},
        },
        "transformer_layer_config": shape.layer.to_diff_dict(),
        "draft_vocab_size": shape.draft_vocabulary,
        "norm_before_residual": shape.norm_before_residual,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),
        "dtype": str(head.lm_head.weight.dtype).removeprefix("torch."),
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    save_file(
        {name: tensor.contiguous() for name, tensor in head.state_dict().items()}, folder / WEIGHTS, {"format": "pt"}
    )


def load_head(folder: Path, dtype: torch.dtype = torch.float32) -> EagleHead:
    """A head from a folder in the speculators format.

    Raises ModelError for what is not there, is no EAGLE-3 head, lacks tensors, holds numbers that are not finite, or maps draft tokens wrongly.
    """
    if not folder.is_dir():
        raise ModelError(
            f"there is no folder '{folder}' with a drafter; `respec drafter train CONFIG --to {folder}` makes one"
        )
    try:
        config = json.loads((folder / CONFIG).read_text())
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelError(f"'{folder}' holds no drafter that can be read: {error}") from None
    if (
        config.get("speculators_model_type") != "eagle3"
        or config["transformer_layer_config"].get("model_type") != "llama"
    ):
        raise ModelError(
            f"'{folder}' is not an EAGLE-3 head of one Llama layer in the speculators format (see its {CONFIG})"
        )
    layer = LlamaConfig(**config["transformer_layer_config"])
    verifier = config["speculators_config"]["verifier"]
    shape = EagleShape(
        layer, config["draft_vocab_size"], tuple(config.get("eagle_aux_hidden_state_layer_ids") or ()),
        config.get("norm_before_residual", False), verifier.get("name_or_path"), (verifier.get("architectures") or ["?"])[0],
    )  # fmt: skip
    if not shape.taps:
        raise ModelError(
            f"'{folder}' does not say which of the target's layers it reads (eagle_aux_hidden_state_layer_ids)"
        )
    head = EagleHead(shape)
    try:
        head.load_state_dict(tensors)
    except RuntimeError as error:
        raise ModelError(f"the weights in '{folder}' do not fit its {CONFIG}: {error}") from None
    check_head(head, str(folder))
    return head.to(dtype)


def check_head(head: EagleHead, name: str) -> None:
    """Raises ModelError for weights that are not finite, or a vocabulary map that is none."""
    bad = [
        key for key, tensor in head.state_dict().items() if tensor.is_floating_point() and not tensor.isfinite().all()
    ]
    if bad:
        raise ModelError(f"drafter '{name}': {len(bad)} of its tensors are not finite (first: {bad[0]}); train it anew")
    token = head.draft_token
    marked = head.t2d.nonzero().flatten() if head.t2d is not None else token
    if not torch.equal(token, marked):
        raise ModelError(f"drafter '{name}': its two vocabulary maps (d2t, t2d) contradict each other; train it anew")


def check_fits(head: EagleHead, model: PreTrainedModel) -> None:
    """Raises ModelError for a head that was made for another model: of another width, vocabulary or depth."""
    layer, config = head.shape.layer, model.config
    made_for = (layer.hidden_size, layer.vocab_size)
    if made_for != (config.hidden_size, config.vocab_size) or max(head.shape.taps) >= config.num_hidden_layers:
        raise ModelError(
            f"the drafter was made for a model {made_for[0]} wide with {made_for[1]} tokens, reading layers {head.shape.taps}; the policy "
            f"is {config.hidden_size} wide with {config.vocab_size} tokens and {config.num_hidden_layers} layers: train one for it with "
            "`respec drafter train`"
        )
