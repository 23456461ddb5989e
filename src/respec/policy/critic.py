"""The critic: a transformer's body and a line on its last hidden state, which says what reward a completion is still to get."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from importlib.util import find_spec

import torch
from jaxtyping import Float
from torch import nn
from transformers import PreTrainedModel

from respec.config import CriticConfig
from respec.errors import ConfigError
from respec.models.packed_attention import packed_hidden
from respec.types import Batch

ADAPTER = "critic"


class Critic(nn.Module):
    """The value of each state along a completion: of what has been read up to a token, that token included.

    The line begins at zero, so a new critic expects nothing anywhere, whatever the scale of rewards.
    """

    def __init__(self, body: PreTrainedModel):
        super().__init__()
        self.body = body
        weight = next(body.parameters())
        # made without memory first: what nn.Linear draws for its weights would come from the process's random numbers
        line = nn.Linear(body.config.hidden_size, 1, dtype=weight.dtype, device="meta")
        self.line = line.to_empty(device=weight.device)
        nn.init.zeros_(self.line.weight)
        nn.init.zeros_(self.line.bias)

    def forward(self, batch: Batch) -> Float[torch.Tensor, "N"]:
        """A value for each of the batch's tokens, prompts included."""
        hidden_NE = packed_hidden(self.body, batch.token_N, batch.position_N, batch.start_S)
        return self.line(hidden_NE)[:, 0]


def separate(model: PreTrainedModel, config: CriticConfig, seed: int) -> Critic:
    """A critic of its own weights, which begin as the policy's: once more the model, and its optimizer."""
    return Critic(copy.deepcopy(_body(model)).requires_grad_(True))


def lora(model: PreTrainedModel, config: CriticConfig, seed: int) -> Critic:
    """A critic that reads the policy's own weights, as they move, through low-rank adapters of its own (LoRA, arXiv 2106.09685).

    The weights are shared, not copied, and get no gradient from the critic; of a policy that is itself adapted, they are those below its
    adapter. Raises ConfigError where peft is not installed.
    """
    if find_spec("peft") is None:
        raise ConfigError(
            "critic.kind is 'lora', which needs the package peft, and it is not installed; `pip install peft`, or set critic.kind to 'separate'"
        )
    peft = importlib.import_module("peft")
    body = _body(model)
    shared = [*body.parameters(), *body.buffers()]
    # a parameter of the same memory, so that freezing it here does not freeze the policy's
    alias = {id(t): nn.Parameter(t.detach(), False) if isinstance(t, nn.Parameter) else t for t in shared}
    view = copy.deepcopy(body, alias)
    adapter = peft.LoraConfig(
        r=config.lora_rank, lora_alpha=config.lora_alpha, lora_dropout=0.0, target_modules="all-linear"
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(adapter, view, adapter_name=ADAPTER)
    # also where the policy has an adapter of its own, which is the policy's to train
    for name, parameter in view.named_parameters():
        parameter.requires_grad_(f".{ADAPTER}." in name)
    return Critic(view).eval()


def _body(model: PreTrainedModel) -> PreTrainedModel:
    """The model without its head over the vocabulary."""
    return model.base_model  # type: ignore[return-value]


KINDS: dict[str, Callable[[PreTrainedModel, CriticConfig, int], Critic]] = {"separate": separate, "lora": lora}
