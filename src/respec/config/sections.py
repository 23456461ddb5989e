"""The sections of a configuration: one frozen pydantic model a room. Paths are relative to the working directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from respec.config.collect import CollectConfig
from respec.config.critic import CriticConfig
from respec.config.drafter import DrafterConfig
from respec.config.policy import PolicyConfig
from respec.config.room import Room
from respec.config.speculation import SpeculationConfig
from respec.config.task import TaskConfig
from respec.config.terms import ReferenceConfig, TeacherConfig
from respec.config.tracking import TrackingConfig, moved
from respec.config.vllm import VllmConfig
from respec.types import Sampling


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
    dtype: Literal["auto", "bfloat16", "float32", "float64", "int8"] = Field(
        default="auto",
        description="of the decoding snapshot; int8: its linear layers at 8 bits, another policy than the trained one: see policy.correction",
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    trust_remote_code: bool = False


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
    entropy_floor: float = Field(
        default=0.0, ge=0, description="nats a token: a warm-up that ends below is warned of; 0 does not look"
    )


class RolloutConfig(Room):
    """How completions are drawn in training."""

    engine: Literal["native", "vllm"] = Field(
        default="native", description="what draws: respec's own engine, or vLLM, see [rollout.vllm]"
    )
    vllm: VllmConfig = VllmConfig()
    prompts_per_step: int = Field(default=16, ge=1)
    group_size: int = Field(default=8, ge=1)
    max_new_tokens: int = Field(
        default=128, ge=1, description="task.kind 'env': of a whole episode, what the environment says included"
    )
    max_turn_tokens: int = Field(default=0, ge=0, description="task.kind 'env': of one turn; 0: no limit of its own")
    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, lt=1)
    stop: tuple[str, ...] = ()
    max_batch: int = Field(default=64, ge=1, description="sequences decoded at once")
    prefill_chunk: int = Field(default=256, ge=8)
    kv_cache_mb: float | None = Field(
        default=None,
        gt=0,
        description="MiB that keys and values may take, drafters' included: sequences that they leave no room for wait. None: what max_batch takes",
    )
    sync_every: int = Field(
        default=1,
        ge=1,
        description="steps between two copies of the weights to the engine; above 1 rollouts are of older policies, see policy.correction",
    )

    @property
    def kv_bytes(self) -> int | None:
        return None if self.kv_cache_mb is None else int(self.kv_cache_mb * 2**20)

    def sampling(self) -> Sampling:
        return Sampling(
            self.max_new_tokens,
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.stop,
            (),
            self.max_turn_tokens,
        )


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
    collect: CollectConfig = CollectConfig()
    policy: PolicyConfig = PolicyConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    teacher: TeacherConfig = TeacherConfig()
    drafter: DrafterConfig = DrafterConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    report: ReportConfig = ReportConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="before")
    @classmethod
    def _as_named_today(cls, tree: Any) -> Any:
        return moved(tree)

    @model_validator(mode="after")
    def _fits_together(self) -> Config:
        if self.speculation.mode == "lossy" and (self.report.rollouts_per_step, self.report.rollout_every) != (0, 1):
            raise ValueError(
                "speculation.mode 'lossy' reads old answers back from the run folder when a run is gone on with, got a [report] that keeps "
                "some of them only; leave out report.rollouts_per_step and report.rollout_every"
            )
        if self.task.kind == "env" and self.speculation.mode == "lossy":
            raise ValueError(
                "speculation.mode 'lossy' follows one old answer, got task.kind 'env', whose episodes are several with an environment between "
                "them; set the mode to 'matching'"
            )
        if self.task.kind == "env" and self.drafter.learn:
            raise ValueError(
                "drafter.learn learns from completions that are the policy's own from end to end, got task.kind 'env'; set drafter.learn = false"
            )
        if self.drafter.learn and "eagle" not in self.speculation.wanted:
            raise ValueError(
                "drafter.learn is on, but drafter 'eagle' is not among those of [speculation]; name it there"
            )
        terms = self.policy.entropy_bonus or (self.reference.kl and self.reference.kl_in == "loss") or self.teacher.path
        if self.critic.head_start and terms:
            raise ValueError(
                "critic.head_start holds the policy still while the critic learns, and got a term that moves it all the same (policy.entropy_bonus, "
                "reference.kl in the loss, or a teacher); set critic.head_start = 0, or leave the terms out"
            )
        if self.policy.token_budget and (self.task.kind == "env" or self.task.sampling_columns):
            raise ValueError(
                "policy.token_budget cuts completions and goes on with a part as the prompt, which episodes (task.kind 'env') and rows with settings of "
                "their own (task.sampling_columns) do not allow; leave one out"
            )
        if self.drafter.learn and self.rollout.sync_every > 1:
            raise ValueError(
                f"drafter.learn follows the newest policy, but with rollout.sync_every {self.rollout.sync_every} the engine decodes with an older "
                "one; set rollout.sync_every = 1 or drafter.learn = false"
            )
        if self.drafter.async_steps and self.drafter.learn and self.speculation.mode == "rejection":
            raise ValueError(
                "drafter.async_steps 1 goes with speculation.mode 'matching' alone, got 'rejection', whose tokens depend on which head drafts, and a "
                "run that goes on from a checkpoint drafts with a head one update newer; set drafter.async_steps = 0, or the mode to 'matching'"
            )
        if self.rollout.engine == "vllm" and (wrong := unfit_for_vllm(self)):
            raise ValueError(f"rollout.engine 'vllm' {wrong}; or set rollout.engine = 'native'")
        return self

    def eval_sampling(self) -> Sampling:
        new = self.eval.max_new_tokens or self.rollout.max_new_tokens
        turn = self.rollout.max_turn_tokens
        return Sampling(new, self.eval.temperature, self.eval.top_k, self.eval.top_p, 0.0, self.rollout.stop, (), turn)


def unfit_for_vllm(config: Config) -> str:
    """What of a configuration vLLM cannot do, and what to do about it; empty for one that it can."""
    drawn, asked = config.rollout, config.speculation
    truncated = drawn.top_k or drawn.top_p < 1 or drawn.min_p or config.eval.top_k or config.eval.top_p < 1
    cannot = {
        "draws single completions, got task.kind 'env'; take another task": config.task.kind == "env",
        "verifies by rejection, got speculation.mode 'lossy'; leave the mode out": asked.mode == "lossy",
        "drafts with a head that learns between two rollouts, got drafter.async_steps 1; set it to 0": bool(config.drafter.learn and config.drafter.async_steps),
        f"has no drafter '{asked.drafter}'; take auto, off, ngram, suffix, model or eagle": asked.drafter in ("previous", "self_quant"),
        "drafts chains, got speculation.t above 1; leave it out": asked.t > 1,
        "drafts as deep for all, got speculation.per_request_depth; leave it out": asked.per_request_depth,
        "tells log-probabilities after truncation only, got top_k, top_p or min_p; leave them out": bool(truncated),
        f"decodes in bfloat16 or float32, got model.dtype '{config.model.dtype}'": config.model.dtype in ("int8", "float64"),
    }  # fmt: skip
    return next((words for words, holds in cannot.items() if holds), "")
