"""Makes the snapshot that decodes: the lean decoder where model and machine allow, else transformers' own code."""

from __future__ import annotations

import torch

from respec.models import lean_decoder
from respec.models.decoder import Decoder, decode_dtype
from respec.models.hf_decoder import HFDecoder
from respec.models.linear import MakeLinear, PackedLinear
from respec.models.load import Policy
from respec.models.quantized import quantized


def publish(policy: Policy, dtype: str, version: int) -> Decoder:
    """A copy of the policy's weights in the decoding dtype, stamped with its version; an adapter is merged in before they are rounded. `int8`: its
    linear layers at 8 bits, the rest as with `auto`.

    Bit for bit the same for the same weights, dtype and machine. The learner may go on changing its own.
    """
    return _snapshot(policy, dtype, version, quantized if dtype == "int8" else PackedLinear)


def publish_draft(policy: Policy, dtype: str, version: int) -> Decoder:
    """The same with its linear layers at int8, for drafting with the policy's own weights: it decodes on the target's KV cache."""
    return _snapshot(policy, dtype, version, quantized)


def _snapshot(policy: Policy, dtype: str, version: int, linear: MakeLinear) -> Decoder:
    device = policy.model.device
    resolved = decode_dtype(dtype, device)
    if lean_decoder.fits(policy.model, resolved, device):
        return lean_decoder.LeanDecoder(policy.model, resolved, version, linear)
    return HFDecoder(policy.model, resolved, torch.device(device), version, linear)
