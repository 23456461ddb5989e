"""Tasks: prompts and rewards. Empty on purpose: the reward worker imports this package and must start fast."""
