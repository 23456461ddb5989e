"""The vLLM worker: an engine in a process of its own, asked over its standard streams. Run by a Python that has vLLM, in this folder.

When respec goes, however it goes, this process and all it has started go too, and the folder of weights with them.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import shutil
import signal
import sys
import threading
import time
import traceback
from typing import Any

from wire import (  # pyright: ignore[reportMissingImports]
    Completion,
    Depth,
    Done,
    Draw,
    Drawn,
    Failed,
    Held,
    Push,
    Ready,
    Round,
    Sleep,
    Start,
    Wake,
    from_line,
    to_line,
)

LOOK_S = 0.5
# Tokens of prompts that one step may read.
STEP_TOKENS = 4096


class Vllm:
    """vLLM's engine, made by `start` and stepped by hand, so that every step is seen and the next one's drafts are decided."""

    def __init__(self, talk: Any) -> None:
        self._talk = talk
        self._engine: Any = None
        self._batch = 0
        self._first, self._count = -1, 0
        self._drafts: Any = None
        # its suffix decoding holds that the depth is the one that it was made for
        self._asserts = False

    def start(self, asked: Start) -> Ready:
        os.environ |= _environment(asked)
        import inside  # pyright: ignore[reportMissingImports]
        from vllm.engine.arg_utils import EngineArgs  # pyright: ignore[reportMissingImports]
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
        from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]
        from vllm.v1.metrics.loggers import StatLoggerBase  # pyright: ignore[reportMissingImports]

        on_cpu, holder = current_platform.is_cpu(), self

        class Listen(StatLoggerBase):
            """Hears of each step's drafts."""

            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
                pass

            def record(self, scheduler_stats: Any = None, *_: Any, **__: Any) -> None:
                holder._drafts = getattr(scheduler_stats, "spec_decoding_stats", None)

            def log_engine_initialized(self) -> None:
                pass

        settings: dict[str, Any] = {
            "model": asked.model, "dtype": asked.dtype, "max_model_len": asked.context, "max_num_seqs": asked.batch, "seed": asked.seed,
            "generation_config": "vllm", "logprobs_mode": "processed_logprobs", "enforce_eager": not asked.compiled,
            "speculative_config": asked.speculation, "disable_log_stats": False, "worker_extension_cls": "inside.Extension",
            "enable_sleep_mode": asked.sleeps and not on_cpu,
        }  # fmt: skip
        if asked.speculation is not None:
            # else a head's drafts come a step later than they are told how deep to be
            settings["async_scheduling"] = False
        if on_cpu:
            # where a prompt is read in parts it winds a seeded request's generator back, which those of a CPU cannot do
            settings |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(STEP_TOKENS, asked.context)}
        else:
            settings["gpu_memory_utilization"] = asked.gpu_share
        self._engine = LLMEngine.from_engine_args(EngineArgs(**settings), stat_loggers=[Listen])
        self._batch, self._first = asked.batch, asked.version
        self._asserts = asked.speculation is not None and asked.speculation["method"] == "suffix"
        versions = {name: importlib.metadata.version(name) for name in ("torch", "transformers")}
        versions["vllm"] = __import__("vllm").__version__
        steers = asked.speculation is not None and self._table() is not None
        return Ready(versions, "cpu" if on_cpu else "cuda", steers, asked.sleeps and not on_cpu, inside.MENDED)

    def push(self, asked: Push) -> Held:
        """Takes weights over; no key of older ones is read again, a drafter's keys lie beside the target's."""
        self._engine.collective_rpc("respec_push", args=(asked.path, asked.version, asked.drafter))
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its prefix cache, which holds keys of the weights before these")
        return Held(*self._held())

    def sleep(self, _: Sleep) -> Done:
        self._engine.sleep(level=1)
        return Done()

    def wake(self, _: Wake) -> Done:
        self._engine.wake_up()
        self._engine.reset_prefix_cache()
        return Done()

    def draw(self, asked: Draw) -> Drawn:
        """Steps vLLM until all is drawn; tells every step, and hears how deep the next is to draft."""
        held = self._held()
        if held != (asked.version, asked.drafter):
            raise RuntimeError(
                f"versions {(asked.version, asked.drafter)} (policy, drafter) were to draw, vLLM holds {held}"
            )
        made = {name: Completion([], [], [], [], []) for name in self._ask(asked)}
        lengths = {name: len(one.prompt) for name, one in zip(made, asked.asked, strict=True)}
        left, step, depth = len(made), 0, asked.depth
        while self._engine.has_unfinished_requests():
            self._steer(depth)
            began, self._drafts, before = time.perf_counter(), None, left
            outputs = self._engine.step()
            seconds = time.perf_counter() - began
            got = [output for output in outputs if output.outputs and output.outputs[0].token_ids]
            fresh = not got or any(not made[output.request_id].tokens for output in got)
            contexts = [lengths[output.request_id] + len(made[output.request_id].tokens) for output in got]
            emitted = sum(_take(made, output, step) for output in got)
            left -= sum(output.finished for output in outputs)
            drafted, accepted = self._of_drafts()
            mean = sum(contexts) / max(len(contexts), 1)
            waiting = max(before - len(got), 0)
            said = self._talk.ask(Round(len(got), waiting, left, emitted, drafted, accepted, seconds, mean, fresh))
            depth, step = said.depth, step + 1
        empty = sum(not one.tokens for one in made.values())
        if empty:
            raise RuntimeError(f"{empty} of {len(made)} completions came back empty")
        return Drawn(*self._held(), list(made.values()), sum(lengths.values()))

    def abort(self) -> None:
        """Lets go of what a draw that failed has left."""
        if self._engine is not None:
            self._engine.abort_request(list(self._engine.output_processor.request_states), internal=True)

    def _ask(self, asked: Draw) -> list[str]:
        from vllm import SamplingParams  # pyright: ignore
        from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]

        names = []
        for one in asked.asked:
            self._count += 1
            names.append(str(self._count))
            sampling = SamplingParams(
                temperature=one.temperature, max_tokens=one.max_tokens, seed=one.seed, logprobs=0, ignore_eos=True,
                stop_token_ids=asked.stop_token_ids, stop=asked.stop or None, detokenize=bool(asked.stop), skip_special_tokens=False,
                include_stop_str_in_output=True, output_kind=RequestOutputKind.DELTA,
            )  # fmt: skip
            self._engine.add_request(names[-1], {"prompt_token_ids": one.prompt}, sampling)
        return names

    def _held(self) -> tuple[int, int]:
        """Versions of the policy and the drafter."""
        held = set(map(tuple, self._engine.collective_rpc("respec_held")))
        if len(held) > 1:
            raise RuntimeError(f"vLLM's processes hold weights of different versions: {sorted(held)}")
        version, drafter = held.pop()
        return self._first if version == -1 else version, drafter

    def _table(self) -> Any:
        """The scheduler, where it can be told how deep to draft from step to step: vLLM has a table by batch size, made once; it is in this
        process, and is replaced."""
        scheduler = getattr(getattr(self._engine.engine_core, "engine_core", None), "scheduler", None)
        return scheduler if getattr(scheduler, "dynamic_sd_lookup", None) is not None else None

    def _steer(self, depth: int) -> None:
        scheduler = self._table()
        if scheduler is not None:
            depth = min(depth, scheduler.num_spec_tokens)
            scheduler.dynamic_sd_lookup = [depth] * (self._batch + 1)
            if self._asserts:
                self._engine.collective_rpc("respec_depth", args=(depth,))

    def _of_drafts(self) -> tuple[list[int], list[int]]:
        """By depth, how many sequences had a draft in the last step, and how many had it accepted."""
        stats = self._drafts
        if stats is None:
            return [], []
        drafted, accepted = list(stats.num_draft_tokens_per_pos), list(stats.num_accepted_tokens_per_pos)
        deepest = sum(count > 0 for count in drafted)
        return drafted[:deepest], accepted[:deepest]


def _take(made: dict[str, Completion], output: Any, step: int) -> int:
    """Adds a step's tokens to a completion; all but the last of them were drafts. Says how many there were."""
    one, found = output.outputs[0], made[output.request_id]
    tokens = list(one.token_ids)
    for place, (token, at) in enumerate(zip(tokens, one.logprobs, strict=True)):
        if not math.isfinite(at[token].logprob):
            raise RuntimeError(f"vLLM drew a token whose log-probability it gives as {at[token].logprob}")
        if at[token].rank >= 0:
            raise RuntimeError("vLLM gave a rank where its entropy was to be: its sampler is another than was prepared")
        found.tokens.append(token)
        found.logprobs.append(at[token].logprob)
        found.entropies.append((-1 - at[token].rank) / 1e6)
        found.rounds.append(step)
        found.drafted.append(place < len(tokens) - 1)
    return len(tokens)


def _environment(asked: Start) -> dict[str, str]:
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its engine in this process, where its steps can be seen
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the one whose sampler tells entropies
        "VLLM_CPU_KVCACHE_SPACE": str(asked.cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores[: asked.threads])),
        "OMP_NUM_THREADS": str(asked.threads),
        "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "RESPEC_VLLM_MEND": str(int(asked.mend)),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    }  # fmt: skip


class Talk:
    """This end of the pipe. Whatever libraries print goes to standard error, so that nothing stands between the messages."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        self._in = os.fdopen(os.dup(0), "r")
        os.dup2(2, 1)
        sys.stdout = sys.stderr

    def hear(self) -> Any:
        """The next message; None when there will be no more."""
        line = self._in.readline()
        return from_line(line) if line else None

    def say(self, message: Any) -> None:
        self._out.write(to_line(message))
        self._out.flush()

    def ask(self, message: Any) -> Depth:
        self.say(message)
        said = self.hear()
        if not isinstance(said, Depth):
            raise EOFError("respec went away within a draw")
        return said


def end(folder: str) -> None:
    """Ends this process and all it has started, which are a process group of their own."""
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def watch(parent: int, folder: str) -> None:
    """Ends all of it once respec's process is gone."""
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    end(folder)


def main() -> None:
    folder, parent = sys.argv[1], int(sys.argv[2])
    threading.Thread(target=watch, args=(parent, folder), daemon=True).start()
    talk = Talk()
    vllm = Vllm(talk)
    handlers = {Start: vllm.start, Push: vllm.push, Draw: vllm.draw, Sleep: vllm.sleep, Wake: vllm.wake}
    while (message := talk.hear()) is not None:
        try:
            talk.say(handlers[type(message)](message))
        except EOFError:
            break
        except Exception as error:
            traceback.print_exc()
            vllm.abort()
            talk.say(Failed(type(error).__name__, str(error)))
    end(folder)


if __name__ == "__main__":
    main()
