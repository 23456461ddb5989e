"""Models with low-rank adapters (LoRA, DoRA; layers and file format of the peft library): what they weigh as a plain model, and their files.

The adapted weights stay as they are beside their adapters. A plain model's weight is merged where it is asked for, one matrix at a time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from respec.errors import ConfigError, ModelError

NAME = "default"  # peft's own name for a model's only adapter
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."  # peft's files name weights as its wrapper does
MAGNITUDE = "lora_magnitude_vector"
LOOKED_AT = 4096


def peft() -> Any:
    """The peft library. Raises ConfigError where it is not installed."""
    try:
        import peft
    except ImportError:
        raise ConfigError(
            "adapters need the peft library, which is not installed: pip install 'respec-rl[lora]'"
        ) from None
    return peft


def is_adapted(model: nn.Module) -> bool:
    return any(_layer_is_adapted(module) for module in model.modules())


def weight_of(linear: nn.Module) -> Float[Tensor, "out in"]:
    """The matrix that a linear layer multiplies by, in the trainer's dtype; a layer without adapter gives its own, not a copy.

    W + alpha / r * B A (LoRA, arXiv 2106.09685, equation 3); for DoRA its rows at the learned magnitudes, m (W + ..) / ||W + ..||
    (arXiv 2402.09353, equation 5).
    """
    if not _layer_is_adapted(linear):
        return linear.get_parameter("weight").detach()
    layer: Any = linear
    with torch.no_grad():
        low_rank = layer.lora_B[NAME].weight @ layer.lora_A[NAME].weight
        merged = layer.base_layer.weight + layer.scaling[NAME] * low_rank
        if NAME in layer.lora_magnitude_vector:
            magnitude = layer.lora_magnitude_vector[NAME].weight
            merged *= (magnitude / torch.linalg.norm(merged, dim=1))[:, None]
    return merged


def plain_state(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Names and weights as of the same model without adapters, these merged in; each is made when it is reached."""
    for name, weight in model.state_dict().items():
        above, found, last = name.partition(".base_layer.")
        if found:
            yield f"{above}.{last}", weight_of(model.get_submodule(above)) if last == "weight" else weight
        elif "lora_" not in name:
            yield name, weight


def adapter_weights(model: PreTrainedModel) -> dict[str, nn.Parameter]:
    """The adapter's weights under the names they have in peft's files; empty for a model without one."""
    named = {name: weight for name, weight in model.named_parameters() if ".lora_" in name}
    return {PREFIX + _filed(name): weight for name, weight in named.items()}


def save_adapter(model: Any, folder: Path, base: str) -> None:
    """Writes the adapter in peft's format; `base` (a folder or a hub id) is what it will be loaded on."""
    config = model.peft_config[NAME]
    local = Path(base).expanduser()
    config.base_model_name_or_path = str(local.resolve()) if local.is_dir() else base
    config.inference_mode = True
    config.save_pretrained(folder)
    tensors = {name: weight.detach().contiguous() for name, weight in adapter_weights(model).items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt", "base": fingerprint(model)})


def load_adapter(model: PreTrainedModel, folder: Path) -> None:
    """Puts the weights of a folder of `save_adapter`, or of peft, into the model's adapter, bit for bit. Raises ModelError if they do not fit."""
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            base = (file.metadata() or {}).get("base")
        saved = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the adapter in '{folder}' cannot be read: {error}") from None
    own = adapter_weights(model)
    odd = [n for n in own if n not in saved or (saved[n].shape, saved[n].dtype) != (own[n].shape, own[n].dtype)]
    odd += [name for name in saved if name not in own]
    if odd:
        raise ModelError(
            f"the adapter in '{folder}' is of other layers, rank or dtype than the model's ({len(odd)} weights, first: {odd[0]})"
        )
    if base not in (None, fingerprint(model)):
        raise ModelError(
            f"the adapter in '{folder}' was trained on other weights than those below it now; load it on its own base model"
        )
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(saved[name])


def read_adapter_config(folder: Path) -> dict[str, Any] | None:
    """What the adapter in a folder says of itself; None where there is none. Raises ModelError for one that is not LoRA alone."""
    if not (folder / CONFIG).is_file():
        return None
    try:
        said = dict(json.loads((folder / CONFIG).read_text()))
    except ValueError as error:
        raise ModelError(f"'{folder / CONFIG}' cannot be read: {error}") from None
    more = [key for key in ("modules_to_save", "layer_replication", "trainable_token_indices") if said.get(key)]
    if said.get("peft_type") != "LORA" or said.get("bias", "none") != "none" or more:
        got = ", ".join([str(said.get("peft_type")), f"bias {said.get('bias')}", *more])
        raise ModelError(
            f"the adapter in '{folder}' is {got}; handled are LoRA and DoRA on linear layers, without biases"
        )
    return said


def merge_folder(model: PreTrainedModel, folder: Path) -> None:
    """Makes a plain model that has the adapter of `folder` in its weights. Raises ModelError if they do not belong together."""
    library = peft()
    config = library.LoraConfig.from_pretrained(str(folder))
    config.lora_dropout = 0.0
    try:
        inject(model, config)
    except ValueError as error:
        raise ModelError(f"the adapter in '{folder}' does not go with its base model: {error}") from None
    load_adapter(model, folder)
    for name, module in list(model.named_modules()):
        if _layer_is_adapted(module):
            plain: Any = module.base_layer
            plain.weight.data = weight_of(module)
            model.set_submodule(name, plain)
    model.requires_grad_(True)
    del model.peft_config  # pyright: ignore[reportAttributeAccessIssue]


def inject(model: PreTrainedModel, config: Any) -> None:
    """Puts peft's layers into the model, in place; only they have gradients then. Raises ValueError for targets that are not linear layers."""
    library = peft()
    library.inject_adapter_in_model(config, model, NAME).train(model.training)
    layers = [m for m in model.modules() if isinstance(m, library.tuners.tuners_utils.BaseTunerLayer)]
    if odd := {type(layer).__name__ for layer in layers if not _layer_is_adapted(layer)}:
        raise ValueError(f"it adapts layers that are not linear ({', '.join(sorted(odd))})")


def fingerprint(model: PreTrainedModel) -> str:
    """Tells the weights below an adapter from others: a hash of shapes and of evenly spread numbers of each matrix."""
    seen = hashlib.sha256()
    for name, weight in model.named_parameters():
        if ".lora_" not in name:
            flat = weight.detach().flatten()
            seen.update(f"{name.replace('.base_layer.', '.')} {tuple(weight.shape)}".encode())
            seen.update(flat[:: max(1, len(flat) // LOOKED_AT)].float().cpu().numpy().tobytes())
    return seen.hexdigest()


def _layer_is_adapted(module: nn.Module) -> bool:
    return hasattr(module, "lora_A") and isinstance(getattr(module, "base_layer", None), nn.Linear)


def _filed(name: str) -> str:
    plain = name.replace(f".{NAME}", "")
    return plain.removesuffix(".weight") if MAGNITUDE in plain else plain
