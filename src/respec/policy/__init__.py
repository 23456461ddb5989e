"""The policy learner: advantages, losses as four factors, packing, updates, and the supervised warm-up."""
