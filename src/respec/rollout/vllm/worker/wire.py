"""The messages between respec and its vLLM worker: one JSON object a line, each one of these classes by name. Standard library only.

respec asks with Start, Push, Draw, Sleep or Wake. The worker answers Start with Ready, a push with Held, a draw with a Round for each of vLLM's
steps, to each of which respec answers with a Depth, and then with Drawn; the rest with Done; anything with Failed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any


class WireError(Exception):
    """A line that is none of the messages, or has other fields."""


@dataclass(frozen=True)
class Start:
    """An engine for `batch` sequences of up to `context` tokens with the weights in the folder `model`. `speculation` is vLLM's own
    `speculative_config`; `mend` mends what is known to be wrong in a build; `cache_gib` is the KV cache on a CPU, `gpu_share` vLLM's share of a GPU."""

    model: str
    version: int
    dtype: str
    context: int
    batch: int
    seed: int
    threads: int
    cache_gib: int
    gpu_share: float
    compiled: bool
    sleeps: bool
    speculation: dict[str, Any] | None
    mend: bool


@dataclass(frozen=True)
class Push:
    """Weights in the safetensors file `path`, whose metadata has the same `version`: the policy's, or the `drafter`'s."""

    path: str
    version: int
    drafter: bool = False


@dataclass(frozen=True)
class Asked:
    """One completion to be drawn."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True)
class Draw:
    """Completions to be drawn together, by the policy's weights of `version` and the drafter's of `drafter`. `depth` is the first answer to a
    Round, before there is one."""

    version: int
    drafter: int
    asked: list[Asked]
    stop: list[str]
    stop_token_ids: list[int]
    depth: int


@dataclass(frozen=True)
class Depth:
    """Tokens to be drafted for each sequence in the step to come; they are verified in the one after it."""

    depth: int


@dataclass(frozen=True)
class Sleep:
    """Memory is to be given back until Wake, as far as the build can."""


@dataclass(frozen=True)
class Wake:
    """The end of a Sleep; weights are what they were."""


@dataclass(frozen=True)
class Ready:
    """What has been started: versions, the kind of device, what of it can be changed while it runs, and what was mended."""

    versions: dict[str, str]
    device: str
    steers: bool
    sleeps: bool
    mended: list[str]


@dataclass(frozen=True)
class Held:
    """The versions of the weights that every process of vLLM's says it holds: the policy's and the drafter's, which is 0 for what it was started with."""

    version: int
    drafter: int


@dataclass(frozen=True)
class Round:
    """One step of vLLM's: `active` sequences got `emitted` tokens, `left` are not finished, `waiting` of them got nothing. By depth:
    sequences with a draft that deep, and with one accepted that deep. `fresh`: prompts were read in it."""

    active: int
    waiting: int
    left: int
    emitted: int
    drafted: list[int]
    accepted: list[int]
    seconds: float
    context: float
    fresh: bool


@dataclass(frozen=True)
class Completion:
    """Token by token: id, log-probability at the temperature, entropy, the step that gave it, and whether it was a draft."""

    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]
    rounds: list[int]
    drafted: list[bool]


@dataclass(frozen=True)
class Drawn:
    """All of a Draw's completions, in its order, and the versions of the weights that drew them."""

    version: int
    drafter: int
    completions: list[Completion]
    prompt_tokens: int


@dataclass(frozen=True)
class Done:
    """Nothing to be said."""


@dataclass(frozen=True)
class Failed:
    """What was asked for could not be done; the traceback is in the worker's log."""

    kind: str
    text: str


Message = Start | Push | Draw | Depth | Sleep | Wake | Ready | Held | Round | Drawn | Done | Failed
KINDS = {
    kind.__name__: kind for kind in (Start, Push, Draw, Depth, Sleep, Wake, Ready, Held, Round, Drawn, Done, Failed)
}
PARTS = {"asked": Asked, "completions": Completion}


def to_line(message: Message) -> str:
    """The message as a line, its end included."""
    return json.dumps({"is": type(message).__name__, **asdict(message)}) + "\n"


def from_line(line: str) -> Message:
    """The message of a line. Raises WireError for anything else."""
    try:
        tree = json.loads(line)
        kind = KINDS[tree.pop("is")]
        return _made(kind, tree)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WireError(f"not a message: {line[:200]!r} ({type(error).__name__}: {error})") from None


def _made(kind: type[Any], tree: Mapping[str, Any]) -> Any:
    wanted = {field.name for field in fields(kind)}
    if set(tree) != wanted:
        raise TypeError(f"{kind.__name__} has the fields {sorted(wanted)}")
    return kind(**{
        name: [_made(PARTS[name], item) for item in value] if name in PARTS else value for name, value in tree.items()
    })  # fmt: skip
