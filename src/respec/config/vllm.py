"""The section of vLLM, where it draws the rollouts."""

from __future__ import annotations

from pydantic import Field

from respec.config.room import Room


class VllmConfig(Room):
    """[rollout.vllm]: which vLLM draws when rollout.engine is "vllm", and what it may take."""

    python: str = Field(
        default="",
        description="the Python of an environment that has vLLM, which need not have respec; empty: this one",
    )
    cache_gib: int = Field(default=2, ge=1, description="KV cache on a CPU, GiB")
    gpu_share: float = Field(
        default=0.4, gt=0, le=1, description="of a GPU's memory, for weights and KV cache; the trainer has the rest"
    )
    compile: bool = Field(default=False, description="let vLLM compile the model: minutes at the start, faster after")
    mend: bool = Field(
        default=True,
        description="mend what is known to be wrong in a build: on CPU 0.32, temperatures of drafted tokens",
    )
    sleep: bool = Field(
        default=True, description="give the memory back while the policy is trained, where the build can (CUDA)"
    )
    start_s: float = Field(default=900.0, gt=0, description="seconds that vLLM may take to start")
    timeout_s: float = Field(default=600.0, gt=0, description="seconds that one step of it may take")
    mismatch: float = Field(
        default=0.1, gt=0, description="nats: a mean |trainer - vLLM| log-probability above it is warned of"
    )
