"""Loads a causal language model to be trained, or says why it cannot be."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from respec.config import ModelConfig
from respec.errors import ModelError
from respec.models import hub
from respec.models.adapted import merge_folder, read_adapter_config
from respec.models.packed_attention import PACKED

FAMILIES = ("llama", "qwen2", "qwen3")
# Those whose rotary frequencies do not depend on the length of what has been read so far.
STATIC_ROPE = ("default", "linear", "llama3", "yarn")
BUILTIN = "builtin:demo"


@dataclass(frozen=True)
class Policy:
    """The model being trained, with what is needed to talk to it. Made by `load_policy`, read by the engine and the learner.

    `model` holds the trainer's weights (float32, or float64) and is in eval mode: dropout would make the old policy a
    different one in each pass. `eos_token_ids` end a completion; `context_length` is in tokens. `source` is what it was loaded from.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    context_length: int
    source: str = ""


def load_policy(config: ModelConfig, own_dtype: str | None = None) -> Policy:
    """Loads a local folder, a hub id, or `builtin:demo`, for training with packed attention. A folder with an adapter in peft's format is
    loaded with its base model, and merged in the training dtype.

    For training weights are float32, or float64 where the configuration's dtype is. A model that is only asked may keep its `own_dtype`:
    a dtype's name, or `auto`, as it was saved.

    Raises ModelError, with the reason, for what is not there, has no tokenizer or no EOS token, is of another family, or uses
    what the engine cannot keep exact: sliding windows, quantized weights, rotary frequencies that change with the length.
    """
    adapter = Path(config.path).expanduser()
    if (said := read_adapter_config(adapter)) is not None:
        base = load_policy(config.model_copy(update={"path": str(said.get("base_model_name_or_path"))}))
        merge_folder(base.model, adapter)
        return base
    source = _source(config.path)
    shared = {"trust_remote_code": config.trust_remote_code, "local_files_only": _stays_here(source)}
    try:
        hf_config = AutoConfig.from_pretrained(source, **shared)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(_unreadable(config.path, error)) from None
    refuse(hf_config, config.path)
    tokenizer = _tokenizer(config, source)
    dtype = own_dtype or ("float64" if config.dtype == "float64" else "float32")
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, config=hf_config, dtype=dtype, attn_implementation=PACKED, output_loading_info=True, **shared
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ModelError(f"the weights of '{config.path}' cannot be loaded: {_first_line(error)}") from None
    model, report = loaded
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ModelError(
            f"'{config.path}' lacks {len(missing)} of the model's weights (first: {missing[0]}), which would start at random; "
            "take a complete checkpoint"
        )
    if len(tokenizer) > model.config.vocab_size:
        raise ModelError(
            f"'{config.path}': the tokenizer knows {len(tokenizer)} tokens, the model only {model.config.vocab_size}; "
            "they do not belong together"
        )
    eos = _eos(model, tokenizer, config.path)
    pad: Any = tokenizer.pad_token_id
    return Policy(
        model=model.to(_device(config.device)).eval(),
        tokenizer=tokenizer,
        eos_token_ids=eos,
        pad_token_id=eos[0] if pad is None else pad,
        context_length=model.config.max_position_embeddings,
        source=config.path,
    )


def refuse(hf_config: Any, path: str) -> None:
    """Raises ModelError if a model with this transformers configuration cannot be handled; returns nothing otherwise."""
    if hf_config.model_type not in FAMILIES:
        raise ModelError(f"'{path}' is of family '{hf_config.model_type}'; handled are {', '.join(FAMILIES)}")
    if getattr(hf_config, "quantization_config", None):
        raise ModelError(f"'{path}' is a quantized checkpoint, which cannot be trained; take the unquantized one")
    if "sliding_attention" in (getattr(hf_config, "layer_types", None) or ()):
        raise ModelError(
            f"'{path}' uses sliding-window attention in some layers, which is not handled; if its context is not needed beyond "
            "the window, set use_sliding_window to false in its config.json"
        )
    rope = (getattr(hf_config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in STATIC_ROPE:
        raise ModelError(
            f"'{path}' scales its rotary positions by '{rope}', so that a token's key depends on the length of what follows; "
            f"handled are {', '.join(STATIC_ROPE)}"
        )


def _source(path: str) -> str:
    if path.startswith("builtin:"):
        folder = Path(__file__).parent / path.removeprefix("builtin:")
        if path != BUILTIN or not folder.is_dir():
            raise ModelError(f"model.path: there is no built-in model '{path}' in this installation (known: {BUILTIN})")
        return str(folder)
    found = hub.folder(path)
    if found is not None:
        return str(found)
    if not hub.is_id(path):
        raise ModelError(f"model.path: there is no folder '{path}', and it is not a hub id (like 'owner/name')")
    return path


def _stays_here(source: str) -> bool:
    """Whether the hub is not to be asked: for a folder, and where it does not answer. What was fetched before is found all the same."""
    return hub.folder(source) is not None or not hub.reachable()


def _unreadable(path: str, error: Exception) -> str:
    if hub.folder(path) is not None or path == BUILTIN:
        return f"the folder '{path}' holds no model transformers can read: {_first_line(error)}"
    hint = "; `respec fetch smollm2` makes that folder" if Path(path) == Path("models/smollm2") else ""
    if not hub.reachable():
        return f"there is no folder '{path}'{hint}; the hub cannot be reached, and no model of that id was fetched from it before"
    return f"there is no folder '{path}'{hint}, and it could not be fetched from the hub either: {_first_line(error)}"


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _tokenizer(config: ModelConfig, source: str) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, trust_remote_code=config.trust_remote_code, local_files_only=_stays_here(source)
        )
    except Exception as error:  # the tokenizer backends raise kinds of their own for a missing or broken file
        raise ModelError(f"'{config.path}' has no tokenizer that can be loaded: {_first_line(error)}") from None
    # Without its files, transformers makes some families an empty tokenizer of their usual special tokens.
    if len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelError(
            f"'{config.path}' has no tokenizer that can be loaded: there is no vocabulary beside the model"
        )
    return tokenizer


def _eos(model: PreTrainedModel, tokenizer: Any, path: str) -> tuple[int, ...]:
    """What generation config or tokenizer call EOS, ascending: chat models often end a turn by another than the base's."""
    declared: Any = model.generation_config.eos_token_id if model.generation_config is not None else None
    found = {*(declared if isinstance(declared, list | tuple) else [declared]), tokenizer.eos_token_id}
    eos = tuple(sorted(token for token in found if token is not None))
    if not eos:
        raise ModelError(
            f"'{path}' has no EOS token, so no completion would ever end; set it in its generation_config.json"
        )
    return eos


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ModelError("model.device is 'cuda', but this machine or this torch has no CUDA; use 'auto' or 'cpu'")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)
