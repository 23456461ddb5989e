"""A worker that speaks the protocol without vLLM: completions that a test can foretell, and the faults that it is told to have (FAKE)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKER = Path(__file__).parents[3] / "src" / "respec" / "rollout" / "vllm" / "worker"
sys.path.insert(0, str(WORKER))

import main as worker  # noqa: E402  # pyright: ignore[reportMissingImports]
import wire  # noqa: E402  # pyright: ignore[reportMissingImports]

FAULT = os.environ.get("FAKE", "")


class Fake:
    """Completion i of a draw has the tokens seed % 97 + 0, 1, 2, ...; drafts are always accepted."""

    def __init__(self, talk: Any) -> None:
        self._talk, self._version, self._drafter = talk, 0, 0

    def start(self, asked: Any) -> Any:
        if FAULT == "no vllm":
            raise ModuleNotFoundError("No module named 'vllm'")
        if FAULT == "child":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (Path(sys.argv[1]) / "child").write_text(str(child.pid))
        self._version = asked.version
        return wire.Ready({"vllm": "0.32.0"}, "cpu", True, False, [])

    def push(self, asked: Any) -> Any:
        if FAULT == "has no drafter" and asked.drafter:
            raise RuntimeError("weights of a drafter were sent, and vLLM has none that has any")
        if FAULT != "keeps old weights" and asked.drafter:
            self._drafter = asked.version
        elif FAULT != "keeps old weights":
            self._version = asked.version
        return wire.Held(self._version, self._drafter)

    def draw(self, asked: Any) -> Any:
        print("the fake is drawing")
        if FAULT == "dies":
            os._exit(7)
        if FAULT == "hangs":
            time.sleep(600)
        if FAULT == "garbles":
            self._talk._out.write("what\n")
            self._talk._out.flush()
        if FAULT == "raises":
            raise RuntimeError("out of blocks")
        made = [wire.Completion([], [], [], [], []) for _ in asked.asked]
        step, depth, drafts = 0, asked.depth, 0
        while any(len(one.tokens) < want.max_tokens for one, want in zip(made, asked.asked, strict=True)):
            going = [(o, w) for o, w in zip(made, asked.asked, strict=True) if len(o.tokens) < w.max_tokens]
            for one, want in going:
                count = min(drafts + 1, want.max_tokens - len(one.tokens))
                for place in range(count):
                    one.tokens.append(want.seed % 97 + len(one.tokens))
                    one.logprobs.append(-0.5)
                    one.entropies.append(0.5)
                    one.rounds.append(step)
                    one.drafted.append(place < count - 1)
            left = sum(len(o.tokens) < w.max_tokens for o, w in zip(made, asked.asked, strict=True))
            counts = [len(going)] * drafts
            emitted = len(going) * (1 + drafts)
            said = self._talk.ask(wire.Round(len(going), 0, left, emitted, counts, counts, 0.01, 9.0, step == 0))
            drafts, depth, step = depth, said.depth, step + 1
        version = self._version + (FAULT == "stamps another version")
        drafter = self._drafter + (FAULT == "stamps another drafter")
        return wire.Drawn(version, drafter, made, sum(len(want.prompt) for want in asked.asked))

    def abort(self) -> None:
        """Nothing is under way."""


worker.Vllm = Fake
for name in ("sleep", "wake"):
    setattr(Fake, name, lambda self, _: wire.Done())
if __name__ == "__main__":
    worker.main()
