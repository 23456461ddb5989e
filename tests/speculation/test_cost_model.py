"""The cost model fits measured tables, never falls in any argument, and survives JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import nnls

from respec.speculation.cost_model import (
    CostError,
    CostModel,
    CostSample,
    fit,
    nonnegative_least_squares,
    relative_errors,
)

# Milliseconds on two cores of an AMD EPYC (Zen 4), SmolLM2-135M. All linear layers, by rows: float32, bf16, bf16 prepacked, int8.
LINEAR = {
    1: (38, 19, 13.7, 8.3),
    4: (53, 19, 11.7, 8.0),
    8: (44, 21, 14.2, 13.3),
    16: (59, 25, 17.4, 15.4),
    32: (81, 36, 26, 22),
    64: (113, 58, 44, 31),
    128: (191, 97, 91, 67),
}
# Attention at context 168, by (sequences, tokens a sequence): query heads folded, matmul and softmax.
ATTENTION = {
    (1, 1): (1.9, 5.4),
    (4, 4): (5.0, 8.7),
    (16, 1): (16, 20),
    (16, 4): (19, 23),
    (64, 1): (59, 48),
    (64, 8): (92, 108),
}
# A whole pass at context 160, by sequences; 1, 4, 8 tokens a sequence: transformers' code, a lean fused decoder.
WHOLE = {
    1: ((34, 31, 35), (21, 20, 30)),
    4: ((41, 46, 71), (30, 38, 53)),
    16: ((52, 128, 180), (50, 82, 154)),
    64: ((159, 317, 511), (133, 288, 514)),
}


def tables() -> dict[str, list[CostSample]]:
    linear = {
        f"linear {i}": [CostSample(rows, rows, 0.0, verify_s=row[i] / 1e3) for rows, row in LINEAR.items()]
        for i in range(4)
    }
    attention = {
        f"attention {i}": [CostSample(b, b * t, 168.0, verify_s=row[i] / 1e3) for (b, t), row in ATTENTION.items()]
        for i in range(2)
    }
    whole = {
        f"whole {i}": [
            CostSample(b, b * t, 160.0, verify_s=ms / 1e3)
            for b, rows in WHOLE.items()
            for t, ms in zip((1, 4, 8), rows[i], strict=True)
        ]
        for i in range(2)
    }
    return linear | attention | whole


def profile() -> list[CostSample]:
    """A profile of a made-up machine: flat to eight rows, then affine; two drafters."""
    return [
        CostSample(
            b, b * (1 + s), c, drafter if s else "off", s,
            (3e-4 + 1e-4 * b * s) * bool(s), 0.02 + 1e-3 * max(b * (1 + s) - 8, 0) + 1e-6 * b * c, 1e-3 + 1e-5 * b,
        )
        for b in (1, 2, 4, 8, 16, 32)
        for s in (0, 2, 4)
        for c in (50.0, 400.0)
        for drafter in ("ngram", "suffix")
    ]  # fmt: skip


@pytest.mark.parametrize("name", tables())
def test_measured_tables_are_fitted_to_eight_percent(name: str):
    samples = tables()[name]
    assert np.median(relative_errors(fit(samples), samples)) < 0.08


def test_the_held_out_error_is_that_of_samples_left_out():
    exact = fit(profile())
    assert exact.held_out_error < 0.03
    rng = np.random.default_rng(0)
    noisy = [replace(x, verify_s=x.verify_s * float(rng.lognormal(0, 0.3))) for x in profile()]
    left_out = []
    for fold in range(5):
        kept = fit([x for i, x in enumerate(noisy) if i % 5 != fold])
        left_out += relative_errors(kept, [x for i, x in enumerate(noisy) if i % 5 == fold])
    assert fit(noisy).held_out_error == np.median(left_out) > np.median(relative_errors(fit(noisy), noisy))
    assert np.isnan(fit(profile()[:5]).held_out_error)


def test_seconds_never_fall_in_any_argument():
    rng = np.random.default_rng(1)
    for trial in range(20):
        samples = [replace(x, verify_s=x.verify_s * float(rng.lognormal(0, 0.5))) for x in profile()]
        model = fit([samples[i] for i in rng.permutation(len(samples))[: 12 + trial]])

        def seconds(b: int, rows: float, c: float, s: int, model: CostModel = model) -> float:
            return float(model.seconds(b, np.array([rows]), c, ("suffix",), np.array([float(s)]))[0])

        for _ in range(20):
            b, s, c = int(rng.integers(1, 70)), int(rng.integers(1, 8)), float(rng.uniform(10, 2000))
            rows = b * (1 + s * rng.uniform())
            here = seconds(b, rows, c, s) * (1 - 1e-12)
            assert seconds(b + 1, rows, c, s) >= here
            assert seconds(b, rows + 1, c, s) >= here
            assert seconds(b, rows, c * 1.5, s) >= here
            assert seconds(b, rows, c, s + 1) >= here


def test_an_unmeasured_drafter_costs_what_the_dearest_does():
    model = fit([replace(x, draft_s=x.draft_s * (5 if x.drafter == "suffix" else 1)) for x in profile()])
    seconds = model.seconds(4, np.full(3, 12.0), 50.0, ("ngram", "suffix", "eagle"), np.full(3, 2.0))
    assert seconds[0] < seconds[1] == pytest.approx(seconds[2])


def test_json_keeps_everything():
    model = fit(profile())
    assert CostModel.from_dict(json.loads(json.dumps(model.to_dict()))) == model


def test_nothing_to_fit_is_said():
    with pytest.raises(CostError, match="0 samples"):
        fit([])
    with pytest.raises(CostError, match="positive"):
        fit([CostSample(1, 1, 0.0)])


def test_nonnegative_least_squares_equals_the_reference():
    rng = np.random.default_rng(2)
    for _ in range(50):
        a, y = rng.normal(size=(12, 6)) + 0.5, rng.normal(size=12)
        x = nonnegative_least_squares(a, y)
        assert (x >= 0).all()
        assert np.linalg.norm(a @ x - y) == pytest.approx(nnls(a, y)[1], abs=1e-9)


def test_the_start_of_a_drafter_grows_with_the_keys_it_reads():
    samples = [
        CostSample(b, 3 * b, context, "eagle", 2, 1e-3, 1e-2, 0.0, 2e-3 + 1e-6 * b * context)
        for b in (1, 8, 32)
        for context in (64.0, 256.0)
    ]
    model = CostModel.from_dict(json.loads(json.dumps(fit(samples).to_dict())))
    found = model.starts(16, 100.0, ("off", "eagle", "never measured"))
    np.testing.assert_allclose(found, [0.0, 2e-3 + 1.6e-3, 0.0], rtol=1e-6)
