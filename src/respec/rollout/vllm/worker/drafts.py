"""A drafter's weights inside vLLM's own processes: kept apart from the target's, replaced, and held against what was sent.

Linear layers are asked, not read: on a CPU vLLM multiplies by a packed copy and drops the weights that it was made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from vllm.config import set_current_vllm_config  # pyright: ignore
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod  # pyright: ignore
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

# What vLLM stacks into one layer, in its order.
STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
# A checkpoint of a head has no `model.` before its layers' names, vLLM's module has.
PREFIX = "model."
# The language-model head's as well, where a checkpoint has none.
TIED = "model.embed_tokens.weight"
# Of a product's norm, what rounding its entries explains.
ROUNDED = {torch.float32: 1e-4, torch.bfloat16: 2**-7, torch.float16: 2**-9}
UNPACKED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)


def apart(share: Callable[[Any, Any], None], own: str) -> Callable[[Any, Any], None]:
    """vLLM's way to save memory, for heads alone that bring no weights of their own: `own` names the flag that says so.

    As it comes a head whose embedding (or language-model head) equals the target's shares it: what is pushed to either then lands in both.
    """

    def where_there_are_none(self: Any, target: Any) -> None:
        if not getattr(self.model, own, False):
            share(self, target)

    return where_there_are_none


def replace(worker: Any, weights: Mapping[str, torch.Tensor], repack: Callable[[Any], None]) -> None:
    """Puts these in the place of the drafter's. `repack` makes anew what vLLM's reload leaves as it was.

    Raises RuntimeError where there is no drafter with weights, for one that shares them with the target, and where it then computes by others.
    """
    model = worker.get_draft_model()
    if model is None:
        raise RuntimeError("weights of a drafter were sent, and vLLM has none that has any")
    if shared := list(_shared(model, worker.get_model(), weights)):
        raise RuntimeError(f"the drafter's {shared[0]} is the target's own, which what was sent would overwrite")
    with set_current_vllm_config(worker.vllm_config):
        initialize_layerwise_reload(model)
        model.load_weights(iter(weights.items()))
        finalize_layerwise_reload(model, worker.vllm_config.speculative_config.draft_model_config)
    repack(model)
    if wrong := list(unlike(model, weights)):
        raise RuntimeError(f"vLLM was sent a drafter's weights and computes by others in {', '.join(wrong[:3])}")


def _shared(model: Any, target: Any, weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """The parameters that were sent and are the target's as well."""
    theirs = {id(parameter) for parameter in target.parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if id(parameter) in theirs and _sent(name, weights) is not None:
            yield name


@torch.inference_mode()
def unlike(model: Any, weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Layers that answer otherwise than by these weights. Those that are quantized or split over processes, or were not sent, are not asked."""
    for name, module in model.named_modules():
        if isinstance(module, LinearBase | ParallelLMHead):
            tied = weights.get(TIED) if isinstance(module, ParallelLMHead) else None
            held = _sent(f"{name}.weight", weights)
            held = tied if held is None else held
            if held is not None and isinstance(module.quant_method, UNPACKED) and not _answers(module, held):
                yield name
        else:
            for key, parameter in module.named_parameters(recurse=False):
                held = _sent(f"{name}.{key}", weights)
                if held is not None and not _holds(parameter, held):
                    yield f"{name}.{key}"


def _holds(parameter: torch.Tensor, held: torch.Tensor) -> bool:
    """Whether these are its first rows, after which there may be padding; True where it is a part of them."""
    part = len(parameter) < len(held) or parameter.shape[1:] != held.shape[1:]
    return part or torch.equal(parameter[: len(held)].to("cpu", held.dtype), held)


def _answers(module: Any, held: torch.Tensor) -> bool:
    """Whether the layer multiplies a made-up row by `held`; True where it holds a part of it only."""
    device = next(module.parameters()).device
    # the same row every time, and no zeros in it
    row = torch.sin(1.0 + torch.arange(held.shape[1])).to(device, held.dtype)[None]
    width = getattr(module, "input_size_per_partition", getattr(module, "input_size", held.shape[1]))
    if width != held.shape[1]:
        return True
    answer = module.quant_method.apply(module, row, None)[..., : held.shape[0]].float()
    if answer.shape[-1] != held.shape[0]:
        return True
    wanted = row.float() @ held.to(device).float().T
    return float((answer - wanted).norm()) <= ROUNDED[held.dtype] * float(wanted.norm())


def _sent(name: str, weights: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """What was sent for vLLM's parameter `name`, the parts of a stacked one joined; None for nothing."""
    path, _, kind = name.rpartition(".")
    above, _, last = path.rpartition(".")
    whole = [f"{above}.{part}.{kind}" for part in STACKED.get(last, ())] or [name]
    for names in (whole, [part.removeprefix(PREFIX) for part in whole]):
        if all(part in weights for part in names):
            return torch.cat([weights[part] for part in names]) if len(names) > 1 else weights[names[0]]
    return None
