"""A small model to draft with, from a policy: its first layers, to be taught by `respec warmup` what the policy was.

python benchmarks/draft_model.py models/smollm2-warm models/smollm2-first4
respec warmup examples/smollm2.toml --set model.path=models/smollm2-first4 --set warmup.lr=5e-4 --to models/smollm2-small
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from respec.config import ModelConfig
from respec.models.load import load_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy")
    parser.add_argument("to", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    asked = parser.parse_args()
    policy = load_policy(ModelConfig(path=asked.policy, device="cpu"))
    model: Any = policy.model
    model.model.layers = model.model.layers[: asked.layers]
    model.config.num_hidden_layers = asked.layers
    model.config.layer_types = None
    model.save_pretrained(asked.to)
    policy.tokenizer.save_pretrained(asked.to)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters in {asked.to}")


if __name__ == "__main__":
    main()
