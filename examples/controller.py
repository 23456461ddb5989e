"""The controller alone, beside an engine of your own: told what rounds cost and how many drafted tokens were right, it says how to draft.

python examples/controller.py
"""

from respec import Acceptance, Controller, Load, Plan, RoundRecord
from respec.speculation.cost_model import CostSample, fit

# measured rounds of your engine: with 64 sequences more rows cost more, with few they are free
samples = [
    CostSample(active, active * (1 + s), 128.0, "ngram" if s else "off", s, draft_s=1e-4 * (s > 0), verify_s=max(8e-3, 2e-4 * active * (1 + s)))
    for active in (1, 4, 16, 64) for s in (0, 2, 4)
]  # fmt: skip
controller = Controller([Plan("ngram", s, 1, s) for s in (2, 4)], fit(samples), Acceptance(depth=4))
for active in (64, 1):
    load = Load(active, 0, 128.0, (100,) * active)
    for _ in range(300):  # here four in five drafted tokens are right
        plan = controller.plan(load)
        right = tuple(round(active * 0.8**depth) for depth in range(1, plan.s + 1))
        seconds = max(8e-3, 2e-4 * active * (1 + plan.s))
        controller.observe(RoundRecord(active, 0, plan, active * plan.n, sum(right), active + sum(right), 1e-4 * (plan.n > 0), seconds, 0.0, 128.0,
                                       (active,) * plan.s, (active, *right)[: plan.s], right))  # fmt: skip
    print(f"{active} sequences: {controller.predict(load)[0].plan}")
