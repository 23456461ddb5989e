"""Activations computed twice are the same to the bit, and fewer are kept; what `auto` decides by; products in bfloat16."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from respec.config import LoraConfig, PolicyConfig
from respec.models.lean_pass import switch, takes
from respec.policy import recomputation
from respec.policy.adapters import choose_trained
from respec.policy.learner import PolicyLearner
from respec.policy.logprobs import token_logprobs, token_pass
from respec.policy.pack import pack
from respec.policy.recomputation import activation_bytes, is_wanted, recomputing

ADVANTAGES = (1.0, -1.0, 0.5, -0.5, 0.7, -0.7, 0.3, -0.3)


class Looking:
    """A watch with taps, for what it is shown."""

    taps = (0, 1)

    def __init__(self) -> None:
        self.shown: list[torch.Tensor] = []

    def laws(self, batch, part, logp_cV) -> None:
        self.shown.append(logp_cV.clone())

    def states(self, batch, tap_NE) -> None:
        self.shown += tap_NE


@contextlib.contextmanager
def kept():
    """Bytes that the graph keeps of forward passes within: distinct storages, those of weights too."""
    found: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        yield lambda: sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize(
    "settings", [{}, {"lora": LoraConfig(r=2)}, {"freeze": ("embed_tokens", "layers.0")}, {"dtype": "bfloat16"}]
)
def test_an_update_is_the_same_to_the_bit(make_policy, make_samples, settings) -> None:
    weights, stats, shown = [], [], []
    for setting in (False, True):
        config = PolicyConfig(lr=0.01, gradient_checkpointing=setting, **settings)
        policy, watch = make_policy(torch.float32), Looking()
        choose_trained(policy.model, config, 0)
        done = PolicyLearner(policy, config, 10).update(make_samples(ADVANTAGES), 1.0, watch=watch)
        weights.append(policy.model.state_dict())
        stats.append((done.loss, done.grad_norm, done.entropy))
        shown.append(watch.shown)
        assert not any(module.training for module in policy.model.modules())
    assert stats[0] == stats[1] and stats[0][1] > 0
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert len(shown[0]) == len(shown[1]) and all(map(torch.equal, *shown))


def test_less_is_kept(make_policy, make_samples) -> None:
    policy, (batch,) = make_policy(torch.float32), pack(make_samples(ADVANTAGES), 10_000, 1.0)
    sizes = []
    for wanted in (False, True):
        with kept() as size, recomputing(policy.model, wanted):
            result = token_logprobs(policy.model, batch, 64)
        sizes.append(size())
        del result
    assert sizes[1] < sizes[0] / 2


@pytest.mark.parametrize("products", [None, torch.bfloat16])
@pytest.mark.parametrize("lean", [True, False])
def test_the_estimate_is_of_what_is_kept(make_policy, make_samples, lean: bool, products) -> None:
    """Sequences of one length, so that nothing is padded; a fifth is the promise, for transformers' code in the model's own dtype."""
    policy = make_policy(torch.float32, hidden=64)
    sample = make_samples((1.0, 1.0, 1.0, 1.0))[3]
    (batch,) = pack([sample] * 40, 10_000, 1.0)
    with contextlib.nullcontext() if lean else switch.off():
        assert takes(policy.model) == lean
        with kept() as size:
            result = token_logprobs(policy.model, batch, 64, products=products)
        weights = sum(p.numel() * 4 for p in policy.model.parameters())
        ratio = (size() - weights) / activation_bytes(policy.model, len(batch.token_N), products)
    del result
    assert (0.8 if lean or products is None else 0.4) < ratio < 1.2


def test_a_budget_cuts_micro_batches_and_not_the_gradient(make_policy, make_samples) -> None:
    """What is kept stays within the budget; a sequence that is more than it alone is computed twice; all this changes only roundings."""
    weights, sizes, calls = [], [], []
    one = activation_bytes(make_policy(torch.float32).model, 1)
    longest = max(len(s.scored.rollout.prompt.token_ids) + len(s.advantage_T) for s in make_samples(ADVANTAGES))
    for budget in (None, one * longest, one * (longest - 1)):
        policy = make_policy(torch.float32)
        config = PolicyConfig(lr=0.01, activations_mb=budget and budget / 2**20)
        learner = PolicyLearner(policy, config, 10)
        passes, again = [], []

        def note(model, batch, *rest, whole=token_pass, passes=passes, again=again, **more):
            passes.append(activation_bytes(model, len(batch.token_N)))
            again.append(any(module.training for module in model.modules()))
            return whole(model, batch, *rest, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("respec.policy.learner.token_pass", note)
            learner.update(make_samples(ADVANTAGES), 1.0)
        weights.append(policy.model.state_dict())
        sizes.append(max(passes))
        calls.append((len(passes), any(again)))
    assert sizes[1] <= one * longest and calls[0] == (1, False) and calls[1][0] > 1 and not calls[1][1] and calls[2][1]
    for other in weights[1:]:
        for name, value in other.items():
            torch.testing.assert_close(value, weights[0][name], rtol=0, atol=2e-4, msg=name)


def test_auto_asks_for_the_memory(make_policy, monkeypatch) -> None:
    model = make_policy().model
    needed = activation_bytes(model, 100)
    for free, wanted in ((2 * needed, False), (2 * needed - 2, True)):
        monkeypatch.setattr(recomputation, "free_bytes", lambda device, free=free: free)
        assert is_wanted("auto", model, 100) is wanted
        assert is_wanted(True, model, 1) and not is_wanted(False, model, 10**12)


def test_products_in_bfloat16_keep_the_direction_of_the_gradient_and_float32_weights(make_policy, make_samples) -> None:
    gradients, (batch,) = [], pack(make_samples(ADVANTAGES), 10_000, 1.0)
    for products in (None, torch.bfloat16):
        model = make_policy(torch.float32, hidden=64).model
        logprob_C, _ = token_logprobs(model, batch, 64, products=products)
        assert logprob_C.dtype == torch.float32
        (logprob_C * batch.advantage_C).sum().backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    cosine = torch.cosine_similarity(*gradients, dim=0).item()
    assert 0.99 < cosine < 1 - 1e-7, "1 would be float32"
