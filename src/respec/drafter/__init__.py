"""The drafter learner: what teaches an EAGLE-3 head to follow the policy (same shape as `policy`, on purpose)."""
