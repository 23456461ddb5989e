"""What of a model is trained: all of it, all but frozen weights, or low-rank adapters beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from transformers import PreTrainedModel

from respec.config import LoraConfig, PolicyConfig
from respec.errors import ConfigError
from respec.models.adapted import inject, peft


def choose_trained(model: PreTrainedModel, config: PolicyConfig, seed: int) -> None:
    """Gives the model the adapters of `config.lora`, drawn by `seed`, and takes the gradients of `config.freeze` away; in place.

    Raises ConfigError for a pattern that matches nothing, or when nothing is left to train.
    """
    if config.lora is not None:
        with_lora(model, config.lora, seed)
    freeze(model, config.freeze)


def with_lora(model: PreTrainedModel, config: LoraConfig, seed: int = 0) -> PreTrainedModel:
    """The same model, its weights frozen, with an adapter at each linear layer of `config.targets`: A random, B zero, so that the policy
    is as before (LoRA, arXiv 2106.09685, section 4.1). Raises ConfigError for a target that is none, and without peft.
    """
    head = model.get_output_embeddings()
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]
    targets = matched(config.targets, linear, "policy.lora.targets")
    asked = peft().LoraConfig(
        r=config.r, lora_alpha=config.alpha, lora_dropout=0.0, bias="none", target_modules=targets, use_dora=config.dora,
        task_type="CAUSAL_LM",
    )  # fmt: skip
    with torch.random.fork_rng(), torch.device(model.device):
        torch.manual_seed(seed)
        inject(model, asked)
    return model


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Takes the gradients of the matching weights away. Raises ConfigError for a pattern that matches nothing, or when nothing is left."""
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in matched(patterns, names, "policy.freeze"):
        model.get_parameter(name).requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(f"policy.freeze leaves nothing to train, got {list(patterns)}; leave some weights out of it")


def matched(patterns: Sequence[str], names: Sequence[str], key: str) -> list[str]:
    """The dotted names that a pattern is a run of parts of, so that `layers.1` is not `layers.10`; `*`, `?` and `[..]` are as in a shell.

    Raises ConfigError, with names that there are, for a pattern that matches none.
    """
    found: list[str] = []
    for pattern in patterns:
        hits = [name for name in names if _matches(name, pattern)]
        if not hits:
            raise ConfigError(f"{key}: '{pattern}' matches nothing; there are {', '.join(_few(names))}")
        found += hits
    return list(dict.fromkeys(found))


def _matches(name: str, pattern: str) -> bool:
    return any(fnmatchcase(name, shape) for shape in (pattern, f"*.{pattern}", f"{pattern}.*", f"*.{pattern}.*"))


def _few(names: Iterable[str]) -> list[str]:
    """One name of each kind: numbered layers but for the first are left out."""
    return [name for name in names if not any(part.isdigit() and part != "0" for part in name.split("."))][:16]
