"""TRL's GRPOTrainer as a peer: one optimizer step a request, its own generation included. Run by the Python of its environment."""

from __future__ import annotations

import importlib.metadata
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from wire import Request, Wire, distinct_words, peak_memory  # pyright: ignore[reportMissingImports]

MANY = 100_000


def main() -> None:
    """The trainer owns the loop; it waits for a request before each step, and answers after it."""
    wire = Wire()
    request = wire.receive()
    if request is None:
        return
    try:
        trainer(request, wire).train()
    except Exception as error:
        wire.fail(error)


def trainer(request: Request, wire: Wire) -> Any:
    """A GRPOTrainer in float32 over `prompts`: each sampled `group` times, exactly `new_tokens` tokens, all in one optimizer step."""
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(request["threads"])
    prompts, new = request["prompts"], request["new_tokens"]
    arguments = GRPOConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=request["checkpointing"],
        per_device_train_batch_size=len(prompts) * request["group"], num_generations=request["group"],
        gradient_accumulation_steps=1, max_completion_length=new, generation_kwargs={"min_new_tokens": new},
        temperature=1.0, top_k=0, top_p=1.0, learning_rate=request["lr"], max_steps=MANY, save_strategy="no", report_to=[],
        logging_steps=MANY, disable_tqdm=True, seed=0,
    )  # fmt: skip
    drawn = [0]

    def reward(completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float | None]:
        drawn[0] = sum(map(len, completion_ids))
        return [*distinct_words(completions)]

    model = AutoModelForCausalLM.from_pretrained(request["model"], dtype=torch.float32)
    return GRPOTrainer(
        model=model, reward_funcs=reward, args=arguments, train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=AutoTokenizer.from_pretrained(request["model"]), callbacks=[turns(wire, drawn)],
    )  # fmt: skip


def turns(wire: Wire, drawn: Sequence[int]) -> Any:
    """The callback that keeps step with the benchmark. `drawn[0]` is how many tokens the last step drew."""
    from transformers import TrainerCallback

    versions = {name: importlib.metadata.version(name) for name in ("trl", "torch", "transformers")}

    class Turns(TrainerCallback):
        answer: Mapping[str, Any] = {"versions": versions}
        began = 0.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wire.send(self.answer)
            if wire.receive() is None:
                sys.exit(0)
            self.began = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.answer = {"seconds": time.perf_counter() - self.began, "peak_bytes": peak_memory(), "tokens": drawn[0]}

    return Turns()


if __name__ == "__main__":
    main()
