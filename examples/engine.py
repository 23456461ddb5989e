"""The engine alone: whole completions, then tokens as they come. Speculation and streaming change no token.

python examples/engine.py [MODEL]
"""

import sys

from respec import Engine, Sampling

engine = Engine(sys.argv[1] if len(sys.argv) > 1 else "builtin:demo", speculation="suffix")
prompts, sampling = ["3 + 4 - 2 + 9\n", "8 - 5 + 1\n"], Sampling(max_new_tokens=96, temperature=1.0)

whole = engine.generate(prompts, sampling, n=2, seed=7)
for rollout in whole:
    drafted = (rollout.proposer_T > 0).mean()
    print(f"{rollout.text!r}: {len(rollout.token_T)} tokens, {drafted:.0%} of them drafted, ended by {rollout.finish}")

streamed = dict.fromkeys(range(len(prompts)), "")
for delta in engine.stream(prompts, sampling, seed=7):
    streamed[delta.prompt] += delta.text
    print(f"prompt {delta.prompt} +{len(delta.token_T)} tokens: {delta.text!r}")
assert [streamed[0], streamed[1]] == [rollout.text for rollout in whole[::2]]
