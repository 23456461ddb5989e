"""Makes the configured drafters for a policy: what each of them needs comes from different rooms."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from respec.config import ModelConfig, SpeculationConfig
from respec.models.decoder import decode_dtype
from respec.models.eagle import EagleHead, check_fits, load_head
from respec.models.load import Policy, load_policy
from respec.rollout.draft.eagle import EagleDrafter
from respec.rollout.draft.model import ModelDrafter
from respec.rollout.draft.ngram import NgramDrafter
from respec.rollout.draft.previous import PreviousDrafter
from respec.rollout.draft.protocol import Drafter
from respec.rollout.draft.self_quant import SelfQuantDrafter
from respec.rollout.draft.suffix import SuffixDrafter
from respec.rollout.lenient import Lenience
from respec.weights.publish import publish, publish_draft


def make_drafters(config: SpeculationConfig, policy: Policy, dtype: str, version: int = 0) -> tuple[Drafter, ...]:
    """The configured drafters, new; none for plain decoding. `dtype` and `version` are those of the policy's decoding snapshot.

    Raises ModelError for a head or a model that does not fit the policy.
    """
    return tuple(MAKERS[name](config, policy, dtype, version) for name in config.wanted)


def make_lenience(config: SpeculationConfig) -> Lenience | None:
    """What the engine is given in mode `lossy`."""
    return Lenience(config.lenience, config.recorded) if config.mode == "lossy" else None


def _ngram(config: SpeculationConfig, policy: Policy, dtype: str, version: int) -> Drafter:
    return NgramDrafter(config.min_match)


def _suffix(config: SpeculationConfig, policy: Policy, dtype: str, version: int) -> SuffixDrafter:
    return SuffixDrafter(config.min_match, config.min_confidence, config.history_tokens)


def _previous(config: SpeculationConfig, policy: Policy, dtype: str, version: int) -> Drafter:
    return PreviousDrafter(_suffix(config, policy, dtype, version), config.history_tokens)


def _model(config: SpeculationConfig, policy: Policy, dtype: str, version: int) -> Drafter:
    small = load_policy(ModelConfig.model_validate({"path": config.draft_model, "dtype": dtype}))
    decoder = publish(small, dtype, 0)
    return ModelDrafter(decoder, small.tokenizer, policy.tokenizer, policy.model.config.vocab_size)


def _self_quant(config: SpeculationConfig, policy: Policy, dtype: str, version: int) -> Drafter:
    return SelfQuantDrafter(publish_draft(policy, dtype, version))


def first_head(config: SpeculationConfig, policy: Policy) -> EagleHead:
    """The head of the configuration, where the policy is. Raises ModelError for one that does not fit the policy."""
    assert config.drafter_path is not None, "the configuration holds that there is one"
    head = load_head(config.drafter_path)
    check_fits(head, policy.model)
    return head.to(policy.model.device)


def _eagle(config: SpeculationConfig, policy: Policy, dtype: str, version: int) -> Drafter:
    return EagleDrafter(first_head(config, policy), decode_dtype(dtype, policy.model.device))


MAKERS: Mapping[str, Callable[[SpeculationConfig, Policy, str, int], Drafter]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "previous": _previous,
    "model": _model,
    "self_quant": _self_quant,
    "eagle": _eagle,
}
