"""The drafter's learner alone: a new EAGLE-3 head learns from completions, in whatever way they were drawn.

python examples/drafter_learner.py [FOLDER]    with FOLDER: the head is kept there, for speculation.drafter_path
"""

import sys
from pathlib import Path

from respec import DrafterLearner, Engine, LearnerSettings, Sampling
from respec.config import ModelConfig
from respec.drafter.examples import capture
from respec.drafter.judge import judge
from respec.models.eagle import create_head, save_head
from respec.models.load import load_policy

policy, sampling = load_policy(ModelConfig(path="builtin:demo")), Sampling(max_new_tokens=48)
rollouts = Engine(policy, speculation="off").generate([f"{a} + {a + 1} - 2\n" for a in range(4)], sampling, n=2)
head = create_head(policy.model)
examples = capture(policy.model, head.shape.taps, rollouts, sampling)
learner = DrafterLearner(head, LearnerSettings(loss="kl", depths=3, lr=2e-3))
for step in range(8):
    print(f"step {step}: loss {learner.step(examples).loss:.3f}")
print("overlap with the policy, by depth:", judge(head, examples, 3, sampling.temperature).overlap_K.round(3))
if len(sys.argv) > 1:
    save_head(head, Path(sys.argv[1]))
