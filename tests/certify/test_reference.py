"""The reference against sums written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from respec.certify import reference as module
from respec.types import PLAIN, Sampling

SAMPLING = Sampling(9, 0.8)


def slow_intervals(logp: np.ndarray, token: int, context: list[int]) -> dict[str, tuple[float, float]]:
    """Mass before a token and its own, by walking through each order."""
    p = np.exp(logp)
    tokens = range(len(p))
    orders = {
        "probability": sorted(tokens, key=lambda v: -p[v]),
        "seen": sorted(tokens, key=lambda v: (v not in context, -p[v])),
        "id": list(tokens),
    }
    found = {}
    for name, order in orders.items():
        at = order.index(token)
        found[name] = (sum(p[v] for v in order[:at]), p[token])
    return found


@pytest.mark.parametrize("most", [2**25, 500], ids=["at once", "row by row"])
def test_every_token_gets_its_log_probability_and_its_place_in_each_order(
    policy, reference, make_sampler, asks, monkeypatch, most
):
    monkeypatch.setattr(module, "MOST_LOGITS", most)
    drawn = make_sampler()(asks(3), SAMPLING, PLAIN)
    # of different lengths, as completions are
    drawn = [module.Rollout(**{**r.__dict__, **cut(r, 2 + i % 7)}) for i, r in enumerate(drawn)]
    judged = reference.judge(drawn, SAMPLING.temperature, seed=3)
    assert np.array_equal(judged.recorded_N, np.concatenate([r.logprob_T for r in drawn]).astype(np.float64))
    at, half_an_ulp = 0, 2e-6
    for rollout in drawn:
        known = list(rollout.prompt.token_ids)
        for token in rollout.token_T.tolist():
            with torch.inference_mode():
                logits = policy.model(input_ids=torch.tensor([known])).logits[0, -1].double() / SAMPLING.temperature
            logp = torch.log_softmax(logits, -1).numpy()
            assert np.abs(reference.after(known, SAMPLING.temperature) - logp).max() < 1e-5
            assert judged.logprob_N[at] == pytest.approx(logp[token], abs=1e-5)
            for name, (before, own) in slow_intervals(logp, token, known).items():
                assert before - half_an_ulp <= judged.pit_N[name][at] <= before + own + half_an_ulp, name
            known.append(token)
            at += 1
    assert at == len(judged.logprob_N)


def cut(rollout, length: int) -> dict[str, np.ndarray]:
    return {
        name: getattr(rollout, name)[:length]
        for name, value in rollout.__dict__.items()
        if name.endswith("_T") and value is not None
    }


def test_tied_tokens_share_their_mass():
    p = torch.tensor([[[0.25, 0.5, 0.25]]])
    found = module._intervals(p, torch.tensor([[2]]), torch.tensor([[1, 2]]))
    assert [float(x) for x in found["probability"]] == [0.5, 0.5]
    assert [float(x) for x in found["id"]] == [0.75, 0.25]
    assert [float(x) for x in found["seen"]] == [0.5, 0.5]
