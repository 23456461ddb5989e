"""The sections of a configuration: one frozen pydantic model a room. Paths are relative to the working directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from respec.config.drafter import DrafterConfig
from respec.config.room import Room
from respec.types import Mode, Plan, Sampling

DrafterName = Literal["ngram", "suffix", "previous", "model", "self_quant", "eagle"]


class RunConfig(Room):
    """Where the run lives and how long it goes on."""

    dir: Path = Path("runs/run")
    seed: int = 0
    steps: int = Field(default=100, ge=0)
    threads: int = Field(
        default=0, ge=0, description="CPU threads of generation and training; 0 takes the machine's cores"
    )
    compare_plain_every: int = Field(
        default=0,
        ge=0,
        description="every k steps, time the same rollouts without speculation too and compare tokens; 0 never",
    )


class ModelConfig(Room):
    """The policy. `path` is a local folder or a hub id; `builtin:demo` is the model that ships in the package."""

    path: str
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = Field(
        default="auto", description="of the decoding snapshot"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    trust_remote_code: bool = False


class RewardConfig(Room):
    """One reward: `task` (the dataset's own scorer), `math` (math-verify against a column), or `module:function`."""

    fn: str = "task"
    weight: float = 1.0
    timeout_s: float = Field(default=30.0, gt=0)
    fallback: float | None = Field(
        default=None, description="used, counted and shown when the function fails; without it: an error"
    )


class TaskConfig(Room):
    """Prompts and rewards.

    kind `reasoning_gym`: `dataset` names it, `params` are its parameters. kind `jsonl`: `path` (and `eval_path`, or a split of
    `path`), `prompt_column` (text, or a list of chat messages), `answer_column`, `solution_column` for the warm-up.
    """

    kind: Literal["reasoning_gym", "jsonl"] = "reasoning_gym"
    dataset: str = ""
    params: dict[str, Any] = Field(default_factory=dict)
    path: Path | None = None
    eval_path: Path | None = None
    prompt_column: str = "prompt"
    answer_column: str = "answer"
    solution_column: str = "solution"
    train_size: int = Field(default=1024, ge=1)
    eval_size: int = Field(default=512, ge=0)
    seed: int = Field(default=0, description="of the training rows; held-out rows are drawn apart and never overlap")
    template: str = Field(default="{prompt}", description="the prompt's text; {prompt} and any column by name")
    answer_pattern: str = Field(
        default="", description="regular expression; its last match's group 1 is the answer that is scored"
    )
    solution: str = Field(default="", description="`module:function` giving a row's worked solution, for the warm-up")
    chat: Literal["auto", "never", "always"] = Field(
        default="auto", description="auto: when the tokenizer has a chat template"
    )
    system_prompt: str = ""
    chat_template_args: dict[str, Any] = Field(default_factory=dict)
    reward: tuple[RewardConfig, ...] = (RewardConfig(),)

    @model_validator(mode="after")
    def _needs(self) -> TaskConfig:
        if self.kind == "reasoning_gym" and not self.dataset:
            raise ValueError("task.dataset is empty; name a reasoning-gym dataset, for example 'chain_sum'")
        if self.kind == "jsonl" and self.path is None:
            raise ValueError("task.path is empty; task.kind = 'jsonl' needs the path of a JSON-lines file")
        return self


class WarmupConfig(Room):
    """Supervised learning on the task's own worked solutions, before RL. steps 0: none."""

    steps: int = Field(default=0, ge=0)
    batch_size: int = Field(default=32, ge=1)
    lr: float = Field(default=1e-3, gt=0)
    warmup_steps: int = Field(default=20, ge=0)
    weight_decay: float = Field(default=0.01, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    train_size: int = Field(default=4096, ge=1, description="rows drawn for it, apart from the held-out rows")
    save_to: Path | None = None


class RolloutConfig(Room):
    """How completions are drawn in training."""

    prompts_per_step: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=1)
    max_new_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, lt=1)
    stop: tuple[str, ...] = ()
    max_batch: int = Field(default=64, ge=1, description="sequences decoded at once")
    prefill_chunk: int = Field(default=256, ge=8)

    def sampling(self) -> Sampling:
        return Sampling(self.max_new_tokens, self.temperature, self.top_k, self.top_p, self.min_p, self.stop)


class SpeculationConfig(Room):
    """How rollouts are drafted. `auto`: a controller chooses before every round among the plans of `candidates`, plain decoding
    included; a drafter's name: one static plan of (s, t, n); `off`: plain decoding.
    """

    drafter: Literal["auto", "off", "ngram", "suffix", "previous", "model", "self_quant", "eagle"] = "auto"
    candidates: tuple[DrafterName, ...] = Field(
        default=("suffix", "ngram"), min_length=1, description="the drafters that auto may choose"
    )
    drafter_path: Path | None = Field(
        default=None, description="the EAGLE-3 head of drafter 'eagle': a folder that `respec drafter train` wrote"
    )
    draft_model: str = Field(
        default="", description="the small model of drafter 'model': a folder or a hub id, with the policy's tokenizer"
    )
    mode: Mode = Field(
        default="matching",
        description="matching: the tokens of plain decoding; rejection: their distribution (under auto the tokens then depend on timing); "
        "lossy: neither, old answers of drafter 'previous' are kept leniently",
    )
    lenience: float = Field(default=1.3, ge=1, description="lossy: an old token is kept with min(1, lenience * p / q)")
    recorded: int = Field(default=64, ge=1, description="lossy: tokens of q kept at every place, 8 bytes each")
    s: int = Field(default=8, ge=1, le=64, description="longest draft")
    t: int = Field(default=1, ge=1, le=64, description="branches of a draft at a token; 1 is a chain")
    n: int = Field(default=0, ge=0, le=64, description="drafted tokens in all; 0 takes s")
    min_match: int = Field(default=1, ge=1, description="shortest context that may propose")
    min_confidence: float = Field(
        default=0.3, ge=0, le=1, description="a draft stops where its estimated path probability falls below"
    )
    per_request_depth: bool = Field(
        default=False,
        description="auto: requests that earlier epochs' lengths expect to be long draft deeper, since they end the rollout. Off: sums of 2 to 16 "
        "terms on SmolLM2-135M took 6 % fewer rounds, 1 % more rows and 0.999 of the time, by the costs of two cores",
    )
    history_tokens: int = Field(
        default=4_000_000, ge=0, description="token budget of the suffix index; oldest rows leave first"
    )

    @model_validator(mode="after")
    def _needs(self) -> SpeculationConfig:
        if "eagle" in self.wanted and self.drafter_path is None:
            raise ValueError(
                "drafter 'eagle' needs speculation.drafter_path, a head for this policy; `respec drafter train` makes one"
            )
        if "model" in self.wanted and not self.draft_model:
            raise ValueError("drafter 'model' needs speculation.draft_model, a small model with the policy's tokenizer")
        if self.mode == "lossy" and self.drafter != "previous":
            raise ValueError(
                f"mode 'lossy' follows old answers, which drafter 'previous' alone proposes, got drafter '{self.drafter}'; set "
                "speculation.drafter = 'previous', or speculation.mode to 'matching' or 'rejection'"
            )
        return self

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names of the drafters to be made; none for plain decoding."""
        return {"off": (), "auto": self.candidates}.get(self.drafter, (self.drafter,))

    def plan(self) -> Plan:
        """The static plan; plain decoding for `auto`, whose plans a controller makes."""
        return Plan() if self.drafter in ("off", "auto") else Plan(self.drafter, self.s, self.t, self.n or self.s)


class PolicyConfig(Room):
    """The policy learner. `algorithm` is a preset of estimator x surrogate x aggregation x correction; a factor set here wins."""

    algorithm: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gspo", "cispo"] = "grpo"
    estimator: str | None = None
    surrogate: str | None = None
    aggregation: str | None = None
    correction: str | None = None
    lr: float = Field(default=1e-5, gt=0)
    warmup_steps: int = Field(default=0, ge=0)
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    weight_decay: float = Field(default=0.0, ge=0)
    betas: tuple[float, float] = (0.9, 0.999)
    grad_clip: float = Field(default=1.0, gt=0)
    clip_low: float | None = Field(default=None, ge=0, description="ratio at least 1 - this; None: the algorithm's own")
    clip_high: float | None = Field(default=None, ge=0, description="ratio at most 1 + this; None: the algorithm's own")
    dual_clip: float | None = Field(
        default=None, gt=1, description="bounds the loss of bad tokens: no more than this times the advantage"
    )
    correction_cap: float = Field(default=2.0, gt=0)
    loss_constant: int | None = Field(
        default=None, ge=1, description="tokens: divisor of aggregation 'constant'; None takes rollout.max_new_tokens"
    )
    epochs: int = Field(default=1, ge=1, description="passes over one step's samples")
    minibatches: int = Field(default=1, ge=1, description="optimizer steps per pass")
    tokens_per_microbatch: int = Field(
        default=4096, ge=1, description="gradient accumulation: packed tokens per forward pass"
    )
    logit_chunk: int = Field(default=1024, ge=1, description="completion tokens whose logits are held at once")
    mask_truncated: bool = Field(default=False, description="leave truncated completions out of the loss")


class EvalConfig(Room):
    """Held-out evaluation, under its own sampling settings."""

    every: int = Field(default=0, ge=0, description="0: only before and after")
    items: int = Field(default=256, ge=0, description="of the held-out rows, at each evaluation within the run")
    final_items: int = Field(default=0, ge=0, description="before and after; 0 takes all held-out rows")
    temperature: float = Field(default=0.0, ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    max_new_tokens: int | None = Field(default=None, description="None: as in training")


class CheckpointConfig(Room):
    """When to save, and how many to keep. Whichever comes first; 0 is never."""

    every_steps: int = Field(default=10, ge=0)
    every_minutes: float = Field(default=10.0, ge=0)
    keep: int = Field(default=2, ge=1)


class ReportConfig(Room):
    """What is recorded beside metrics.jsonl."""

    tensorboard: bool = True
    rollouts_per_step: int = Field(
        default=0, ge=0, description="rollouts of each step kept in the run folder; 0 keeps all"
    )
    rollout_every: int = Field(default=1, ge=1)


class Config(Room):
    """A whole run."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    task: TaskConfig
    warmup: WarmupConfig = WarmupConfig()
    rollout: RolloutConfig = RolloutConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    policy: PolicyConfig = PolicyConfig()
    drafter: DrafterConfig = DrafterConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if self.speculation.mode == "lossy" and (self.report.rollouts_per_step, self.report.rollout_every) != (0, 1):
            raise ValueError(
                "speculation.mode 'lossy' reads old answers back from the run folder when a run is gone on with, got a [report] that keeps "
                "some of them only; leave out report.rollouts_per_step and report.rollout_every"
            )
        if self.drafter.learn and "eagle" not in self.speculation.wanted:
            raise ValueError(
                "drafter.learn is on, but drafter 'eagle' is not among those of [speculation]; name it there"
            )
        if self.drafter.async_steps and self.drafter.learn and self.speculation.mode == "rejection":
            raise ValueError(
                "drafter.async_steps 1 goes with speculation.mode 'matching' alone, got 'rejection', whose tokens depend on which head drafts, and a "
                "run that goes on from a checkpoint drafts with a head one update newer; set drafter.async_steps = 0, or the mode to 'matching'"
            )
        return self

    def eval_sampling(self) -> Sampling:
        new = self.eval.max_new_tokens or self.rollout.max_new_tokens
        return Sampling(new, self.eval.temperature, self.eval.top_k, self.eval.top_p, 0.0, self.rollout.stop)
