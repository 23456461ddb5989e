"""The name, unit, reduction and meaning of every metric. Only the loop writes them; whoever shows them looks them up here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """`unit` is what one is; `reduction` how a step's many values became one; `meaning` a line for a reader."""

    unit: str
    reduction: str
    meaning: str


# A name ending in `*` stands for every name that begins like it.
METRICS: dict[str, Metric] = {
    "reward/mean": Metric("reward", "mean over rollouts", "weighted sum of the applicable rewards"),
    "reward/std": Metric("reward", "standard deviation over rollouts", "spread of the reward over all rollouts"),
    "reward/part/*": Metric("reward", "mean over rollouts it applies to", "one reward function, before its weight"),
    "reward/task/*": Metric("reward", "mean over its rollouts", "reward of one task of a mixture"),
    "reward/fell_back": Metric("rollouts", "count", "rollouts in which a failed reward took its fallback value"),
    "eval/accuracy": Metric("share", "mean over held-out items", "held-out reward under evaluation's own sampling"),
    "eval/task/*": Metric("share", "mean over its held-out items", "held-out accuracy of one task of a mixture"),
    "eval/se": Metric("share", "standard error of the mean", "uncertainty of eval/accuracy from the number of items"),
    "eval/length": Metric("tokens", "mean over held-out items", "length of held-out completions"),
    "eval/entropy": Metric("nats", "mean over tokens", "policy's entropy on held-out completions"),
    "eval/items": Metric("items", "count", "held-out items evaluated"),
    "data/passed_over": Metric("rows", "count", "rows outside the band of task.difficulty that this step went past"),
    "data/in_band_share": Metric("share", "ratio", "rows in the band of those whose reward has been measured"),
    "policy/loss": Metric("loss", "mean over mini-batches", "surrogate loss, with the terms beside it"),
    "policy/entropy": Metric("nats", "mean over completion tokens", "entropy of the policy before the update"),
    "policy/clip_fraction": Metric("share", "mean over completion tokens", "tokens whose ratio was clipped"),
    "policy/grad_norm": Metric("norm", "mean over mini-batches", "global gradient norm before clipping"),
    "policy/kl": Metric("nats", "mean over completion tokens", "the chosen estimator of KL(policy || reference)"),
    "policy/entropy_bonus": Metric("loss", "mean over completion tokens", "entropy times its coefficient"),
    "policy/lr": Metric("rate", "last", "learning rate of the step's last optimizer step"),
    "policy/ratio_mean": Metric("ratio", "mean over completion tokens", "theta / old probability"),
    "policy/mismatch_mean": Metric("nats", "mean over completion tokens", "|trainer - rollout| log-probability"),
    "policy/mismatch_max": Metric("nats", "maximum over completion tokens", "|trainer - rollout| log-probability"),
    "policy/tokens": Metric("tokens", "count", "completion tokens learned from in this step"),
    "policy/minibatches": Metric("updates", "count", "optimizer steps taken"),
    "critic/loss": Metric(
        "reward²", "mean over mini-batches", "half the squared error of the critic's values, clipped"
    ),
    "critic/explained_variance": Metric(
        "share",
        "over completion tokens",
        "of the returns' variance, what the values foretold before the update; below 0: worse than a constant",
    ),
    "critic/clip_fraction": Metric("share", "mean over tokens and epochs", "values that moved too far to be taught on"),
    "critic/value_mean": Metric("reward", "mean over completion tokens", "what the critic expected, before the update"),
    "critic/return_mean": Metric("reward", "mean over completion tokens", "what it is taught to expect"),
    "critic/grad_norm": Metric("norm", "mean over mini-batches", "the critic's gradient norm before clipping"),
    "critic/lr": Metric("rate", "last", "the critic's learning rate"),
    "distill/reverse_kl": Metric("nats", "mean over completion tokens", "KL(policy || teacher), sampled or exact"),
    "distill/forward_kl": Metric("nats", "mean over completion tokens", "KL(teacher || policy) at the policy's tokens"),
    "distill/jsd": Metric(
        "nats", "mean over completion tokens", "generalised Jensen-Shannon divergence to the teacher"
    ),
    "length/mean": Metric("tokens", "mean over rollouts", "completion length"),
    "length/max": Metric("tokens", "maximum over rollouts", "longest completion"),
    "length/truncated_share": Metric("share", "mean over rollouts", "completions that the length limit ended"),
    "group/no_spread_share": Metric(
        "share", "mean over groups", "groups whose rewards are all equal: they teach nothing"
    ),
    "collect/draws": Metric("draws", "count", "times that the step drew prompts until it had enough"),
    "collect/groups": Metric("groups", "count", "groups drawn in this step"),
    "collect/dropped_groups": Metric("groups", "count", "groups that the filter threw away, or that were too many"),
    "collect/dropped_tokens": Metric("tokens", "count", "completion tokens of those"),
    "collect/carried_tokens": Metric("tokens", "count", "tokens trained on that were drawn in an earlier step"),
    "collect/left_tokens": Metric("tokens", "count", "tokens that the budget left over for the next step"),
    "collect/expired_tokens": Metric("tokens", "count", "tokens that had waited too long, and were thrown away"),
    "group/spread": Metric("reward", "mean over groups", "standard deviation of the rewards in a group"),
    "episode/turns": Metric("turns", "mean over rollouts", "the policy's turns in an episode"),
    "rollout/repetition": Metric(
        "share", "ratio of sums", "4-grams that a group's samples have written before, within turns"
    ),
    "rollout/tokens_per_s": Metric("tokens/s", "ratio of sums", "tokens generated per second of generation"),
    "rollout/accepted_length": Metric(
        "tokens", "ratio of sums", "tokens per sequence and round; 1 without speculation"
    ),
    "rollout/draft_acceptance": Metric("share", "ratio of sums", "drafted tokens that were accepted"),
    "rollout/entropy": Metric("nats", "mean over tokens", "entropy of the sampled distribution, untruncated"),
    "rollout/surprise": Metric(
        "nats", "mean over tokens", "-log p - entropy: 0 but for chance where tokens are the policy's own draws"
    ),
    "rollout/surprise_square": Metric("nats²", "mean over tokens", "its square, which tells how far chance goes"),
    "rollout/speedup": Metric(
        "x", "ratio of times", "tokens/s of the rollouts over plain decoding's of the same prompts"
    ),
    "rollout/tokens_identical": Metric(
        "yes/no", "all rollouts", "matching: 1 when plain decoding gave the very same tokens"
    ),
    "rollout/weight_mean": Metric("weight", "mean over tokens", "mode lossy: what tokens' losses are multiplied by"),
    "rollout/weight_max": Metric("weight", "maximum over tokens", "mode lossy: what a token's loss is multiplied by"),
    "rollout/tokens": Metric("tokens", "count", "completion tokens generated in this step"),
    "rollout/prompt_tokens": Metric("tokens", "count", "prompt tokens prefilled in this step"),
    "rollout/rounds": Metric("rounds", "count", "decode rounds of this step"),
    "plan/*": Metric(
        "share",
        "mean over rounds",
        "decode rounds that this drafter drafted in; off: plain decoding (in TRL's log only)",
    ),
    "drafter/loss": Metric("loss", "mean over mini-batches", "the drafter's distillation loss"),
    "drafter/grad_norm": Metric("norm", "mean over mini-batches", "the drafter's gradient norm before clipping"),
    "drafter/overlap": Metric(
        "share",
        "mean over tokens",
        "sum of min(p, q) at depth 1 on new rollouts, before the update: by the head of the step before",
    ),
    "drafter/expected_length": Metric(
        "tokens", "mean over tokens", "tokens a round that the head of the step before promises on new rollouts"
    ),
    "drafter/drift": Metric(
        "share", "mean over tokens", "overlap missing to the head's best, beyond what the policy's entropy explains"
    ),
    "drafter/gained": Metric(
        "share", "mean over tokens", "overlap after an update less before it, on what it learned from"
    ),
    "drafter/age": Metric(
        "updates",
        "last",
        "policy updates from the laws that the drafter learned last to the policy that it drafted for",
    ),
    "drafter/updated": Metric("yes/no", "last", "1 when an update was begun"),
    "drafter/failed": Metric(
        "yes/no", "last", "1 when an update was not finite: the drafter and its optimizer are what they were before"
    ),
    "drafter/lr": Metric("rate", "last", "the drafter's learning rate"),
    "drafter/replay_mb": Metric("MB", "last", "held by the replay buffer"),
    "drafter/forgotten": Metric(
        "rollouts", "count", "left the replay buffer, for want of memory, before they were learned from"
    ),
    "drafter/left_out": Metric("rollouts", "count", "not learned from, for hidden states or laws that were not finite"),
    "drafter/share": Metric("share", "ratio", "time/drafter_s of the step's time"),
    "drafter/tokens": Metric("tokens", "count", "tokens the drafter learned from in this step"),
    "drafter/uniform": Metric("yes/no", "last", "1 when rewards did not tell the rollouts apart, so all weighed alike"),
    "drafter/alarms": Metric(
        "alarms", "count", "draft weights refused at the door, and collapses of acceptance seen after a swap"
    ),
    "warmup/loss": Metric("nats", "mean over solution tokens", "supervised loss on worked solutions"),
    "warmup/entropy": Metric("nats", "mean over tokens", "entropy after the warm-up, under training's sampling"),
    "time/generation_s": Metric("s", "sum", "rollouts: prefill, drafts, verification"),
    "time/prefill_s": Metric("s", "sum", "part of generation: prompts"),
    "time/draft_s": Metric("s", "sum", "part of generation: proposing tokens"),
    "time/verify_s": Metric("s", "sum", "part of generation: the policy's forward passes"),
    "time/overhead_s": Metric("s", "sum", "part of generation: everything else"),
    "time/reward_s": Metric("s", "sum", "scoring"),
    "time/training_s": Metric("s", "sum", "the policy's update, without what the drafter's learner looked at in it"),
    "time/critic_s": Metric("s", "sum", "the critic: its values before the policy's update, and its own update"),
    "time/reference_s": Metric("s", "sum", "asking reference and teacher for log-probabilities, before the update"),
    "time/drafter_s": Metric("s", "sum", "the drafter's learning, as far as the step waited for it"),
    "time/drafter_update_s": Metric("s", "sum", "the drafter's update itself, wherever it ran"),
    "time/weights_s": Metric("s", "sum", "publishing new weights to the engine"),
    "time/eval_s": Metric("s", "sum", "held-out evaluation"),
    "time/compare_s": Metric("s", "sum", "the same rollouts once more, without speculation, to compare"),
    "time/step_s": Metric("s", "sum", "the whole step, evaluation and comparison included"),
    "tokens/total": Metric("tokens", "running sum", "completion tokens generated since the run began"),
}


def metric(name: str) -> Metric:
    """The table's entry for `name`. Raises KeyError for a name that is not in it."""
    if name in METRICS and not name.endswith("*"):
        return METRICS[name]
    for known, entry in METRICS.items():
        stem = known.removesuffix("*")
        if stem != known and name.startswith(stem) and name not in (stem, known):
            return entry
    raise KeyError(f"'{name}' is no metric of respec; name it in report/metrics.py with unit, reduction and meaning")


def checked(metrics: Mapping[str, float]) -> dict[str, float]:
    """The same metrics as plain floats, in the table's order. Raises KeyError for a name that is not in the table."""
    order = {known.removesuffix("*"): i for i, known in enumerate(METRICS)}
    for name in metrics:
        metric(name)

    def place(name: str) -> tuple[int, str]:
        if name in order:
            return order[name], name
        return next(i for stem, i in order.items() if stem.endswith("/") and name.startswith(stem)), name

    return {name: float(metrics[name]) for name in sorted(metrics, key=place)}
